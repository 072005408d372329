"""Problem: network, likelihood, prior, data and temperature, and the density that they define.

    log p_T(w | D) = (1/T_lik) * sum_i v_i log p(y_i | x_i, w) + (1/T_prior) * log p(w) + const

Every method evaluates this density through the functions here, which alone handle N, the weights v of the rows (1 by
default), the prior and the temperatures.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from credibly.core.autodiff import grad_and_aux
from credibly.core.checks import check_integer
from credibly.core.html import fact_table
from credibly.core.inputs import Inputs, in_order, map_inputs, tensors_of
from credibly.core.placement import placement
from credibly.core.rows import Rows, hash_rows, join_weights, leave_out, sum_rows
from credibly.core.stream import BoundStream, needs_memory
from credibly.core.tempering import Evaluation, Tempering, weighted_sum
from credibly.errors import InputError
from credibly.forward import Forward, Plan, bind_heads, try_network
from credibly.frozen.reducible import Reducible
from credibly.likelihoods import Heads, Likelihood
from credibly.likelihoods.units import scaled_to_targets
from credibly.networks.behaviour import check_behaviour
from credibly.networks.copying import copy_module
from credibly.networks.gradient_trial import refuse_without_gradient
from credibly.networks.layout import Layout
from credibly.networks.nodes import attach_graph
from credibly.networks.problem_rows import read_rows
from credibly.networks.refusals import admit
from credibly.networks.selection import Patterns
from credibly.priors.elementwise import Prior
from credibly.priors.gaussian import GaussianPrior
from credibly.priors.hierarchical import bind_prior, scale_parameters

__all__ = ["Evaluation", "Problem", "Tempering"]
# Activations of a full-batch pass above which it is split into micro-batches: 1 GiB in float32.
ACTIVATION_BUDGET = 2**28


class Problem(Reducible):
    """The posterior density to infer: everything that a method needs to know.

    Args:
        net: any `nn.Module`. It is copied and never modified. Dropout is off in the density (it belongs to MCDropout).
        data: (x, y) as tensors, numpy arrays or pandas objects, a torch Dataset or a DataLoader, or rows of a graph
            (`credibly.data.Nodes`). x may be a tensor, or a tuple or dict of tensors that the network takes as
            arguments. All of it is kept on the network's device, except for a `credibly.data.Stream` and for loaders
            that would take more than a quarter of the memory or that augment their rows: these are read batch by batch.
        likelihood: the distribution of y given the network's output.
        prior: one prior for all random parameters, {name pattern: prior}, or an earlier posterior's `as_prior()`.
        sample_weight: the weights v of the rows, (N,): survey weights, class weights or counts. They multiply the log
            likelihoods, and N becomes their sum, so an integer weight equals that many copies of the row and a row of
            weight 0 is left out. Weights with a mean of 1 keep the number of observations. None weighs all rows alike.
        temperature: one number T for likelihood and prior, or a `Tempering`.
        random: glob patterns of the parameters that are random; the others are fixed. `random="head.*"` makes the last
            layer of a pretrained network Bayesian. None selects the trainable parameters, those with `requires_grad`.
        device, dtype: where to move network and data; by default they stay where the network is.
        plan: how several parameter vectors are evaluated: "auto", "batched" or "looped".
        micro_batch: rows per micro-batch of a full-batch pass; None chooses by memory.
        precision: "bf16" or "fp16" runs the network under autocast to that dtype. Parameters and the likelihood keep
            their dtype, and so do HMC's energies: each trajectory ends with a full-precision forward pass.
    """

    def __init__(
        self,
        net: nn.Module,
        data: Any,
        likelihood: Likelihood,
        prior: Prior | Mapping[str, Prior] | GaussianPrior,
        *,
        sample_weight: Any = None,
        temperature: float | Tempering = 1.0,
        random: Patterns | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        plan: Plan = "auto",
        micro_batch: int | None = None,
        precision: str | None = None,
    ) -> None:
        if not isinstance(likelihood, Likelihood):
            advice = "credibly.likelihoods has Gaussian(), Categorical() and others"
            raise InputError("likelihood", f"must be a Likelihood, got {likelihood!r}", advice)
        self.tempering = temperature if isinstance(temperature, Tempering) else Tempering(temperature, temperature)
        if micro_batch is not None:
            check_integer("micro_batch", micro_batch, advice="None chooses it by memory")
        place = placement(device, dtype)
        if isinstance(net, nn.Module):
            net = copy_module(admit(net)).to(**place) if place else admit(net)
        net, data, all_at_once = attach_graph(net, data)
        layout = Layout(net, random)
        bind = functools.partial(bind_heads, layout, likelihood)
        (self.x, y, self.sample_weight), found, likelihood = read_rows(layout, data, sample_weight, bool(place), bind)
        # A copy: a network that edits its input must not reach the caller's.
        trial = map_inputs(lambda t: t[:2].clone(), self.x)
        output = try_network(layout, trial, heads=isinstance(likelihood, Heads))
        self.likelihood = likelihood.bind(output, y)
        check_behaviour(layout, map_inputs(lambda t: t[:2], self.x), output.detach().clone())
        self.y = self.likelihood.prepare(y, layout.dtype)
        held = leave_out(Rows(self.x, self.y, self.sample_weight), self.likelihood.counted(self.y))
        self.x, self.y, self.sample_weight = held
        self.n = len(self.y)
        self.likelihood = scaled_to_targets(self.likelihood, output, self.y, self.sample_weight)
        own = {f"likelihood.{k}": p for k, p in self.likelihood.parameters().items()} | scale_parameters(prior, layout)
        self.layout = Layout(net, random, {k: p.shape for k, p in own.items()}) if own else layout
        self.layout.adopt(layout)
        self.prior_spec = prior
        self.prior = bind_prior(prior, self.layout, {k: p.prior for k, p in own.items()})
        self.forward = Forward(self.layout, plan, trial, precision=precision, deferred=self.layout.has_fixed)
        self.settle_statistics(net, trial)
        if self.device.type == "cuda":
            self.x = self.forward.arranged(self.x)  # once, here: a full-batch pass on a GPU takes all rows
        refuse_without_gradient(self.forward, trial)
        self.micro_batch, self.plan = micro_batch or (self.n if all_at_once else None), plan
        self.fused = self.forward.fuses(trial)
        self.stream: BoundStream | None = None
        self._sample: Problem | None = None
        if found is not None:
            self.n = found.n
            self._sample = copy.copy(self)
            prepare = functools.partial(self.likelihood.prepare, dtype=layout.dtype)
            self.stream = BoundStream(found, layout.device, layout.input_dtype, prepare)
            # From here on, anything that needs all rows in memory raises, see `__getattr__`.
            del self.x, self.y

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise for the rows of a stream, which are not in memory."""
            if name in ("x", "y") and self.__dict__.get("stream") is not None:
                raise needs_memory(self.stream)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def sample(self) -> Problem:
        """The problem with rows that are in memory: all of them, or the first of a stream; N is that of all rows."""
        return self._sample or self

    @property
    def dim(self) -> int:
        """Number of random parameters, D."""
        return self.layout.dim

    @property
    def device(self) -> torch.device:
        """Device of the network, the data and the density."""
        return self.layout.device

    @property
    def total_weight(self) -> float:
        """N in the density: the sum of the row weights, or the number of rows if there are none."""
        return float(self.n) if self.sample_weight is None else float(self.sample_weight.double().sum())

    @property
    def relative_weight(self) -> Tensor | None:
        """Weights divided by their mean, (N,), for objectives that are means over rows; None if there are none."""
        return None if self.sample_weight is None else self.sample_weight * (self.n / self.total_weight)

    def in_full_precision(self) -> Problem:
        """Return a copy that runs the network in its native dtype, without autocast."""
        other = copy.copy(self)
        other.forward = self.forward.in_full_precision()
        return other

    def subset(self, rows: Tensor) -> Self:
        """Return the same problem on the given rows of the data, with their weights; N counts only these rows."""
        part = copy.copy(self)
        part.x = map_inputs(lambda t: t[rows], self.x)
        part.y = self.y[rows]
        part.n, part.features = len(rows), self.features_at(rows)
        part.sample_weight = None if self.sample_weight is None else self.sample_weight[rows]
        return part

    def with_rows(self, *more: tuple[Inputs, Tensor] | Rows) -> Self:
        """Return the same problem with the rows of further (x, y, weights), in the problem's own layout, appended.

        Rows without weights, as (x, y), weigh 1 each.
        """
        names = list(self.x) if isinstance(self.x, dict) else []
        sets = [self.rows, *(Rows(in_order(some[0], names), *some[1:]) for some in more)]
        columns = [[t for _, t in tensors_of(some.x)] for some in sets]
        stacked = iter([torch.cat(column) for column in zip(*columns, strict=True)])
        whole = copy.copy(self)
        whole.x = map_inputs(lambda _: next(stacked), self.x)
        whole.features = self.features_with([some.x for some in sets[1:]])
        whole.y = torch.cat([some.y for some in sets])
        whole.n = len(whole.y)
        weights = [(len(some.y), some.weight) for some in sets]
        whole.sample_weight = join_weights(weights, torch.empty((), dtype=self.layout.dtype, device=self.device))
        return whole

    @property
    def rows(self) -> Rows:
        """All rows of the data, with their weights."""
        return Rows(self.x, self.y, self.sample_weight)

    # -- the density ---------------------------------------------------------------------------------------------------
    def log_likelihood_rows(self, theta: Tensor, x: Inputs, y: Tensor, *, shared: bool = True) -> Tensor:
        """Return the log likelihood per row, (C, N, ...), not weighted; x and y are (C, N, ...) with shared=False."""
        output = self.likelihood.arrange(self.forward(theta, x, shared=shared), 1)
        return self.likelihood.log_prob(output, y, self.extra(theta))

    def extra(self, theta: Tensor) -> dict[str, Tensor]:
        """Return the likelihood's own parameters in theta (C, D), by name without the "likelihood." prefix."""
        if not self.layout.extra:
            return {}
        return {k.removeprefix("likelihood."): v for k, v in self.layout.split(theta)[1].items()}

    def parts(
        self, theta: Tensor, x: Inputs, y: Tensor, *, shared: bool = True, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the log likelihood summed over rows and the log prior, (C,) each, untempered and not rescaled.

        `weight` are the weights of these rows, (N,) or (C, N).
        """
        rows = self.log_likelihood_rows(theta, x, y, shared=shared)
        return sum_rows(rows, weight), self.prior.log_prob(theta)

    def parts_and_grad(
        self,
        theta: Tensor,
        x: Inputs,
        y: Tensor,
        likelihood_weight: float | Tensor,
        prior_weight: float | Tensor,
        *,
        shared: bool = True,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `parts` and the gradient (C, D) of likelihood_weight * log lik + prior_weight * log prior.

        The C points are independent, so one backward pass of their sum gives every gradient. It can be compiled: under
        `torch.compile` the derivative is taken by torch.func, in eager mode by autograd, which has less overhead.
        """

        def total(t: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            log_lik, log_prior = self.parts(t, x, y, shared=shared, weight=weight)
            return weighted_sum(log_lik, likelihood_weight, log_prior, prior_weight).sum(), (log_lik, log_prior)

        gradient, (log_lik, log_prior) = grad_and_aux(total, theta)
        return log_lik.detach(), log_prior.detach(), gradient

    def block_rows(self, chains: int) -> int:
        """Return the rows per block of a full-batch pass of `chains` chains: `micro_batch`, or as memory allows.

        Blocks have nearly equal lengths, so one compiled function serves all of them or all but the last.
        """
        most = self.budget() // ((1 if self.forward.looped else chains) * self.forward.row_width)
        return self.micro_batch or math.ceil(self.n / math.ceil(self.n / max(1, most)))

    def budget(self) -> int:
        """Return the activations that a full-batch pass may hold: `ACTIVATION_BUDGET`, or a fifth of a GPU's memory."""
        if self.device.type != "cuda":
            return ACTIVATION_BUDGET
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return max(ACTIVATION_BUDGET, int(0.2 * memory) // self.layout.dtype.itemsize)

    def blocks(self, chains: int) -> Iterator[Rows]:
        """Yield the data in blocks of `block_rows` rows; those of a stream in its own batches, by one pass."""
        if self.stream is not None:
            yield from self.stream.one_pass()
            return
        size = self.block_rows(chains)
        if size >= self.n:
            yield self.rows
            return
        for start in range(0, len(self.y), size):
            yield self.rows.at(slice(start, start + size))

    def log_density(self, theta: Tensor) -> Tensor:
        """Return log p_T(w | D) up to a constant at theta (C, D) or (D,), shape (C,) or ()."""
        points = self._points(theta)
        with torch.no_grad():
            log_lik = torch.zeros(len(points), dtype=torch.float64, device=self.device)
            for x, y, weight in self.blocks(len(points)):
                log_lik += sum_rows(self.log_likelihood_rows(points, x, y), weight)
            value = self._temper(log_lik, self.prior.log_prob(points))
        return value.to(theta.dtype).reshape(theta.shape[:-1])

    def log_density_and_grad(self, theta: Tensor) -> Evaluation:
        """Return the density and its gradient on all data at theta (C, D), in micro-batches if memory requires it."""
        points = self._points(theta)
        groups = points.split(1) if self.forward.looped else (points,)
        parts = [self._full(group) for group in groups]
        log_lik, log_prior, gradient = (torch.cat(column) for column in zip(*parts))
        return Evaluation(log_lik, log_prior, self._temper(log_lik, log_prior), gradient)

    def minibatch(self, theta: Tensor, rows: Tensor) -> Evaluation:
        """Return an unbiased estimate from a minibatch B of rows, whose log likelihood is rescaled by n/|B|.

        n is the number of rows, weighted or not: every row is equally likely to be in a batch. `rows` holds indices,
        (B,) for all chains or (C, B) with one batch per chain.
        """
        points = self._points(theta)
        shared, scale = rows.ndim == 1, self.n / rows.shape[-1]
        x, y, weight = self.rows.at(rows)
        log_lik, log_prior, gradient = self.parts_and_grad(
            points, x, y, scale / self.tempering.likelihood, 1 / self.tempering.prior, shared=shared, weight=weight
        )
        return Evaluation(log_lik * scale, log_prior, self._temper(log_lik * scale, log_prior), gradient)

    def _full(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_lik = torch.zeros(len(points), dtype=torch.float64, device=self.device)
        log_prior = gradient = torch.zeros((), device=self.device, dtype=points.dtype)
        prior_weight = 1 / self.tempering.prior
        for x, y, weight in self.blocks(len(points)):
            block_lik, block_prior, block_grad = self.parts_and_grad(
                points, x, y, 1 / self.tempering.likelihood, prior_weight, weight=weight
            )
            log_prior = block_prior if prior_weight else log_prior
            log_lik, gradient, prior_weight = log_lik + block_lik, gradient + block_grad, 0.0
        return log_lik.to(points.dtype), log_prior, gradient

    def _temper(self, log_lik: Tensor, log_prior: Tensor) -> Tensor:
        return log_lik / self.tempering.likelihood + log_prior / self.tempering.prior

    def _points(self, theta: Tensor) -> Tensor:
        if theta.shape[-1:] != (self.dim,) or theta.ndim > 2:
            raise InputError("theta", f"must have shape (chains, {self.dim}), got {tuple(theta.shape)}")
        return theta.reshape(-1, self.dim)

    def fingerprint(self) -> str:
        """Return a short hash of the rows, their order and their weights; for a stream, of N and the form of a row."""
        if self.whole is not None:
            return str(self.whole.fingerprint())
        return hash_rows(self.rows) if self.stream is None else self.stream.fingerprint()

    def _repr_html_(self) -> str:
        plan = f"{'looped' if self.forward.looped else 'batched'}: {self.forward.reason}"
        rows = f"{self.n:,}" if self.sample_weight is None else f"{self.n:,} of total weight {self.total_weight:g}"
        names = {"rows (N)": rows, **self.layout.facts(), "likelihood": self.likelihood, "prior": self.prior_spec}
        return fact_table("Problem", {**names, "temperature": self.tempering, "parameter vectors": plan})

    def __repr__(self) -> str:
        plan = "looped" if self.forward.looped else "batched"
        weighted = "" if self.sample_weight is None else f" rows of total weight {self.total_weight:g}"
        weighted += "" if self.stream is None else f" streamed ({self.stream.stream.reason})"
        return (
            f"Problem(N = {self.n}{weighted}, {self.layout.counts()}, {self.likelihood}, {self.tempering}, {plan}: "
            f"{self.forward.reason})"
        )
