"""Deep ensembles: M fits from different starts, trained together as one (M, D) computation.

With anchored=True each member m solves its own randomised problem: its prior is centred at a draw a_m of the prior and, for
a Gaussian likelihood of fixed scale, its targets are y + e_m with e_m from the noise. For a linear-Gaussian model the
minimiser is then an exact draw of the posterior (and of the tempered one: both perturbations carry their temperature).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.rng import stream
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.inference.method import Method, fit_draws, initial
from credibly.inference.training.loop import Data, Training, rotated, split, train
from credibly.inference.training.objectives import NegativeLogDensity, Perturbation
from credibly.likelihoods import Gaussian
from credibly.posterior.draws import DrawsPosterior
from credibly.problem import Problem


@dataclass(frozen=True, kw_only=True)
class DeepEnsemble(Training, Method):
    """Deep ensemble: several fits from different starts, trained as one, whose disagreement is the epistemic part.

    Args:
        members: how many.
        rotate: with `validation`, members hold out different rows, in turn, so that every row trains most of them; False has
            all hold out the same.
        bootstrap: each member sees N rows drawn with replacement.
        anchored: randomised MAP, see the module's page; needs Normal priors.
        prior: False leaves the prior out (an ensemble of maximum-likelihood fits).
        init: "fresh" (each member from the modules' own initialisers), "prior", "network" or an (M, D) tensor.
    """

    name: ClassVar[str] = "ensemble"
    members: int = 10
    rotate: bool = True
    bootstrap: bool = False
    anchored: bool = False
    prior: bool = True
    init: str | Tensor = "fresh"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.members, bool) or not isinstance(self.members, int) or self.members < 1:
            raise InputError("members", f"found {self.members!r}", "Pass a whole number from 1 up")
        if self.anchored and not self.prior:
            raise InputError(
                "anchored", "found with prior=False", "Anchored members are drawn towards the prior; leave prior=True"
            )

    def fit(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> DrawsPosterior:
        """M parameter vectors as a posterior of M chains with one draw each."""

        def work(world: World, shown: bool | None) -> tuple[Tensor, dict[str, Any]]:
            mesh = world.mesh(self.members)
            own = mesh.chains(self.members)
            theta = initial(problem, self.init, self.members, seed)[own.start : own.stop].clone()
            perturbation = self.perturbation(problem, seed, own)
            data = self.rows(problem, seed, own)
            objective = NegativeLogDensity(problem, data.count, float(self.prior), perturbation)
            done = train(
                problem, objective, theta, self, data, seed=seed, title=f"ensemble of {self.members}",
                progress=shown, first=own.start, peers=world,
            )  # fmt: skip
            return mesh.all_chains(done.theta, self.members).unsqueeze(1), join_histories(mesh, done.history)

        return fit_draws(self, problem, seed, out, progress, work)

    def rows(self, problem: Problem, seed: int, own: range) -> Data:
        """What these members train on, and the rows that they stop by."""
        if self.validation and self.bootstrap:
            raise InputError(
                "validation",
                "found with bootstrap=True",
                "The held-out rows would be drawn into training; choose one",
            )
        if self.validation and self.rotate:
            return rotated(problem, self, seed, own)
        data = split(problem, self, seed)
        if not self.bootstrap:
            return data
        drawn = [torch.randint(problem.n, (problem.n,), generator=stream(seed, "bootstrap", m)) for m in own]
        return dataclasses.replace(data, resampled=torch.stack(drawn).to(problem.device))

    def perturbation(self, problem: Problem, seed: int, own: range | None = None) -> Perturbation:
        """What sets the members (or some of them) apart beside their starts, each from the member's own stream."""
        members, device = own if own is not None else range(self.members), problem.device
        targets = anchors = None
        if self.anchored:
            if not problem.prior.is_normal:
                raise InputError("anchored", "the prior is not Normal", "Use priors.Normal, or anchored=False")
            draws = torch.cat([problem.prior.sample(1, stream(seed, "anchor", m, device=device)) for m in members])
            loc = problem.prior.loc
            anchors = loc + (draws - loc) * problem.tempering.prior**0.5
            likelihood = problem.likelihood
            if isinstance(likelihood, Gaussian) and likelihood.scale != "learned":
                scale = (
                    torch.as_tensor(likelihood.scale, dtype=problem.y.dtype, device=device)
                    * problem.tempering.likelihood**0.5
                )
                noise = [
                    torch.randn(
                        problem.y.shape,
                        generator=stream(seed, "target noise", m, device=device),
                        dtype=problem.y.dtype,
                        device=device,
                    )
                    for m in members
                ]
                targets = problem.y + scale * torch.stack(noise)
        return Perturbation(targets, anchors)


def join_histories(mesh: Mesh, history: dict[str, Any]) -> dict[str, Any]:
    """The history of all members from those of the processes that trained them, as one process would have written it."""
    if mesh.shape[0] == 1:
        return history
    told = mesh.world.gather(history)[:: mesh.shape[1]]  # one of those that hold the same members

    def joined(tables: Iterable[list[list[float]]]) -> list[list[float]]:
        return [[value for part in row for value in part] for row in zip(*tables, strict=True)]

    whole: dict[str, Any] = {**history, "parts": {}}
    for key in ("loss", "validation"):
        whole[key] = joined(t[key] for t in told)
    for name in history["parts"]:
        whole["parts"][name] = joined(t["parts"][name] for t in told)
    return whole
