"""Time of `import credibly` against `import torch`, each in fresh interpreters.

    python -m benchmarks.imports                 # about a minute
    python -m benchmarks.imports --json out.json

credibly resolves its names lazily, so the bare import loads little. The second row also accesses the names that any fit
needs, which loads torch, and so shows what we add to it. It also lists heavy packages that were loaded: those that only
some programs need (plots, tables, scikit-learn) must load on use, not before.
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

# Timed inside the new interpreter: starting and stopping Python is the same for all and not an import.
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
    """Run the statement in a fresh interpreter."""
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return Import(found["seconds"], frozenset(found["packages"]))


def main() -> None:
    args = options(__doc__).parse_args()
    with report("imports", args) as record:
        fresh(BARE)  # warms the file cache and the .pyc files
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
        print(f"Loaded beyond what torch loads: {', '.join(public)}")
        record["heavy_loaded"], record["added_packages"] = heavy, public
    if heavy:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
