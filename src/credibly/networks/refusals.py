"""Checks of networks before any work: wrappers are opened, and networks that cannot work are rejected.

A network has to be a differentiable function of its random parameters and of each row alone, whose parameters can be
exchanged from outside. The checks here read the module. `gradient_trial` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from credibly.errors import InputError
from credibly.networks.copying import copy_module

# Switches of activation checkpointing in transformers, timm and monai.
CHECKPOINT_FLAGS = ("gradient_checkpointing", "grad_checkpointing", "use_checkpoint")


def admit(net: nn.Module) -> nn.Module:
    """Return the network inside wrappers such as DataParallel and torch.compile. Raise if no method can fit it."""
    net = unwrapped(net)
    for name, part in net.named_modules():
        _check_part(f"{name!r} ({type(part).__name__})" if name else f"the network ({type(part).__name__})", part)
    for name, parameter in net.named_parameters():
        _check_parameter(name, parameter)
    if {parameter.device.type for parameter in net.parameters()} == {"meta"}:
        found = "its parameters are on the meta device, where tensors have no values"
        raise InputError("net", found, "Give them values: net.to_empty(device=...) and load_state_dict")
    return net


def unwrapped(net: nn.Module) -> nn.Module:
    """Return the network inside wrappers such as DataParallel and torch.compile, which prefix parameter names."""
    net = _inside(net)
    return _without_wrappers(net) if any(_is_wrapper(part) for part in net.modules()) else net


def settle(net: nn.Module) -> None:
    """Switch off, in place, features for plain training loops: sparse gradients, checkpointing, compiled calls.

    Also nested tensors, by which encoders return zeros at padded positions in evaluation mode without gradients only.
    """
    for part in net.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.sparse = False
        for flag in CHECKPOINT_FLAGS:
            if getattr(part, flag, False) is True:
                setattr(part, flag, False)
        if part._compiled_call_impl is not None:
            part._compiled_call_impl = None


@contextmanager
def unchanged_buffers(net: nn.Module) -> Iterator[None]:
    """Raise if the forward pass within the context changes a buffer of the network.

    The network has run before, so a cache that the first pass fills is not changed by this one.
    """
    before = {name: _value(buffer) for name, buffer in net.named_buffers()}
    yield
    for name, buffer in net.named_buffers() if before else ():
        old, new = before.get(name), _value(buffer)
        if old is not None and (old.shape != new.shape or old.dtype != new.dtype or not _same(old, new)):
            _put(net, before)
            raise InputError(
                "net",
                f"its forward changes the buffer {name!r} in evaluation mode, so outputs depend on earlier calls",
                "Update it only if self.training, or pass what it holds as an input",
            )


def _inside(net: nn.Module) -> nn.Module:
    while _is_wrapper(net):
        net = cast(nn.Module, net._orig_mod if hasattr(net, "_orig_mod") else net.module)
    return net


def _is_wrapper(net: nn.Module) -> bool:
    # By its name: importing torch's compiler takes seconds.
    compiled = type(net).__name__ == "OptimizedModule" and hasattr(net, "_orig_mod")
    return compiled or isinstance(net, (nn.DataParallel, nn.parallel.DistributedDataParallel))


def _without_wrappers(net: nn.Module) -> nn.Module:
    net = copy_module(net)
    for part in list(net.modules()):
        for name, child in list(part.named_children()):
            if _is_wrapper(child):
                setattr(part, name, _inside(child))
    return net


def _check_part(described: str, part: nn.Module) -> None:
    kinds = {kind.__name__ for kind in type(part).__mro__}
    if isinstance(part, torch.jit.ScriptModule):
        found = f"{described} is a ScriptModule, whose parameters cannot be exchanged"
        raise InputError("net", found, "Pass the Python module that was scripted or traced, with the same weights")
    if "_StatefulGraphModule" in kinds:
        found = f"{described} comes from torch.export, whose graph is fixed to one mode and its own weights"
        raise InputError("net", found, "Pass the module that was exported")
    if "FullyShardedDataParallel" in kinds or "FSDPModule" in kinds:
        found = f"{described} is sharded over processes, so no process has all of its weights"
        raise InputError(
            "net", found, "Pass the module before it is sharded; a run over processes shares chains or rows"
        )
    if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
        found = f"{described} has max_norm={part.max_norm}, which edits its weight in every forward pass"
        raise InputError("net", found, "Set max_norm=None: a prior on its weight bounds it smoothly")


def _check_parameter(name: str, parameter: Tensor) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return
    if parameter.is_complex():
        found = f"parameter {name!r} is complex ({parameter.dtype})"
        raise InputError("net", found, "Hold its real and imaginary parts as two real parameters, joined in forward")
    if parameter.is_sparse or parameter.layout != torch.strided:
        found = f"parameter {name!r} has the layout {parameter.layout}"
        raise InputError("net", found, "Make it dense: nn.Parameter(parameter.to_dense())")


def _value(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and bool(((a == b) | ((a != a) & (b != b))).all())


def _put(net: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        net.get_submodule(owner)._buffers[attribute] = value
