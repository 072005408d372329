"""Time to the first draw of HMC, 13-50-1 with 8 chains: from the call to the first state, with a cold and a warm cache.

    python -m benchmarks.first_draw --jax PYTHON         # about two minutes

Every measurement is a fresh process; imports are not counted. JAX has no on-disk cache by default. Ours has one, so the
warm start is the usual case.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import hmc
from benchmarks.case import Case, Setting
from benchmarks.suite import print_rows
from benchmarks.timing import Row, options, report

CASE = {"sizes": [13, 50, 1], "rows": 455, "chains": 8, "steps": 50, "iterations": 1, "step_size": 1e-4}
TINY = {**CASE, "sizes": [3, 4, 1], "rows": 20, "chains": 2, "steps": 9}


def ours(cache: str, setting: Setting) -> float:
    """Return the seconds to the first draw in a fresh process with this compiler cache."""
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": cache,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    arguments = ["--child", str(setting.threads or 0), str(int(setting.quick))]
    command = [sys.executable, "-m", "benchmarks.first_draw", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def child(threads: int, quick: bool) -> None:
    """Run in the fresh process: print the seconds."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    start = time.perf_counter()
    iterate = hmc.ours(TINY if quick else CASE)[0]
    iterate()
    print(time.perf_counter() - start)


def theirs(setting: Setting, kind: str = "blackjax_hmc") -> float:
    """Return the seconds to the first draw of BlackJAX."""
    case = TINY if setting.quick else CASE
    problem = hmc.problem(case)
    start = problem.layout.read(problem.layout.module).expand(case["chains"], -1)  # type: ignore[call-overload]
    with setting.jax_side() as side:
        assert side is not None
        return float(side.build(kind, hmc.jax_case(case), x=problem.x, y=problem.y, theta=start).info["seconds"])


def comparisons(setting: Setting) -> Iterator[Row]:
    cold: list[float] = []
    warm: list[float] = []
    peer: list[float] = []
    with setting.jax_side() as side:
        has_peer = side is not None and side.has("blackjax")
    for _ in range(min(2, setting.repeats)):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(ours(cache, setting))
            warm.append(ours(cache, setting))
        if has_peer:
            peer.append(theirs(setting))
    name = "BlackJAX" if peer else ""
    yield Row("first draw of 8 chains of 13-50-1, cold compiler cache", cold, peer, inverse=True, peer=name)
    yield Row("first draw of 8 chains of 13-50-1, warm compiler cache", warm, peer, inverse=True, peer=name)


def cases() -> list[Case]:
    return [
        Case(
            "first-draw",
            "From the call to the first draw of HMC, compilation included.",
            "initialisation: the C++ library comes with the package.",
            comparisons,
            1.5,
            peers=("BlackJAX",),
        )
    ]


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), sys.argv[3] == "1")
        return
    parser = options(__doc__)
    parser.add_argument("--jax", default=None, metavar="PYTHON", help="an interpreter with jax and blackjax")
    args = parser.parse_args()
    with report("first_draw", args) as record:
        found = list(comparisons(Setting(args.repeats, args.seconds, args.threads, args.jax)))
        print_rows(found, record)


if __name__ == "__main__":
    main()
