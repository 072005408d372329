"""One sampler on one posterior: draws from its defaults, compared with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import credibly as cr
from benchmarks.jax_client import JaxSide
from benchmarks.posteriordb.models import POSTERIORS
from benchmarks.posteriordb.models.base import Model
from benchmarks.posteriordb.reference import FUNCTIONS, Reference, read_data, read_reference
from benchmarks.posteriordb.torch_arrays import TorchArrays
from credibly.diagnostics.convergence import measure
from credibly.errors import InputError, SamplingError

# BlackJAX runs as long as our defaults: 4 chains, 300 iterations of warm-up, 500 draws.
CHAINS, WARMUP, DRAWS = 4, 300, 500
# Above this R-hat, chains have not mixed and their errors mean nothing.
MIXED = 1.05
# Fewer trajectories than this may diverge.
FEW_DIVERGENT = 0.01


@dataclass(frozen=True)
class Outcome:
    """The result of one run of one sampler.

    Attributes:
        posterior, sampler, dim, seed: which run; D.
        z: the largest |z| by function: mean, square, lower tail, upper tail.
        limit: what the largest of all of them may be.
        rhat, ess: the worst R-hat and bulk ESS of the parameters of the reference.
        steps: leapfrog steps per draw, a gradient each, averaged over draws and chains.
        warmup_gradients: gradients per chain before the first draw, including those of chains that wait for others.
        divergent: fraction of the draws whose trajectory diverged.
        count: draws of all chains.
        failure: why there are no draws; empty if there are.
    """

    posterior: str
    sampler: str
    dim: int
    seed: int
    z: tuple[float, ...] = (math.nan,) * len(FUNCTIONS)
    limit: float = math.nan
    rhat: float = math.nan
    ess: float = math.nan
    steps: float = math.nan
    warmup_gradients: float = math.nan
    divergent: float = math.nan
    count: int = CHAINS * DRAWS
    failure: str = ""

    @property
    def per_gradient(self) -> float:
        """ESS of the worst parameter per gradient, warm-up left out."""
        return self.ess / (self.count * self.steps)

    @property
    def verdict(self) -> str:
        """Whether the draws agree with the reference, in words."""
        if self.failure:
            return "failed"
        if not self.rhat < MIXED:
            return "not mixed"
        if not max(self.z) < self.limit:
            return "differs"
        return "agrees, divergent" if self.divergent > FEW_DIVERGENT else "agrees"

    def record(self) -> dict[str, Any]:
        """Return the outcome as a line of JSON."""
        return asdict(self)


def model_of(posterior: str) -> Model:
    """Return a posterior with torch's arrays."""
    return POSTERIORS[posterior](TorchArrays(), read_data(posterior))


def density_of(posterior: str) -> cr.Density:
    """Return a posterior as a target of the samplers."""
    model = model_of(posterior)
    return cr.Density(model.log_prob, model.dim, batched=True, name=posterior)


def nuts(density: cr.Density, seed: int, **settings: Any) -> tuple[Tensor, dict[str, Any]]:
    """Run NUTS."""
    posterior = cr.NUTS(compile=False, **settings).fit(density, seed=seed, progress=False)
    steps = float(posterior.statistics["steps"].double().mean())
    return posterior.draws, _costs(posterior, steps, float(posterior.statistics["steps"].amax(0).sum()))


def hmc(density: cr.Density, seed: int, **settings: Any) -> tuple[Tensor, dict[str, Any]]:
    """Run HMC. The steps of a trajectory are averaged over the jitter of its length."""
    method = cr.HMC(compile=False, **settings)
    posterior = method.fit(density, seed=seed, progress=False)
    history = posterior.record.history
    lengths = history["trajectory_length"] * (1 + method.jitter_fraction * torch.linspace(-1, 1, 1001))
    wanted = torch.ceil(lengths / max(history["step_size"]) - 1e-9).clamp(1, method.max_steps)
    steps = float(wanted.mean())
    return posterior.draws, _costs(posterior, steps, steps * posterior.draws.shape[1])


def _costs(posterior: Any, steps: float, sampling: float) -> dict[str, Any]:
    """Return steps per draw, gradients per chain of the warm-up, and the fraction of divergent draws."""
    total = posterior.record.history["gradients"] / len(posterior.draws)
    divergent = float(posterior.statistics["divergent"].double().mean())
    return {"steps": steps, "warmup_gradients": total - sampling, "divergent": divergent}


OURS: dict[str, Callable[..., tuple[Tensor, dict[str, Any]]]] = {"NUTS": nuts, "HMC": hmc}


def run_ours(posterior: str, sampler: str, seed: int, **settings: Any) -> Outcome:
    """Run one of our samplers, with its defaults unless there are settings, and compare."""
    model, density = model_of(posterior), density_of(posterior)
    try:
        draws, costs = OURS[sampler](density, seed, **settings)
    except (InputError, SamplingError) as error:
        return Outcome(posterior, sampler, model.dim, seed, failure=str(error))
    with torch.no_grad():
        return compare(Outcome(posterior, sampler, model.dim, seed, **costs), model.constrain(draws))


def run_blackjax(posterior: str, seed: int, side: JaxSide) -> Outcome:
    """Run BlackJAX's NUTS on the same density from starting points of the same distribution, and compare."""
    model, data = model_of(posterior), {f"data_{k}": v for k, v in read_data(posterior).items()}
    start = torch.randn(CHAINS, model.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    check_same(posterior, model, start, data, side)
    case = {"posterior": posterior, "library": "blackjax", "seed": seed, "target_accept": 0.8}
    lengths = {"warmup": WARMUP, "draws": DRAWS, "thin": 1}
    _, found = side.fetch(sample="posterior_nuts", **case, **lengths, theta=start, **data)
    costs: dict[str, Any] = {
        "steps": float(found["steps"].mean()),
        "warmup_gradients": float(found["warmup_steps"].mean()),
        "divergent": float(found["divergent"].mean()),
    }
    draws = torch.from_numpy(found["draws"])
    return compare(Outcome(posterior, "BlackJAX NUTS", model.dim, seed, **costs), draws)


def check_same(posterior: str, model: Model, points: Tensor, data: dict[str, Any], side: JaxSide) -> None:
    """Exit unless both sides give the same log density and gradient."""
    points = 0.1 * points
    _, found = side.fetch(density="posteriors", posterior=posterior, theta=points, **data)
    at = points.clone().requires_grad_()
    value = model.log_prob(at)
    (gradient,) = torch.autograd.grad(value.sum(), at)
    for ours, name in ((value.detach(), "log_density"), (gradient, "gradient")):
        if not torch.allclose(torch.from_numpy(found[name]), ours, rtol=1e-8, atol=1e-8):
            raise SystemExit(f"{posterior}: JAX computes another {name}: nothing to compare")


def compare(outcome: Outcome, draws: Tensor) -> Outcome:
    """Return the outcome with the diagnostics of draws (chain, draw, P) and their distance from the reference."""
    reference: Reference = read_reference(outcome.posterior)
    z = reference.scores(draws).abs().amax(-1)
    quality = measure(draws)
    found = {"z": tuple(z.tolist()), "limit": reference.limit, "count": draws.shape[0] * draws.shape[1]}
    return Outcome(**{**asdict(outcome), **found, "rhat": float(quality.rhat.max()), "ess": float(quality.bulk.min())})
