"""Effective samples per second in function space, on real data: ours against NumPyro's NUTS, BlackJAX's NUTS and MCLMC.

    python -m benchmarks.efficiency --jax PYTHON --root DIR       # DIR has uci/concrete.npz; else diabetes; two minutes

All sample the same density (inputs-50-1, SiLU, known noise, Normal prior) from the same starting points, and the time
includes everything from the first step of warm-up to the last draw. The same function,
`credibly.diagnostics.convergence.ess`, is then applied to the predictions of all draws at held-out rows. Reported is
the time per effective sample, for the median and the worst row. MCLMC has no Metropolis correction; ESS does not detect
the bias of its draws, which is in its favour.
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
from benchmarks.suite import print_rows
from benchmarks.timing import Goal, Row, cold_compiler, options, report
from credibly.backends.cpp.library import library
from credibly.core import compilation as compiling
from credibly.diagnostics.convergence import measure
from credibly.posterior.model import Model
from credibly.storage.record import Record

NOISE, HIDDEN, CHAINS, HELD_OUT = 0.3, 50, 4, 100
PEERS = {"numpyro_nuts": "NumPyro NUTS", "blackjax_nuts": "BlackJAX NUTS", "blackjax_mclmc": "BlackJAX MCLMC"}
# Warm-up and draws, long enough for an ESS of about three hundred. For MCLMC they are steps of two gradients each,
# thinned by `thin`. `max_steps` and `depth` (2^depth - 1 steps) are each library's default.
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
    """One whole run: compile seconds, all other seconds, and the quality of the draws."""

    compile: float
    seconds: float
    median: float  # ESS of the prediction at the median row
    least: float
    rhat: float  # of the worst row

    def per_sample(self, *, worst: bool = False, compiling: bool = False) -> float:
        """Return the seconds per effective sample."""
        return (self.seconds + (self.compile if compiling else 0.0)) / (self.least if worst else self.median)

    def __str__(self) -> str:
        return (
            f"{self.seconds:.1f} s plus {self.compile:.1f} s to compile, ESS {self.median:.0f} "
            f"(worst row {self.least:.0f}), R-hat up to {self.rhat:.3f}"
        )


def data(root: Path | None) -> tuple[str, Tensor, Tensor, Tensor]:
    """Return the name of the data set, standardised training rows, and held-out inputs."""
    found = cr.data.uci(root, "concrete", 0) if root is not None else cr.data.embedded("diabetes", seed=0)
    name = "concrete" if root is not None else "diabetes"
    return name, found.x_train, found.y_train, found.x_test[:HELD_OUT]


def draw_ours(problem: cr.Problem, start: Tensor, lengths: dict[str, int], seed: int) -> tuple[Tensor, float, float]:
    """Return the draws (chain, draw, D) of our HMC, seconds without compilation, and compile seconds."""
    method = cr.HMC(chains=len(start), init=start, compile=True, trajectory_length="tuned", **lengths)
    with compile_clock() as spent:
        built, first = spent[0], time.perf_counter()
        posterior = method.fit(problem, seed=seed, progress=False)
        total = time.perf_counter() - first
    return posterior.draws, total - (spent[0] - built), spent[0]


@contextmanager
def compile_clock() -> Iterator[list[float]]:
    """Count compile seconds in this block: the C++ library, and first calls of compiled functions (one step each)."""
    start = time.perf_counter()
    library()
    spent, plain = [time.perf_counter() - start], compiling._Fallback.__call__

    def timed(self: Any, *args: Any) -> Any:
        if self.tried:
            return self.active(*args)
        start = time.perf_counter()
        try:
            return plain(self, *args)
        finally:
            spent[0] += time.perf_counter() - start

    compiling._Fallback.__call__ = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        compiling._Fallback.__call__ = plain  # type: ignore[method-assign]


def _theirs(
    side: JaxSide, kind: str, problem: cr.Problem, start: Tensor, lengths: dict[str, int], seed: int
) -> tuple[Tensor, float, float]:
    case = {"sizes": [problem.x.shape[1], HIDDEN, 1], "noise": NOISE, "prior": 1.0, "seed": seed, **lengths}
    info, arrays = side.fetch(sample=kind, **case, x=problem.x, y=problem.y, theta=start)
    return torch.from_numpy(arrays["draws"]), info["seconds"], info["compile"]


def outcome(problem: cr.Problem, draws: Tensor, x: Tensor, seconds: float, compile: float) -> Outcome:
    """Compute ESS and R-hat of the predictions of these draws at the rows x."""
    posterior = cr.DrawsPosterior(Model.of(problem), draws.float(), Record(method="benchmark"))
    functions = posterior.predict(x).functions().reshape(*draws.shape[:2], len(x))
    found = measure(functions)
    return Outcome(compile, seconds, float(found.bulk.median()), float(found.bulk.min()), float(found.rhat.max()))


def comparisons(setting: Setting) -> Iterator[Row]:
    name, x, y, x_new = data(setting.root)
    prior, likelihood = cr.priors.Normal(1.0), cr.likelihoods.Gaussian(scale=NOISE)
    problem = cr.Problem(cr.zoo.mlp(x.shape[1], (HIDDEN,), 1), (x, y), likelihood, prior)
    start = 0.3 * torch.randn(CHAINS, problem.dim, generator=torch.Generator().manual_seed(2))
    lengths = QUICK if setting.quick else LENGTHS
    repeats = 1 if setting.quick else max(1, min(2, setting.repeats))
    implementations: dict[str, Callable[[int], tuple[Tensor, float, float]]] = {
        "ours": lambda seed: draw_ours(problem, start, lengths["ours"], seed)
    }
    with cold_compiler(), setting.jax_side(devices=CHAINS) as side:
        if side is not None:
            case = {"sizes": [x.shape[1], HIDDEN, 1], "noise": NOISE, "prior": 1.0}
            check_density(side, case, problem, start)
            for kind in PEERS:
                if side.has(kind.split("_")[0]):
                    implementations[kind] = partial(_theirs, side, kind, problem, start, lengths[kind])
        outcomes = alternate(implementations, repeats, problem, x_new, setting)
    mine = outcomes.pop("ours")
    shape = f"{name}, {x.shape[1]}-{HIDDEN}-1, {CHAINS} chains"
    for kind, theirs in outcomes.items():
        for what, worst, compiled in (
            ("one effective sample, median row", False, False),
            ("one effective sample, worst row", True, False),
            ("one effective sample, median row, with compilation", False, True),
        ):
            a, b = ([one.per_sample(worst=worst, compiling=compiled) for one in runs] for runs in (mine, theirs))
            goal = Goal(">=", 3) if not worst and not compiled else None
            yield Row(f"{shape}: {what}", a, b, goal, inverse=True, peer=PEERS[kind])
    if not outcomes:
        times = [one.per_sample() for one in mine]
        yield Row(f"{shape}: one effective sample, median row", times, [], Goal(">=", 3), inverse=True)


def alternate(
    implementations: dict[str, Callable[[int], tuple[Tensor, float, float]]],
    repeats: int,
    problem: cr.Problem,
    x: Tensor,
    setting: Setting,
) -> dict[str, list[Outcome]]:
    """Alternate whole runs, with a new seed in each repetition; a peer that fails is left out."""
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in implementations}
    for seed in range(repeats):
        for kind in list(outcomes):
            try:
                draws, seconds, compile = implementations[kind](seed)
            except PeerError as error:
                setting.note(f"{PEERS[kind]}: {error}")
                del outcomes[kind]
                continue
            if seed:  # later compilations hit the cache of the first
                compile = outcomes[kind][0].compile
            outcomes[kind].append(outcome(problem, draws, x, seconds, compile))
            if seed == 0:
                setting.note(f"{PEERS.get(kind, 'HMC')}, {draws.shape[1]} draws: {outcomes[kind][0]}")
    return outcomes


def cases() -> list[Case]:
    return [
        Case(
            "ess-concrete",
            "Effective samples per second of the predictions at held-out rows, inputs-50-1 on real data, 4 chains, "
            "warm-up included.",
            "gradients per effective sample: hundreds per trajectory, as the step size is 0.001 of the prior's scale.",
            comparisons,
            3.0,
            goals="3",
            peers=tuple(PEERS.values()),
        )
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--jax", required=True, metavar="PYTHON", help="an interpreter with jax, blackjax and numpyro")
    parser.add_argument("--root", type=Path, default=None, metavar="DIR", help="folder with uci/concrete.npz")
    args = parser.parse_args()
    with report("efficiency", args) as record:
        found = list(comparisons(Setting(args.repeats, args.seconds, args.threads, args.jax, args.root)))
        print_rows(found, record)


if __name__ == "__main__":
    main()
