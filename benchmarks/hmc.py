"""HMC against BlackJAX: gradient evaluations a second, the same network, data, step size and steps, one chain and many.

    python -m benchmarks.hmc --jax PYTHON        # PYTHON: an interpreter with jax and blackjax; about five minutes

BlackJAX runs in a process of its own; the two take turns, and one rests while the other works. Both draw momenta, integrate,
correct by Metropolis and keep the state; ours also notes energies and acceptance of every draw. Compile time is left out of
the rates and reported beside them.
"""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import torch

import credibly as cr
from benchmarks.timing import Goal, Row, duration, options, report, show
from credibly.methods.hmc_run import HMCRun
from credibly.target import ProblemTarget

CASES: list[dict[str, Any]] = [
    {"sizes": [13, 50, 1], "rows": 455, "chains": 1, "steps": 50, "iterations": 20, "goal": 1.0},
    {"sizes": [13, 50, 1], "rows": 455, "chains": 8, "steps": 50, "iterations": 10, "goal": 1.5},
    {"sizes": [13, 50, 1], "rows": 455, "chains": 64, "steps": 50, "iterations": 2, "goal": 1.5},
    {"sizes": [8, 50, 50, 1], "rows": 7000, "chains": 1, "steps": 20, "iterations": 5, "goal": 1.0},
    {"sizes": [8, 50, 50, 1], "rows": 7000, "chains": 8, "steps": 20, "iterations": 1, "goal": 1.3},
    {"sizes": [784, 400, 400, 10], "rows": 5000, "chains": 1, "steps": 3, "iterations": 1, "goal": None},
]


class Peer:
    """BlackJAX in its own process."""

    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, "benchmarks/peer_blackjax.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.versions = json.loads(self.process.stdout.readline())

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def problem(case: dict[str, Any]) -> cr.Problem:
    generator = torch.Generator().manual_seed(0)
    sizes, rows = case["sizes"], case["rows"]
    net = cr.zoo.mlp(sizes[0], tuple(sizes[1:-1]), sizes[-1])
    x = torch.randn(rows, sizes[0], generator=generator)
    if sizes[-1] > 1:
        y = torch.randint(sizes[-1], (rows,), generator=generator)
        return cr.Problem(net, (x, y), cr.likelihoods.Categorical(), cr.priors.Normal(1.0))
    return cr.Problem(
        net, (x, torch.randn(rows, 1, generator=generator)), cr.likelihoods.Gaussian(scale=0.5), cr.priors.Normal(1.0)
    )


def ours(case: dict[str, Any]) -> tuple[HMCRun, float]:
    """A run of this case and the seconds of its first iterations, compilation among them."""
    target = ProblemTarget(problem(case))
    method = cr.HMC(
        chains=case["chains"], draws=10**6, warmup=0, step_size=case["step_size"], trajectory_length=case["step_size"] * case["steps"],
        init="network", compile=True, mass="identity",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    began = time.perf_counter()
    run = HMCRun(target, method, 0)
    run.start(0.1 * torch.randn(case["chains"], target.dim, generator=generator))
    for _ in range(2):
        run.advance(lambda: False)
    return run, time.perf_counter() - began


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--jax", required=True, metavar="PYTHON", help="an interpreter with jax and blackjax")
    parser.add_argument("--cases", default=None, help="numbers of the cases to run, with commas")
    args = parser.parse_args()
    picked = CASES if args.cases is None else [CASES[int(i)] for i in args.cases.split(",")]
    with report("hmc", args) as record:
        peer = Peer(args.jax)
        print(", ".join(f"{k} {v}" for k, v in peer.versions.items()) + "\n")
        rows = []
        for case in picked:
            case = {**case, "step_size": 1e-4}
            run, first = ours(case)
            built = peer.ask(build=case)
            count, gradients = case["iterations"], case["iterations"] * case["steps"] * case["chains"]

            def mine(run: HMCRun = run, count: int = count) -> float:
                began = time.perf_counter()
                for _ in range(count):
                    run.advance(lambda: False)
                return time.perf_counter() - began

            calls = max(1, round(args.seconds / max(1e-3, mine())))
            theirs_calls = max(1, round(args.seconds / max(1e-3, peer.ask(run=1)["seconds"])))
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(args.repeats):
                times[0].append(sum(mine() for _ in range(calls)) / calls / gradients)
                times[1].append(peer.ask(run=theirs_calls)["seconds"] / theirs_calls / gradients)
            name = f"{'-'.join(map(str, case['sizes']))} on {case['rows']} rows, {case['chains']} chains"
            goal = Goal(">=", case["goal"]) if case["goal"] else None
            rows.append(Row(f"BlackJAX / ours: {name}", times[0], times[1], goal, inverse=True))
            print(
                f"{rows[-1].cells()}  first iterations {duration(first)}, theirs {duration(built['seconds'])}",
                flush=True,
            )
        print()
        show(rows, record)


if __name__ == "__main__":
    main()
