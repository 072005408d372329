"""Heads of any other form: the network's own code runs again, with stored activations where its frozen modules were.

Every outermost call of a frozen module returns what the body stored, and inputs of the other modules that the body
could compute are replaced by what it stored. Where a frozen value only feeds other frozen values it is replaced by a
tensor that has a shape and no data: on the meta device or, for code that asks for the device, a single zero expanded to
    that shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from credibly.core.inputs import Inputs, arguments
from credibly.frozen.trace import Call, Operation, Trace, Value
from credibly.networks.copying import copy_module


class NotSplit(Exception):
    """The network cannot be split; the message says why."""


@dataclass(frozen=True)
class Site:
    """Where a value appears: leaf of the inputs ("in") or the result ("out") of a call; name None for an input of x."""

    name: str | None
    number: int
    side: str
    leaf: int


@dataclass
class Cut:
    """The values that the body stores, and the sites at which the head uses them.

    Attributes:
        features: for each stored value, all sites where the head needs it. The body reads the first.
        stubs: calls that the head replaces.
        hollow: names of parameters and buffers that only frozen code reads.
    """

    features: list[list[Site]] = field(default_factory=list)
    stubs: list[Call] = field(default_factory=list)
    hollow: list[str] = field(default_factory=list)


def find_cut(trace: Trace, *, thorough: bool) -> Cut:
    """Return where to cut a network. `thorough` stores every value that the head's own code touches."""
    stubs = _stubs(trace)
    inside = set()
    for call in trace.calls:
        if call in stubs or call.parent in inside:
            inside.add(call)
    own = [op for op in trace.operations if op.call not in inside]
    search = _Search(trace, stubs, own)
    for op in own:
        # Without a result that is a tensor, Python reads the values.
        if op.depends or thorough or not op.results:
            for number in op.reads:
                search.need(number, op.call)
    stored = {value.storage for value in search.sites}
    if any(number in stored for op in own for number in op.writes):
        raise NotSplit("its code changes activations in place")
    read = {number for op in own for number in op.reads}
    hollow = [n for number, n in trace.tensors.items() if number in read - search.kept and not trace.dependent(number)]
    inputs = [[Site(None, 0, "in", i)] for number, i in trace.inputs.items() if number in search.kept]
    return Cut([*search.sites.values(), *inputs], stubs, hollow)


class _Search:
    """A search backwards from the head's own operations to the frozen values that they need.

    Attributes:
        sites: for each value that the body stores, the sites at which the head takes it.
        kept: storages of parameters, buffers and inputs of the network that the head reads itself.
    """

    def __init__(self, trace: Trace, stubs: list[Call], own: list[Operation]) -> None:
        self.trace = trace
        self.made_by: dict[int, list[Operation]] = {}
        for op in own:
            for number in {*op.results, *op.writes} - set(op.reads):
                self.made_by.setdefault(number, []).append(op)
        self.stub_of = {v.storage: c for c in stubs for v in c.outputs if isinstance(v, Value)}
        self.sites: dict[Value, list[Site]] = {}
        self.kept: set[int] = set()
        self.seen: set[tuple[int, int]] = set()

    def need(self, number: int, call: Call) -> None:
        """Find where the head gets a storage that the code of this call reads."""
        if (number, id(call)) in self.seen or self.trace.dependent(number):
            return
        self.seen.add((number, id(call)))
        entries = [(i, v) for i, v in enumerate(call.inputs) if isinstance(v, Value) and v.storage == number]
        if number in self.trace.tensors:
            self.kept.add(number)
        elif call.parent is not None and entries:
            for i, v in entries:
                self.sites.setdefault(v, []).append(Site(call.name, call.number, "in", i))
        elif number in self.stub_of:
            self._take_result(number, self.stub_of[number])
        elif number in self.trace.inputs:
            self.kept.add(number)
        else:
            for op in self.made_by.get(number, ()):
                for other in op.reads:
                    self.need(other, op.call)

    def _take_result(self, number: int, stub: Call) -> None:
        """Store the results of a frozen call that are views of this storage."""
        for i, v in enumerate(stub.outputs):
            if isinstance(v, Value) and v.storage == number:
                site, known = Site(stub.name, stub.number, "out", i), self.sites.setdefault(v, [])
                if site not in known:
                    known.append(site)


