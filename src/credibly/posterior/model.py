"""The part of a problem that prediction needs, without the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from credibly.core.autodiff import attached
from credibly.core.inputs import Inputs, describe, in_order, map_inputs, tensors_of, to_inputs
from credibly.errors import InputError
from credibly.forward import Forward, try_network
from credibly.frozen.features import Frozen
from credibly.likelihoods import Likelihood
from credibly.networks.layout import Layout
from credibly.problem import Problem


@dataclass(frozen=True)
class Model:
    """The part of a problem that prediction needs: network, flat layout and likelihood, without the data.

    Attributes:
        forward: forward pass of the network, or of its head if `inputs` runs its frozen body separately.
        frozen: the network in two parts, if it is run that way.
        row: structure, shapes and dtypes of one row of x, as returned by `credibly.core.inputs.describe`.
    """

    layout: Layout
    likelihood: Likelihood
    forward: Forward
    row: dict[str, Any]
    frozen: Frozen | None = None

    @classmethod
    def of(cls, problem: Problem) -> Model:
        """Return the model of a problem."""
        whole = problem if problem.whole is None else problem.whole
        frozen = None if problem.whole is None else problem.frozen
        return cls(whole.layout, problem.likelihood, problem.forward, describe(whole.sample.x), frozen)

    def inputs(self, x: Any, grad: bool = False) -> Inputs:
        """Return x on the model's device, or the activations of its frozen body if `forward` takes those.

        With `grad`, they are differentiable functions of x. Raise on a wrong shape before anything is computed.
        """
        ready = self.as_fitted(to_inputs(x, self.layout.device, self.layout.input_dtype, convert=True))
        try_network(self.layout, map_inputs(lambda t: t[:1], ready))
        ready = attached(x, ready) if grad else ready
        return ready if self.frozen is None else self.frozen.features(ready)

    def as_fitted(self, x: Inputs) -> Inputs:
        """Return x with the structure of the fit's rows: names in their order, which a frozen body relies on.

        Raise if x has another structure, other names or no axis for a single input.
        """
        form, parts = self.row["form"], self.row["parts"]
        names = [part["name"] for part in parts]
        mine = tensors_of(x)
        # A single tensor may have a name or not.
        if len(parts) > 1 or len(mine) > 1:
            found = {Tensor: "tensor", dict: "dict"}.get(type(x), "tuple")
            if found != form or (form == "tuple" and len(mine) != len(parts)):
                wanted = "one tensor" if form == "tensor" else f"a {form} of {len(parts)} tensors"
                raise InputError("x", f"must be {wanted}, as in the fit, got a {found} of {len(mine)}")
            x = in_order(x, names)
        for part, (name, tensor) in zip(parts, tensors_of(x), strict=True):
            # One number looks like a row of one input to a Linear layer. Other shapes are left to the network: lengths
            # may vary, and layers that act on the last axis take any number of axes.
            if tensor.ndim == 1 and part["shape"] == [1]:
                raise InputError(name, "has rows of shape (), the fit had (1,)", f"Pass {name}.unsqueeze(1)")
        return x

    @property
    def forward_layout(self) -> Layout:
        """The layout of the network that `forward` runs: of the head, if the body is frozen."""
        return self.layout if self.frozen is None else self.forward.layout

    @property
    def forward_row(self) -> dict[str, Any]:
        """The structure of one row of the inputs of `forward`: stored activations, if the body is frozen."""
        return self.row if self.frozen is None else self.frozen.row

    def extra(self, theta: Tensor) -> dict[str, Tensor]:
        """Return the likelihood's own parameters in theta (S, D)."""
        if not self.layout.extra:
            return {}
        return {k.removeprefix("likelihood."): v for k, v in self.layout.split(theta)[1].items()}
