"""Body and head of a network: head(body(x)) is the network, and the body depends on no random parameter.

The cut is found by a recorded forward pass of the unmodified network, not by symbolic tracing: any Python code works,
and both parts are compared with the network, bit for bit, before they are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from credibly.core.autodiff import grad_for
from credibly.core.inputs import Inputs, arguments, map_inputs, row_count
from credibly.core.rng import stream
from credibly.frozen.chain import find_chain, sequential
from credibly.frozen.replay import NotSplit, Replay, Site, build_replay, find_cut
from credibly.frozen.trace import Trace, Value
from credibly.networks.calling import call_with
from credibly.networks.layout import Layout

log = logging.getLogger("credibly")
# Fraction of the weights in products (all except embeddings) that must be frozen for a cut to pay off.
LEAST_FRACTION = 0.2
META = torch.device("meta")
# Rows of the two trials.
ROWS = (2, 3)


class _Enough(BaseException):
    """Ends a forward pass when everything is stored; no handler of the network's catches it."""


class Trial(NamedTuple):
    """Rows, their activations, and the network's outputs at `moved_values` of the random parameters."""

    x: Inputs
    features: Inputs
    output: Tensor


class Body:
    """The part of a network that depends on no random parameter.

    Attributes:
        module: the full network, of which only the frozen part runs.
        head: the rest, as a module on the activations: of one tensor, or with one keyword per tensor.
        where: the boundary, in words.
        trial: rows on which head(body(x)) was compared with the network, with the activations and outputs found.
    """

    trial: Trial

    def __init__(self, module: nn.Module, head: nn.Module, sites: list[Site], where: str) -> None:
        self.module, self.head, self.sites, self.where = module, head, sites, where

    def __call__(self, x: Inputs) -> Inputs:
        """Return the activations at the boundary for the rows of x, by one partial forward pass."""
        found = self.capture(x)
        if not isinstance(self.head, Replay):
            return found[0]
        constants = self.head.tape.constants
        return {f"f{i}": value for i, value in enumerate(found) if f"f{i}" not in constants}

    def capture(self, x: Inputs) -> list[Tensor]:
        """Return the values at all sites."""
        given = tree_flatten(x)[0]
        found: list[Tensor | None] = [given[s.leaf] if s.name is None else None for s in self.sites]
        counts: dict[tuple[str, str], int] = {}

        def take(name: str, side: str, leaves: Callable[[], list[Any]]) -> None:
            number = counts.get((name, side), 0)
            counts[name, side] = number + 1
            for i, site in enumerate(self.sites):
                if (site.name, site.side, site.number) == (name, side, number):
                    found[i] = leaves()[site.leaf]
            if all(value is not None for value in found):
                raise _Enough

        handles = []
        for name in {site.name for site in self.sites if site.name is not None}:
            part = self.module.get_submodule(name)
            handles.append(
                part.register_forward_pre_hook(
                    lambda m, args, kwargs, n=name: take(n, "in", lambda: tree_flatten((args, kwargs))[0]),
                    with_kwargs=True,
                )
            )
            handles.append(
                part.register_forward_hook(lambda m, args, out, n=name: take(n, "out", lambda: tree_flatten(out)[0]))
            )
        args, kwargs = arguments(x)
        try:
            with grad_for(x):
                self.module(*args, **kwargs)
        except _Enough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        values = [value for value in found if value is not None]
        if len(values) < len(found):
            raise NotSplit("its calls depend on the values of the rows")
        return values


def split(layout: Layout, module: nn.Module, x: Inputs, trace: Trace | None = None) -> Body:
    """Return body and head of a network. Raise `NotSplit` if there is nothing to gain, or it cannot be split.

    Args:
        layout: the network and which of its parameters are random.
        module: the network as it is run, with the names of the layout's.
        x: some rows; the first three are tried.
        trace: the record of a pass of this module over the first two of them, if there is one.
    """
    try:
        trials = [_first(x, rows) for rows in ROWS]
        names = [e.name for e in layout.entries if e.name not in layout.extra]
        one = Trace(module, names, trials[0]) if trace is None else trace
        two = Trace(module, names, trials[1], moved_values(layout, module))
        if not one.calls[0].depends:
            raise NotSplit("its output depends on no random parameter")
        if len(one.calls) != len(two.calls) or not all(a.alike(b) for a, b in zip(one.calls, two.calls)):
            raise NotSplit("its calls depend on the number of rows")
        fraction = frozen_fraction(one, module)
        if fraction < LEAST_FRACTION:
            raise NotSplit(f"{fraction:.0%} of its weights come before the first random one")
        reason = ""
        for make in (_as_chain, _as_replay, _on_device, _thorough):
            try:
                body = make(layout, module, trials, (one, two))
                _verify(layout, body, trials[1], two.result)
            except Exception as error:
                reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
                continue
            return body
        raise NotSplit(reason)
    except NotSplit:
        raise
    except Exception as error:  # whatever a network does that cannot be recorded
        raise NotSplit(f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}") from error