def _stubs(trace: Trace) -> list[Call]:
    """Return the outermost frozen calls of modules that have no other calls."""
    outermost = [c for c in trace.calls if not c.depends and c.parent is not None and c.parent.depends]
    chosen = {id(c) for c in outermost}
    mixed = {id(c.module) for c in trace.calls if id(c) not in chosen and _is_open(c)}
    return [c for c in outermost if id(c.module) not in mixed and not _shares_parts(c, mixed)]


def _is_open(call: Call) -> bool:
    """Return whether the head runs this call itself: no call around it is frozen."""
    while call.parent is not None:
        if not call.parent.depends:
            return False
        call = call.parent
    return True


def _shares_parts(call: Call, mixed: set[int]) -> bool:
    return any(id(part) in mixed for part in call.module.modules())


@dataclass(frozen=True)
class Hollow:
    """A tensor without data, some of whose axes grow with the rows."""

    shape: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self, rows: int) -> Tensor:
        """Return the tensor for a number of rows."""
        shape = [fixed + rows * each for fixed, each in self.shape]
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(shape)


@dataclass(frozen=True)
class Key:
    """The name of a stored value."""

    name: str


class Tape:
    """The activations of the current forward pass, and how many rows they have."""

    def __init__(self) -> None:
        self.features: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self.rows = 0
        self.counts: dict[str, int] = {}

    def value(self, leaf: Any) -> Any:
        """Return what a leaf stands for in this pass: a stored value, a tensor without data, or itself."""
        if isinstance(leaf, Key):
            return self.constants[leaf.name] if leaf.name in self.constants else self.features[leaf.name]
        return leaf.tensor(self.rows) if isinstance(leaf, Hollow) else leaf

    def next(self, name: str) -> int:
        """Return how often a module was called before in this pass, and count this call."""
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        return number


class _Shared:
    """A reference that copies of the head share."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: object) -> _Shared:
        return self


class _Form(_Shared):
    """The leaves and the structure of a result. Pickles have an example of the structure, which torch advises."""

    def __reduce__(self) -> tuple[Any, ...]:
        leaves, form = self.value
        return _form_like, (leaves, tree_unflatten(list(range(len(leaves))), form))


def _form_like(leaves: list[Any], example: Any) -> _Form:
    return _Form((leaves, tree_flatten(example)[1]))


class Stored(nn.Module):
    """The replacement of a frozen module: it returns the stored results of its calls."""

    tape: Tape

    def __init__(self, tape: Tape, name: str, calls: list[_Form], original: nn.Module) -> None:
        super().__init__()
        self.tape, self.name, self.results = tape, name, calls
        self.original = _Shared(original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stored result of this call; tensors that nothing depends on have no data."""
        leaves, form = self.results[self.tape.next(self.name)].value
        found = [self.tape.value(leaf) for leaf in leaves]
        return tree_unflatten(found, form)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("original").value, name)


