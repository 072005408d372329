"""The peers of Bayes by Backprop as training loops, with means, rhos, noise and gradients in our order for checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.ensemble import NOISE, PRIOR, Task
from benchmarks.vi_steps import Loop, check_gradient, own_copy
from credibly.gaussians.families import inverse_softplus
from credibly.methods.bbb import FreeEnergy


@dataclass(frozen=True)
class Peer:
    """A peer's loop. After a backward pass `parts` returns (mean, rho, noise) of all parameters in our order."""

    loop: Loop
    misfit: Callable[[Tensor], Tensor]  # rows -> mean misfit with new noise
    parts: Callable[[], Sequence[tuple[Tensor, Tensor, Tensor]]]


def check(task: Task, peer: Peer, objective: FreeEnergy, name: str) -> None:
    """Exit unless the peer has our gradient of the misfit on the same weights, rows and noise."""
    rows = torch.arange(task.batch)
    peer.loop.adam.zero_grad()
    peer.misfit(rows).backward()
    parts = peer.parts()
    theirs = torch.cat([(p[k].grad).flatten() for k in (0, 1) for p in parts])  # type: ignore[union-attr]
    phi = torch.cat([p[k].detach().flatten() for k in (0, 1) for p in parts]).unsqueeze(0)
    noise = torch.cat([p[2].detach().flatten() for p in parts])[None, None]
    problem = task.problem()
    ours = objective.evaluate(phi, (), problem.x, problem.y, rows, (noise,), torch.zeros(1))[1][0]
    peer.loop.adam.zero_grad()
    check_gradient(theirs, ours, name)


def bayesian_torch(task: Task, scale: float, kind: str = "Reparameterization", *, fused: bool = True) -> Peer | None:
    """Return the network as converted by bayesian-torch, with its own KL divergence.

    That KL is a mean over the weights of a tensor where it should be a sum: the same work, another weight of the prior.
    """
    library = peers.module("bayesian_torch.models.dnn_to_bnn")
    if library is None:
        return None
    net, n = own_copy(task), len(task.x)
    settings = {
        "prior_mu": 0.0,
        "prior_sigma": PRIOR,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": inverse_softplus(scale),
        "type": kind,
        "moped_enable": False,
        "moped_delta": 0.5,
    }
    library.dnn_to_bnn(net, settings)
    layers: list[Any] = [layer for layer in net.modules() if hasattr(layer, "rho_bias")]

    def parts() -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for layer in layers:
            for part in ("weight" if hasattr(layer, "mu_weight") else "kernel", "bias"):
                found.append(tuple(getattr(layer, f"{which}_{part}") for which in ("mu", "rho", "eps")))
        return found  # type: ignore[return-value]

    loop = Loop(task, net, lambda: library.get_kl_loss(net) / n, fused=fused)
    return Peer(loop, lambda rows: task.loss(net(task.x[rows]), task.y[rows]), parts)


def torch_uncertainty(task: Task, scale: float) -> Peer | None:
    """Return the network with torch-uncertainty's Bayesian layers and its one-sample estimate of the KL divergence.

    Its `KLDiv` and `ELBOLoss` live in files that import the whole package; the sum over layers is written out here.
    """
    files = ["layers/bayesian/bayes_linear.py", "layers/bayesian/bayes_conv.py"]
    found = peers.single_files("torch_uncertainty", files)
    if found is None:
        return None
    linear, conv = found[0].BayesLinear, found[1].BayesConv2d
    net, n = own_copy(task), len(task.x)
    settings = {"prior_sigma_1": PRIOR, "prior_sigma_2": PRIOR, "prior_pi": 1.0, "sigma_init": inverse_softplus(scale)}
    layers: list[Any] = []
    for name, layer in list(net.named_children()):
        if isinstance(layer, nn.Linear):
            layers.append(linear(layer.in_features, layer.out_features, **settings))
        elif isinstance(layer, nn.Conv2d):
            layers.append(conv(layer.in_channels, layer.out_channels, layer.kernel_size, **settings))
        else:
            continue
        setattr(net, name, layers[-1])

    def parts() -> list[tuple[Tensor, Tensor, Tensor]]:
        return [
            (s.mu, s.rho, (s.weight - s.mu) / s.sigma)
            for layer in layers
            for s in (layer.weight_sampler, layer.bias_sampler)
        ]

    def kl() -> Tensor:
        return sum((layer.log_variational_posterior - layer.log_prior for layer in layers), torch.zeros(())) / n

    return Peer(Loop(task, net, kl), lambda rows: task.loss(net(task.x[rows]), task.y[rows]), parts)


