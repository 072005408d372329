"""Posteriors of networks that were trained elsewhere: nothing is trained, except the noise if the likelihood learns it.

One network is a point estimate, several are an ensemble.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from credibly.curvature.evidence import fit_own_parameters
from credibly.errors import InputError
from credibly.inference.method import Method, initial
from credibly.likelihoods import Likelihood
from credibly.networks.refusals import unwrapped
from credibly.networks.statistics import folded
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.model import Model
from credibly.priors import Normal
from credibly.problem import Problem


def trained_posterior(method: Method, nets: Sequence[nn.Module], data: Any, likelihood: Likelihood) -> DrawsPosterior:
    """Return the weights of trained networks as a posterior with one draw per network.

    Args:
        method: the method that the record names.
        nets: networks of one architecture. Statistics of BatchNorm are folded into its weights, as members may differ
            in them.
        data: (x, y), which give the shapes and, if the likelihood's scale is learned, each network's noise.
        likelihood: the likelihood of y given the network's output.
    """
    for number, net in enumerate(nets):
        if not isinstance(net, nn.Module):
            raise InputError(f"nets[{number}]", f"must be a torch.nn.Module, got {type(net).__name__}")
    settled = [folded(unwrapped(net)) for net in nets]
    random = _random(settled)
    problem = Problem(settled[0], data, likelihood, Normal(), random=random).reduced()
    layout = problem.layout
    start, theta = initial(problem, "network", 1, 0)[0], []
    for net in settled:
        values = dict(net.named_parameters())
        blocks = [values[e.name].detach().reshape(-1).to(start) for e in layout.entries if e.name not in layout.extra]
        theta.append(fit_own_parameters(problem, torch.cat([*blocks, start[layout.network_dim :]])))
    record = method.record(problem, 0, {"from_trained": True})
    return DrawsPosterior(Model.of(problem), torch.stack(theta).unsqueeze(1), record)


def _random(nets: Sequence[nn.Module]) -> tuple[str, ...] | str | None:
    """Return which parameters are random: the trainable ones, and all others in which the networks differ.

    Raise if their architectures differ, or if they differ in other tensors.
    """
    first = nets[0]
    shapes = {name: t.shape for name, t in first.state_dict().items()}
    tensors: list[dict[str, Tensor]] = []
    for number, net in enumerate(nets):
        mine = {name: t.shape for name, t in net.state_dict().items()}
        if mine != shapes:
            name = next(n for n in [*shapes, *mine] if shapes.get(n) != mine.get(n))
            found = f"its tensor {name!r} has shape {_size(mine.get(name))}, that of nets[0] {_size(shapes.get(name))}"
            raise InputError(f"nets[{number}]", found, "Pass networks of one architecture")
        tensors.append({**dict(net.named_parameters()), **dict(net.named_buffers())})
    differ = {
        name for name, t in tensors[0].items() for other in tensors[1:] if not torch.equal(t.cpu(), other[name].cpu())
    }
    parameters = dict(first.named_parameters())
    buffers = sorted(differ - set(parameters))
    if buffers:
        found = f"differ in {buffers[0]!r}, which is not a parameter"
        raise InputError("nets", found, "Give all networks the same values of their buffers")
    trainable = {name for name, p in parameters.items() if p.requires_grad} or set(parameters)
    chosen = trainable | differ
    if chosen == set(parameters):
        return "*"
    return tuple(glob.escape(name) for name in parameters if name in chosen)


def _size(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))
