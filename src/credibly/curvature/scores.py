"""Output vectors whose outer products make up the Fisher information of a row: exact, sampled or empirical.

    exact       columns of a root S of F = E_y[s s'], with s = d log p(y | f) / d f: about one per output
    sampled     s at labels drawn from the model, divided by the root of their number M: unbiased for F, M vectors
    empirical   s at the observed label: one vector, but a different matrix than F

A vector of the second and third kind covers all elements (pixels) of a row at once: their scores are independent given
the weights and have mean zero under the model, so the products between elements vanish on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_integer
from credibly.core.rng import stream
from credibly.curvature.output_fisher import closed_form, fisher_root
from credibly.errors import InputError
from credibly.likelihoods import Likelihood
from credibly.likelihoods.base import Extra

FISHERS = ("exact", "sampled", "empirical")


@dataclass(frozen=True)
class Fisher:
    """Which Fisher information to compute: one of `FISHERS`; with "sampled", from how many labels per row."""

    kind: str = "exact"
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("fisher", self.kind, FISHERS)
        check_integer("fisher_samples", self.samples)

    def check(self, likelihood: Likelihood) -> None:
        """Raise if labels cannot be drawn from the density of this likelihood."""
        if self.kind != "sampled" or closed_form(likelihood):
            return
        if not issubclass(_definer(likelihood, "sample"), _definer(likelihood, "log_prob")):
            name = type(likelihood).__name__
            raise InputError(
                "fisher",
                f'must be "exact" or "empirical" for {name}, got \'sampled\'',
                f"{name} overrides log_prob and not sample, so labels would be drawn from another density",
            )

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the stream that labels are drawn from, for one pass over the rows."""
        return stream(self.seed, "fisher labels", device=device)

    def vectors(
        self, likelihood: Likelihood, output: Tensor, y: Tensor, extra: Extra, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield vectors (N, ..., W) for arranged outputs (N, ..., W) and `extra` (1, ...), as for one draw."""
        if self.kind == "exact":
            yield from output_vectors(fisher_root(likelihood, output, y, extra))
        elif self.kind == "empirical":
            yield score(likelihood, output, y, extra)
        else:
            for _ in range(self.samples):
                labels = likelihood.sample(output.unsqueeze(0), extra, generator).squeeze(0)
                kept = likelihood.counted(y)
                labels = labels if kept is None else torch.where(kept, labels, y)
                yield score(likelihood, output, labels, extra) * self.samples**-0.5


def score(likelihood: Likelihood, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
    """Return d log p(y | f) / d f, (N, ..., W)."""
    leaf = output.detach().requires_grad_()
    with torch.enable_grad():
        value = likelihood.log_prob(leaf.unsqueeze(0), y, extra).sum()
        (found,) = torch.autograd.grad(value, leaf)
    if not bool(torch.isfinite(found).all()):
        raise InputError(
            "likelihood",
            "its gradient in the network's output is not finite",
            "Check the network's outputs on the data",
        )
    return found


def output_vectors(root: Tensor) -> Iterator[Tensor]:
    """Yield the columns of S (N, ..., W, R) as output vectors (N, ..., W), one per element (pixel) and column."""
    elements = root.shape[1:-2]
    if not elements:
        yield from root.unbind(-1)
        return
    flat = root.flatten(1, -3)
    for element in range(flat.shape[1]):
        for column in range(flat.shape[-1]):
            vector = torch.zeros_like(flat[..., 0])
            vector[:, element] = flat[:, element, :, column]
            yield vector.unflatten(1, elements)


def _definer(likelihood: Likelihood, name: str) -> type:
    """Return the class that a method comes from."""
    return next(owner for owner in type(likelihood).__mro__ if name in vars(owner))