class PyroLoop(Loop):
    """Pyro's SVI: AutoNormal guide, closed-form KL divergences, one fused Adam on the guide's parameters."""

    def __init__(self, task: Task, pyro: Any, scale: float) -> None:
        from pyro.infer import TraceMeanField_ELBO
        from pyro.infer.autoguide import AutoNormal
        from pyro.nn.module import PyroSample, to_pyro_module_

        pyro.enable_validation(False)
        pyro.settings.set(module_local_params=True)
        dist, n = pyro.distributions, len(task.x)
        net: Any = own_copy(task)
        to_pyro_module_(net)
        self.names: list[str] = []
        for prefix, layer in net.named_modules():
            for name, value in list(layer.named_parameters(recurse=False)):
                prior = dist.Normal(torch.zeros_like(value), PRIOR).to_event(value.dim())
                self.names.append(f"{prefix}.{name}")
                setattr(layer, name, PyroSample(prior))

        def model(rows: Tensor) -> None:
            out = net(task.x[rows])
            with pyro.plate("rows", n, subsample=rows):
                if task.y.is_floating_point():
                    pyro.sample("y", dist.Normal(out, NOISE).to_event(1), obs=task.y[rows])
                else:
                    pyro.sample("y", dist.Categorical(logits=out), obs=task.y[rows])

        self.guide = AutoNormal(model, init_scale=scale)
        self.guide(torch.arange(task.batch))
        self.model, self.elbo, self.n, self.poutine = model, TraceMeanField_ELBO(), n, pyro.poutine
        self.values: dict[str, Tensor] = {}
        super().__init__(task, self.guide)

    def loss(self, rows: Tensor) -> Tensor:
        found: Tensor = self.elbo.differentiable_loss(self.model, self.guide, rows) / self.n
        return found

    def misfit(self, rows: Tensor) -> Tensor:
        """Return the likelihood term for one draw of the guide, and keep its values."""
        drawn = self.poutine.trace(self.guide).get_trace(rows)
        # The auto guide holds the draw at its inner site, and the same value at the outer one.
        self.values = {name: drawn.nodes[name]["value"] for name in self.names}
        trace = self.poutine.trace(self.poutine.replay(self.model, drawn)).get_trace(rows)
        trace.compute_log_prob()
        constant = 0.0
        if self.task.y.is_floating_point():
            constant = -0.5 * torch.log(torch.tensor(2 * torch.pi * NOISE**2)) * trace.nodes["y"]["value"].shape[1]
        total: Tensor = trace.nodes["y"]["unscaled_log_prob"]
        return -(total.mean() - constant)

    def parts(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        parameters = dict(self.guide.named_parameters())
        for name in self.names:
            loc, rho = parameters[f"locs.{name}_unconstrained"], parameters[f"scales.{name}_unconstrained"]
            found.append((loc, rho, (self.values[name] - loc) / nn.functional.softplus(rho)))
        return found


def pyro(task: Task, scale: float) -> Peer | None:
    """Return the network in Pyro."""
    library = peers.module("pyro")
    if library is None or peers.module("pyro.infer.autoguide") is None:
        return None
    loop = PyroLoop(task, library, scale)
    return Peer(loop, loop.misfit, loop.parts)


MAKERS: dict[str, Callable[[Task, float], Peer | None]] = {
    "bayesian-torch": bayesian_torch,
    "torch-uncertainty": torch_uncertainty,
    "Pyro": pyro,
}
