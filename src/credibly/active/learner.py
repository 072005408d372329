"""ActiveLearner: fit, score the pool, query the most informative labels, add them, refit.

A round depends on earlier rounds only through the labels: random streams are keyed by the number of labels, so an
interrupted loop makes the same choices after resuming as one that ran through.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from credibly.active.acquisition import ACQUISITIONS, FITS, acquisition_name, check_fits, epig, random
from credibly.active.batch import batch_bald, stochastic, top
from credibly.active.folder import LoopFolder, check_absent, check_same_loop, describe_loop
from credibly.active.labels import errors_about, prepare_labels, restore_labels
from credibly.core.checks import check_choice, check_integer
from credibly.core.inputs import Inputs, map_inputs, row_count
from credibly.core.progress import Progress
from credibly.core.rng import check_seed, stream, stream_seed
from credibly.core.specs import from_spec, kinds_of
from credibly.errors import InputError
from credibly.inference.method import initial
from credibly.inference.sampling.identity import check_same
from credibly.methods import METHODS, DeepEnsemble, MCDropout, Method
from credibly.posterior.base import Posterior
from credibly.posterior.draws import DrawsPosterior, WeightDraws
from credibly.posterior.dropout import DropoutPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.predictive.base import Predictive
from credibly.problem import Problem

Oracle = Callable[[Tensor, Inputs], Any]  # (rows of the pool, their inputs) -> labels
Evaluate = Callable[[Posterior], float | Mapping[str, float]]
TARGETS = 100  # rows of the pool that EPIG uses as targets by default


class ActiveLearner:
    """Pool-based active learning.

    Args:
        problem: network, likelihood, prior and the rows that are already labelled.
        pool: unlabelled inputs, in the form of the problem's x.
        acquisition: a key of `ACQUISITIONS`, "batch_bald", or a function from a `Predictive` to scores (N,).
        batch: rows to query per round.
        method: inference method; by default MC-Dropout for a network with dropout layers, otherwise a deep ensemble.
        oracle: function from row numbers in the pool and their inputs to labels. None for a human in the loop, with
            `ask` and `tell`.
        initial: size of the first batch, which is drawn uniformly at random.
        choose: "top" for the highest scores, "stochastic" to sample rows in proportion to them.
        draws: draws of the weights per score: passes of MC-Dropout, draws of a Gaussian; an ensemble uses its members.
        targets: inputs of interest for EPIG; by default 100 rows of the pool.
        seed: random seed of the whole loop.
        out: folder to store the loop in; `resume` continues from it.
        progress: whether to show a progress line; None shows it on a terminal and in a notebook.
    """

    def __init__(
        self,
        problem: Problem,
        pool: Any,
        acquisition: str | Callable[[Predictive], Tensor] = "bald",
        *,
        batch: int = 10,
        method: Method | None = None,
        oracle: Oracle | None = None,
        initial: int = 0,
        choose: str = "top",
        draws: int = 50,
        targets: Any = None,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> None:
        if not isinstance(problem, Problem):
            raise InputError("problem", f"must be a credibly.Problem, got {type(problem).__name__}")
        self.seed, self.progress, self.oracle = check_seed(seed), progress, oracle
        self.start, self.acquisition, self.choose = problem, acquisition, choose
        with errors_about("pool"):
            self.pool = Model.of(problem).inputs(pool)
        self.rows = row_count(self.pool)
        check_integer("batch", batch)
        check_integer("initial", initial, least=0)
        check_integer("draws", draws)
        for name, value in (("batch", batch), ("initial", initial)):
            if value > self.rows:
                raise InputError(name, f"must be at most {self.rows}, the rows of the pool, got {value}")
        check_choice("choose", choose, ("top", "stochastic"))
        self.batch, self.initial, self.draws = batch, initial, draws
        self.method = method if method is not None else _default_method(problem)
        self._check_acquisition()
        with errors_about("targets"):
            self.targets = None if targets is None else Model.of(problem).inputs(targets)
        self.labelled = torch.empty(0, dtype=torch.int64)
        self.waiting = torch.empty(0, dtype=torch.int64)
        self.history: list[dict[str, Any]] = []
        self._y = problem.y[:0]
        self._fitted: tuple[int, Posterior] | None = None
        self._folder: LoopFolder | None = None
        if out is not None:
            check_absent(out)
            self._folder = LoopFolder.create(out, self._description(), self._state())

    @classmethod
    def resume(
        cls,
        out: str | os.PathLike[str],
        problem: Problem,
        pool: Any,
        *,
        oracle: Oracle | None = None,
        method: Method | None = None,
        acquisition: Callable[[Predictive], Tensor] | None = None,
        targets: Any = None,
        progress: bool | None = None,
    ) -> Self:
        """Resume a loop from its folder, with the settings stored there.

        Args:
            out: the folder.
            problem, pool: those that the loop was started with. Raises if they differ.
            oracle, targets, progress: as for a new loop.
            method: needed only for a custom method, which a folder cannot describe.
            acquisition: needed only for a custom function.
        """
        folder, tensors = LoopFolder.open(out)
        manifest = folder.manifest
        check_same(problem, manifest, folder.name)
        settings = dict(manifest["settings"])
        if method is None:
            method = from_spec(manifest["record"]["settings"], kinds_of(*METHODS.values()))
        name = settings.pop("acquisition")
        if acquisition is None and name not in FITS:
            raise InputError("acquisition", f"the loop was started with {name!r}", "Pass that function again")
        settings |= {"method": method, "oracle": oracle, "targets": targets, "progress": progress}
        learner = cls(problem, pool, acquisition or name, seed=manifest["record"]["seed"], **settings)
        check_same_loop(learner._description(), manifest, folder.name)
        learner._folder, learner.history = folder, [dict(entry) for entry in manifest["history"]]
        learner.labelled, learner.waiting = tensors["labelled"].clone(), tensors["waiting"].clone()
        learner._y = tensors["labels"].clone().to(problem.y)
        return learner

    # -- state ---------------------------------------------------------------------------------------------------------
    @property
    def problem(self) -> Problem:
        """The problem with all labels so far."""
        return self.start.with_rows((self._inputs(self.labelled), self._y)) if len(self.labelled) else self.start

    @property
    def posterior(self) -> Posterior:
        """The posterior given all labels so far, fitted on first access."""
        if self._fitted is None or self._fitted[0] != len(self.labelled):
            seed = stream_seed(self.seed, "active fit", len(self.labelled))
            self._fitted = len(self.labelled), self.method.fit(self.problem, seed=seed, progress=self.progress)
        return self._fitted[1]

    @property
    def labels(self) -> Tensor:
        """The labels of the rows in `labelled`, in the form of the problem's y."""
        return restore_labels(self.start, self._y)

    def scores(self) -> Tensor:
        """Return the acquisition scores of the pool under the current posterior, (N,); BALD's for "batch_bald"."""
        predictive = self._predict(self.pool)
        if callable(self.acquisition):
            found = self.acquisition(predictive)
            if not isinstance(found, Tensor) or found.shape != (self.rows,):
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise InputError("acquisition", f"must return scores of shape ({self.rows},), got {shape}")
        elif self.acquisition == "random":
            found = random(predictive, seed=stream_seed(self.seed, "active random", len(self.labelled)))
        elif self.acquisition == "epig":
            found = epig(predictive, self._predict(self._targets()))
        else:
            found = ACQUISITIONS["bald" if self.acquisition == "batch_bald" else self.acquisition](predictive)
        return found.detach().cpu()

    # -- queries and answers -------------------------------------------------------------------------------------------
    def ask(self) -> Tensor:
        """Return the row numbers in the pool to label next, (B,); the same ones until `tell` has their labels."""
        if len(self.waiting):
            return self.waiting.clone()
        unlabelled = self._unlabelled()
        if not len(unlabelled):
            raise InputError("pool", f"all of its {self.rows} rows are labelled")
        if self.initial and not len(self.labelled):
            order = torch.randperm(len(unlabelled), generator=stream(self.seed, "active initial"))
            chosen = unlabelled[order[: self.initial]]
        else:
            chosen = self._select(unlabelled, min(self.batch, len(unlabelled)))
        self.waiting = chosen
        self._current_entry()["asked"] = chosen.tolist()
        self._save()
        return chosen.clone()

    def tell(self, rows: Any, labels: Any) -> None:
        """Add labels for rows of the pool: those returned by `ask`, some of them, or others.

        Args:
            rows: row numbers in the pool, (B,).
            labels: one per row, in the form of the problem's y.
        """
        index = torch.as_tensor(rows, dtype=torch.int64).cpu().reshape(-1)
        if not len(index) or bool(((index < 0) | (index >= self.rows)).any()) or len(index.unique()) != len(index):
            found = f"must be distinct row numbers from 0 to {self.rows - 1}, got {index.tolist()[:10]}"
            raise InputError("rows", found)
        known = index[torch.isin(index, self.labelled)]
        if len(known):
            raise InputError("rows", f"{known.tolist()[:10]} are already labelled", "Pass unlabelled rows")
        prepared = prepare_labels(self.start, len(index), labels)
        self.labelled = torch.cat([self.labelled, index])
        self._y = torch.cat([self._y, prepared])
        self.waiting = self.waiting[~torch.isin(self.waiting, index)]
        self._save()

    def run(
        self,
        rounds: int | None = None,
        *,
        labels: int | None = None,
        evaluate: Evaluate | None = None,
        until: Callable[[dict[str, float]], bool] | None = None,
    ) -> list[dict[str, Any]]:
        """Query the oracle round by round. Returns the history: labels, rows queried and metrics of each state.

        Args:
            rounds: number of rounds to add. Pass either this or `labels`.
            labels: stop once at least this many rows of the pool are labelled.
            evaluate: metrics of the posterior, before the first round and after each: one number, or several by name.
            until: stop once this function of the metrics returns True.
        """
        if self.oracle is None:
            raise InputError("oracle", "is None", "Pass one to ActiveLearner, or use ask() and tell(rows, labels)")
        if (rounds is None) == (labels is None):
            raise InputError("rounds", f"is {rounds!r} and labels is {labels!r}", "Pass exactly one of them")
        goal = min(self.rows, labels if labels is not None else self._labels_after(rounds or 0))
        show, self.progress = self.progress, False  # one progress line for the loop, none for the fits inside
        try:
            title = f"active learning by {acquisition_name(self.acquisition)}"
            with Progress(title, goal, show, first=len(self.labelled)) as line:
                while True:
                    metrics = self._evaluate(evaluate)
                    done = len(self.labelled) >= goal or (until is not None and until(metrics))
                    line.update(len(self.labelled), final=done, **metrics)
                    if done:
                        return self.history
                    rows = self.ask()
                    self.tell(rows, self.oracle(rows, self._inputs(rows)))
        finally:
            self.progress = show

    # -- helpers -------------------------------------------------------------------------------------------------------
    def _select(self, unlabelled: Tensor, count: int) -> Tensor:
        seed = stream_seed(self.seed, "active choice", len(self.labelled))
        if self.acquisition == "batch_bald":
            return batch_bald(self._predict(self.pool), count, rows=unlabelled, seed=seed).rows
        scores = torch.full((self.rows,), -math.inf, dtype=torch.float64)
        scores[unlabelled] = self.scores().double()[unlabelled]
        return top(scores, count) if self.choose == "top" else stochastic(scores, count, seed=seed)

    def _predict(self, x: Inputs) -> Predictive:
        if self.acquisition == "random":  # needs no predictions, so skip the fit
            theta = initial(self.start, "network", 1, 0)
            return Predictive(WeightDraws(Model.of(self.start), theta), x)
        posterior, seed = self.posterior, stream_seed(self.seed, "active draws", len(self.labelled))
        if isinstance(posterior, DropoutPosterior):
            return posterior.predict(x, passes=self.draws, seed=seed)
        if isinstance(posterior, GaussianPosterior):
            return posterior.predict(x, draws=self.draws, seed=seed)
        return posterior.predict(x, draws=self.draws) if isinstance(posterior, DrawsPosterior) else posterior.predict(x)

    def _targets(self) -> Inputs:
        if self.targets is not None:
            return self.targets
        order = torch.randperm(self.rows, generator=stream(self.seed, "active targets"))
        return self._inputs(order[:TARGETS])

    def _inputs(self, rows: Tensor) -> Inputs:
        return map_inputs(lambda t: t[rows.to(t.device)], self.pool)

    def _unlabelled(self) -> Tensor:
        unlabelled = torch.ones(self.rows, dtype=torch.bool)
        unlabelled[self.labelled] = False
        return unlabelled.nonzero().flatten()

    def _labels_after(self, rounds: int) -> int:
        done, left = len(self.labelled), rounds
        if left and len(self.waiting):
            done, left = done + len(self.waiting), left - 1
        elif left and self.initial and not done:
            done, left = self.initial, left - 1
        return done + left * self.batch

    def _evaluate(self, evaluate: Evaluate | None) -> dict[str, float]:
        """Return the metrics of the current state, computed unless the history already has them."""
        entry = self._current_entry()
        if evaluate is not None and entry["figures"] is None:
            found = evaluate(self.posterior)
            metrics = found if isinstance(found, Mapping) else {"figure": found}
            entry["figures"] = {name: float(value) for name, value in metrics.items()}
            self._save()
        return dict(entry["figures"] or {})

    def _current_entry(self) -> dict[str, Any]:
        if not self.history or self.history[-1]["labels"] != len(self.labelled):
            self.history.append({"labels": len(self.labelled), "figures": None, "asked": None})
        return self.history[-1]

    def _check_acquisition(self) -> None:
        if callable(self.acquisition):
            return
        theta = initial(self.start, "network", 1, 0)
        row = map_inputs(lambda t: t[:1], self.pool)
        check_fits(self.acquisition, Predictive(WeightDraws(Model.of(self.start), theta), row))

    def _description(self) -> dict[str, Any]:
        """Return the entries of the manifest that identify the loop."""
        names = ("batch", "initial", "choose", "draws")
        settings = {"acquisition": acquisition_name(self.acquisition), **{name: getattr(self, name) for name in names}}
        return describe_loop(self.start, self.method, self.seed, settings, self.pool, self.targets)

    def _state(self) -> dict[str, Tensor]:
        return {"labelled": self.labelled, "labels": self._y, "waiting": self.waiting}

    def _save(self) -> None:
        if self._folder is not None:
            self._folder.save(self._state(), self.history)

    def __repr__(self) -> str:
        labelled = f"{len(self.labelled)} of {self.rows} rows of the pool labelled"
        return f"ActiveLearner({acquisition_name(self.acquisition)}: {labelled})"


def _default_method(problem: Problem) -> Method:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    return MCDropout() if any(isinstance(m, kinds) for m in problem.layout.module.modules()) else DeepEnsemble()
