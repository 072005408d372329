"""Forward: network outputs for several parameter vectors, batched or one at a time."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import vmap

from credibly import runtime
from credibly.backends.cpp.outputs import cpp_outputs, use_cpp_outputs
from credibly.backends.cpp.stack import Stack
from credibly.core.checks import check_choice
from credibly.core.inputs import Inputs, arguments, call, is_heads, map_inputs, row_count, tensors_of
from credibly.errors import InputError
from credibly.likelihoods import Heads, Likelihood
from credibly.networks.calling import call_with, find_ties
from credibly.networks.channels_last import (
    channels_last,
    default_layout,
    find_arrangement,
    with_paired_pools,
)
from credibly.networks.complex_views import viewed_as_complex
from credibly.networks.fused_unit import fuses
from credibly.networks.gradient_trial import try_batched
from credibly.networks.layout import Layout
from credibly.networks.own_gradients import needs_own_gradients
from credibly.networks.stacked import stacked_forward

Plan = Literal["auto", "batched", "looped"]
log = logging.getLogger("credibly")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}

runtime.keep_freed_memory()


class Forward:
    """Forward passes of N rows under C parameter vectors (C, D), with outputs (C, N, ...).

    There are two plans with the same result. `batched` evaluates all C at once (layer by layer for plain stacks,
    `torch.func.vmap` otherwise). `looped` evaluates one at a time, for networks that have no batching rule (LSTM, GRU)
    or are slower batched (convolutions). `auto` decides by the layers of the network and never by timing, so results
    are bit-for-bit reproducible; `reason` explains its choice.

    Args:
        layout: the network and its flat vector.
        plan: "auto", "batched" or "looped".
        trial: one or two rows to try the batched plan on.
        module: the network to run instead of the layout's, such as a copy with masks.
        varied: example tensors (2, *shape) of what differs between the C; the layout's random parameters by default.
        precision: "bf16" or "fp16" runs the network under autocast to that dtype; weights, outputs and gradients keep
            the layout's dtype.
        deferred: whether "auto" decides on first use, which never comes if only a part of the network is run.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        trial: Inputs,
        *,
        module: nn.Module | None = None,
        varied: dict[str, Tensor] | None = None,
        precision: str | None = None,
        deferred: bool = False,
    ) -> None:
        check_choice("plan", plan, get_args(Plan))
        if precision is not None:
            check_choice("precision", precision, PRECISIONS, "Or pass None")
        self.precision = precision
        self.layout = layout
        self.module = layout.module if module is None else module
        self.ties = find_ties(self.module)
        self.stack = stacked_forward(self.module, layout.aliases) if isinstance(trial, Tensor) else None
        if self.stack is None and self.module is layout.module:
            layout.apart = viewed_as_complex(layout, trial)
        self._decision: tuple[bool, str] | None = None
        self._pending: tuple[Any, ...] = (plan, trial, varied)
        if not deferred or plan == "batched":
            self._decide()
        self.group_norm, self.channels_last, self.row_width = find_arrangement(
            self.module, trial, layout.device, layout.dtype
        )
        on_cpu = layout.device.type == "cpu"
        if self.group_norm:
            # Convolutions also follow the memory format of their weights, and only fixed weights can have another.
            self.module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        if self.channels_last and on_cpu:
            self.module = with_paired_pools(self.module)

    @property
    def looped(self) -> bool:
        """Whether parameter vectors are evaluated one at a time."""
        return self._decide()[0]

    @property
    def reason(self) -> str:
        """The reason for the chosen plan."""
        return self._decide()[1]

    def _decide(self) -> tuple[bool, str]:
        if self._decision is None:
            looped, reason = self._decision = self._choose(*self._pending)
            self._pending = ()
            log.debug("plan %s: %s", "looped" if looped else "batched", reason)
        return self._decision

    def __call__(self, theta: Tensor, x: Inputs, *, shared: bool = True) -> Tensor:
        """Return outputs (C, N, ...) for theta (C, D) and x (N, ...), or x (C, N, ...) with shared=False."""
        if (
            self.stack is not None
            and shared
            and isinstance(x, Tensor)
            and use_cpp_outputs(theta, x)
            and self.cpp_stack is not None
        ):
            return cpp_outputs(self.cpp_stack, theta, x)
        return self.apply(self.layout.split(theta)[0], x, shared=shared)

    @property
    def cpp_stack(self) -> Stack | None:
        """The network for the C++ backend, or None if it is not supported or the library is missing."""
        return self.small_stack if self.small_stack is not None and self.small_stack.compiled() else None

    @functools.cached_property
    def small_stack(self) -> Stack | None:
        """The network as a stack of small layers, on any device, or None if it is not one."""
        plain = self.stack is not None and self.module is self.layout.module and self.precision is None
        return Stack.of(self.module, self.layout) if plain and not self.looped else None

    def in_full_precision(self) -> Forward:
        """Return a copy that runs the network in its native dtype, without autocast."""
        other = copy.copy(self)
        other.precision = None
        other.__dict__.pop("small_stack", None)  # cached, and None under autocast
        return other

    def apply(self, parameters: dict[str, Tensor], x: Inputs, *, shared: bool = True) -> Tensor:
        """Return outputs for named tensors (C, *shape): parameters of the network, or buffers such as masks."""
        if self.precision is None:
            return self._apply(parameters, x, shared)
        with torch.autocast(self.layout.device.type, PRECISIONS[self.precision], cache_enabled=False):
            output = self._apply(parameters, x, shared)
        return output.to(self.layout.dtype)

    def _apply(self, parameters: dict[str, Tensor], x: Inputs, shared: bool) -> Tensor:
        if self.stack is not None and isinstance(x, Tensor):
            return self.stack(parameters, x, not shared)
        count = next(iter(parameters.values())).shape[0]
        if count == 1 or self.looped:
            x = self.arranged(x) if shared else x
            rows = []
            for c in range(count):
                mine = x if shared else self.arranged(map_inputs(lambda t, c=c: t[c], x))  # type: ignore[misc]
                rows.append(self._one({k: v[c] for k, v in parameters.items()}, mine))
            return torch.stack(rows)
        return self._vmapped(parameters, x, shared)

    def fuses(self, trial: Inputs) -> bool:
        """Return whether first derivatives in eager mode use the Triton kernels of `fused_unit`."""
        if not isinstance(trial, Tensor):
            return False
        cast_to = None if self.precision is None else PRECISIONS[self.precision]
        with torch.autocast(self.layout.device.type, cast_to, enabled=cast_to is not None, cache_enabled=False):
            return fuses(self.module, trial) and self.looped

    def arranged(self, x: Inputs) -> Inputs:
        """Return the inputs in the memory format that the network runs fastest in: channels last for most images."""
        if self.group_norm:
            return map_inputs(default_layout, x)
        return map_inputs(channels_last, x) if self.channels_last else x

    def _one(self, parameters: dict[str, Tensor], x: Inputs) -> Tensor:
        args, kwargs = arguments(x)
        return self.layout.output(call_with(self.module, parameters, args, kwargs, self.ties))

    def _vmapped(self, parameters: dict[str, Tensor], x: Inputs, shared: bool) -> Tensor:
        result: Tensor = vmap(self._one, in_dims=(0, None if shared else 0))(parameters, x)
        return result

    def _choose(self, plan: Plan, trial: Inputs, varied: dict[str, Tensor] | None) -> tuple[bool, str]:
        if plan == "looped":
            return True, "asked for"
        if self.stack is not None:
            return False, "a stack of layers, batched layer by layer"
        if varied is None:
            theta = self.layout.read(self.layout.module).expand(2, -1)
            extra = theta.new_zeros(2, self.layout.dim - self.layout.network_dim)
            varied = self.layout.split(torch.cat([theta, extra], -1) if extra.numel() else theta)[0]
        # Only layers with varied tensors matter: those before the first run once in the batched plan.
        owners = [self.module.get_submodule(name.rpartition(".")[0]) for name in varied]
        recurrent = {type(m).__name__ for m in owners if isinstance(m, nn.RNNBase)}
        if recurrent and plan == "auto":
            return True, f"{', '.join(sorted(recurrent))} cannot be batched over parameters"
        weights = {name for name in varied if not name.endswith("mask")}
        if plan == "auto" and weights and any(isinstance(m, nn.modules.conv._ConvNd) for m in owners):
            return True, "convolutions run faster one parameter vector at a time"
        try:
            with _no_silent_fallback():
                try_batched(self._vmapped, varied, trial, own_rows=bool(weights))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            if plan == "batched":
                raise InputError(
                    "plan", f"this network cannot be batched ({reason})", 'Leave plan="auto" or pass "looped"'
                ) from error
            return True, f"it cannot be batched ({reason})"
        return False, "batched by vmap"


