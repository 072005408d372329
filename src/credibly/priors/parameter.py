"""A random parameter of the model besides the network's: of a likelihood, or of a hierarchical prior."""

from __future__ import annotations

from dataclasses import dataclass

from credibly.priors.elementwise import Prior


@dataclass(frozen=True)
class Parameter:
    """A random parameter that a likelihood or prior adds to the flat vector.

    Attributes:
        shape: its shape.
        prior: the prior of all its elements, or one per element.
        init: the starting value of all its elements, or one per element.
    """

    shape: tuple[int, ...]
    prior: Prior | tuple[Prior, ...]
    init: float | tuple[float, ...]
