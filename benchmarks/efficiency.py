"""Effective samples a second in function space: ours against NumPyro's NUTS, BlackJAX's NUTS and its MCLMC, on real data.

    python -m benchmarks.efficiency --jax PYTHON --root DIR       # DIR holds uci/concrete.npz; without it, diabetes; two minutes

The same density for all (inputs-50-1, SiLU, known noise, Normal prior), the same starting points, and everything from the first
step of warm-up to the last draw in the time. Then the same function, `credibly.diagnostics.convergence.ess`, looks at the predictions of all
draws at held-out rows. Reported is the time an effective sample takes, by the median row and by the worst. MCLMC has no Metropolis
correction, so its draws have a bias that this figure does not see; that is in its favour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import credibly as cr
from benchmarks.case import Case, Setting
from benchmarks.jax_client import JaxSide, PeerError, check_density
from benchmarks.suite import alone
from benchmarks.timing import Goal, Row, cold_compiler, options, report
from credibly.backends.cpp.library import library
from credibly.core import compilation as compiling
from credibly.diagnostics.convergence import measure
from credibly.posterior.model import Model
from credibly.storage.record import Record

NOISE, HIDDEN, CHAINS, HELD_OUT = 0.3, 50, 4, 100
PEERS = {"numpyro_nuts": "NumPyro NUTS", "blackjax_nuts": "BlackJAX NUTS", "blackjax_mclmc": "BlackJAX MCLMC"}
# Warm-up and draws, long enough for an ESS of some three hundred. Those of MCLMC are steps of two gradients, every `thin`-th kept.
# `max_steps` and `depth` (2^depth - 1 steps) are the defaults of the three.
LENGTHS: dict[str, dict[str, int]] = {
    "ours": {"warmup": 100, "draws": 150, "max_steps": 1000},
    "numpyro_nuts": {"warmup": 100, "draws": 100, "depth": 10},
    "blackjax_nuts": {"warmup": 100, "draws": 100, "depth": 10},
    "blackjax_mclmc": {"warmup": 4000, "draws": 1000, "thin": 20},
}
QUICK: dict[str, dict[str, int]] = {
    "ours": {"warmup": 60, "draws": 20, "max_steps": 10},
    "numpyro_nuts": {"warmup": 20, "draws": 20, "depth": 3},
    "blackjax_nuts": {"warmup": 20, "draws": 20, "depth": 3},
    "blackjax_mclmc": {"warmup": 200, "draws": 20, "thin": 2},
}


@dataclass(frozen=True)
class Outcome:
    """One whole run: seconds of compiling and of all else, and what the draws are worth."""

    compile: float
    seconds: float
    median: float  # effective samples of the predictions at the median row
    least: float
    rhat: float  # the worst of the rows

    def a_sample(self, *, worst: bool = False, compiling: bool = False) -> float:
        """Seconds an effective sample."""
        return (self.seconds + (self.compile if compiling else 0.0)) / (self.least if worst else self.median)

    def __str__(self) -> str:
        return (
            f"{self.seconds:.1f} s and {self.compile:.1f} s of compiling, ESS {self.median:.0f} (worst row {self.least:.0f}), "
            f"R-hat up to {self.rhat:.3f}"
        )


def data(root: Path | None) -> tuple[str, Tensor, Tensor, Tensor]:
    """The name of the set, standardised training rows, and inputs that are held out."""
    found = cr.data.uci(root, "concrete", 0) if root is not None else cr.data.embedded("diabetes", seed=0)
    name = "concrete" if root is not None else "diabetes"
    return name, found.x_train, found.y_train, found.x_test[:HELD_OUT]


def draw_ours(problem: cr.Problem, start: Tensor, lengths: dict[str, int], seed: int) -> tuple[Tensor, float, float]:
    """Draws (chain, draw, D) of our HMC, seconds without compiling, and those of compiling."""
    method = cr.HMC(chains=len(start), init=start, compile=True, trajectory_length="tuned", **lengths)
    with compile_clock() as spent:
        built, began = spent[0], time.perf_counter()
        posterior = method.fit(problem, seed=seed, progress=False)
        whole = time.perf_counter() - began
    return posterior.draws, whole - (spent[0] - built), spent[0]


@contextmanager
def compile_clock() -> Iterator[list[float]]:
    """The seconds of compiling in this block: of our own library, and of first calls of compiled functions, with one step each."""
    began = time.perf_counter()
    library()
    spent, plain = [time.perf_counter() - began], compiling._Fallback.__call__

    def timed(self: Any, *args: Any) -> Any:
        if self.tried:
            return self.active(*args)
        began = time.perf_counter()
        try:
            return plain(self, *args)
        finally:
            spent[0] += time.perf_counter() - began

    compiling._Fallback.__call__ = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        compiling._Fallback.__call__ = plain  # type: ignore[method-assign]


def _theirs(
    side: JaxSide, kind: str, problem: cr.Problem, start: Tensor, lengths: dict[str, int], seed: int
) -> tuple[Tensor, float, float]:
    words = {"sizes": [problem.x.shape[1], HIDDEN, 1], "noise": NOISE, "prior": 1.0, "seed": seed, **lengths}
    told, arrays = side.fetch(sample=kind, **words, x=problem.x, y=problem.y, theta=start)
    return torch.from_numpy(arrays["draws"]), told["seconds"], told["compile"]


def worth(problem: cr.Problem, draws: Tensor, x: Tensor, seconds: float, compile: float) -> Outcome:
    """The effective samples of the predictions of these draws at the rows x."""
    posterior = cr.DrawsPosterior(Model.of(problem), draws.float(), Record(method="benchmark"))
    functions = posterior.predict(x).functions().reshape(*draws.shape[:2], len(x))
    found = measure(functions)
    return Outcome(compile, seconds, float(found.bulk.median()), float(found.bulk.min()), float(found.rhat.max()))


def contest(setting: Setting) -> Iterator[Row]:
    name, x, y, x_new = data(setting.root)
    prior, likelihood = cr.priors.Normal(1.0), cr.likelihoods.Gaussian(scale=NOISE)
    problem = cr.Problem(cr.zoo.mlp(x.shape[1], (HIDDEN,), 1), (x, y), likelihood, prior)
    start = 0.3 * torch.randn(CHAINS, problem.dim, generator=torch.Generator().manual_seed(2))
    lengths = QUICK if setting.quick else LENGTHS
    repeats = 1 if setting.quick else max(1, min(2, setting.repeats))
    contestants: dict[str, Callable[[int], tuple[Tensor, float, float]]] = {
        "ours": lambda seed: draw_ours(problem, start, lengths["ours"], seed)
    }
    with cold_compiler(), setting.jax_side(devices=CHAINS) as side:
        if side is not None:
            words = {"sizes": [x.shape[1], HIDDEN, 1], "noise": NOISE, "prior": 1.0}
            check_density(side, words, problem, start)
            for kind in PEERS:
                if side.has(kind.split("_")[0]):
                    contestants[kind] = partial(_theirs, side, kind, problem, start, lengths[kind])
        outcomes = take_turns(contestants, repeats, problem, x_new, setting)
    mine = outcomes.pop("ours")
    shape = f"{name}, {x.shape[1]}-{HIDDEN}-1, {CHAINS} chains"
    for kind, theirs in outcomes.items():
        for what, worst, compiled in (
            ("an effective sample, median row", False, False),
            ("an effective sample, worst row", True, False),
            ("an effective sample, median row, compiling too", False, True),
        ):
            a, b = ([one.a_sample(worst=worst, compiling=compiled) for one in some] for some in (mine, theirs))
            goal = Goal(">=", 3) if not worst and not compiled else None
            yield Row(f"{shape}: {what}", a, b, goal, inverse=True, peer=PEERS[kind])
    if not outcomes:
        yield Row(
            f"{shape}: an effective sample, median row",
            [one.a_sample() for one in mine],
            [],
            Goal(">=", 3),
            inverse=True,
        )


def take_turns(
    contestants: dict[str, Callable[[int], tuple[Tensor, float, float]]], repeats: int, problem: cr.Problem, x: Tensor, setting: Setting
) -> dict[str, list[Outcome]]:  # fmt: skip
    """Whole runs in turns, each turn with a seed of its own; a peer that fails is left out."""
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in contestants}
    for seed in range(repeats):
        for kind in list(outcomes):
            try:
                draws, seconds, compile = contestants[kind](seed)
            except PeerError as error:
                setting.note(f"{PEERS[kind]}: {error}")
                del outcomes[kind]
                continue
            if seed:  # a second compilation finds the cache of the first
                compile = outcomes[kind][0].compile
            outcomes[kind].append(worth(problem, draws, x, seconds, compile))
            if seed == 0:
                setting.note(f"{PEERS.get(kind, 'HMC')}, {draws.shape[1]} draws: {outcomes[kind][0]}")
    return outcomes


def cases() -> list[Case]:
    return [
        Case(
            "ess-concrete",
            "Effective samples a second of the predictions at held-out rows, inputs-50-1 on a real set, 4 chains from warm-up to the end.",
            "gradients an effective sample: step sizes of a thousandth of the prior's scale, so hundreds of them a trajectory.",
            contest,
            3.0,
            goals="3",
            peers=tuple(PEERS.values()),
        )
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--jax", required=True, metavar="PYTHON", help="an interpreter with jax, blackjax and numpyro")
    parser.add_argument("--root", type=Path, default=None, metavar="DIR", help="the folder that holds uci/concrete.npz")
    args = parser.parse_args()
    with report("efficiency", args) as record:
        found = list(contest(Setting(args.repeats, args.seconds, args.threads, args.jax, args.root)))
        record["rows"] = [row.record() for row in found]
        alone(found)


if __name__ == "__main__":
    main()
