"""A Gaussian over the whole flat vector as a prior: what `posterior.as_prior()` gives, for the next problem.

    log p(w) = -1/2 (w - m)' P (w - m) + 1/2 log det P - D/2 log(2 pi)

Bayes' rule in turns: with the posterior of the first data as the prior of the second, the second posterior is that of both.
That holds exactly where the first posterior is exact; otherwise as well as it stands in for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.gaussians.precisions import Dense, Diagonal, Precision
from credibly.networks.layout import Layout

Signature = tuple[tuple[str, tuple[int, ...]], ...]


def signature(layout: Layout) -> Signature:
    """Names and shapes of the random tensors, in their order."""
    return tuple((e.name, e.shape) for e in layout.entries)


class GaussianPrior:
    """N(loc, P^-1) over all random parameters of one network, for `Problem(prior=...)`.

    Args:
        loc: the mean, (D,).
        precision: the shape.
        names: names and shapes of the tensors that the vector is made of; a problem with others refuses the prior.
        source: what it was made from, for the record.
    """

    def __init__(self, loc: Tensor, precision: Precision, names: Signature, source: str = "") -> None:
        if loc.shape != (precision.dim,) or precision.dim != sum(math.prod(shape) for _, shape in names):
            raise InputError(
                "loc",
                f"has shape {tuple(loc.shape)} for a precision of {precision.dim} coordinates",
                "Pass the mean of all random parameters, in the order of the layout",
            )
        # A coordinate without a spread has no density, and one without precision is no part of a Gaussian.
        variance = precision.variance()
        if not bool(torch.isfinite(loc).all()) or not bool((torch.isfinite(variance) & (variance > 0)).all()):
            raise InputError(
                "precision",
                "some coordinate has a spread of zero, or a value that is not finite",
                "A prior needs a positive finite deviation of every parameter; pruned posteriors have none",
            )
        self.loc = loc.detach()
        self.precision = precision
        self.names = names
        self.source = source

    def bind(self, layout: Layout) -> BoundGaussianPrior:
        """The prior on a layout's device and in its dtype; another network's is refused with what differs."""
        mine, theirs = dict(self.names), dict(signature(layout))
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                raise InputError(
                    "prior",
                    f"is from a posterior of another network: there {name!r} has {_shape(mine.get(name))}, "
                    f"here {_shape(theirs.get(name))}",
                    "Pass a posterior's as_prior() to a problem of the network, the random parameters and the likelihood that it is of",
                )
        if self.names != signature(layout):
            raise InputError("prior", "its parameters lie in another order", "Build the network by the same code")
        return BoundGaussianPrior(self.loc, self.precision, layout.device, layout.dtype)

    def checksum(self) -> str:
        """A short hash of all its numbers: the same posterior gives the same."""
        digest = hashlib.sha256(self.precision.structure.encode())
        for tensor in (self.loc, *self.precision.tensors()):
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]

    def spec(self) -> dict[str, Any]:
        """What a record keeps of it: enough to know it again, not to make it again."""
        return {
            "kind": "gaussian_prior.GaussianPrior",
            "structure": self.precision.structure,
            "dim": self.precision.dim,
            "source": self.source,
            "checksum": self.checksum(),
        }

    def __repr__(self) -> str:
        return f"GaussianPrior({self.precision.structure} over {self.precision.dim} parameters, from {self.source or 'given values'})"


class BoundGaussianPrior:
    """The prior of a problem's flat vector; it does what `credibly.priors.flat.BoundPrior` does."""

    groups = 0  # there is no scale to learn: the prior is a posterior
    closed_form = True  # E_q log p is known for every Gaussian q

    def __init__(self, loc: Tensor, precision: Precision, device: torch.device, dtype: torch.dtype) -> None:
        self.loc = loc.to(device, dtype)
        self.precision = precision.to(device, dtype)
        self.dim, self.device, self.dtype = precision.dim, device, dtype
        # In float64 from the source: the sum of many logarithms is no place for rounding.
        half = 0.5 * float(precision.to(device, torch.float64).log_det())
        self.constant = half - 0.5 * self.dim * math.log(2 * math.pi)
        self._double: tuple[Tensor, Precision] | None = None

    def log_prob(self, theta: Tensor) -> Tensor:
        """Normalised log density: (C, D) -> (C,)."""
        loc, precision = self._in(theta.dtype)
        return self.constant - 0.5 * precision.quadratic(theta - loc)

    def expected_log_prob(
        self, loc: Tensor, variance: Tensor, draws: Tensor, stretch: Tensor | None = None, factor: Tensor | None = None
    ) -> Tensor:
        """E_q log p(w), (M,), in closed form: log p(E w) - tr(P Sigma_q) / 2.

        For Gaussians q with that mean and variance (M, D) and, where they are not diagonal, a factor (M, D, R) whose
        products F F' are what lies beside the diagonal. The draws are not looked at.
        """
        if stretch is not None:
            raise InputError(
                "learn_prior_scale", "found with a prior that is a posterior", "Its scale is known; leave it out"
            )
        return self.log_prob(loc) - 0.5 * self.precision.trace_with(variance, factor)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D)."""
        shape = (count, self.precision.noise_size())
        noise = torch.randn(shape, generator=generator, dtype=self.dtype, device=generator.device)
        return self.loc + self.precision.draw(noise)

    @property
    def std(self) -> Tensor:
        """Standard deviation of every coordinate, (D,)."""
        return self.precision.variance().sqrt()

    @property
    def is_normal(self) -> bool:
        """Whether the coordinates are independent normal variables."""
        return self.precision.structure == "diagonal"

    def _in(self, dtype: torch.dtype) -> tuple[Tensor, Precision]:
        if dtype == self.dtype:
            return self.loc, self.precision
        if dtype != torch.float64:
            return self.loc.to(dtype), self.precision.to(self.device, dtype)
        if self._double is None:
            self._double = self.loc.double(), self.precision.to(self.device, torch.float64)
        return self._double


def by_moments(draws: Tensor, names: Signature, family: str, source: str) -> GaussianPrior:
    """The Gaussian with the mean and the variances ("diag") or the covariance ("full") of draws (S, D)."""
    if family not in ("diag", "full"):
        raise InputError("family", f"found {family!r}", 'Pass "diag" or "full"')
    count, dim = draws.shape
    least = 2 if family == "diag" else dim + 1
    if count < least:
        what = "one point has no spread" if count == 1 else f"{count} draws of {dim} parameters have no {family} spread"
        advice = (
            "Fit a method that gives a distribution, such as BayesByBackprop" if count == 1 else 'Use family="diag"'
        )
        raise InputError("as_prior", f"{source}: {what}", advice)
    wide = draws.double()
    mean = wide.mean(0)
    if family == "diag":
        variance = wide.var(0).to(draws.dtype)
        if bool((variance == 0).any()):
            raise InputError("as_prior", f"{source}: some parameter is the same in all draws", "Use more draws")
        return GaussianPrior(mean.to(draws.dtype), Diagonal(1 / variance), names, source)
    shape = Dense.of_covariance(torch.cov(wide.mT).reshape(dim, dim).to(draws.dtype))
    return GaussianPrior(mean.to(draws.dtype), shape, names, source)


def _shape(shape: Sequence[int] | None) -> str:
    return "no such tensor" if shape is None else f"shape {tuple(shape)}"


__all__ = ["BoundGaussianPrior", "GaussianPrior", "by_moments", "signature"]
