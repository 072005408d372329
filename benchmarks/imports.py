"""Time of `import credibly` against `import torch`, each in fresh interpreters.

    python -m benchmarks.imports                 # about a minute
    python -m benchmarks.imports --json out.json

credibly looks up its names when they are first used, so the bare import says little: the second row also touches the names that
any fit needs, which loads torch, and so says what we add to it. It also lists what heavy packages came along: those that only
some programs need (plots, tables, scikit-learn) must load when they are used, not before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.timing import Goal, Row, options, report, show

MUST_NOT_LOAD = ("sklearn", "pandas", "matplotlib", "torchmetrics", "scipy")

BARE = "import credibly"
READY = (
    "import credibly as c; c.Problem, c.DeepEnsemble, c.DrawsPosterior, c.likelihoods.Gaussian, c.priors.Normal, c.load"
)
TORCH = "import torch"

# The clock runs inside the new interpreter: starting and stopping Python is the same for all and not an import.
PROBE = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "packages": sorted({{name.partition(".")[0] for name in sys.modules}})}}))
"""


@dataclass(frozen=True)
class Import:
    seconds: float
    packages: frozenset[str]


def fresh(statement: str) -> Import:
    """The statement in an interpreter of its own."""
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return Import(found["seconds"], frozenset(found["packages"]))


def main() -> None:
    args = options(__doc__).parse_args()
    with report("imports", args) as record:
        fresh(BARE)  # this round also warms the file cache and the .pyc files
        added = fresh(READY).packages - fresh(TORCH).packages
        times: dict[str, list[float]] = {BARE: [], READY: [], TORCH: []}
        for _ in range(max(7, args.repeats)):
            for statement in times:
                times[statement].append(fresh(statement).seconds)
        goal = Goal("<=", 1.15)
        show(
            [
                Row("import credibly / import torch", times[BARE], times[TORCH], goal),
                Row("import credibly, ready to fit / import torch", times[READY], times[TORCH], goal),
            ],
            record,
        )
        heavy = sorted(added & set(MUST_NOT_LOAD))
        public = sorted(name for name in added if not name.startswith("_"))
        print(f"Heavy packages loaded: {', '.join(heavy) or 'none'} (looked for {', '.join(MUST_NOT_LOAD)})")
        print(f"All that torch alone does not load: {', '.join(public)}")
        record["heavy_loaded"], record["added_packages"] = heavy, public
    if heavy:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
