"""The contract of a method: settings as fields, one `fit`, and its presentation in demo, tables and command line."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.checks import check_choice
from credibly.core.plain_settings import PlainSettings
from credibly.core.rng import check_seed, stream
from credibly.core.specs import to_spec
from credibly.distributed.world import World, current
from credibly.errors import InputError, StoreError, TrainingError
from credibly.inference.agreement import check_same_everywhere
from credibly.inference.streaming import check_streamable
from credibly.inference.training.journal import current_journal
from credibly.networks.statistics import refuse_moving
from credibly.posterior.base import Posterior
from credibly.priors.hierarchical import BoundHierarchical, scale_parameters
from credibly.problem import Problem
from credibly.storage.record import Record


class Method(PlainSettings, ABC):
    """An inference method: `fit` turns a `Problem` into a `Posterior`. Settings are fields.

    Attributes:
        name: the key in `METHODS` and on the command line.
        label: a short name for figures and tables; by default the class name.
        infers_scales: whether a method that trains can infer the scales of a hierarchical prior; samplers can.
        uses_dropout: whether dropout layers act in its fits; it is off in the density.
        streams: whether it works on data that are read batch by batch.
    """

    streams: ClassVar[bool] = False
    name: ClassVar[str]
    label: ClassVar[str] = ""
    infers_scales: ClassVar[bool] = False
    uses_dropout: ClassVar[bool] = False

    @abstractmethod
    def fit(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> Posterior:
        """Fit the problem.

        Args:
            problem: the posterior density to infer.
            seed: the source of all randomness; the same seed gives the same result.
            out: a folder to save the posterior in; it must not exist yet.
            progress: whether to show a progress bar; None shows it on a terminal and in a notebook.
        """

    def record(self, problem: Problem, seed: int, history: dict[str, Any], status: str = "complete") -> Record:
        """Return the record of how a posterior was made."""
        tempering = {"likelihood": problem.tempering.likelihood, "prior": problem.tempering.prior}
        if self.starts_fresh:
            history = {"initialisers": problem.layout.start_rules, **history}
        if problem.stream is not None:
            history = {**history, "stream": problem.stream.stream.describe()}
        if not self.uses_dropout and problem.layout.dropout_off:
            history = {**history, "dropout_off": {"evaluation mode": problem.layout.dropout_off}}
        history = {**history, **problem.frozen_facts()}
        return Record(
            method=self.name,
            settings=to_spec(self),
            seed=seed,
            n=problem.n,
            fingerprint=problem.fingerprint(),
            prior=to_spec(problem.prior_spec),
            tempering=tempering,
            history=history,
            status=status,
        )

    @property
    def post_hoc(self) -> bool:
        """Whether a fit leaves the weights of the network as they are."""
        return False

    def takes_activations(self, problem: Problem) -> bool:
        """Return whether a frozen body of the network may be computed once, for all steps; by default it may."""
        return True

    @property
    def starts_fresh(self) -> bool:
        """Whether a fit starts at new initial values of the network; the record then has the initialisers."""
        init = getattr(self, "init", None)
        return isinstance(init, str) and init in ("fresh", "ensemble")

    @classmethod
    def title(cls) -> str:
        """Return the first line of the class docstring, without its full stop."""
        return (inspect.getdoc(cls) or "").partition("\n")[0].rstrip(".")

    @classmethod
    def short_name(cls) -> str:
        """Return the label, or the name of the class."""
        return cls.label or cls.__name__

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return settings for an ordinary table: a calibrated answer within a minute or two.

        Args:
            layers: hidden layers of the network.
            noise: the noise model of a regression, see `credibly.tables.recipe.Recipe`.
        """
        return {}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return settings for the demo's small tasks; `quick` does hardly any work."""
        return {}