class Replace:
    """A hook before a module of the head: it replaces inputs by the values that the body stored."""

    def __init__(self, tape: Tape, name: str, leaves: dict[int, dict[int, Key]]) -> None:
        self.tape, self.name, self.leaves = tape, name, leaves

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of this call with the stored values among them."""
        found, form = tree_flatten((args, kwargs))
        for leaf, key in self.leaves.get(self.tape.next(self.name), {}).items():
            found[leaf] = self.tape.value(key)
        return tree_unflatten(found, form)


class Replay(nn.Module):
    """The network's own code on stored activations: forward(**features).

    It shares the dictionaries of parameters and modules with the network, so all names are those of the network.
    """

    tape: Tape
    network: tuple[nn.Module]
    given: _Form

    def __init__(self, network: nn.Module, tape: Tape, inputs: list[Any], form: Any) -> None:
        super().__init__()
        self.__dict__["tape"], self.__dict__["network"] = tape, (network,)
        self.__dict__["given"] = _Form((inputs, form))
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = network.__dict__[shared]
        self.training = False

    def forward(self, **features: Tensor) -> Any:
        """Return the network's output for the rows of the features."""
        tape, (leaves, form) = self.tape, self.given.value
        tape.features, tape.counts = features, {}
        tape.rows = next(iter(features.values())).shape[0]
        found = [tape.value(leaf) for leaf in leaves]
        args, kwargs = arguments(tree_unflatten(found, form))
        try:
            return self.network[0](*args, **kwargs)
        finally:
            tape.features = {}


def build_replay(
    network: nn.Module,
    x: Inputs,
    traces: tuple[Trace, Trace],
    cut: Cut,
    rows: tuple[int, int],
    device: torch.device,
) -> Replay:
    """Return the head. The two traces, on different numbers of rows, show which axes are rows.

    `device` is that of tensors without data.
    """
    tape = Tape()
    keys = {site: Key(f"f{i}") for i, places in enumerate(cut.features) for site in places}
    other = {(c.name, c.number): c for c in traces[1].calls}
    # deepcopy looks every object up in the memo first: tensors are shared, and frozen modules replaced.
    memo: dict[int, Any] = {id(t): t for t in (*network.parameters(), *network.buffers())}
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for name in cut.hollow if device.type == "meta" else ():
        meta = torch.empty_like(tensors[name], device="meta")
        is_parameter = isinstance(tensors[name], nn.Parameter)
        memo[id(tensors[name])] = nn.Parameter(meta, requires_grad=False) if is_parameter else meta
    calls: dict[int, list[Call]] = {}
    for call in cut.stubs:
        calls.setdefault(id(call.module), []).append(call)
    for mine in calls.values():
        results = []
        for call in mine:
            pairs = zip(call.outputs, other[call.name, call.number].outputs)
            leaves = [
                keys.get(Site(call.name, call.number, "out", i)) or _plain(leaf, there, rows, device)
                for i, (leaf, there) in enumerate(pairs)
            ]
            results.append(_Form((leaves, call.form)))
        memo[id(mine[0].module)] = Stored(tape, mine[0].name, results, mine[0].module)
    new = copy_module(network, memo)
    replaced: dict[str, dict[int, dict[int, Key]]] = {}
    for site, key in keys.items():
        if site.side == "in" and site.name is not None:
            replaced.setdefault(site.name, {}).setdefault(site.number, {})[site.leaf] = key
    for name, by_call in replaced.items():
        new.get_submodule(name).register_forward_pre_hook(Replace(tape, name, by_call), with_kwargs=True)
    leaves, form = tree_flatten(x)
    shapes = [((0, 1), *((size, 0) for size in t.shape[1:])) for t in leaves]
    inputs = [
        keys.get(Site(None, 0, "in", i)) or Hollow(shape, t.dtype, device)
        for i, (t, shape) in enumerate(zip(leaves, shapes))
    ]
    return Replay(new, tape, inputs, form)


def _plain(leaf: Any, there: Any, rows: tuple[int, int], device: torch.device) -> Any:
    """Return a leaf of a result that the head does not read."""
    if isinstance(leaf, Value) and isinstance(there, Value):
        shape = []
        for one, two in zip(leaf.shape, there.shape, strict=True):
            each, left = divmod(two - one, rows[1] - rows[0])
            if left:
                raise NotSplit("the shape of an activation does not grow with the rows")
            shape.append((one - each * rows[0], each))
        return Hollow(tuple(shape), leaf.dtype, device)
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        if leaf != there:
            raise NotSplit("a module returns a number that depends on the rows")
        return leaf
    # Other objects (caches of keys and values) may hold activations of these rows. If the head reads one, it raises.
    return None
