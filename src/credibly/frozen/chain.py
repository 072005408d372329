"""Heads that are a plain chain of modules: network(x) = last(...first(activations)), written as an nn.Sequential.

The modules keep their names, so every method finds the parameters and layers that it knows, and the fast paths for
stacks of layers apply as to a network that is nothing but the head.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from credibly.frozen.trace import Call, Trace, Value


def find_chain(trace: Trace) -> list[Call] | None:
    """Return the calls of the chain, or None if the dependent part of the network is not one."""
    chain = _chain(trace, trace.calls[0])
    if chain is None or not isinstance(chain[0].inputs[0], Value):
        return None
    names = [call.name for call in chain]
    modules = {id(call.module) for call in chain}
    once = [call for call in trace.calls if id(call.module) in modules]
    if len(once) != len(chain) or len(set(names)) != len(names):
        return None
    boundary = chain[0].inputs[0].storage
    if trace.dependent(boundary) or any(boundary in op.writes and op.depends for op in trace.operations):
        return None
    return chain


def _chain(trace: Trace, call: Call) -> list[Call] | None:
    """Return the calls that a dependent call consists of, or the call itself; None unless one tensor goes in and out.

    The network's own call may take and return anything: only the tensor of its result that predictions use matters.
    """
    parts = [inner for inner in call.calls if inner.depends]
    whole = [call] if call.parent is not None and _one_to_one(call) else None
    glue = any(op.depends and op.call is call for op in trace.operations)
    if not parts or glue or not all(_one_to_one(part) for part in parts):
        return whole
    links = [(before.outputs[0], after.inputs[0]) for before, after in pairwise(parts)]
    ends = parts[-1].outputs[0] == (trace.output if call.parent is None else call.outputs[0])
    if any(out != into for out, into in links) or not ends or trace.dependent(parts[0].inputs[0].storage):
        return whole
    first = _chain(trace, parts[0])
    return [*(first or parts[:1]), *parts[1:]]


def _one_to_one(call: Call) -> bool:
    return all(len(side) == 1 and isinstance(side[0], Value) for side in (call.inputs, call.outputs))


def sequential(calls: list[Call]) -> nn.Sequential | None:
    """Return the modules in nested nn.Sequential, each under its own name; None if their order does not nest."""
    root = nn.Sequential()
    order: list[str] = []
    for call in calls:
        *path, last = call.name.split(".")
        parent: nn.Module = root
        for step in path:
            if step not in parent._modules:
                parent.add_module(step, nn.Sequential())
            parent = parent.get_submodule(step)
        parent.add_module(last, call.module)
        order.append(call.name)
    leaves = {id(call.module) for call in calls}
    nested = [name for name, module in root.named_modules() if id(module) in leaves]
    return root.eval() if nested == order else None