def frozen_fraction(trace: Trace, module: nn.Module) -> float:
    """Return the fraction of the weights in products that only frozen operations read."""
    looked_up = {
        f"{prefix}.weight".lstrip(".")
        for prefix, part in module.named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag))
    }
    read: dict[bool, set[int]] = {True: set(), False: set()}
    for op in trace.operations:
        read[op.depends].update(
            number for number in op.reads if trace.sizes.get(number) and trace.tensors[number] not in looked_up
        )
    live = sum(trace.sizes[number] for number in read[True])
    frozen = sum(trace.sizes[number] for number in read[False] - read[True])
    return frozen / max(1, live + frozen)


def _as_chain(layout: Layout, module: nn.Module, trials: list[Inputs], traces: tuple[Trace, Trace]) -> Body:
    chains = [find_chain(trace) for trace in traces]
    if chains[0] is None or chains[1] is None:
        raise NotSplit("its head is not a chain of modules")
    if [c.name for c in chains[0]] != [c.name for c in chains[1]]:
        raise NotSplit("its calls depend on the number of rows")
    head = sequential(chains[0])
    parameters = {} if head is None else dict(head.named_parameters())
    if head is None or any(e.name not in parameters for e in layout.entries if e.name not in layout.extra):
        raise NotSplit("the names of its head's parameters do not nest")
    values = [chain[0].inputs[0] for chain in chains if chain is not None]
    if not _per_row(values):
        raise NotSplit("the first axis of its activations is not the rows")
    shape = "x".join(str(size) for size in values[0].shape[1:])
    first = chains[0][0]
    return Body(module, head, [Site(first.name, 0, "in", 0)], f"input of {first.name} ({shape} values per row)")


def _as_replay(
    layout: Layout,
    module: nn.Module,
    trials: list[Inputs],
    traces: tuple[Trace, Trace],
    *,
    thorough: bool = False,
    device: torch.device = META,
) -> Body:
    cuts = [find_cut(trace, thorough=thorough) for trace in traces]
    cut = cuts[0]
    if cut.features != cuts[1].features or not any(place[0].name for place in cut.features):
        raise NotSplit("its activations depend on the number of rows")
    head = build_replay(module, trials[0], traces, cut, ROWS, device)
    sites = [places[0] for places in cut.features]
    calls = [{(c.name, c.number): c for c in trace.calls} for trace in traces]
    body = Body(module, head, sites, _words(sites))
    captured = [body.capture(trial) for trial in trials]
    for i, site in enumerate(sites):
        if site.name is None:
            continue
        sides = [c[site.name, site.number] for c in calls]
        values = [(c.inputs if site.side == "in" else c.outputs)[site.leaf] for c in sides]
        if _per_row(values):
            continue
        if values[0].shape != values[1].shape or not torch.equal(captured[0][i], captured[1][i]):
            raise NotSplit("the first axis of its activations is not the rows")
        head.tape.constants[f"f{i}"] = captured[0][i]
    if len(head.tape.constants) == len(sites):
        raise NotSplit("its activations have no rows")
    return body


def _on_device(layout: Layout, module: nn.Module, trials: list[Inputs], traces: tuple[Trace, Trace]) -> Body:
    return _as_replay(layout, module, trials, traces, device=layout.device)


def _thorough(layout: Layout, module: nn.Module, trials: list[Inputs], traces: tuple[Trace, Trace]) -> Body:
    return _as_replay(layout, module, trials, traces, thorough=True)


def _verify(layout: Layout, body: Body, x: Inputs, result: Tensor) -> None:
    """Raise unless head(body(x)) is the network's output, bit for bit, at `moved_values`. Keep the trial."""
    whole = layout.output(result)
    with torch.no_grad():
        body.trial = Trial(x, body(x), whole)
        moved = moved_values(layout, body.module)
        again = layout.output(call_with(body.head, moved, *arguments(body.trial.features)))
    if not torch.equal(whole.nan_to_num(), again.nan_to_num()):
        raise NotSplit("its head, run on stored activations, gives other outputs")


def moved_values(layout: Layout, module: nn.Module) -> dict[str, Tensor]:
    """Return values of the random parameters near the network's own, the same in every call."""
    parameters = dict(module.named_parameters())
    generator = stream(0, "frozen body")
    moved = {}
    for entry in layout.entries:
        if entry.name not in layout.extra:
            own = parameters[entry.name].detach()
            noise = torch.randn(own.shape, generator=generator, dtype=torch.float64).to(own)
            moved[entry.name] = own + (0.1 * entry.fan_in**-0.5) * noise
    return moved


def _first(x: Inputs, rows: int) -> Inputs:
    """Return the given number of rows, the first ones again if there are too few."""
    count = row_count(x)
    return map_inputs(lambda t: t[torch.arange(rows, device=t.device) % count], x)


def _per_row(values: list[Value]) -> bool:
    return all(v.shape[:1] == (rows,) for v, rows in zip(values, ROWS)) and values[0].shape[1:] == values[1].shape[1:]


def _words(sites: list[Site]) -> str:
    names = [f"{'input' if s.side == 'in' else 'output'} of {s.name}" for s in sites if s.name is not None]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
