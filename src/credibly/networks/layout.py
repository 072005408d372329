"""Layout: a module's parameters as one flat (..., D) tensor, and back."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credibly.core.inputs import Inputs, arguments, network_device, output_tensor, to_inputs
from credibly.core.rng import global_stream, stream
from credibly.errors import InputError
from credibly.networks.calling import call_with
from credibly.networks.copying import copy_module, forget_results
from credibly.networks.fans import fan_in
from credibly.networks.held_padding import hold_padding, release_padding
from credibly.networks.initialisers import perturb, reinitialise, uninitialised
from credibly.networks.mixed_dtypes import align_dtypes
from credibly.networks.own_gradients import record_own_gradients
from credibly.networks.refusals import admit, settle, unwrapped
from credibly.networks.selection import (
    RANDOM,
    Patterns,
    frozen_names,
    input_dtype,
    joint_dtype,
    listed,
    matching,
    names_by_parameter,
    random_patterns,
)
from credibly.networks.statistics import with_fixed_statistics

log = logging.getLogger("credibly")


@dataclass(frozen=True)
class Entry:
    """The position of one parameter tensor in the flat vector: theta[..., start:stop] has this shape."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    fan_in: int
    dtype: torch.dtype = torch.float32


class Layout:
    """Which parameters of a module are random, and their positions in the flat vector.

    The module is copied, so the caller's is never changed, and the copy is put into evaluation mode: the density of a
    problem is a deterministic function of the weights. Tied parameters appear once. Parameters that are not random, and
    buffers, keep their values.

    The flat vector has one dtype, the smallest that holds all random parameters. The network computes with each
    parameter in its own dtype; its outputs are returned in that of the flat vector.

    Args:
        module: any network.
        random: glob pattern or patterns on parameter names; those that match are random. By default the trainable ones,
            with `requires_grad`.
        extra: further random tensors by name and shape, such as a learned noise scale; they follow the network's.
        trained: whether statistics of BatchNorm layers are final, whichever mode the module is in. If not, they are
            rejected in training mode unless some parameters are fixed.
    """

    def __init__(
        self,
        module: nn.Module,
        random: Patterns | None = None,
        extra: Mapping[str, tuple[int, ...]] | None = None,
        *,
        trained: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InputError("net", f"must be a torch.nn.Module, got {type(module).__name__}")
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            raise InputError("net", "has lazy parameters without a shape", "Call it once on a batch first")
        if not any(True for _ in module.parameters()):
            raise InputError("net", "has no parameters", "Pass a network with weights")
        module = admit(module)
        self.device = network_device(module)
        self.random = random_patterns(module, random)
        # With fixed parameters, BatchNorm may lie before all random ones; whether it does shows with data.
        module, self.norms = with_fixed_statistics(module, trained=trained or self.random != ("*",))
        self.frozen = frozen_names(module)
        self.module = _deterministic_copy(module)
        RANDOM[self.module] = self.random
        self.silenced = _hidden_dropout(module)
        names = names_by_parameter(self.module)
        fans = fan_in(self.module)
        parameters = dict(self.module.named_parameters())
        entries, start = [], 0
        for name in matching(names, self.random):
            shape, dtype = tuple(parameters[name].shape), parameters[name].dtype
            if not dtype.is_floating_point:
                raise InputError("net", f"parameter {name!r} is {dtype}", "Only floating parameters can be random")
            entries.append(Entry(name, shape, start, start + math.prod(shape), fans.get(name, 1), dtype))
            start += math.prod(shape)
        hold_padding(self.module, {e.name for e in entries})
        self.dtype = joint_dtype([e.dtype for e in entries])
        floating = [p.dtype for p in parameters.values() if p.is_floating_point()]
        self.mixed = len(set(floating)) > 1
        if self.mixed and min(dtype.itemsize for dtype in floating) == 2:
            align_dtypes(self.module)
        # Of floating inputs; a problem determines which one a network of several dtypes takes.
        self.input_dtype = floating[0]
        self.network_dim = start
        for name, shape in (extra or {}).items():
            entries.append(Entry(name, tuple(shape), start, start + math.prod(shape), 1, self.dtype))
            start += math.prod(shape)
        self.extra: tuple[str, ...] = tuple(extra or ())
        self.entries: tuple[Entry, ...] = tuple(entries)
        self.aliases = {alias: name for name, aliases in names.items() for alias in aliases}
        self.dim = start
        self._sizes = [e.stop - e.start for e in entries]
        self.own_gradients = False
        self.whole: Layout | None = None
        # Parameters that need memory of their own; set by `Forward`, which runs the network.
        self.apart: frozenset[str] = frozenset()

    @property
    def has_fixed(self) -> bool:
        """Whether the network has parameters that are not random, in which case only a part of it may be run."""
        return self.network_dim < sum(p.numel() for p in self.module.parameters())

    @property
    def dropout_off(self) -> list[str]:
        """Modules of the network that apply dropout in training mode; it is off in the density."""
        kind = nn.modules.dropout._DropoutNd
        named = (self.whole or self).module.named_modules()
        return [name or type(m).__name__ for name, m in named if isinstance(m, kind) and m.p > 0] + self.silenced

    def record_own_gradients(self) -> None:
        """Let the network differentiate within its forward pass, also in predictions."""
        self.own_gradients = True
        record_own_gradients(self.module)

    def adopt(self, found: Layout) -> None:
        """Copy what trial passes with another layout of this network have found."""
        self.input_dtype = found.input_dtype
        if found.own_gradients:
            self.record_own_gradients()

    def on(self, head: nn.Module) -> Layout:
        """Return this layout for a part of the network that has all random parameters, under the same names."""
        part = copy.copy(self)
        part.module, part.whole = head, self
        part.aliases = {alias: name for name, group in names_by_parameter(head).items() for alias in group}
        part.__dict__.pop("start_rules", None)
        return part

    def inputs(self, x: Any, convert: bool) -> Inputs:
        """Return x on the network's device. A network of several dtypes gets it in the first one that it takes."""
        if not self.mixed:
            return to_inputs(x, self.device, self.input_dtype, convert=convert)
        given = to_inputs(x, self.device, None, convert=convert)
        self.input_dtype = input_dtype(self.module, given) or self.input_dtype
        return to_inputs(given, self.device, self.input_dtype, convert=True)

    def split(self, theta: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return theta (..., D) as two dicts of views (..., *shape): the network's parameters and the extra ones.

        A parameter of another dtype than the flat vector's is cast to its own.
        """
        lead = theta.shape[:-1]
        blocks = theta.split(self._sizes, -1)
        views = {e.name: block.reshape(lead + e.shape) for e, block in zip(self.entries, blocks)}
        if self.mixed and theta.dtype == self.dtype:
            views = {e.name: views[e.name].to(e.dtype) for e in self.entries}
        if self.apart:
            views |= {name: views[name].clone(memory_format=torch.contiguous_format) for name in self.apart}
        return {k: v for k, v in views.items() if k not in self.extra}, {k: views[k] for k in self.extra}

    def flatten(self, tensors: Mapping[str, Tensor], extra: Mapping[str, Tensor] | None = None) -> Tensor:
        """Invert `split`: return the flat (..., D) vector of tensors (*shape) or (..., *shape)."""
        every = {**tensors, **(extra or {})}
        blocks = []
        for e in self.entries:
            lead = every[e.name].shape[: every[e.name].ndim - len(e.shape)]
            blocks.append(every[e.name].reshape((*lead, -1)))
        return torch.cat(blocks, -1)

    def read(self, module: nn.Module) -> Tensor:
        """Return the random parameters of a module of the same architecture as a (network_dim,) vector."""
        values = dict(unwrapped(module).named_parameters())
        blocks = [values[e.name].detach().reshape(-1).to(self.dtype) for e in self.entries if e.name not in self.extra]
        return torch.cat(blocks).to(self.device, self.dtype)

    def call(self, theta: Tensor, x: Inputs) -> Tensor:
        """Return the network's output for one parameter vector (D,)."""
        args, kwargs = arguments(x)
        return self.output(call_with(self.module, self.split(theta)[0], args, kwargs))

    def output(self, out: Any) -> Tensor:
        """Return the output tensor of a network, in the layout's dtype if the network has several."""
        tensor = output_tensor(out)
        return tensor.to(self.dtype) if self.mixed else tensor

    def write(self, theta: Tensor, *, fast: bool = True) -> nn.Module:
        """Return an independent copy of the module with the values of one vector (D,); frozen ones stay frozen.

        It is in evaluation mode. Without `fast`, its attention layers do not use torch's inference fast path, which
        skips hooks and gradients of the layers inside.
        """
        module = copy_module(self.module)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.split(theta)[0].items():
                parameters[name].copy_(value)
        for name, parameter in parameters.items():
            parameter.requires_grad_(parameter.is_floating_point() and name not in self.frozen)
        if fast:
            release_padding(module.eval())
        return module

    def fixed(self) -> dict[str, Tensor]:
        """Return the parameters that are not random, and the buffers, by name."""
        random = {e.name for e in self.entries}
        held = {n: p.detach() for n, p in self.module.named_parameters() if n not in random}
        return {**held, **dict(self.module.named_buffers())}

    def set_fixed(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the fixed parameters and buffers of this layout's copy with stored values."""
        mine = self.fixed()
        if set(mine) != set(tensors) or any(mine[k].shape != tensors[k].shape for k in mine):
            found = f"its fixed tensors are {listed(mine)}, the stored ones {listed(tensors)}"
            raise InputError("net", found, "Pass the network that the posterior was fitted with")
        with torch.no_grad():
            for name, value in tensors.items():
                mine[name].copy_(value)

    @functools.cached_property
    def start_rules(self) -> dict[str, list[str]]:
        """The origin of the values of `reinitialised`: names of random parameters by rule."""
        if self.whole is not None:
            return self.whole.start_rules
        perturbed = uninitialised(self.module)
        names = [e.name for e in self.entries if e.name not in self.extra]
        rules = {
            "own initialiser": [n for n in names if n not in perturbed],
            "perturbed": [n for n in names if n in perturbed],
        }
        if rules["perturbed"]:
            log.info("starts: no module initialises %s; perturbed around the given values", listed(rules["perturbed"]))
        return rules

    def reinitialised(self, seed: int, count: int, first: int = 0) -> Tensor:
        """Return new initial values (count, network_dim) from the modules' own initialisers, one stream per row.

        Parameters that no initialiser writes are perturbed around their values; `start_rules` lists them.
        """
        if self.whole is not None:
            return self.whole.reinitialised(seed, count, first)
        rows = []
        for member in range(first, first + count):
            module = copy_module(self.module).cpu()
            with global_stream(seed, "initialise", member):
                reinitialise(module)
            parameters, noise = dict(module.named_parameters()), stream(seed, "perturb", member)
            for name in self.start_rules["perturbed"]:
                perturb(parameters[name], noise)
            rows.append(self.read(module))
        return torch.stack(rows)

    def signature(self) -> list[dict[str, Any]]:
        """Return names, shapes and roles of all tensors, which a stored run is compared with."""
        random = [
            {"name": e.name, "shape": list(e.shape), "role": "extra" if e.name in self.extra else "random"}
            for e in self.entries
        ]
        return random + [{"name": n, "shape": list(t.shape), "role": "fixed"} for n, t in self.fixed().items()]

    def facts(self) -> dict[str, str]:
        """Return facts about the network for a table: its class, its random and fixed tensors, device and dtype."""
        fixed = self.fixed()
        held = f"; fixed: {sum(t.numel() for t in fixed.values()):,} values in {len(fixed)} tensors" if fixed else ""
        off = {"dropout": _off(self.dropout_off)} if self.dropout_off else {}
        return {
            "network": type(self.module).__name__,
            "random parameters (D)": f"{self.dim:,} in {len(self.entries)} tensors{held}",
            "device, dtype": f"{self.device}, {self.dtype}".replace("torch.", ""),
            **off,
        }

    def __getstate__(self) -> dict[str, Any]:
        # Tensors that forward passes left on the module cannot be pickled.
        forget_results(self.module)
        return dict(vars(self))

    def __repr__(self) -> str:
        return f"Layout({len(self.entries)} random tensors, {self.counts()}, {len(self.fixed())} fixed tensors)"

    def counts(self) -> str:
        """Return D and, if there are any, the number of parameters that are not random, and where dropout is off."""
        fixed = sum(p.numel() for p in self.module.parameters()) - self.network_dim
        off = f", dropout {_off(self.dropout_off)}" if self.dropout_off else ""
        return (f"D = {self.dim:,} random and {fixed:,} fixed parameters" if fixed else f"D = {self.dim}") + off


def _off(names: list[str]) -> str:
    return f"off in {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _deterministic_copy(module: nn.Module) -> nn.Module:
    module = copy_module(module).eval().requires_grad_(False)
    settle(module)
    for part in module.modules():
        if getattr(part, "inplace", False) is True:
            # Under vmap the input of an activation may be shared by all draws.
            part.inplace = False  # type: ignore[assignment]
        if isinstance(part, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)):
            # Their inference fast path has no batching rule, and is off in training mode. Dropout stays off: the
            # Dropout children are in evaluation mode, and the attention's own rate is set to zero.
            part.training = True
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
    return module


def _hidden_dropout(module: nn.Module) -> list[str]:
    """Return the modules that apply dropout inside their own forward, without a layer; it is off in the density."""
    kinds = (nn.MultiheadAttention, nn.RNNBase)
    return [
        name or "the network" for name, m in module.named_modules() if isinstance(m, kinds) and float(m.dropout) > 0
    ]


def layout_mismatch(mine: list[dict[str, Any]], stored: list[dict[str, Any]]) -> str:
    """Return a message with the first difference between two layout signatures."""
    here, there = ({e["name"]: tuple(e["shape"]) for e in side} for side in (mine, stored))
    for name in [*there, *here]:
        if here.get(name) != there.get(name):
            found = f"shape {here[name]}" if name in here else "no such tensor"
            return f"net: {name} has {found}, the stored run has {there.get(name, 'no such tensor')}"
    return "net: its tensors have other roles than in the stored run"
