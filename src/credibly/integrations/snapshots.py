"""Snapshots of weights during training by another library, and the posterior built from them.

`kind="swag"` keeps the running mean and variance of the snapshots and the last deviations from that mean, and gives the
Gaussian of SWAG as published (Maddox et al. 2019). `kind="draws"` keeps every snapshot as a draw: a snapshot ensemble
(Huang et al. 2017), if the learning rate is cyclical and `every` is a cycle.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from credibly.core.checks import check_choice, check_integer, is_integer, is_real
from credibly.core.specs import to_spec
from credibly.curvature.evidence import fit_own_parameters
from credibly.errors import InputError
from credibly.gaussians.families import LowRank
from credibly.inference.training.iterates import Iterates
from credibly.networks.layout import Layout
from credibly.posterior.base import Posterior
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.problem import Problem
from credibly.storage.record import Record

KINDS = ("swag", "draws")


class SnapshotCollector:
    """Collects the trainable parameters of a module during training.

    Args:
        kind: "swag" (a Gaussian with the moments of the snapshots) or "draws" (every snapshot is a draw).
        every: optimiser steps between two snapshots, or "epoch".
        start: where collection starts: a fraction of training from 0 to below 1, or a number of steps.
        rank: number of last deviations that the Gaussian keeps.
        device: where snapshots are kept; by default in the memory of the host.
    """

    def __init__(
        self,
        *,
        kind: str = "swag",
        every: int | str = "epoch",
        start: float = 0.75,
        rank: int = 20,
        device: torch.device | str = "cpu",
    ) -> None:
        check_choice("kind", kind, KINDS)
        if every != "epoch":
            check_integer("every", every, advice='Or pass "epoch"')
        if not (is_integer(start) and start >= 0) and not (is_real(start) and 0 <= start < 1):
            raise InputError(
                "start", f"must be a fraction from 0 to below 1, or a non-negative number of steps, got {start!r}"
            )
        check_integer("rank", rank, 2)
        self.kind, self.every, self.start, self.rank = kind, every, start, rank
        self.device = torch.device(device)
        self.names: list[tuple[str, tuple[int, ...]]] = []
        self.steps: list[int] = []
        self._points: list[Tensor] = []
        self._iterates: Iterates | None = None

    def due(self, step: int, total: float | None, *, epoch_ends: bool) -> bool:
        """Return whether to take a snapshot after step 1, 2, ... of `total`, None if unknown."""
        first = float(self.start)
        if not is_integer(self.start) and self.start > 0:
            if total is None or not math.isfinite(total) or total <= 0:
                raise InputError(
                    "start",
                    f"must be a number of steps where the length of training is unknown, got {self.start}",
                    "Pass a number of steps, such as start=1000",
                )
            first = self.start * total
        if step < first or (self.steps and step <= self.steps[-1]):
            return False
        return epoch_ends if self.every == "epoch" else step % int(self.every) == 0

    def add(self, module: nn.Module, step: int) -> None:
        """Take a snapshot of the trainable parameters of a module."""
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        names = [(name, tuple(p.shape)) for name, p in parameters]
        if self.names and names != self.names:
            raise InputError("module", "must have the same trainable parameters at every snapshot, got others")
        if not names:
            raise InputError("module", "has no trainable parameters")
        self.names = names
        point = torch.cat([p.detach().to(self.device).reshape(-1) for _, p in parameters])
        self.steps.append(step)
        if self.kind == "draws":
            self._points.append(point)
            return
        if self._iterates is None:
            self._iterates = Iterates(self.rank, len(point), self.device)
        self._iterates.add(point)

    def posterior(self, problem: Problem) -> Posterior:
        """Return the posterior of the snapshots for the problem whose network was trained.

        Names of parameters may have a prefix in the module that was trained, such as "model.". Parameters of the
        likelihood, such as a learned noise, are fitted to the data of the problem.
        """
        least = 2 if self.kind == "swag" else 1
        if len(self.steps) < least:
            raise InputError(
                "snapshots",
                f"must be at least {least}, got {len(self.steps)}",
                "Train longer, or take them earlier or more often: start, every",
            )
        slices = self._slices(problem.layout)
        model = Model.of(problem)
        if self._iterates is None:
            theta = torch.stack([self._whole(problem, point, slices) for point in self._points])
            return DrawsPosterior(model, theta.unsqueeze(1), self._record(problem))
        own, dim = Iterates(self.rank, problem.dim, problem.device), problem.layout.network_dim
        own.running.count = self._iterates.running.count
        found = self._iterates.running
        for mine, theirs in ((own.running.mean, found.mean), (own.running.squares, found.squares)):
            mine[0, :dim] = _picked(theirs[0], slices).to(mine)
        if problem.dim > dim:
            mean = self._whole(problem, self._iterates.running.mean[0], slices)
            own.running.mean[0, dim:] = mean[dim:]
        for deviation in self._iterates.deviations:
            column = torch.zeros(problem.dim, dtype=problem.layout.dtype, device=problem.device)
            column[:dim] = _picked(deviation, slices).to(column)
            own.deviations.append(column)
        phi = own.phi(problem.layout.dtype)
        return GaussianPosterior(model, LowRank(len(own.deviations)), phi, self._record(problem))

    def _whole(self, problem: Problem, point: Tensor, slices: list[slice]) -> Tensor:
        """Return the flat vector (D,) of a snapshot, with the likelihood's own parameters fitted."""
        layout = problem.layout
        theta = torch.zeros(problem.dim, dtype=layout.dtype, device=layout.device)
        theta[: layout.network_dim] = _picked(point, slices).to(theta)
        if not layout.extra:
            return theta
        inits = [
            torch.as_tensor(p.init, dtype=layout.dtype).expand(entry.stop - entry.start)
            for p, entry in zip(problem.likelihood.parameters().values(), layout.entries[-len(layout.extra) :])
        ]
        theta[layout.network_dim :] = torch.cat(inits).to(theta)
        return fit_own_parameters(problem, theta)

    def _slices(self, layout: Layout) -> list[slice]:
        """Return where the layout's entries are in a snapshot."""
        starts, at = {}, 0
        for name, shape in self.names:
            starts[name] = (at, shape)
            at += math.prod(shape)
        wanted = [e for e in layout.entries if e.name not in layout.extra]
        prefixes = [name.removesuffix(wanted[0].name) for name in starts if f".{name}".endswith(f".{wanted[0].name}")]
        for prefix in sorted(prefixes, key=len):
            found = [starts.get(prefix + e.name) for e in wanted]
            if all(f is not None and f[1] == e.shape for f, e in zip(found, wanted)):
                return [slice(f[0], f[0] + e.stop - e.start) for f, e in zip(found, wanted) if f is not None]
        known = ", ".join(name for name, _ in self.names[:6])
        raise InputError(
            "problem",
            f"its random parameters are not among those that were trained ({known}, ...): no {wanted[0].name!r} in the "
            "same shape, with any prefix",
            "Pass the problem of the network that was trained, with the same trainable parameters",
        )

    def _record(self, problem: Problem) -> Record:
        settings = {"kind": self.kind, "every": self.every, "start": self.start, "rank": self.rank}
        tempering = {"likelihood": problem.tempering.likelihood, "prior": problem.tempering.prior}
        history: dict[str, Any] = {"snapshots": len(self.steps), "snapshot_steps": list(self.steps)}
        return Record(
            method="snapshots",
            settings=settings,
            n=problem.n,
            fingerprint=problem.fingerprint(),
            prior=to_spec(problem.prior_spec),
            tempering=tempering,
            history=history,
        )


def _picked(flat: Tensor, slices: list[slice]) -> Tensor:
    return torch.cat([flat[part] for part in slices])
