"""Deep ensembles: M fits from different starting points, trained together as one (M, D) computation.

With anchored=True each member m solves its own randomised problem: its prior is centred at a draw a_m from the prior
and, for a Gaussian likelihood of fixed scale, its targets are y + e_m with e_m from the noise. For a linear-Gaussian
model the minimiser is then an exact draw from the posterior (and from the tempered one: both perturbations carry their
temperature).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credibly.core.checks import check_integer
from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.errors import InputError
from credibly.inference.footprint import check_training
from credibly.inference.method import Fit, initial
from credibly.inference.module_leaves import LARGE
from credibly.inference.trained import trained_posterior
from credibly.inference.training.data import Data, rotated, split
from credibly.inference.training.held_out_noise import HELD_OUT, TRAINING, check_noise_from, with_held_out_noise
from credibly.inference.training.loop import train
from credibly.inference.training.method import TrainingMethod, partial_draws
from credibly.inference.training.objectives import NegativeLogDensity, Perturbation
from credibly.inference.training.predicted_noise import with_rescaled_noise
from credibly.likelihoods import Gaussian, Likelihood
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.model import Model
from credibly.problem import Problem


@dataclass(frozen=True, kw_only=True)
class DeepEnsemble(TrainingMethod[DrawsPosterior]):
    """Deep ensemble: fits from different starting points, trained as one batch; their disagreement is epistemic.

    Args:
        members: number of members.
        rotate: with `validation`, members hold out different rows in turn, so that every row trains most of them; False
            holds out the same rows for all.
        bootstrap: each member sees N rows resampled with replacement, with their weights if they have any.
        anchored: randomised MAP, see the module docstring; needs Normal priors.
        prior: False leaves the prior out (an ensemble of maximum-likelihood fits).
        noise_from: rows that learned noise comes from: "training" (the joint mode with the weights, too small if the
            network has fitted some of the noise) or "held-out" (those of `validation`, or else ten folds, each
            predicted by a further fit to the others). With `validation`, noise that the network predicts is multiplied
            by a factor from those rows; `record.history["noise_factor"]` has it.
        init: "fresh" (each member from the modules' own initialisers, or perturbed around the given weights where there
            is none; `record.history["initialisers"]` lists both), "prior", "network" or an (M, D) tensor.
    """

    name: ClassVar[str] = "ensemble"
    label: ClassVar[str] = "deep ensemble"
    members: int = 10
    rotate: bool = True
    bootstrap: bool = False
    anchored: bool = False
    prior: bool = True
    noise_from: str = TRAINING
    init: str | Tensor = "fresh"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("members", self.members)
        check_noise_from(self.noise_from)
        if self.anchored and not self.prior:
            raise InputError("anchored", "must be False with prior=False, got True", "Anchored members need the prior")

    def check_memory(self, problem: Problem) -> None:
        """Raise if a fit would need more memory than is available: members of large networks are trained in turn."""
        large, rows = problem.dim >= LARGE, self.rows_at_once(problem)
        trained, beside = (1, self.members - 1) if large else (self.members, 0)
        check_training(
            type(self).__name__, problem, parameters=trained * problem.dim, result=beside * problem.dim, batch=rows
        )

    def _fit(self, fit: Fit) -> DrawsPosterior:
        """Return M parameter vectors as a posterior of M chains with one draw each."""
        problem, seed = fit.problem, fit.seed
        mesh = fit.world.mesh(self.members)
        own = mesh.chains(self.members)
        with fit.keep_partial(partial(partial_draws, fit)):
            theta = initial(problem, self.init, self.members, seed)[own.start : own.stop].clone()
            perturbation = self.perturbation(problem, seed, own)
            data = self.rows(problem, seed, own)
            objective = NegativeLogDensity(problem, data.count, float(self.prior), perturbation)
            done = train(
                problem,
                objective,
                theta,
                self,
                data,
                seed=seed,
                title=f"ensemble of {self.members}",
                progress=fit.progress,
                first=own.start,
                peers=fit.world,
            )
            members = mesh.all_chains(done.theta, self.members)
            history = join_histories(mesh, done.history)
            # Rounded here: sums over processes differ in the last digits.
            history["gradients"] = round(history["gradients"], 2)
            if self.noise_from == HELD_OUT:
                # All members in every process: a row that one has not seen may have been seen in another process.
                start = initial(problem, self.init, self.members, seed)
                every = self.rows(problem, seed, range(self.members))
                loss = partial(NegativeLogDensity, problem, prior_weight=float(self.prior))
                members, history["held_out_noise"] = with_held_out_noise(
                    problem, members, every, loss, self, start, seed=seed, progress=fit.progress
                )
                if every.stops:
                    members, factor = with_rescaled_noise(problem, members, every.unseen(self.members))
                    history |= {} if factor is None else {"noise_factor": factor}
        return DrawsPosterior(Model.of(problem), members.unsqueeze(1), fit.record(history))

    @classmethod
    def from_trained(cls, nets: Sequence[nn.Module], data: Any, likelihood: Likelihood) -> DrawsPosterior:
        """Return networks that were trained elsewhere as an ensemble, one member each.

        Args:
            nets: trained networks of one architecture, or checkpoints loaded into it. Parameters that are frozen and
                equal in all of them stay fixed. Statistics of BatchNorm become part of its weights.
            data: (x, y), preferably rows that they were not trained on. They give the shapes and, if the likelihood's
                scale is "learned", the noise scale of each member.
            likelihood: of y given the network's output.
        """
        if isinstance(nets, nn.Module) or not isinstance(nets, Sequence) or not nets:
            found = "an empty one" if isinstance(nets, Sequence) else type(nets).__name__
            raise InputError("nets", f"must be a list of one network or more, got {found}")
        return trained_posterior(cls(members=len(nets), init="network"), nets, data, likelihood)

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return anchored members that start at draws from the prior, with early stopping and noise by held-out rows.

        Members that start alike and share one prior mean would mostly agree. Early stopping ends each of them before it
        fits the noise of its rows; the part it has fitted by then would still make its intervals too narrow.
        """
        anchored = {"members": 10, "anchored": True, "init": "prior", "validation": 0.2, "noise_from": HELD_OUT}
        return super().table_settings(layers, noise) | anchored

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return anchored members that start at draws from the prior."""
        return super().demo_settings(quick) | {"members": 10, "anchored": True, "init": "prior"}

    def rows(self, problem: Problem, seed: int, own: range) -> Data:
        """Return the rows that these members train on, and those that decide early stopping."""
        if self.validation and self.bootstrap:
            raise InputError(
                "validation",
                f"must be 0 with bootstrap=True, got {self.validation}",
                "Held-out rows would be resampled into training",
            )
        if self.validation and self.rotate:
            return rotated(problem, self, seed, own)
        data = split(problem, self, seed)
        if not self.bootstrap:
            return data
        drawn = [torch.randint(problem.n, (problem.n,), generator=stream(seed, "bootstrap", m)) for m in own]
        return dataclasses.replace(data, resampled=torch.stack(drawn).to(problem.device))

    def perturbation(self, problem: Problem, seed: int, own: range | None = None) -> Perturbation:
        """Return how the members (or some of them) differ beyond their starting points, each from its own stream."""
        members, device = own if own is not None else range(self.members), problem.device
        targets = anchors = None
        if self.anchored:
            if not problem.prior.is_normal:
                raise InputError("anchored", "must be False unless the prior is Normal, got True", "Use priors.Normal")
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
                if problem.sample_weight is not None:
                    # A row of weight v is as precise as the mean of v rows.
                    scale = scale / problem.sample_weight.sqrt().reshape(-1, *(1,) * (problem.y.ndim - 1))
                targets = problem.y + scale * torch.stack(noise)
        return Perturbation(targets, anchors)


def join_histories(mesh: Mesh, history: dict[str, Any]) -> dict[str, Any]:
    """Return the history of all members, the same as in a single process."""
    if mesh.shape[0] == 1:
        return history
    # One of the processes that hold the same members.
    gathered = mesh.world.gather(history)[:: mesh.shape[1]]

    def joined(tables: Iterable[list[list[float]]]) -> list[list[float]]:
        return [[value for part in row for value in part] for row in zip(*tables, strict=True)]

    whole: dict[str, Any] = {**history, "parts": {}}
    for key in ("loss", "validation"):
        whole[key] = joined(t[key] for t in gathered)
    whole["gradients"] = sum(t["gradients"] for t in gathered)
    for name in history["parts"]:
        whole["parts"][name] = joined(t["parts"][name] for t in gathered)
    return whole
