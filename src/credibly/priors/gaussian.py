"""A Gaussian prior over the flat vector, as returned by `posterior.as_prior()`, for sequential inference.

    log p(w) = -1/2 (w - m)' P (w - m) + 1/2 log det P - D/2 log(2 pi)

With the posterior of the first data set as the prior for the second, the second posterior is that of both. This is
exact if the first posterior is, and otherwise as good as its Gaussian approximation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credibly.core.checks import check_choice
from credibly.errors import InputError
from credibly.gaussians.precisions import Dense, Diagonal, Precision
from credibly.networks.layout import Layout

Signature = tuple[tuple[str, tuple[int, ...]], ...]


def signature(layout: Layout) -> Signature:
    """Return the names and shapes of the random tensors, in order."""
    return tuple((e.name, e.shape) for e in layout.entries)


class GaussianPrior:
    """N(loc, P^-1) over all random parameters of one network, for `Problem(prior=...)`.

    Args:
        loc: the mean, (D,).
        precision: the precision P.
        names: names and shapes of the tensors in the flat vector; a problem with other tensors rejects the prior.
        source: what it was made from, for the record.
    """

    def __init__(self, loc: Tensor, precision: Precision, names: Signature, source: str = "") -> None:
        if loc.shape != (precision.dim,) or precision.dim != sum(math.prod(shape) for _, shape in names):
            raise InputError(
                "loc",
                f"has shape {tuple(loc.shape)}, the precision has {precision.dim} coordinates",
                "Pass the mean of all random parameters, in the order of the layout",
            )
        # A coordinate of zero variance has no density, and one of infinite variance is improper.
        variance = precision.variance()
        if not bool(torch.isfinite(loc).all()) or not bool((torch.isfinite(variance) & (variance > 0)).all()):
            raise InputError(
                "precision",
                "must have a positive finite variance for every parameter",
                "Pruned posteriors have parameters of zero variance",
            )
        self.loc = loc.detach()
        self.precision = precision
        self.names = names
        self.source = source

    def bind(self, layout: Layout) -> BoundGaussianPrior:
        """Return the prior on the layout's device and in its dtype. Raise if it belongs to another network."""
        mine, theirs = dict(self.names), dict(signature(layout))
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                raise InputError(
                    "prior",
                    f"is from a posterior of another network: {name!r} has {_shape(mine.get(name))} there, "
                    f"{_shape(theirs.get(name))} here",
                    "The network, its random parameters and the likelihood must be those of the posterior",
                )
        if self.names != signature(layout):
            raise InputError("prior", "has the parameters in another order", "Build the network with the same code")
        return BoundGaussianPrior(self.loc, self.precision, layout.device, layout.dtype)

    def checksum(self) -> str:
        """Return a short hash of all its values."""
        digest = hashlib.sha256(self.precision.structure.encode())
        for tensor in (self.loc, *self.precision.tensors()):
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]

    def spec(self) -> dict[str, Any]:
        """Return a description for a record: enough to recognise the prior, not to rebuild it."""
        return {
            "kind": "gaussian_prior.GaussianPrior",
            "structure": self.precision.structure,
            "dim": self.precision.dim,
            "source": self.source,
            "checksum": self.checksum(),
        }

    def __repr__(self) -> str:
        structure, dim, source = self.precision.structure, self.precision.dim, self.source or "given values"
        return f"GaussianPrior({structure} over {dim} parameters, from {source})"


class BoundGaussianPrior:
    """A Gaussian prior of a problem's flat vector, with the interface of `credibly.priors.flat.BoundPrior`."""

    groups = 0  # no scale can be learned: the prior is a posterior
    closed_form = True  # E_q log p has a closed form for every Gaussian q

    def __init__(self, loc: Tensor, precision: Precision, device: torch.device, dtype: torch.dtype) -> None:
        self.loc = loc.to(device, dtype)
        self.precision = precision.to(device, dtype)
        self.dim, self.device, self.dtype = precision.dim, device, dtype
        # In float64, before rounding to dtype: the log determinant sums D logarithms.
        half = 0.5 * float(precision.to(device, torch.float64).log_det())
        self.constant = half - 0.5 * self.dim * math.log(2 * math.pi)
        self._double: tuple[Tensor, Precision] | None = None

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return the normalised log density: (C, D) -> (C,)."""
        loc, precision = self._in_dtype(theta.dtype)
        return self.constant - 0.5 * precision.quadratic(theta - loc)

    def expected_log_prob(
        self, loc: Tensor, variance: Tensor, draws: Tensor, stretch: Tensor | None = None, factor: Tensor | None = None
    ) -> Tensor:
        """Return E_q log p(w), (M,), in closed form: log p(E w) - tr(P Sigma_q) / 2.

        q are Gaussians with means `loc` and variances `variance`, (M, D) each; the off-diagonal covariance is that of
        F F' for a factor F (M, D, R), or zero without one. The draws are ignored.
        """
        if stretch is not None:
            raise InputError("learn_prior_scale", "the prior is a posterior, whose scale is known", "Leave it out")
        return self.log_prob(loc) - 0.5 * self.precision.trace_with(variance, factor)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw samples (count, D)."""
        shape = (count, self.precision.noise_size())
        noise = torch.randn(shape, generator=generator, dtype=self.dtype, device=generator.device)
        return self.loc + self.precision.draw(noise)

    @property
    def std(self) -> Tensor:
        """Standard deviation of every coordinate, (D,)."""
        return self.precision.variance().sqrt()

    @property
    def is_normal(self) -> bool:
        """Whether the coordinates are independent."""
        return self.precision.structure == "diagonal"

    def _in_dtype(self, dtype: torch.dtype) -> tuple[Tensor, Precision]:
        if dtype == self.dtype:
            return self.loc, self.precision
        if dtype != torch.float64:
            return self.loc.to(dtype), self.precision.to(self.device, dtype)
        if self._double is None:
            self._double = self.loc.double(), self.precision.to(self.device, torch.float64)
        return self._double


def by_moments(draws: Tensor, names: Signature, family: str, source: str) -> GaussianPrior:
    """Return the Gaussian with the mean and the variances ("diag") or the covariance ("full") of draws (S, D)."""
    check_choice("family", family, ("diag", "full"))
    count, dim = draws.shape
    if count < 2:
        advice = "Fit a method that gives a distribution, such as BayesByBackprop"
        raise InputError("as_prior", f"{source} is a single point, which has no variance", advice)
    if family == "full" and count <= dim:
        found = f"{count} draws of {source} do not determine the covariance of {dim} parameters"
        raise InputError("as_prior", found, 'Use family="diag"')
    double = draws.double()
    mean = double.mean(0)
    if family == "diag":
        variance = double.var(0).to(draws.dtype)
        if bool((variance == 0).any()):
            raise InputError("as_prior", f"some parameter is the same in all draws of {source}", "Use more draws")
        return GaussianPrior(mean.to(draws.dtype), Diagonal(1 / variance), names, source)
    precision = Dense.of_covariance(torch.cov(double.mT).reshape(dim, dim).to(draws.dtype))
    return GaussianPrior(mean.to(draws.dtype), precision, names, source)


def _shape(shape: Sequence[int] | None) -> str:
    return "no such tensor" if shape is None else f"shape {tuple(shape)}"


__all__ = ["BoundGaussianPrior", "GaussianPrior", "by_moments", "signature"]
