"""Time to the first draw: HMC of 13-50-1, 8 chains, from the call to the first state, with an empty compiler cache and a full one.

    python -m benchmarks.first_draw --jax PYTHON         # about two minutes

Every measurement is a fresh process, whose imports are not counted. JAX has no cache on the disk unless it is told to; a run of ours
leaves one behind, so that the second start of the same problem is the usual one.
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
from benchmarks.suite import alone
from benchmarks.timing import Row, options, report

CASE = {"sizes": [13, 50, 1], "rows": 455, "chains": 8, "steps": 50, "iterations": 1, "step_size": 1e-4}
TINY = {**CASE, "sizes": [3, 4, 1], "rows": 20, "chains": 2, "steps": 9}


def ours(cache: str, setting: Setting) -> float:
    """Seconds to the first draw in a fresh process with this compiler cache."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache, "CREDIBLY_CACHE": cache,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    words = [
        sys.executable,
        "-m",
        "benchmarks.first_draw",
        "--child",
        str(setting.threads or 0),
        str(int(setting.quick)),
    ]
    told = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return float(told.stdout.strip().splitlines()[-1])


def child(threads: int, quick: bool) -> None:
    """What the fresh process does: prints the seconds."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    began = time.perf_counter()
    some = hmc.ours(TINY if quick else CASE)[0]
    some()
    print(time.perf_counter() - began)


def theirs(setting: Setting, kind: str = "blackjax_hmc") -> float:
    """The same of BlackJAX."""
    case = TINY if setting.quick else CASE
    problem = hmc.problem(case)
    start = problem.layout.read(problem.layout.module).expand(case["chains"], -1)  # type: ignore[call-overload]
    with setting.jax_side() as side:
        assert side is not None
        return float(side.build(kind, hmc.words(case), x=problem.x, y=problem.y, theta=start).told["seconds"])


def contest(setting: Setting) -> Iterator[Row]:
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
    yield Row("first draw of 8 chains of 13-50-1, empty compiler cache", cold, peer, inverse=True, peer=name)
    yield Row("first draw of 8 chains of 13-50-1, cache of an earlier run", warm, peer, inverse=True, peer=name)


def cases() -> list[Case]:
    return [
        Case(
            "first-draw",
            "From the call to the first draw of HMC, compilation included.",
            "the C++ compiler, which makes one library for all small networks, once on a machine; after that, the start of the chains.",
            contest,
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
        found = list(contest(Setting(args.repeats, args.seconds, args.threads, args.jax)))
        record["rows"] = [row.record() for row in found]
        alone(found)


if __name__ == "__main__":
    main()
