"""What every method shares: `fit(problem, seed=...)`, checks before work, the record, and saving on the way."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from credibly.core.rng import check_seed, stream
from credibly.core.specs import to_spec
from credibly.distributed.world import Mesh, World, current
from credibly.errors import InputError, StoreError, TrainingError
from credibly.inference.agreement import check_same_everywhere
from credibly.posterior.base import DrawsPosterior, Model, Posterior
from credibly.problem import Problem
from credibly.storage.record import Record

Fitted = TypeVar("Fitted", bound=Posterior)


class Method(ABC):
    """A way from a `Problem` to a `Posterior`. Settings are fields; `fit` does the work."""

    name: ClassVar[str]

    @abstractmethod
    def fit(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> Posterior:
        """Fits the problem.

        Args:
            problem: the density.
            seed: all randomness comes from it; the same seed gives the same result.
            out: a folder to save the posterior in; it must not exist yet.
            progress: whether to show a progress line; None shows it on a terminal.
        """

    def record(self, problem: Problem, seed: int, history: dict[str, Any], status: str = "complete") -> Record:
        """How the posterior came about."""
        return Record(
            method=self.name, settings=to_spec(self), seed=seed, n=problem.n, fingerprint=problem.fingerprint(),
            prior=to_spec(problem.prior_spec), tempering={"likelihood": problem.tempering.likelihood, "prior": problem.tempering.prior},
            history=history, status=status,
        )  # fmt: skip


def check_fit(problem: Problem, seed: int, out: str | os.PathLike[str] | None) -> None:
    """Refuses what cannot be used before any work starts."""
    if not isinstance(problem, Problem):
        raise InputError("problem", f"found {type(problem).__name__}", "Pass a credibly.Problem")
    check_run(seed, out)


def check_run(seed: int, out: str | os.PathLike[str] | None) -> None:
    """Refuses a seed or a folder that cannot be used."""
    check_seed(seed)
    if out is not None and Path(out).exists():
        raise StoreError(f"out: {os.fspath(out)!r} exists already. Choose another folder or remove it first")


@contextmanager
def partial_result(
    out: str | os.PathLike[str] | None, make: Callable[[Tensor, TrainingError], Posterior]
) -> Iterator[None]:
    """When training in the block fails, what it had last known to be finite goes with its error as a posterior, and into `out`.

    `make` gives that posterior, marked as partial, from the parameters (M, P) and the error.
    """
    try:
        yield
    except TrainingError as error:
        if isinstance(error.posterior, Tensor):
            error.posterior = make(error.posterior, error)
            if out is not None:
                error.posterior.save(out)
        raise


def fit_together(
    method: Method,
    problem: Problem,
    seed: int,
    out: str | os.PathLike[str] | None,
    progress: bool | None,
    work: Callable[[World, str | os.PathLike[str] | None, bool | None], Fitted],
) -> Fitted:
    """Runs the work of a fit in all processes, which have been found to want the same, and saves its result.

    The work gets the processes, and `out` and `progress` as this one is to take them: only the leader writes and speaks. An
    error of one process, in the work or in saving, ends it for all.
    """
    world = current()
    with world.propagate_errors():
        check_fit(problem, seed, out)
        check_same_everywhere(world, problem, method, seed)
        mine = out if world.leader else None
        posterior = work(world, mine, progress if world.leader else False)
        if mine is not None:
            posterior.save(mine)
        if out is not None:
            world.barrier()
    return posterior


def fit_with_rows(
    method: Method,
    problem: Problem,
    seed: int,
    out: str | os.PathLike[str] | None,
    progress: bool | None,
    work: Callable[[Problem, int, Mesh, str | os.PathLike[str] | None, bool | None], Fitted],
) -> Fitted:
    """As `fit_together`, for work whose rows all processes share: it gets the problem, the seed and the mesh of them."""
    return fit_together(
        method, problem, seed, out, progress, lambda world, mine, shown: work(problem, seed, world.all_rows(), mine, shown)
    )  # fmt: skip


def fit_draws(
    method: Method,
    problem: Problem,
    seed: int,
    out: str | os.PathLike[str] | None,
    progress: bool | None,
    work: Callable[[World, bool | None], tuple[Tensor, dict[str, Any]]],
) -> DrawsPosterior:
    """As `fit_together`, for work that gives draws (chain, draw, D) and a history."""

    def fitted(world: World, mine: str | os.PathLike[str] | None, shown: bool | None) -> DrawsPosterior:
        model = Model.of(problem)

        def partial(theta: Tensor, error: TrainingError) -> Posterior:
            record = method.record(problem, seed, {"error": str(error)}, status="partial")
            return DrawsPosterior(model, theta.unsqueeze(1), record)

        with partial_result(mine, partial):
            draws, history = work(world, shown)
        return DrawsPosterior(model, draws, method.record(problem, seed, history))

    return fit_together(method, problem, seed, out, progress, fitted)


def initial(problem: Problem, init: str | Tensor, members: int, seed: int) -> Tensor:
    """Starting points (M, D): the network's own weights, fresh ones by its modules' initialisers, or draws of the prior."""
    layout = problem.layout
    extras = [
        torch.full((members, e.stop - e.start), own.init, dtype=layout.dtype, device=layout.device)
        for e, own in zip(
            layout.entries[len(layout.entries) - len(layout.extra) :], problem.likelihood.parameters().values()
        )
    ]
    if isinstance(init, Tensor):
        if init.shape != (members, layout.dim) or not bool(torch.isfinite(init).all()):
            raise InputError(
                "init",
                f"has shape {tuple(init.shape)}, or values that are not finite",
                f"Pass a finite ({members}, {layout.dim}) tensor",
            )
        return init.detach().to(layout.device, layout.dtype).clone()
    if init == "network":
        network = layout.read(layout.module).expand(members, -1)
    elif init == "fresh":
        network = layout.reinitialised(seed, members)
    elif init == "prior":
        return torch.cat(
            [problem.prior.sample(1, stream(seed, "prior start", m, device=layout.device)) for m in range(members)]
        )
    else:
        raise InputError("init", f"found {init!r}", 'Pass "network", "fresh", "prior" or a (members, D) tensor')
    return torch.cat([network, *extras], -1).clone()
