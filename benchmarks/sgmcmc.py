"""SGHMC and SGLD steps against `posteriors` and BlackJAX: time per gradient and chain, batch 64, 8 chains.

    python -m benchmarks.sgmcmc --jax PYTHON     # about three minutes; that peer needs `posteriors` in this environment

In one step of ours every chain takes its own minibatch from its own shuffle, the gradient of its density, new noise,
and an update. `posteriors` runs one chain at a time, so its time per step is its time per step and chain; its batches
are made the same way. BlackJAX runs 8 chains under `vmap`, each with its own minibatches of random rows instead of a
shuffle; its SGHMC takes ten steps per minibatch, so it gathers a tenth as often. Log densities and gradients on all
rows are compared first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional as F

import credibly as cr
from benchmarks import peers
from benchmarks.case import Case, Setting
from benchmarks.floors import Floor, gradient_flops
from benchmarks.jax_client import JaxSide, check_density
from benchmarks.suite import print_rows
from benchmarks.timing import Goal, Row, interleaved, options, report, scaled
from credibly.inference.target import ProblemTarget

CHAINS, BATCH = 8, 64
STEPS = 20  # per call
INNER = 10  # steps of BlackJAX's SGHMC per minibatch, its default


def small() -> tuple[cr.Problem, float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(455, 13, generator=generator)
    y = torch.sin(x[:, :1]) + 0.5 * torch.randn(455, 1, generator=generator)
    return cr.Problem(cr.zoo.mlp(13, (50,), 1), (x, y), cr.likelihoods.Gaussian(scale=0.5), cr.priors.Normal(1.0)), 40.0


def large() -> tuple[cr.Problem, float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 784, generator=generator)
    y = torch.randint(10, (2000,), generator=generator)
    return cr.Problem(cr.zoo.mlp(784, (400, 400), 10), (x, y), cr.likelihoods.Categorical(), cr.priors.Normal(0.1)), 2.5


def ours(problem: cr.Problem, method: Any) -> Any:
    """Return a call that takes `STEPS` steps of all chains."""
    run = method.sampler(ProblemTarget(problem), 0)
    run.start(problem.layout.read(problem.layout.module).expand(method.chains, -1).clone())

    def steps() -> None:
        upto = run.done + STEPS
        while run.done < upto:
            run.advance(lambda: False)

    return steps


def log_posterior_of(problem: cr.Problem) -> Any:
    """Return the minibatch log density, scaled to all rows, in the form `posteriors` expects."""
    n, prior, module = problem.n, problem.prior_spec, problem.layout.module
    scale = prior.scale  # type: ignore[union-attr]

    def log_posterior(
        parameters: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        out = functional_call(module, parameters, (x,))
        if isinstance(problem.likelihood, cr.likelihoods.Categorical):
            fit = -F.cross_entropy(out, y, reduction="sum")
        else:
            fit = -0.5 * torch.square((out - y) / 0.5).sum()
        log_prior = -0.5 * sum(torch.square(p).sum() for p in parameters.values()) / scale**2
        return n / len(x) * fit + log_prior, out

    return log_posterior


def theirs(problem: cr.Problem, kind: str) -> Any:
    """Return a call that takes `STEPS` steps of one chain with `posteriors`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from posteriors.sgmcmc import sghmc, sgld
    n, module, log_posterior = problem.n, problem.layout.module, log_posterior_of(problem)
    parameters = {k: v.detach().clone() for k, v in module.named_parameters()}
    build = {"sghmc": partial(sghmc.build, lr=1e-4, alpha=1.0), "sgld": partial(sgld.build, lr=1e-6)}[kind]
    transform = build(log_posterior)
    carry = {"state": transform.init(parameters), "order": torch.randperm(n), "start": 0}
    y = problem.y

    def steps() -> None:
        for _ in range(STEPS):
            if carry["start"] + BATCH > n:
                carry["order"], carry["start"] = torch.randperm(n), 0
            rows = carry["order"][carry["start"] : carry["start"] + BATCH]
            carry["start"] += BATCH
            carry["state"], _ = transform.update(carry["state"], (problem.x[rows], y[rows]), inplace=True)

    return steps


def check_posteriors(problem: cr.Problem) -> None:
    """Exit unless the density passed to `posteriors` has our gradient on the same rows."""
    rows = torch.arange(BATCH)
    module = problem.layout.module
    parameters = {k: v.detach().clone().requires_grad_() for k, v in module.named_parameters()}
    value = log_posterior_of(problem)(parameters, (problem.x[rows], problem.y[rows]))[0]
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(parameters.values()))])
    mine = problem.minibatch(problem.layout.read(module).unsqueeze(0), rows).gradient[0]
    error = float((gradient - mine).norm() / mine.norm())
    if not error < 1e-3:
        raise SystemExit(f"`posteriors` has another gradient (relative error {error:.2g}): nothing to compare")


