"""The network under every draw of a posterior, as tensors stacked over draws and a traced function of one draw."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from credibly.core.inputs import Inputs, arguments
from credibly.errors import InputError
from credibly.export.linearised import LinearisedStack, is_linearisable
from credibly.likelihoods import Likelihood
from credibly.networks.calling import call_with, find_ties
from credibly.networks.layout import Layout
from credibly.networks.tabular import PeriodicEmbedding
from credibly.posterior.draws import WeightDraws
from credibly.posterior.dropout import MaskDraws
from credibly.posterior.linearised import FunctionDraws
from credibly.predictive.source import DrawSource


@dataclass(frozen=True)
class StackedNetwork:
    """A network and what differs between its draws.

    Attributes:
        varied: weights, steps away from the mode, or masks, by name, (S, *shape).
        body: the network as a function of one draw of them and of the inputs.
        extra: the likelihood's own parameters, by name, (S, ...).
        likelihood: of the outputs.
        batched: whether all draws are evaluated at once, rather than one after another.
    """

    varied: dict[str, Tensor]
    body: OneDraw
    extra: dict[str, Tensor]
    likelihood: Likelihood
    batched: bool

    @property
    def draws(self) -> int:
        """Number of draws."""
        return len(next(iter(self.varied.values())))

    @property
    def bytes(self) -> int:
        """Size of everything that differs between draws."""
        return sum(t.numel() * t.element_size() for t in self.varied.values())

    def every(self, step: int) -> StackedNetwork:
        """Return the network with every `step`-th draw."""
        varied = {name: value[::step] for name, value in self.varied.items()}
        return replace(self, varied=varied, extra={name: value[::step] for name, value in self.extra.items()})


def joined(networks: Sequence[StackedNetwork]) -> StackedNetwork:
    """Return one network with the draws of several fits of the same architecture, one after another."""
    first = networks[0]
    for other in networks[1:]:
        if not _same_constants(first, other):
            found = "has folds whose networks differ in more than their random weights"
            raise InputError("run", found, "Fit again with --no-conformal, which needs no folds")
    varied = {name: torch.cat([n.varied[name] for n in networks]) for name in first.varied}
    extra = {name: torch.cat([n.extra[name] for n in networks]) for name in first.extra}
    return replace(first, varied=varied, extra=extra)


def _same_constants(one: StackedNetwork, other: StackedNetwork) -> bool:
    if list(one.varied) != list(other.varied) or one.batched != other.batched:
        return False
    mine, theirs = ({k: v for k, v in n.body.net.state_dict().items() if k not in n.varied} for n in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


class OneDraw(nn.Module):
    """A network with some of its tensors given: forward(values, inputs) -> arranged outputs (rows, ..., K)."""

    def __init__(
        self, module: nn.Module, layout: Layout, likelihood: Likelihood, names: Sequence[str], row: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.net = copy.deepcopy(module).cpu().requires_grad_(False)
        self.layout, self.likelihood, self.names = layout, likelihood, tuple(names)
        self.form, self.keys = row["form"], tuple(part["name"] for part in row["parts"])
        self.ties = find_ties(self.net)

    def forward(self, values: list[Tensor], inputs: list[Tensor]) -> Tensor:
        """Return the arranged outputs."""
        return self.likelihood.arrange(self.call(dict(zip(self.names, values)), inputs))

    def call(self, values: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Return the network's outputs with the given tensors."""
        args, kwargs = arguments(self.assemble(inputs))
        return self.layout.output(call_with(self.net, values, args, kwargs, self.ties))

    def assemble(self, inputs: Sequence[Tensor]) -> Inputs:
        """Return a list of tensors in the form that the network takes."""
        if self.form == "dict":
            return dict(zip(self.keys, inputs))
        return inputs[0] if self.form == "tensor" else tuple(inputs)


def stacked_network(source: DrawSource, model: Any) -> StackedNetwork:
    """Return the network of a source of draws with everything that differs between them, on the CPU.

    Args:
        source: of a predictive of the posterior.
        model: the posterior's model.
    """
    layout, row, likelihood = model.layout, model.row, source.likelihood
    if getattr(model.forward, "precision", None) is not None:
        found = f"was fitted with precision={model.forward.precision!r}, and runs under autocast"
        raise InputError("posterior", found, "Fit with precision=None, or export the weights by posterior.module()")
    extra = {name: _plain(value) for name, value in source.extra(0, source.count).items()}
    if isinstance(source, WeightDraws):
        theta = source.theta if isinstance(source.theta, Tensor) else source.theta.tensor().flatten(0, 1)
        varied = layout.split(theta.to(layout.dtype))[0]
        body = OneDraw(layout.module, layout, likelihood, list(varied), row)
    elif isinstance(source, FunctionDraws):
        steps, loc = layout.split(source.offsets)[0], layout.split(source.loc)[0]
        if model.forward.stack is not None and is_linearisable(layout.module):
            varied, net = steps, LinearisedStack(layout.write(source.loc).cpu())
            body = OneDraw(net, layout, likelihood, [net.step_name(name) for name in varied], row)
        else:
            # Exact where the network is linear in what is random, such as its last layer; the comparison with `predict`
            # refuses the rest.
            varied = {name: loc[name] + step for name, step in steps.items()}
            body = OneDraw(layout.module, layout, likelihood, list(varied), row)
    elif isinstance(source, MaskDraws):
        if model.frozen is not None:
            found = "is MC-Dropout of a network whose layers without random weights are run apart"
            raise InputError("posterior", found, "Fit with all parameters random, or use DeepEnsemble")
        # A mask has an axis of length 1 for the rows of a pass.
        varied = dict(source.masks)
        body = OneDraw(source.posterior.masked, layout, likelihood, list(varied), row)
    else:
        found = f"has draws of kind {type(source).__name__}, which are not known to this version"
        raise InputError("posterior", found, "Export the posterior of a fit itself")
    return StackedNetwork(
        {name: _plain(value) for name, value in varied.items()},
        body,
        extra,
        likelihood,
        # vmap would build the number of rows into the sums of an embedding.
        batched=model.forward.stack is not None
        and not any(isinstance(part, PeriodicEmbedding) for part in layout.module.modules()),
    )


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().clone()
