"""The same density with the frozen body of the network computed once: its activations take the place of the inputs."""

from __future__ import annotations

import copy
import logging
from typing import Any, Self

import torch
from torch import Tensor, nn

from credibly.core.inputs import Inputs, map_inputs, tensors_of
from credibly.forward import Forward, Plan
from credibly.frozen.features import Frozen
from credibly.frozen.replay import NotSplit
from credibly.frozen.trace import Trace
from credibly.networks.layout import Layout
from credibly.networks.normalisation import refuse_batchnorm

log = logging.getLogger("credibly")


class Reducible:
    """A problem whose network may have a frozen body.

    Attributes:
        plan: the plan as requested.
        frozen: the network in two parts; None if it is not split, or has not been yet.
        features: the activations of all rows, once they are computed.
        whole: for a problem on activations, the original problem.
        stream: the data that are read batch by batch, None if they are in memory.
        moving: BatchNorm layers whose inputs depend on random parameters; their statistics are fixed nevertheless.
    """

    x: Inputs
    n: int
    layout: Layout
    forward: Forward
    plan: Plan
    fused: bool
    frozen: Frozen | None = None
    features: Inputs | None = None
    whole: Any = None
    stream: Any = None
    moving: tuple[str, ...] = ()
    _tried: bool = False
    _trace: Trace | None = None

    def settle_statistics(self, net: nn.Module, trial: Inputs) -> None:
        """Find BatchNorm layers whose inputs depend on random parameters. Raise if the network is in training mode."""
        layout, forward = self.layout, self.forward
        if not layout.norms:
            return
        names = [e.name for e in layout.entries if e.name not in layout.extra]
        try:
            self._trace = Trace(forward.module, names, forward.arranged(trial))
            depend = {c.name for c in self._trace.calls if c.depends}
        except Exception:  # a network that cannot be recorded
            depend = set(layout.norms)
        self.moving = tuple(name for name in layout.norms if name in depend)
        if self.moving and any(net.get_submodule(name).training for name in self.moving):
            refuse_batchnorm(net)

    def split(self) -> Frozen | None:
        """Return the network in two parts, found on first use; None if it cannot be split, or the data are a stream."""
        if self.stream is not None:
            return None
        if not self._tried:
            self._tried = True
            trace = self._trace if self.n > 1 else None
            self.frozen = Frozen.of(self.layout, self.forward, self.x, self.plan, trace)
        return self.frozen

    def __getstate__(self) -> dict[str, Any]:
        # A copy may have other rows, and what forward passes left cannot be pickled.
        return {name: value for name, value in vars(self).items() if name != "_trace"}

    def reduced(self) -> Self:
        """Return the problem on the activations of its frozen body, computed on first use; itself if it has none."""
        if self.whole is not None or self.split() is None:
            return self
        assert self.frozen is not None
        if self.features is None:
            self.features = self._activations()
        if self.features is None:
            self.frozen = None
            return self
        part = copy.copy(self)
        part.whole, part.x, part.features = self, self.features, None
        part.forward = self.frozen.forward
        # The same random parameters, and the extra ones that the likelihood has by now.
        part.layout = part.forward.layout
        part.fused = part.forward.fuses(map_inputs(lambda t: t[:2], part.x))
        return part

    def _activations(self) -> Inputs | None:
        assert self.frozen is not None
        try:
            features = self.frozen.features(self.x)
            if not self.frozen.agrees(self.x, features):
                raise NotSplit("head and network disagree at other rows")
        except NotSplit as reason:
            log.info("frozen body: no activations are stored: %s", reason)
            return None
        facts = self.frozen.facts(features)
        place = "on disk" if facts["on_disk"] else "in memory"
        log.info(
            "frozen body: activations of %d rows at the %s take %.1f MB, %s",
            self.n, facts["boundary"], facts["bytes"] / 1e6, place,
        )  # fmt: skip
        return features

    def features_at(self, rows: Tensor) -> Inputs | None:
        """Return the activations of these rows, if they are computed."""
        return None if self.features is None else map_inputs(lambda t: t[rows], self.features)

    def features_with(self, more: list[Inputs]) -> Inputs | None:
        """Return the activations of all rows and of further ones, if those of all rows are computed."""
        if self.features is None or self.frozen is None:
            return None
        sets = [self.features, *(self.frozen.features(x) for x in more)]
        columns = [[t for _, t in tensors_of(some)] for some in sets]
        stacked = iter([torch.cat(column) for column in zip(*columns, strict=True)])
        return map_inputs(lambda _: next(stacked), self.features)

    def frozen_facts(self) -> dict[str, Any]:
        """Return the entries of a record on fixed BatchNorm statistics and on a frozen body with stored activations."""
        facts: dict[str, Any] = {"fixed_statistics": list(self.layout.norms)} if self.layout.norms else {}
        if self.whole is not None and self.frozen is not None:
            facts["frozen_body"] = self.frozen.facts(self.x)
        return facts