@dataclass(frozen=True)
class Fit:
    """One fit, as seen by one of its processes.

    Attributes:
        method, problem, seed: what is fitted, and how.
        world: all processes of the fit.
        out: the folder to save to, in the leading process only.
        progress: whether this process shows a progress bar.
    """

    method: Method
    problem: Problem
    seed: int
    world: World
    out: str | os.PathLike[str] | None
    progress: bool | None

    def record(self, history: dict[str, Any], status: str = "complete") -> Record:
        """Return the record of how the posterior was made."""
        return self.method.record(self.problem, self.seed, history, status)

    @contextmanager
    def keep_partial(self, make: Callable[[Tensor, Record, TrainingError], Posterior]) -> Iterator[None]:
        """Turn the last finite parameters of a failed training into a posterior, attach it to the error, and save it.

        `make` builds that posterior from the parameters (M, P), a record marked as partial, and the error.
        """
        try:
            yield
        except TrainingError as error:
            if isinstance(error.posterior, Tensor):
                error.posterior = make(error.posterior, self.record({"error": str(error)}, "partial"), error)
                journal = current_journal()
                if journal is not None:
                    journal.discard()
                if self.out is not None:
                    error.posterior.save(self.out)
            raise


@contextmanager
def begin_fit(
    method: Method, problem: Problem, seed: int, out: str | os.PathLike[str] | None, progress: bool | None
) -> Iterator[Fit]:
    """Check the arguments of a fit in all processes; an error in one of them ends the block for all."""
    world = current()
    with world.propagate_errors():
        if not isinstance(problem, Problem):
            raise InputError("problem", f"must be a credibly.Problem, got {type(problem).__name__}")
        check_run(seed, out)
        if problem.stream is not None:
            check_streamable(method, problem)
        if not method.post_hoc:
            refuse_moving(problem.moving)
        if isinstance(problem.prior, BoundHierarchical) and not method.infers_scales:
            raise InputError(
                "prior",
                f"is Hierarchical, and {type(method).__name__} maximises the joint density of weights and scales, "
                "which has no mode: it grows without bound as both go to 0",
                "Use HMC, SGHMC, SGLD, BayesByBackprop or IVON, or a prior of fixed scale",
            )
        if world.size > 1:
            check_same_everywhere(world, problem, method, seed)
        leads = world.leader
        fitted = problem.reduced() if method.takes_activations(problem) else problem
        yield Fit(method, fitted, seed, world, out if leads else None, progress if leads else False)
        if out is not None:
            world.barrier()


def check_run(seed: int, out: str | os.PathLike[str] | None) -> None:
    """Raise if the seed is not valid or the output folder exists."""
    check_seed(seed)
    if out is not None and Path(out).exists():
        raise StoreError(f"out: {os.fspath(out)!r} already exists. Choose another folder or remove it first")


def initial(problem: Problem, init: str | Tensor, members: int, seed: int) -> Tensor:
    """Return starting points (M, D).

    "network" uses the network's own weights, "fresh" new ones from its modules' initialisers (perturbations of its own
    for modules without one), "prior" draws from the prior.
    """
    layout = problem.layout
    if isinstance(init, Tensor):
        if init.shape != (members, layout.dim) or not bool(torch.isfinite(init).all()):
            raise InputError(
                "init", f"must be a finite tensor of shape ({members}, {layout.dim}), got shape {tuple(init.shape)}"
            )
        return init.detach().to(layout.device, layout.dtype).clone()
    check_choice("init", init, ("network", "fresh", "prior"), "Or pass a (members, D) tensor")
    if init == "prior":
        streams = [stream(seed, "prior start", m, device=layout.device) for m in range(members)]
        return torch.cat([problem.prior.sample(1, generator) for generator in streams])
    network = layout.read(layout.module).expand(members, -1)
    if init == "fresh":
        network = layout.reinitialised(seed, members)
    entries = layout.entries[len(layout.entries) - len(layout.extra) :]
    own = problem.likelihood.parameters(), scale_parameters(problem.prior_spec, layout)
    parameters = [parameter for some in own for parameter in some.values()]
    extras = [
        torch.as_tensor(parameter.init, dtype=layout.dtype, device=layout.device).expand(
            members, entry.stop - entry.start
        )
        for entry, parameter in zip(entries, parameters)
    ]
    return torch.cat([network, *extras], -1) if extras else network.contiguous()
