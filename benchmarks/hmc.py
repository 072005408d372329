"""HMC against BlackJAX and NumPyro: time per gradient and chain, for the same network, data, step size and steps.

    python -m benchmarks.hmc --jax PYTHON        # PYTHON has jax, blackjax and numpyro; about three minutes

The peers run in their own process; implementations alternate, and one is idle while the other works. All sample
momenta, integrate, apply the Metropolis correction and keep the state; ours also records energy and acceptance of every
draw. Compile time is excluded. Both sides must first give the same log density and gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import credibly as cr
from benchmarks.case import Case, Setting
from benchmarks.floors import Floor, gradient_flops
from benchmarks.jax_client import JaxSide, PeerError, check_density
from benchmarks.suite import print_rows
from benchmarks.timing import Goal, Row, Times, interleaved, options, report, scaled
from credibly.inference.target import ProblemTarget

PEERS = {"blackjax_hmc": "BlackJAX", "numpyro_hmc": "NumPyro"}
ON_GPU = {"jax_hmc": "JAX scan and vmap"}
# steps: leapfrog steps per iteration; iterations: per call
SMALL = {"sizes": [13, 50, 1], "rows": 455, "steps": 50}
MEDIUM = {"sizes": [8, 50, 50, 1], "rows": 7000, "steps": 20}
LARGE = {"sizes": [784, 400, 400, 10], "rows": 5000, "steps": 3}
SIZES: list[dict[str, Any]] = [
    {"name": "hmc-small-1", **SMALL, "chains": 1, "iterations": 20, "goal": 1.0},
    {"name": "hmc-small-8", **SMALL, "chains": 8, "iterations": 10, "goal": 1.5},
    {"name": "hmc-small-64", **SMALL, "chains": 64, "iterations": 2, "goal": 1.5},
    {"name": "hmc-medium-1", **MEDIUM, "chains": 1, "iterations": 2, "goal": 1.0},
    {"name": "hmc-medium-8", **MEDIUM, "chains": 8, "iterations": 1, "goal": 1.3},
    {"name": "hmc-large-1", **LARGE, "chains": 1, "iterations": 1, "goal": 1.0},
]
LIMITS = {
    "hmc-small-1": "one core: matrix products at about half the peak rate, sums over rows, SiLU; and 250 us of torch "
    "overhead per iteration.",
    "hmc-small-8": "matrix products at about half the peak rate, sums over rows per weight, SiLU and its gradient.",
    "hmc-small-64": "as with 8 chains.",
    "hmc-medium-1": "as with 8 chains; threads split the rows of the single chain.",
    "hmc-medium-8": "matrix products at two thirds of the peak rate, and SiLU and its gradient.",
    "hmc-large-1": "the matrix products: both sides call the same kind of library.",
}


def problem(case: dict[str, Any], device: str = "cpu") -> cr.Problem:
    generator = torch.Generator().manual_seed(0)
    sizes, rows = case["sizes"], case["rows"]
    net = cr.zoo.mlp(sizes[0], tuple(sizes[1:-1]), sizes[-1])
    x = torch.randn(rows, sizes[0], generator=generator)
    prior = cr.priors.Normal(1.0)
    if sizes[-1] > 1:
        y = torch.randint(sizes[-1], (rows,), generator=generator)
        return cr.Problem(net, (x, y), cr.likelihoods.Categorical(), prior, device=device)
    y = torch.randn(rows, 1, generator=generator)
    return cr.Problem(net, (x, y), cr.likelihoods.Gaussian(scale=0.5), prior, device=device)


def chain_count(chains: int) -> str:
    return f"{chains} chain{'s' * (chains > 1)}"


def jax_case(case: dict[str, Any]) -> dict[str, Any]:
    """Return the case in the form the JAX side reads."""
    noise = 0.5 if case["sizes"][-1] == 1 else None
    return {**{k: case[k] for k in ("sizes", "steps", "iterations", "step_size")}, "prior": 1.0, "noise": noise}


def ours(case: dict[str, Any], device: str = "cpu") -> tuple[Callable[[], None], cr.Problem, torch.Tensor]:
    """Return a call that runs some iterations of all chains, the problem, and the initial states."""
    target_problem = problem(case, device)
    target = ProblemTarget(target_problem)
    method = cr.HMC(
        chains=case["chains"],
        draws=10**6,
        warmup=0,
        step_size=case["step_size"],
        trajectory_length=case["step_size"] * case["steps"],
        init="network",
        compile=True,
        mass="identity",
    )
    start = 0.1 * torch.randn(case["chains"], target.dim, generator=torch.Generator().manual_seed(1))
    run = method.sampler(target, 0)
    run.start(start.to(device))

    def iterate() -> None:
        for _ in range(case["iterations"]):
            run.advance(lambda: False)
        if device == "cuda":
            torch.cuda.synchronize()

    return iterate, target_problem, start


def comparisons(case: dict[str, Any], setting: Setting, device: str = "cpu") -> Iterator[Row]:
    """Compare one size with the JAX peers."""
    case = {**case, "step_size": 1e-4}
    if setting.quick:
        case = {**case, "rows": 50, "sizes": [case["sizes"][0], 5, case["sizes"][-1]], "iterations": 1, "steps": 9}
    mine, target_problem, start = ours(case, device)
    implementations: dict[str, Callable[[], object]] = {"ours": mine}
    with setting.jax_side() as side:
        if side is not None:
            check_density(side, jax_case(case), target_problem, start[:4].to(device))
            implementations |= peers(side, case, target_problem, start, setting)
        times = interleaved(implementations, repeats=setting.repeats, seconds=setting.seconds)
    yield from rows(case, times)


def peers(
    side: JaxSide, case: dict[str, Any], target_problem: cr.Problem, start: torch.Tensor, setting: Setting
) -> dict[str, Callable[[], object]]:
    """Build the implementations that the JAX side has installed."""
    found: dict[str, Callable[[], object]] = {}
    for kind, name in (ON_GPU if target_problem.device.type == "cuda" else PEERS).items():
        if not side.has(kind.split("_")[0]):
            setting.note(f"{name} is not installed")
            continue
        try:
            found[name] = side.build(kind, jax_case(case), x=target_problem.x, y=target_problem.y, theta=start)
        except PeerError as error:
            setting.note(f"{name}: {error}")
    return found


def rows(case: dict[str, Any], times: dict[str, Times]) -> Iterator[Row]:
    each = 1 / (case["iterations"] * case["steps"] * case["chains"])
    network = "-".join(map(str, case["sizes"]))
    what = f"{network} on {case['rows']:,} rows, {chain_count(case['chains'])}: one gradient per chain"
    mine, floor = scaled(times["ours"], each), Floor(gradient_flops(case["sizes"], case["rows"]))
    goal = Goal(">=", case["goal"]) if case.get("goal") else None
    others = [name for name in times if name != "ours"]
    for name in others:
        yield Row(what, mine, scaled(times[name], each), goal, inverse=True, peer=name, floor=floor)
    if not others:
        yield Row(what, mine, [], goal, inverse=True, floor=floor)


def cases() -> list[Case]:
    return [
        Case(
            size["name"],
            f"HMC, {'-'.join(map(str, size['sizes']))} (SiLU) on {size['rows']:,} rows, {chain_count(size['chains'])}, "
            f"{size['steps']} leapfrog steps.",
            LIMITS[size["name"]],
            partial(comparisons, size),
            0.35,
            goals=f"{size['goal']:g}",
            peers=tuple(PEERS.values()),
        )
        for size in SIZES
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--jax", required=True, metavar="PYTHON", help="an interpreter with jax, blackjax and numpyro")
    args = parser.parse_args()
    with report("hmc", args) as record:
        setting = Setting(args.repeats, args.seconds, args.threads, args.jax)
        found = [row for size in SIZES for row in comparisons(size, setting)]
        print_rows(found, record)


if __name__ == "__main__":
    main()