@contextmanager
def _no_silent_fallback() -> Iterator[None]:
    """Make operations without a batching rule raise; by default vmap would run them in a slow loop."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def try_network(layout: Layout, rows: Inputs, *, heads: bool = True) -> Tensor:
    """Return the network's output for a few rows, or raise an error about x or net. `heads` allows a dict of them."""
    try:
        with torch.no_grad():
            output = layout.output(call(layout.module, rows, heads=heads))
    except InputError:
        raise
    except Exception as error:
        if needs_own_gradients(error) and not layout.own_gradients:
            layout.record_own_gradients()
            return try_network(layout, rows, heads=heads)
        shapes = ", ".join(
            f"{name} {tuple(t.shape[1:])} {t.dtype}".replace("torch.", "") for name, t in tensors_of(rows)
        )
        advice = "Check the shape of a row and the dtype"
        if layout.mixed:
            dtypes = sorted({str(p.dtype) for p in layout.module.parameters()})
            advice += f". Its parameters are in {dtypes}: its forward has to cast, or pass dtype= to convert everything"
        raise InputError(
            "x",
            f"the network cannot take rows of {shapes} ({type(error).__name__}: {str(error).splitlines()[0][:200]})",
            advice,
        ) from error
    if output.ndim == 0 or output.shape[0] != row_count(rows):
        raise InputError(
            "net",
            f"returned shape {tuple(output.shape)} for {row_count(rows)} rows",
            "The first axis of its output must be the rows",
        )
    return output


def bind_heads(layout: Layout, likelihood: Likelihood, x: Inputs, y: Any) -> tuple[Likelihood, Any]:
    """Return a likelihood of several heads bound to the network's dict of outputs, and all targets in one tensor.

    Other likelihoods and their targets are returned unchanged.
    """
    if not isinstance(likelihood, Heads):
        if isinstance(y, dict):
            found = f"is a dict of targets, and {type(likelihood).__name__} has one"
            raise InputError("y", found, "Use Heads({name: likelihood, ...}), and a network that returns such a dict")
        return likelihood, y
    rows = map_inputs(lambda t: t[:2], x)
    try_network(layout, rows)
    args, kwargs = arguments(rows)
    with torch.no_grad():
        outputs = layout.module(*args, **kwargs)
    if not is_heads(outputs):
        found = f"must return a dict of outputs for Heads, got {type(outputs).__name__}"
        raise InputError("net", found, "Return {name: output, ...}")
    return likelihood.with_targets({name: layout.output(head) for name, head in outputs.items()}, y, layout.dtype)
