"""Continual learning: tasks come one after another, and the posterior of each is the prior of the next.

    p(w | D_1 .. D_t)  is proportional to  p(w | D_1 .. D_t-1) p(D_t | w)

With Bayes by Backprop this is variational continual learning (Nguyen et al. 2018), with Laplace the online Laplace
approximation (Ritter et al. 2018). A coreset keeps some rows of each task out of that chain and fits them last, so that what the
chain has forgotten is seen once more before prediction.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credibly.continual.coresets import choose_rows, joined, other_rows
from credibly.core.progress import Progress
from credibly.core.rng import check_seed, stream_seed
from credibly.core.specs import to_spec
from credibly.errors import InputError, StoreError
from credibly.gaussians.families import MeanField
from credibly.likelihoods import Likelihood
from credibly.methods import BayesByBackprop, Method
from credibly.posterior.base import Posterior
from credibly.posterior.draws import SampledPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.loading import load
from credibly.predictive.base import Predictive
from credibly.priors.elementwise import Prior
from credibly.priors.flat import bind
from credibly.priors.gaussian import GaussianPrior, signature
from credibly.problem import Problem

FACTS = "continual.json"
NO_PRIOR = ("mle", "map", "dropout")  # their posteriors are points or masks, of which no prior can be made


class MultiHead(nn.Module):
    """One body for all tasks and a head for each: the network takes (x, task), with the task's number of every row.

    All heads are computed and one is taken, so `heads=["heads.0.*", "heads.1.*", ...]` tells `learn` whose weights are whose.
    """

    def __init__(self, body: nn.Module, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.body = body
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        """Outputs of each row's own head."""
        features = self.body(x)
        every = torch.stack([head(features) for head in self.heads], -1)
        return every.gather(-1, task.reshape(-1, 1, 1).expand(-1, every.shape[1], 1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Learned:
    """What came of the tasks.

    Attributes:
        posteriors: after each task, without the coreset.
        posterior: to predict with: the last of them, or that of the coreset's fit on top of it.
        coreset: of each task, the rows that were kept for that fit; empty without one.
    """

    posteriors: tuple[Posterior, ...]
    posterior: Posterior
    coreset: tuple[Tensor, ...]

    def predict(self, x: Any) -> Predictive:
        """The Bayesian model average at x."""
        return self.posterior.predict(x)


def learn(
    tasks: Sequence[Any], method: Method, net: nn.Module, likelihood: Likelihood, prior: Prior, *, coreset: int = 0,
    choose: str = "random", heads: Sequence[str] | None = None, family: str = "diag", seed: int = 0,
    out: str | os.PathLike[str] | None = None, progress: bool | None = None, **options: Any,
) -> Learned:  # fmt: skip
    """Fits the tasks in their order, each with the posterior of the one before as its prior.

    Args:
        tasks: the data of each task, as `Problem` takes data.
        method: how each is fitted. It begins at the network that the task before ended with; Bayes by Backprop goes on
            from its whole posterior.
        net, likelihood: the same for all tasks.
        prior: of the first task.
        coreset: rows of each task that are kept for a last fit; 0 for none.
        choose: "random", or "k-centre" (each next row is the farthest from those chosen).
        heads: for each task a name pattern of parameters that it alone uses, see `MultiHead`. With Bayes by Backprop they
            stay at the prior until their task comes.
        family: for methods that give draws, see `DrawsPosterior.as_prior`.
        seed: of everything.
        out: a folder with a run for each task. Where it is there already, tasks that it holds are loaded and not fitted.
        progress: whether to show a progress line; None shows it on a terminal.
        options: of `Problem`, such as temperature or device.
    """
    check_seed(seed)
    _check(tasks, method, coreset, choose, heads)
    problems = [Problem(net, task, likelihood, prior, **options) for task in tasks]
    _check_alike(problems, coreset)
    kept = tuple(choose_rows(p, coreset, choose, stream_seed(seed, "coreset", t)) for t, p in enumerate(problems))
    own = _heads(problems[0], heads, method)
    folder = None if out is None else Path(out)
    if folder is not None:
        facts = {"tasks": len(tasks), "method": to_spec(method), "seed": seed, "coreset": coreset, "choose": choose}
        _open(folder, {**facts, "heads": None if heads is None else list(heads), "family": family})
    posteriors: list[Posterior] = []
    with Progress("continual learning", len(tasks) + bool(coreset), progress) as line:
        for t, whole in enumerate(problems):
            problem = whole if not coreset else whole.subset(other_rows(whole.n, kept[t]))
            before = posteriors[-1] if posteriors else None
            later = [places for s, places in enumerate(own) if s > t]
            fitted = _fit(problem, method, before, family, stream_seed(seed, "task", t), own[t] if own else None, later,
                          None if folder is None else folder / f"task-{t:02d}")  # fmt: skip
            posteriors.append(fitted)
            line.update(t + 1, final=not coreset and t + 1 == len(tasks))
        last = posteriors[-1]
        if coreset:
            rows = joined([p.subset(k) for p, k in zip(problems, kept)])
            place = None if folder is None else folder / "coreset"
            last = _fit(rows, method, last, family, stream_seed(seed, "coreset fit"), None, [], place)
            line.update(len(tasks) + 1, final=True)
    return Learned(tuple(posteriors), last, kept if coreset else ())


def prior_of(posterior: Posterior, family: str = "diag") -> GaussianPrior:
    """The posterior as a prior; for draws, by the moments that `family` names."""
    return posterior.as_prior(family) if isinstance(posterior, SampledPosterior) else posterior.as_prior()


def _fit(
    problem: Problem, method: Method, before: Posterior | None, family: str, seed: int, own: Tensor | None,
    later: list[Tensor], place: Path | None,
) -> Posterior:  # fmt: skip
    """One task under the posterior before it, fitted or, where its folder is there, loaded."""
    base = problem.prior
    if before is not None:
        problem = with_prior(problem, prior_of(before, family))
        method = _warm(problem, method, before, own)
    if place is not None and place.exists():
        return _loaded(problem, place)
    posterior = method.fit(problem, seed=seed, progress=False)
    if later and isinstance(posterior, GaussianPosterior):
        posterior = _untouched(posterior, torch.cat(later), base.loc, base.std)
    if place is not None:
        posterior.save(place)
    return posterior


def with_prior(problem: Problem, prior: GaussianPrior) -> Problem:
    """The same problem under another prior."""
    changed = copy.copy(problem)
    changed.prior_spec, changed.prior = prior, bind(prior, problem.layout)
    return changed


def _warm(problem: Problem, method: Method, before: Posterior, own: Tensor | None) -> Method:
    """The method, set to begin where the last posterior is; parameters of this task's own begin as the network has them."""
    fresh = problem.layout.read(problem.layout.module)
    if isinstance(method, BayesByBackprop) and isinstance(before, GaussianPosterior):
        phi = before.phi.clone()
        if own is not None:
            at = method.init_scale
            start = MeanField().init(fresh[own].unsqueeze(0), at)
            phi[:, own], phi[:, own + problem.dim] = start.chunk(2, -1)
        return replace(method, init=GaussianPosterior(before.model, before.family, phi, before.record))
    centre = (
        before.draws.flatten(0, -2).mean(0) if isinstance(before, SampledPosterior) else getattr(before, "loc", None)
    )
    if centre is not None:
        values = centre.reshape(-1)[: problem.layout.network_dim].to(fresh).clone()
        if own is not None:
            values[own] = fresh[own]
        with torch.no_grad():
            parameters = dict(problem.layout.module.named_parameters())
            for entry in problem.layout.entries:
                if entry.name in parameters:
                    parameters[entry.name].copy_(values[entry.start : entry.stop].reshape(entry.shape))
    return method


def _untouched(posterior: GaussianPosterior, places: Tensor, loc: Tensor, std: Tensor) -> GaussianPosterior:
    """With the prior itself on parameters that no data have touched: their exact posterior, which training is slow to reach."""
    phi = posterior.phi.clone()
    phi[:, places] = loc[places]
    scale = std[places].double()
    phi[:, places + posterior.layout.dim] = (scale + torch.log(-torch.expm1(-scale))).to(phi.dtype)
    return GaussianPosterior(posterior.model, posterior.family, phi, posterior.record)


# -- checks and folders ------------------------------------------------------------------------------------------------
def _check(tasks: Sequence[Any], method: Method, coreset: int, choose: str, heads: Sequence[str] | None) -> None:
    if isinstance(tasks, (str, bytes)) or not isinstance(tasks, Sequence) or not len(tasks):
        raise InputError("tasks", f"found {type(tasks).__name__}", "Pass a list with the data of at least one task")
    if not isinstance(method, Method):
        raise InputError("method", f"found {method!r}", "Pass a method, such as BayesByBackprop()")
    mixture = isinstance(method, BayesByBackprop) and method.members > 1
    if method.name in NO_PRIOR or mixture:
        what = "a mixture" if mixture else "no Gaussian over the weights"
        raise InputError("method", f"{method.name} gives {what}, which the next task cannot start from",
                         "Use BayesByBackprop with one member, Laplace, SWAG or a sampler")  # fmt: skip
    if isinstance(coreset, bool) or not isinstance(coreset, int) or coreset < 0:
        raise InputError("coreset", f"found {coreset!r}", "Pass a number of rows a task from 0 up")
    if choose not in ("random", "k-centre"):
        raise InputError("choose", f"found {choose!r}", 'Pass "random" or "k-centre"')
    if heads is not None and (isinstance(heads, str) or len(heads) != len(tasks)):
        raise InputError("heads", f"found {heads!r} for {len(tasks)} tasks", "Pass a name pattern for each task")


def _check_alike(problems: list[Problem], coreset: int) -> None:
    first = problems[0]
    for t, problem in enumerate(problems):
        if signature(problem.layout) != signature(first.layout) or problem.y.shape[1:] != first.y.shape[1:]:
            raise InputError(
                "tasks", f"task {t} makes another problem than task 0", "Give all tasks targets of one form"
            )
        if coreset >= problem.n:
            raise InputError(
                "coreset", f"found {coreset} for the {problem.n} rows of task {t}", "Leave rows to learn from"
            )


def _heads(problem: Problem, heads: Sequence[str] | None, method: Method) -> list[Tensor]:
    """The coordinates of each task's own parameters."""
    if heads is None:
        return []
    if isinstance(method, BayesByBackprop) and method.family != "mean-field":
        raise InputError("heads", f"found with family={method.family!r}", "Heads are for mean-field, or for Laplace")
    if isinstance(method, BayesByBackprop) and not problem.prior.is_normal:
        raise InputError("heads", "found with a prior that is not Normal", "Use priors.Normal, or one head")
    found = []
    for pattern in heads:
        spans = [torch.arange(e.start, e.stop) for e in problem.layout.entries if fnmatchcase(e.name, pattern)]
        if not spans:
            names = ", ".join(e.name for e in problem.layout.entries[:8])
            raise InputError("heads", f"pattern {pattern!r} matches no parameter", f"The names are {names}")
        found.append(torch.cat(spans).to(problem.device))
    return found


def _open(folder: Path, facts: dict[str, Any]) -> None:
    """Begins the folder, or refuses one that was begun with other settings."""
    name, path = os.fspath(folder), folder / FACTS
    if path.is_file():
        then = json.loads(path.read_text(encoding="utf-8"))
        differ = [key for key in facts if json.loads(json.dumps(facts[key])) != then.get(key)]
        if differ:
            raise StoreError(
                f"out: {name!r} was begun with another {differ[0]}. Choose another folder, or the settings it had"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise StoreError(f"out: {name!r} exists and is not a run of continual learning. Choose another folder")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{FACTS}.part"
        draft.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, path)


def _loaded(problem: Problem, place: Path) -> Posterior:
    """The posterior of a task that had been fitted, if it is of the same rows under the same prior."""
    posterior = load(place, problem.layout.module, likelihood=problem.likelihood)
    record = posterior.record
    same = record.fingerprint == problem.fingerprint() and record.prior == json.loads(
        json.dumps(to_spec(problem.prior_spec))
    )
    if not same or record.status != "complete":
        what = "is of other data or another prior" if not same else "holds a fit that did not end"
        raise StoreError(
            f"out: {os.fspath(place)!r} {what}. Remove it and what comes after it, or choose another folder"
        )
    return posterior
