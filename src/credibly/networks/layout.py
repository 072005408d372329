"""Layout: a module's parameters as one flat (..., D) tensor, and back."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from credibly.core.inputs import Inputs, arguments, network_device_dtype, output_tensor
from credibly.core.rng import global_stream
from credibly.errors import InputError
from credibly.networks.normalisation import refuse_batchnorm

Patterns = str | Sequence[str]


@dataclass(frozen=True)
class Entry:
    """One parameter tensor's place in the flat vector: theta[..., start:stop] has this shape."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    fan_in: int


class Layout:
    """Which parameters of a module are random, and where each lies in the flat vector.

    The module is copied, so the caller's own is never changed, and the copy is put into evaluation mode: the density of a
    problem is a deterministic function of the weights. Tied parameters appear once. Parameters that are not random, and
    buffers, keep the values they had.

    Args:
        module: any network.
        random: glob pattern or patterns on parameter names; those that match are random. All of them by default.
        extra: further random tensors by name and shape, such as a learned noise scale; they come after the network's.
    """

    def __init__(
        self, module: nn.Module, random: Patterns = "*", extra: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InputError("net", f"found {type(module).__name__}", "Pass a torch.nn.Module")
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            raise InputError("net", "has lazy parameters without a shape", "Call it once on a batch first")
        if not any(True for _ in module.parameters()):
            raise InputError("net", "has no parameters", "There is nothing to infer; pass a network with weights")
        refuse_batchnorm(module)
        self.device, self.dtype = network_device_dtype(module)
        self.module = _deterministic_copy(module)
        self.silenced = _hidden_dropout(module)
        self.random: tuple[str, ...] = (random,) if isinstance(random, str) else tuple(random)
        names = _names_by_parameter(self.module)
        for pattern in self.random:
            if not any(fnmatchcase(alias, pattern) for aliases in names.values() for alias in aliases):
                raise InputError(
                    "random",
                    f"pattern {pattern!r} matches no parameter",
                    f"The names are {_list([a[0] for a in names.values()])}",
                )
        fans = _fan_in(self.module)
        parameters = dict(self.module.named_parameters())
        entries, place = [], 0
        for name, aliases in names.items():
            if any(fnmatchcase(alias, pattern) for alias in aliases for pattern in self.random):
                if not parameters[name].is_floating_point():
                    raise InputError(
                        "net",
                        f"parameter {name!r} is {parameters[name].dtype}",
                        "Only floating parameters can be random",
                    )
                shape = tuple(parameters[name].shape)
                entries.append(Entry(name, shape, place, place + math.prod(shape), fans.get(name, 1)))
                place += math.prod(shape)
        self.network_dim = place
        for name, shape in (extra or {}).items():
            entries.append(Entry(name, tuple(shape), place, place + math.prod(shape), 1))
            place += math.prod(shape)
        self.extra: tuple[str, ...] = tuple(extra or ())
        self.entries: tuple[Entry, ...] = tuple(entries)
        self.aliases = {alias: name for name, aliases in names.items() for alias in aliases}
        self.dim = place
        self._sizes = [e.stop - e.start for e in entries]

    def split(self, theta: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """theta (..., D) as two dicts of views (..., *shape): the network's parameters and the extra ones."""
        lead = theta.shape[:-1]
        pieces = theta.split(self._sizes, -1)
        views = {e.name: piece.reshape(lead + e.shape) for e, piece in zip(self.entries, pieces)}
        return {k: v for k, v in views.items() if k not in self.extra}, {k: views[k] for k in self.extra}

    def flatten(self, tensors: Mapping[str, Tensor], extra: Mapping[str, Tensor] | None = None) -> Tensor:
        """The inverse of `split` for tensors (*shape) or (..., *shape): the flat (..., D) vector."""
        every = {**tensors, **(extra or {})}
        pieces = []
        for e in self.entries:
            lead = every[e.name].shape[: every[e.name].ndim - len(e.shape)]
            pieces.append(every[e.name].reshape((*lead, -1)))
        return torch.cat(pieces, -1)

    def read(self, module: nn.Module) -> Tensor:
        """The random parameters of a module of the same shape as a (network_dim,) vector."""
        values = dict(module.named_parameters())
        pieces = [values[e.name].detach().reshape(-1) for e in self.entries if e.name not in self.extra]
        return torch.cat(pieces).to(self.device, self.dtype)

    def call(self, theta: Tensor, x: Inputs) -> Tensor:
        """The network's output for one parameter vector (D,)."""
        args, kwargs = arguments(x)
        return output_tensor(functional_call(self.module, self.split(theta)[0], args, kwargs))

    def write(self, theta: Tensor) -> nn.Module:
        """A plain module, apart from this layout, with the values of one vector (D,) in it."""
        module = copy.deepcopy(self.module)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.split(theta)[0].items():
                parameters[name].copy_(value)
        return module.eval().requires_grad_(True)

    def fixed(self) -> dict[str, Tensor]:
        """Parameters that are not random and buffers, as they were given; each is a (..) tensor by name."""
        random = {e.name for e in self.entries}
        held = {n: p.detach() for n, p in self.module.named_parameters() if n not in random}
        return {**held, **dict(self.module.named_buffers())}

    def set_fixed(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts stored values in place of the fixed parameters and buffers of this layout's own copy."""
        mine = self.fixed()
        if set(mine) != set(tensors) or any(mine[k].shape != tensors[k].shape for k in mine):
            raise InputError(
                "net",
                f"its fixed tensors are {_list(mine)}, the stored ones {_list(tensors)}",
                "Pass the network the posterior was fitted with",
            )
        with torch.no_grad():
            for name, value in tensors.items():
                mine[name].copy_(value)

    def reinitialised(self, seed: int, count: int, first: int = 0) -> Tensor:
        """Fresh initial values (count, network_dim) from the modules' own `reset_parameters`, one stream a row.

        Parameters that no module knows how to reset keep the values they were given.
        """
        rows = []
        for member in range(first, first + count):
            module = copy.deepcopy(self.module).cpu()
            with global_stream(seed, "initialise", member), torch.no_grad():
                for part in module.modules():
                    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
                    if callable(reset):
                        reset()
            rows.append(self.read(module))
        return torch.stack(rows)

    def signature(self) -> list[dict[str, Any]]:
        """Names, shapes and roles of every tensor: what a stored run is compared with."""
        random = [
            {"name": e.name, "shape": list(e.shape), "role": "extra" if e.name in self.extra else "random"}
            for e in self.entries
        ]
        return random + [{"name": n, "shape": list(t.shape), "role": "fixed"} for n, t in self.fixed().items()]

    def __repr__(self) -> str:
        return f"Layout({len(self.entries)} random tensors, D = {self.dim}, {len(self.fixed())} fixed)"


def _names_by_parameter(module: nn.Module) -> dict[str, list[str]]:
    """First name of each parameter -> all its names (more than one where it is tied)."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in groups.values()}


def _deterministic_copy(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module).eval().requires_grad_(False)
    for part in module.modules():
        if getattr(part, "inplace", False) is True:
            part.inplace = False  # type: ignore[assignment]  # under vmap the input of an activation may be shared by all draws
        if isinstance(part, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)):
            # Their inference fast path has no batching rule and runs only when not training. Dropout stays off: the
            # Dropout children are in evaluation mode, and the attention's own rate is set to zero.
            part.training = True
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
    return module


def _hidden_dropout(module: nn.Module) -> list[str]:
    """Modules that drop inside their own forward, where no layer stands for it; it is off in the density."""
    kinds = (nn.MultiheadAttention, nn.RNNBase)
    return [
        name or "the network" for name, m in module.named_modules() if isinstance(m, kinds) and float(m.dropout) > 0
    ]


def _fan_in(module: nn.Module) -> dict[str, int]:
    """Inputs that each unit sums over, by parameter name; 1 for biases, gains and embeddings."""
    fans = {}
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if parameter.ndim < 2 or isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                fans[full] = 1
            elif isinstance(part, nn.modules.conv._ConvTransposeNd):
                fans[full] = math.prod((parameter.shape[0], *parameter.shape[2:])) // part.groups
            else:
                fans[full] = math.prod(parameter.shape[1:])
    return fans


def _list(names: Mapping[str, object] | Sequence[str], most: int = 8) -> str:
    names = list(names)
    return (
        ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") if names else "none"
    )