def blackjax(side: JaxSide, problem: cr.Problem, sizes: list[int]) -> dict[str, Callable[[], object]]:
    """Build BlackJAX's SGLD and SGHMC with as many gradients per call as ours."""
    theta = problem.layout.read(problem.layout.module).expand(CHAINS, -1)
    noise = None if sizes[-1] > 1 else 0.5
    scale = problem.prior_spec.scale  # type: ignore[union-attr]
    case = {"sizes": sizes, "noise": noise, "prior": scale, "batch": BATCH}
    check_density(side, case, problem, theta[:1] + 0.01)
    data = {"x": problem.x, "y": problem.y, "theta": theta}
    sgld = {**case, "iterations": STEPS, "step_size": 1e-9}
    sghmc = {**case, "iterations": STEPS // INNER, "inner": INNER, "step_size": 1e-6}
    return {
        "BlackJAX sgld": side.build("blackjax_sgld", sgld, **data),
        "BlackJAX sghmc": side.build("blackjax_sghmc", sghmc, **data),
    }


def comparisons(build: Callable[[], tuple[cr.Problem, float]], sizes: list[int], setting: Setting) -> Iterator[Row]:
    """Compare SGHMC and SGLD of one network with the installed peers."""
    problem, goal = build()
    shared: dict[str, Any] = {
        "chains": CHAINS,
        "draws": 10**6,
        "warmup": 0,
        "thin": STEPS,
        "batch_size": BATCH,
        "compile": not setting.quick,
        "init": "network",
    }
    implementations: dict[str, Callable[[], object]] = {
        "sghmc": ours(problem, cr.SGHMC(step_size=1e-6, **shared)),
        "sgld": ours(problem, cr.SGLD(step_size=1e-9, **shared)),
    }
    if peers.module("posteriors") is None:
        setting.note("posteriors is not installed")
    else:
        check_posteriors(problem)
        implementations |= {f"posteriors {kind}": theirs(problem, kind) for kind in ("sghmc", "sgld")}
    with setting.jax_side() as side:
        if side is not None and side.has("blackjax"):
            implementations |= blackjax(side, problem, sizes)
        times = interleaved(implementations, repeats=setting.repeats, seconds=setting.seconds)
    state = {"sghmc": 2, "sgld": 1}  # vectors read and written per chain: weights, momenta
    for kind in ("sghmc", "sgld"):
        mine = scaled(times[kind], 1 / STEPS / CHAINS)
        floor = Floor(gradient_flops(sizes, BATCH), 2 * 4 * state[kind] * problem.dim)
        what = f"{kind.upper()}, {'-'.join(map(str, sizes))}, {CHAINS} chains, batch {BATCH}: one gradient per chain"
        found = False
        for peer, least, chains in (("posteriors", goal, 1), ("BlackJAX", 1.5, CHAINS)):
            if f"{peer} {kind}" in times:
                found, other = True, scaled(times[f"{peer} {kind}"], 1 / STEPS / chains)
                yield Row(what, mine, other, Goal(">=", least), inverse=True, peer=peer, floor=floor)
        if not found:
            yield Row(what, mine, [], inverse=True, floor=floor)


def cases() -> list[Case]:
    return [
        Case(
            "sgmcmc-small",
            "Steps of SGHMC and SGLD, 13-50-1, 8 chains, batch 64.",
            "a third is sampling noise and shuffling rows on one thread, most of the rest sums over rows per weight.",
            partial(comparisons, small, [13, 50, 1]),
            0.6,
            goals="40 against posteriors, 1.5 against BlackJAX",
            peers=("posteriors", "BlackJAX"),
        ),
        Case(
            "sgmcmc-large",
            "Steps of SGHMC and SGLD, 784-400-400-10, 8 chains, batch 64.",
            "the matrix products of a batch of 64, then the update and its noise, all on the same threads.",
            partial(comparisons, large, [784, 400, 400, 10]),
            0.9,
            goals="2.5 against posteriors, 1.5 against BlackJAX",
            peers=("posteriors", "BlackJAX"),
        ),
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--jax", default=None, metavar="PYTHON", help="an interpreter with jax and blackjax")
    args = parser.parse_args()
    with report("sgmcmc", args) as record:
        setting = Setting(args.repeats, args.seconds, args.threads, args.jax)
        found = [row for case in cases() for row in case.run(setting)]
        print_rows(found, record)


if __name__ == "__main__":
    main()
