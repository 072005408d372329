"""Time of `import credibly` against `import torch`, each in fresh interpreters.

    python -m benchmarks.imports                 # about a minute
    python -m benchmarks.imports --json out.json

Importing credibly imports torch, so the ratio says what we add. It also lists what heavy packages came along: those that only
some programs need (plots, tables, scikit-learn) must load when they are used, not before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.timing import Goal, Row, options, report, show

MUST_NOT_LOAD = ("sklearn", "pandas", "matplotlib", "torchmetrics", "scipy")

# The clock runs inside the new interpreter: starting and stopping Python is the same for both and not an import.
PROBE = """
import json, sys, time
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "packages": sorted({{name.partition(".")[0] for name in sys.modules}})}}))
"""


@dataclass(frozen=True)
class Import:
    seconds: float
    packages: frozenset[str]


def fresh(module: str) -> Import:
    """The import in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    return Import(found["seconds"], frozenset(found["packages"]))


def main() -> None:
    args = options(__doc__).parse_args()
    with report("imports", args) as record:
        added = fresh("credibly").packages - fresh("torch").packages  # also warms the file cache and the .pyc files
        times: dict[str, list[float]] = {"credibly": [], "torch": []}
        for _ in range(max(7, args.repeats)):
            for module in times:
                times[module].append(fresh(module).seconds)
        show([Row("import credibly / import torch", times["credibly"], times["torch"], Goal("<=", 1.15))], record)
        heavy = sorted(added & set(MUST_NOT_LOAD))
        public = sorted(name for name in added if not name.startswith("_"))
        print(f"Heavy packages loaded: {', '.join(heavy) or 'none'} (looked for {', '.join(MUST_NOT_LOAD)})")
        print(f"All that torch alone does not load: {', '.join(public)}")
        record["heavy_loaded"], record["added_packages"] = heavy, public
    if heavy:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
