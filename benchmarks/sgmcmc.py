"""SGHMC and SGLD steps against `posteriors`: microseconds a step and chain, batch 64, 8 chains.

    python -m benchmarks.sgmcmc                  # about three minutes; needs `posteriors` in the environment for the peer

A step of ours: every chain takes its own minibatch from its own shuffle, the gradient of its density, fresh noise, and an
update. The peer runs one chain at a time, so its time a step is its time a step and chain; its batch is made in the same way.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional as F

import credibly as cr
from benchmarks.timing import Goal, Row, interleaved, options, report, scaled, show
from credibly.methods.sgmcmc_run import SGMCMCRun
from credibly.target import ProblemTarget

CHAINS, BATCH = 8, 64


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
    """A call that takes 20 steps of all chains."""
    run = SGMCMCRun(ProblemTarget(problem), method, 0)
    run.start(problem.layout.read(problem.layout.module).expand(method.chains, -1).clone())

    def steps() -> None:
        upto = run.done + 20
        while run.done < upto:
            run.advance(lambda: False)

    return steps


def theirs(problem: cr.Problem, kind: str) -> Any:
    """A call that takes 20 steps of one chain by `posteriors`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from posteriors.sgmcmc import sghmc, sgld
    n, prior = problem.n, problem.prior_spec
    scale = prior.scale  # type: ignore[union-attr]
    module = problem.layout.module

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

    parameters = {k: v.detach().clone() for k, v in module.named_parameters()}
    transform = (
        sghmc.build(log_posterior, lr=1e-4, alpha=1.0) if kind == "sghmc" else sgld.build(log_posterior, lr=1e-6)
    )
    held = {"state": transform.init(parameters), "order": torch.randperm(n), "place": 0}
    y = problem.y

    def steps() -> None:
        for _ in range(20):
            if held["place"] + BATCH > n:
                held["order"], held["place"] = torch.randperm(n), 0
            rows = held["order"][held["place"] : held["place"] + BATCH]
            held["place"] += BATCH
            held["state"], _ = transform.update(held["state"], (problem.x[rows], y[rows]), inplace=True)

    return steps


def main() -> None:
    parser = options(__doc__)
    args = parser.parse_args()
    with report("sgmcmc", args) as record:
        rows = []
        for name, build in (("13-50-1", small), ("784-400-400-10", large)):
            problem, goal = build()
            shared = {
                "chains": CHAINS,
                "draws": 10**6,
                "warmup": 0,
                "thin": 20,
                "batch_size": BATCH,
                "compile": True,
                "init": "network",
            }
            contestants = {
                "sghmc": ours(problem, cr.SGHMC(step_size=1e-6, **shared)),
                "sgld": ours(problem, cr.SGLD(step_size=1e-9, **shared)),
                "posteriors sghmc": theirs(problem, "sghmc"),
                "posteriors sgld": theirs(problem, "sgld"),
            }
            times = interleaved(contestants, repeats=args.repeats, seconds=args.seconds)
            for kind in ("sghmc", "sgld"):
                mine, peer = scaled(times[kind], 1 / 20 / CHAINS), scaled(times[f"posteriors {kind}"], 1 / 20)
                what = f"posteriors / ours: {kind}, {name}, a step and chain"
                rows.append(Row(what, mine, peer, Goal(">=", goal) if kind == "sghmc" else None, inverse=True))
        show(rows, record)


if __name__ == "__main__":
    main()
