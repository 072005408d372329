"""The density and its gradient against hand-written torch code for the same network.

    python -m benchmarks.density                 # about three minutes
    python -m benchmarks.density --json out.json

All samplers and optimisers call `Problem.parts_and_grad`: log likelihood and log prior of C parameter vectors and the
gradient of their sum, for any network, likelihood and prior. The baseline is hand-written for the given network: its
layers as `baddbmm`, the simplest form of the density, `torch.autograd.grad` in eager code and `torch.func.grad` inside
`torch.compile`. Both must first give the same values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credibly as cr
from benchmarks.hmc import chain_count
from benchmarks.timing import Goal, Row, cold_compiler, duration, interleaved, options, report, show, table

NOISE = 0.5  # standard deviation of the Gaussian likelihood
PRIOR = 0.7  # standard deviation of every weight; not 1, so that a missing division is detected

Result = tuple[Tensor, Tensor, Tensor]  # log likelihood (C,), log prior (C,), gradient of their sum (C, D)
GOAL = Goal("<=", 1.1)


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    rows: int
    chains: int

    @property
    def classes(self) -> bool:
        return self.sizes[-1] > 1

    @property
    def name(self) -> str:
        return f"{'-'.join(map(str, self.sizes))}, {self.rows} rows, {chain_count(self.chains)}"


CASES = (
    Case((13, 50, 1), 455, 1),
    Case((13, 50, 1), 455, 8),
    Case((8, 50, 50, 1), 7_000, 8),
    Case((784, 400, 400, 10), 5_000, 4),
)


def problem_of(case: Case) -> cr.Problem:
    torch.manual_seed(0)
    x = torch.randn(case.rows, case.sizes[0])
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(case.sizes):
        layers += [nn.Linear(inputs, outputs), nn.SiLU()]
    net = nn.Sequential(*layers[:-1])
    prior = cr.priors.Normal(PRIOR)
    if case.classes:
        return cr.Problem(net, (x, torch.randint(case.sizes[-1], (case.rows,))), cr.likelihoods.Categorical(), prior)
    y = torch.sin(x[:, :1]) + NOISE * torch.randn(case.rows, 1)
    return cr.Problem(net, (x, y), cr.likelihoods.Gaussian(NOISE), prior)


class HandWritten:
    """The same density, hand-written for these layers, likelihood and prior."""

    def __init__(self, case: Case) -> None:
        self.shapes = [shape for i, o in pairwise(case.sizes) for shape in ((o, i), (o,))]
        self.lengths = [math.prod(shape) for shape in self.shapes]
        self.classes = case.classes
        self.lik_constant = -case.rows * (math.log(NOISE) + 0.5 * math.log(2 * math.pi))
        self.prior_constant = -sum(self.lengths) * (math.log(PRIOR) + 0.5 * math.log(2 * math.pi))

    def parts(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        chains = len(theta)
        tensors = [p.view(chains, *s) for p, s in zip(theta.split(self.lengths, -1), self.shapes)]
        h = x.expand(chains, *x.shape)
        for i in range(0, len(tensors), 2):
            h = torch.baddbmm(tensors[i + 1].unsqueeze(1), h, tensors[i].mT)
            if i + 2 < len(tensors):
                h = F.silu(h)
        if self.classes:
            labels = y.expand(chains, -1).unsqueeze(-1)
            log_lik = torch.log_softmax(h, -1).gather(-1, labels).sum((1, 2))
        else:
            log_lik = self.lik_constant - 0.5 / NOISE**2 * (h - y).square().sum((1, 2))
        return log_lik, self.prior_constant - 0.5 / PRIOR**2 * theta.square().sum(-1)

    def eager(self, theta: Tensor, x: Tensor, y: Tensor) -> Result:
        with torch.enable_grad():
            point = theta.detach().requires_grad_()
            log_lik, log_prior = self.parts(point, x, y)
            total = (log_lik + log_prior).sum()
        (gradient,) = torch.autograd.grad(total, point)
        return log_lik.detach(), log_prior.detach(), gradient

    def functional(self, theta: Tensor, x: Tensor, y: Tensor) -> Result:
        """Compute the same for torch.compile, which cannot trace autograd.grad."""

        def total(t: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            log_lik, log_prior = self.parts(t, x, y)
            return (log_lik + log_prior).sum(), (log_lik, log_prior)

        gradient, (log_lik, log_prior) = torch.func.grad(total, has_aux=True)(theta)
        return log_lik, log_prior, gradient


def check_same(name: str, results: dict[str, Result]) -> None:
    """Check every implementation's value and gradient against the hand-written eager one."""
    reference = results["hand eager"]
    for who, result in results.items():
        for what, found, expected in zip(("log likelihood", "log prior", "gradient"), result, reference):
            scale = float(expected.abs().max())
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * scale), f"{name}: {what} of {who} differs"


def main() -> None:
    args = options(__doc__).parse_args()
    rows: list[Row] = []
    compiles: list[tuple[str, float]] = []
    with report("density", args) as record, cold_compiler() as loading:
        for case in CASES:
            torch.compiler.reset()  # otherwise every call would first try the guards of earlier cases
            problem, hand = problem_of(case), HandWritten(case)
            x, y = problem.x, problem.y
            assert isinstance(x, Tensor)
            theta = 0.1 * torch.randn(case.chains, problem.dim)

            def ours(theta: Tensor, x: Tensor, y: Tensor, problem: cr.Problem = problem) -> Result:
                return problem.parts_and_grad(theta, x, y, 1.0, 1.0)

            functions: dict[str, Callable[[Tensor, Tensor, Tensor], Result]] = {
                "hand eager": hand.eager,
                "ours eager": ours,
                "ours compiled": torch.compile(ours, dynamic=False),
                "hand compiled": torch.compile(hand.functional, dynamic=False),
            }
            with torch.no_grad():  # as in the training and sampling loops
                start = time.perf_counter()
                functions["ours compiled"](theta, x, y)
                first = time.perf_counter() - start
                check_same(case.name, {who: function(theta, x, y) for who, function in functions.items()})
                compiles.append((case.name, first))
                implementations: dict[str, Callable[[], object]] = {
                    who: partial(function, theta, x, y) for who, function in functions.items()
                }
                implementations["public eager"] = partial(problem.log_density_and_grad, theta)
                times = interleaved(implementations, repeats=args.repeats, seconds=args.seconds)
            rows += [
                Row(f"{case.name}: eager", times["ours eager"], times["hand eager"], GOAL),
                Row(f"{case.name}: compiled", times["ours compiled"], times["hand compiled"], GOAL),
                Row(f"{case.name}: eager, log_density_and_grad", times["public eager"], times["hand eager"]),
            ]
        print("## Value and gradient, one call for all chains\n")
        show(rows, record)
        print(f"Our first compiled call, cold cache; loading the compiler took {duration(loading)} more:\n")
        print(table(["case", "first call"], [[n, duration(s)] for n, s in compiles]))
        record["compiler_loading_s"] = loading
        record["compile"] = [{"case": n, "first_call_s": s} for n, s in compiles]


if __name__ == "__main__":
    main()
