"""Continual learning: tasks arrive in sequence, and the posterior of each is the prior of the next.

    p(w | D_1 .. D_t)  is proportional to  p(w | D_1 .. D_t-1) p(D_t | w)

With Bayes by Backprop this is variational continual learning (Nguyen et al. 2018), with Laplace the online Laplace
approximation (Ritter et al. 2018). A coreset withholds some rows of each task and fits them last, so that forgotten
rows are seen once more before prediction.
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

from credibly.continual.coresets import choose_rows, other_rows
from credibly.core.checks import check_choice, check_integer
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
# Methods whose posteriors are points or masks, which cannot serve as a prior.
NO_PRIOR = ("mle", "map", "dropout")


class MultiHead(nn.Module):
    """A shared body with one head per task. The network takes (x, task), where task is each row's task index.

    All heads are computed and one is selected. Pass `heads=["heads.0.*", "heads.1.*", ...]` to `learn`.
    """

    def __init__(self, body: nn.Module, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.body = body
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        """Return the outputs of each row's own head."""
        features = self.body(x)
        every = torch.stack([head(features) for head in self.heads], -1)
        return every.gather(-1, task.reshape(-1, 1, 1).expand(-1, every.shape[1], 1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Learned:
    """The result of learning a sequence of tasks.

    Attributes:
        posteriors: the posterior after each task, without the coreset.
        posterior: the posterior to predict with: the last of them, or that of the final fit to the coreset.
        coreset: the rows of each task that were kept for that fit; empty without one.
    """

    posteriors: tuple[Posterior, ...]
    posterior: Posterior
    coreset: tuple[Tensor, ...]

    def predict(self, x: Any) -> Predictive:
        """Return the Bayesian model average at x."""
        return self.posterior.predict(x)


def learn(
    tasks: Sequence[Any],
    method: Method,
    net: nn.Module,
    likelihood: Likelihood,
    prior: Prior,
    *,
    coreset: int = 0,
    choose: str = "random",
    heads: Sequence[str] | None = None,
    family: str = "diag",
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Learned:
    """Fit the tasks in order, each with the posterior of the previous one as its prior.

    Args:
        tasks: the data of each task, in any form that `Problem` accepts.
        method: the method to fit with. It starts from the previous task's final network; Bayes by Backprop from the
            whole posterior.
        net, likelihood: the same for all tasks.
        prior: the prior of the first task.
        coreset: rows of each task to keep for a final fit; 0 for none.
        choose: "random", or "k-centre" (each next row is the farthest from those chosen).
        heads: per task, a name pattern of the parameters that only this task uses, see `MultiHead`. With Bayes by
            Backprop they stay at the prior until their task.
        family: for methods that produce draws, see `DrawsPosterior.as_prior`.
        seed: seed of all randomness.
        out: a folder with one run per task. Tasks that are already in it are loaded instead of fitted.
        progress: whether to show a progress line; None shows it on a terminal and in a notebook.
        options: options of `Problem`, such as temperature or device.
    """
    check_seed(seed)
    _check(tasks, method, coreset, choose, heads)
    problems = [Problem(net, task, likelihood, prior, **options) for task in tasks]
    _check_compatible(problems, coreset)
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
            later = [indices for s, indices in enumerate(own) if s > t]
            fit_seed, path = stream_seed(seed, "task", t), None if folder is None else folder / f"task-{t:02d}"
            posteriors.append(_fit(problem, method, before, family, fit_seed, own[t] if own else None, later, path))
            line.update(t + 1, final=not coreset and t + 1 == len(tasks))
        last = posteriors[-1]
        if coreset:
            first, *others = [p.subset(k) for p, k in zip(problems, kept)]
            rows = first.with_rows(*(p.rows for p in others))
            path = None if folder is None else folder / "coreset"
            last = _fit(rows, method, last, family, stream_seed(seed, "coreset fit"), None, [], path)
            line.update(len(tasks) + 1, final=True)
    return Learned(tuple(posteriors), last, kept if coreset else ())


def prior_of(posterior: Posterior, family: str = "diag") -> GaussianPrior:
    """Return the posterior as a prior; for draws, by matching the moments that `family` names."""
    return posterior.as_prior(family) if isinstance(posterior, SampledPosterior) else posterior.as_prior()


def _fit(
    problem: Problem,
    method: Method,
    before: Posterior | None,
    family: str,
    seed: int,
    own: Tensor | None,
    later: list[Tensor],
    path: Path | None,
) -> Posterior:
    """Fit one task with the previous posterior as its prior, or load it if its folder exists."""
    base = problem.prior
    if before is not None:
        problem = with_prior(problem, prior_of(before, family))
        method = _warm_start(problem, method, before, own)
    if path is not None and path.exists():
        return _loaded(problem, path)
    posterior = method.fit(problem, seed=seed, progress=False)
    if later and isinstance(posterior, GaussianPosterior):
        posterior = _reset_to_prior(posterior, torch.cat(later), base.loc, base.std)
    if path is not None:
        posterior.save(path)
    return posterior


def with_prior(problem: Problem, prior: GaussianPrior) -> Problem:
    """Return the same problem with another prior."""
    changed = copy.copy(problem)
    changed.prior_spec, changed.prior = prior, bind(prior, problem.layout)
    return changed


def _warm_start(problem: Problem, method: Method, before: Posterior, own: Tensor | None) -> Method:
    """Start the method from the previous posterior; this task's own parameters start at the network's values."""
    fresh = problem.layout.read(problem.layout.module)
    if isinstance(method, BayesByBackprop) and isinstance(before, GaussianPosterior):
        phi = before.phi.clone()
        if own is not None:
            start = MeanField().init(fresh[own].unsqueeze(0), method.init_scale)
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


def _reset_to_prior(posterior: GaussianPosterior, indices: Tensor, loc: Tensor, std: Tensor) -> GaussianPosterior:
    """Set parameters without data to the prior: their exact posterior, which training approaches slowly."""
    phi = posterior.phi.clone()
    phi[:, indices] = loc[indices]
    scale = std[indices].double()
    phi[:, indices + posterior.layout.dim] = (scale + torch.log(-torch.expm1(-scale))).to(phi.dtype)
    return GaussianPosterior(posterior.model, posterior.family, phi, posterior.record)


# -- checks and folders
def _check(tasks: Sequence[Any], method: Method, coreset: int, choose: str, heads: Sequence[str] | None) -> None:
    if isinstance(tasks, (str, bytes)) or not isinstance(tasks, Sequence) or not len(tasks):
        got = "an empty one" if isinstance(tasks, Sequence) and not len(tasks) else f"a {type(tasks).__name__}"
        raise InputError("tasks", f"must be a list with the data of at least one task, got {got}")
    if not isinstance(method, Method):
        raise InputError("method", f"must be a method such as BayesByBackprop(), got {method!r}")
    mixture = isinstance(method, BayesByBackprop) and method.members > 1
    if method.name in NO_PRIOR or mixture:
        found = "a mixture of Gaussians" if mixture else "no Gaussian over the weights"
        advice = "Use BayesByBackprop with one member, Laplace, SWAG or a sampler"
        raise InputError("method", f"{method.name} gives {found}, so the next task has no Gaussian prior", advice)
    check_integer("coreset", coreset, least=0)
    check_choice("choose", choose, ("random", "k-centre"))
    if heads is not None and (isinstance(heads, str) or len(heads) != len(tasks)):
        raise InputError("heads", f"must be one name pattern per task, got {heads!r} for {len(tasks)} tasks")


def _check_compatible(problems: list[Problem], coreset: int) -> None:
    first = problems[0]
    for t, problem in enumerate(problems):
        if signature(problem.layout) != signature(first.layout) or problem.y.shape[1:] != first.y.shape[1:]:
            found = f"task {t} and task 0 differ in parameters or in the shape of targets"
            raise InputError("tasks", found, "All tasks need targets of the same shape")
        if coreset >= problem.n:
            raise InputError("coreset", f"must be less than the {problem.n} rows of task {t}, got {coreset}")


def _heads(problem: Problem, heads: Sequence[str] | None, method: Method) -> list[Tensor]:
    """Return the indices of each task's own parameters."""
    if heads is None:
        return []
    if isinstance(method, BayesByBackprop) and method.family != "mean-field":
        raise InputError("heads", f"must be None with family={method.family!r}", "Use family='mean-field', or Laplace")
    if isinstance(method, BayesByBackprop) and not problem.prior.is_normal:
        raise InputError("heads", "must be None with a prior that is not Normal", "Use priors.Normal, or one head")
    indices = []
    for pattern in heads:
        spans = [torch.arange(e.start, e.stop) for e in problem.layout.entries if fnmatchcase(e.name, pattern)]
        if not spans:
            names = ", ".join(e.name for e in problem.layout.entries[:8])
            raise InputError("heads", f"pattern {pattern!r} matches no parameter", f"The names are {names}")
        indices.append(torch.cat(spans).to(problem.device))
    return indices


def _open(folder: Path, facts: dict[str, Any]) -> None:
    """Create the folder. Raise if it was started with other settings."""
    name, path = os.fspath(folder), folder / FACTS
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        differ = [key for key in facts if json.loads(json.dumps(facts[key])) != stored.get(key)]
        if differ:
            raise StoreError(
                f"out: {name!r} was started with another {differ[0]}. Choose another folder, or its own settings"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise StoreError(f"out: {name!r} exists and is not a run of continual learning. Choose another folder")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{FACTS}.part"
        draft.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, path)


def _loaded(problem: Problem, path: Path) -> Posterior:
    """Load the posterior of a task that was already fitted. Raise unless it has the same rows and prior."""
    posterior = load(path, problem.layout.module, likelihood=problem.likelihood)
    record = posterior.record
    prior = json.loads(json.dumps(to_spec(problem.prior_spec)))
    same = record.fingerprint == problem.fingerprint() and record.prior == prior
    if not same or record.status != "complete":
        found = "is of other data or another prior" if not same else "holds an incomplete fit"
        raise StoreError(
            f"out: {os.fspath(path)!r} {found}. Remove it and the tasks after it, or choose another folder"
        )
    return posterior
