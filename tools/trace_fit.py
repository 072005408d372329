"""List the modules of credibly that a small fit visits, to keep the path from `fit` to a prediction short.

    python tools/trace_fit.py                         HMC, SGHMC and a deep ensemble, in memory
    python tools/trace_fit.py hmc --out               one of them, streamed to a temporary folder
    python tools/trace_fit.py hmc --starts ensemble   samplers that start at MAP fits

Each method runs `fit` and then `posterior.predict(x).mean` under `sys.setprofile`. Calls during imports do not count,
nor do the methods that `dataclass` generates.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import credibly as cr

SOURCE = Path(cr.__file__).resolve().parent
PATH = ("methods", "inference", "problem", "forward", "posterior", "predictive")
SUPPORT = (
    "core",
    "networks",
    "priors",
    "likelihoods",
    "distributed",
    "storage",
    "backends",
    "gaussians",
    "diagnostics",
    "metrics",
)
SAMPLER = {"chains": 2, "draws": 10, "warmup": 20, "start_steps": 20}
METHODS = {
    "hmc": (cr.HMC, {**SAMPLER, "max_steps": 8}),
    "sghmc": (cr.SGHMC, {**SAMPLER, "thin": 2, "batch_size": 16}),
    "ensemble": (cr.DeepEnsemble, {"members": 2, "steps": 20, "batch_size": 16}),
}


class Trace:
    """Counts the calls of credibly's functions by module, in order of first visit.

    Attributes:
        calls: number of calls by module.
        switches: calls that go from one module to another.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.switches = 0
        self._stack: list[str] = []
        self._importing = 0

    def __enter__(self) -> Trace:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event not in ("call", "return"):
            return
        if frame.f_code.co_name == "<module>":
            self._importing += 1 if event == "call" else -1
        if self._importing > 0:
            return
        module = module_of(frame.f_code.co_filename)
        if module is None:
            return
        if event == "return":
            # A frame that was entered before the trace began also returns.
            if self._stack:
                self._stack.pop()
            return
        self.calls[module] += 1
        self.switches += bool(self._stack) and self._stack[-1] != module
        self._stack.append(module)

    def modules(self, *packages: str) -> list[str]:
        """Return the modules of the given packages that were visited."""
        return [name for name in self.calls if package_of(name) in packages]


def module_of(filename: str) -> str | None:
    """Return the name of credibly's module in a file, without the leading "credibly."; None for other files."""
    if not filename.startswith(str(SOURCE)):
        return None
    parts = Path(filename).relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "credibly"


def package_of(module: str) -> str:
    """Return the package that a module belongs to."""
    return module.partition(".")[0]


def small_problem() -> tuple[cr.Problem, torch.Tensor]:
    """Return a regression with 40 rows and a network of one hidden layer, and its inputs."""
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))
    data = (x, x.sum(1) + 0.1 * torch.randn(40))
    return cr.Problem(net, data=data, likelihood=cr.likelihoods.Gaussian(0.1), prior=cr.priors.Normal()), x


def trace(name: str, *, starts: str = "prior", out: Path | None = None) -> Trace:
    """Fit one method and predict, and return what was called."""
    kind, settings = METHODS[name]
    method = kind(**settings, **({"init": starts} if "draws" in settings else {}))
    problem, x = small_problem()
    with Trace() as found:
        _ = method.fit(problem, seed=0, out=out, progress=False).predict(x).mean
    return found


def import_closure(module: str) -> tuple[int, int]:
    """Return the number of credibly's modules that an import loads, and of their lines."""
    code = (
        f"import sys, {module}\n"
        "for name, loaded in sorted(sys.modules.items()):\n"
        "    if name.split('.')[0] == 'credibly': print(loaded.__file__)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    files = printed.split()
    return len(files), sum(len(Path(file).read_text().splitlines()) for file in files)


def report(name: str, found: Trace) -> str:
    """Return the modules in order of first visit with their calls, and their totals."""
    known = {*PATH, *SUPPORT}
    others = [module for module in found.calls if package_of(module) not in known]
    lines = [name, *(f"  {calls:>8}  {module}" for module, calls in found.calls.items())]
    totals = {
        "modules": len(found.calls),
        f"on the path ({', '.join(PATH)})": len(found.modules(*PATH)),
        "methods and inference": len(found.modules("methods", "inference")),
        "support": len(found.modules(*SUPPORT)),
        "other": len(others),
        "calls": sum(found.calls.values()),
        "switches (calls from one module to another)": found.switches,
    }
    return "\n".join([*lines, *(f"  {what}: {count}" for what, count in totals.items())])


def main() -> None:
    """Trace the methods named on the command line and print what they visit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", choices=[[], *METHODS], help="the methods to trace; default: all")
    parser.add_argument("--out", action="store_true", help="stream or save to a temporary folder")
    parser.add_argument("--starts", choices=("prior", "ensemble"), default="prior", help="starting points of samplers")
    options = parser.parse_args()
    for name in options.methods or METHODS:
        with tempfile.TemporaryDirectory() as folder:
            found = trace(name, starts=options.starts, out=Path(folder) / "run" if options.out else None)
        print(report(name, found), end="\n\n")
    modules, lines = import_closure("credibly.methods.hmc")
    print(f"import credibly.methods.hmc loads {modules} modules with {lines} lines")


if __name__ == "__main__":
    main()
