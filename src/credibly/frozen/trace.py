"""One forward pass, recorded: calls of modules, operations, and which values depend on random parameters.

Values are followed by their storage, operation by operation, so functional code between modules is seen as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten

from credibly.core.inputs import Inputs, arguments, output_tensor, tensors_of
from credibly.networks.calling import call_with

# The declaration of an operator.
_schema_of = attrgetter("_schema")


@functools.cache
def _written(function: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operator writes to."""
    declared = enumerate(_schema_of(function).arguments)
    return tuple((i, a.name) for i, a in declared if a.alias_info is not None and a.alias_info.is_write)


class Value(NamedTuple):
    """A tensor as it was at one time: the number of its storage, and the view of it."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        name, number: the module, and how often it was called before.
        parent: the call whose code made this one; None for the network itself.
        inputs, outputs: the leaves of its arguments and of its result: values of tensors, and other objects.
        form: structure of the result.
        depends: whether an operation inside, or an input, depends on a random parameter.
        calls: the calls that its code made.
    """

    name: str
    number: int
    module: nn.Module
    parent: Call | None
    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)
    form: TreeSpec | None = None
    depends: bool = False
    calls: list[Call] = field(default_factory=list)

    def alike(self, other: Call) -> bool:
        """Return whether another trace has the same call, up to the number of rows."""
        return (self.name, self.number, self.depends, self.form) == (
            other.name,
            other.number,
            other.depends,
            other.form,
        ) and len(self.calls) == len(other.calls)


class Operation(NamedTuple):
    """One operation: the call whose code made it, the storages that it reads and writes, and whether it depends."""

    call: Call
    name: str
    reads: tuple[int, ...]
    results: tuple[int, ...]
    writes: tuple[int, ...]
    depends: bool


class Trace(TorchDispatchMode):
    """The record of one forward pass of a network on a few rows.

    Attributes:
        calls: all calls, in the order in which they began; the first is that of the network.
        operations: all operations, in order.
        tensors: names of the parameters and buffers by the number of their storage.
        sizes: number of values of each of them that has more than one axis, 0 for the others.
        inputs: positions of the network's inputs by the number of their storage.
        output, result: the tensor that predictions are made of, as a value and itself.

    Args:
        module: the network.
        random: names of its random parameters.
        x: the rows.
        values: other values of the random parameters to run it with; its own by default.
    """

    output: Value
    result: Tensor

    def __init__(
        self, module: nn.Module, random: Iterable[str], x: Inputs, values: dict[str, Tensor] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.operations: list[Operation] = []
        self._stack: list[Call] = []
        self._counts: dict[str, int] = {}
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._next = 0
        values = values or {}
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), **values}
        self.tensors = {self.number(t): name for name, t in tensors.items()}
        self.sizes = {self.number(t): t.numel() if t.ndim > 1 else 0 for t in tensors.values()}
        self.inputs = {self.number(t): i for i, (_, t) in enumerate(tensors_of(x))}
        self._dependent = {self.number(tensors[name]) for name in random}
        self._run(module, x, values)

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; a new one for a new storage, also at an address used before."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known[0].expired():
            known = (StorageWeakRef(storage), self._next)
            self._known[storage._cdata] = known
            self._next += 1
        return known[1]

    def value(self, leaf: Any) -> Any:
        """Return the value of a tensor, and any other object unchanged."""
        if not isinstance(leaf, Tensor):
            return leaf
        return Value(self.number(leaf), int(leaf.storage_offset()), tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads = tuple(self.number(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor))
        result = function(*args, **kwargs)
        written = [(args[i] if i < len(args) else kwargs.get(name)) for i, name in _written(function)]
        writes = tuple(self.number(t) for t in tree_flatten(written)[0] if isinstance(t, Tensor)) if written else ()
        results = tuple(self.number(t) for t in tree_flatten(result)[0] if isinstance(t, Tensor))
        depends = any(n in self._dependent for n in reads)
        if depends:
            self._dependent.update((*results, *writes))
            for call in self._stack:
                call.depends = True
        self.operations.append(Operation(self._stack[-1], str(function), reads, results, writes, depends))
        return result

    def _run(self, module: nn.Module, x: Inputs, values: dict[str, Tensor]) -> None:
        def enter(part: nn.Module, args: Any, kwargs: Any, name: str) -> None:
            number = self._counts.get(name, 0)
            self._counts[name] = number + 1
            leaves = [self.value(leaf) for leaf in tree_flatten((args, kwargs))[0]]
            call = Call(name, number, part, self._stack[-1] if self._stack else None, leaves)
            if any(isinstance(leaf, Value) and leaf.storage in self._dependent for leaf in leaves):
                call.depends = True
            if call.parent is not None:
                call.parent.calls.append(call)
            self._stack.append(call)
            self.calls.append(call)

        def leave(part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            call = self._stack.pop()
            leaves, call.form = tree_flatten(out)
            call.outputs = [self.value(leaf) for leaf in leaves]
            if call.parent is None:
                self.result = output_tensor(out)
                self.output = self.value(self.result)

        handles = []
        for name, part in module.named_modules():
            handles.append(
                part.register_forward_pre_hook(
                    lambda m, args, kwargs, name=name: enter(m, args, kwargs, name), with_kwargs=True
                )
            )
            handles.append(part.register_forward_hook(leave, with_kwargs=True))
        args, kwargs = arguments(x)
        try:
            with torch.no_grad(), self:
                call_with(module, values, args, kwargs) if values else module(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def dependent(self, storage: int) -> bool:
        """Return whether a storage held a value that depends on a random parameter, at any time."""
        return storage in self._dependent
