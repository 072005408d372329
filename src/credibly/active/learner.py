"""ActiveLearner: fit, score the pool, ask for the labels that tell most, add them, fit again.

Nothing of a round depends on the rounds before it but through the labels: random streams are named by the number of labels, so
a loop that was stopped goes on with the same choices as one that was not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from credibly.active.acquisition import ACQUISITIONS, FITS, check_fits, epig, random
from credibly.active.batch import batch_bald, stochastic, top
from credibly.active.folder import LoopFolder, check_facts, check_new, facts_of
from credibly.active.labels import as_given, named, prepared, with_rows
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

Oracle = Callable[[Tensor, Inputs], Any]  # rows of the pool and their inputs to their labels
Evaluate = Callable[[Posterior], float | Mapping[str, float]]
TARGETS = 100  # rows of the pool that EPIG asks about where no others are given


class ActiveLearner:
    """Learns from labels that it asks for.

    Args:
        problem: network, likelihood, prior and the rows that have labels already.
        pool: inputs without labels, in the form of the problem's x.
        acquisition: a name of `ACQUISITIONS`, "batch_bald", or a function of a `Predictive` that gives scores (N,).
        batch: rows to ask for at a time.
        method: how to fit; by default MC-Dropout for a network with dropout, otherwise a deep ensemble.
        oracle: gives the labels of rows: called with their places in the pool and their inputs. None for a human, by `ask`
            and `tell`.
        initial: so many rows are asked for first, drawn at random.
        choose: "top" for the best scores, "stochastic" for rows drawn in proportion to them.
        draws: of the weights, for scores: passes of MC-Dropout, draws of a Gaussian; an ensemble has its members.
        targets: for EPIG, the inputs whose predictions matter; by default 100 rows of the pool.
        seed: of everything.
        out: a folder that the loop is kept in; `resume` goes on with it.
        progress: whether to show a progress line; None shows it on a terminal.
    """

    def __init__(
        self, problem: Problem, pool: Any, acquisition: str | Callable[[Predictive], Tensor] = "bald", *, batch: int = 10,
        method: Method | None = None, oracle: Oracle | None = None, initial: int = 0, choose: str = "top", draws: int = 50,
        targets: Any = None, seed: int = 0, out: str | os.PathLike[str] | None = None, progress: bool | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(problem, Problem):
            raise InputError("problem", f"found {type(problem).__name__}", "Pass a credibly.Problem")
        self.seed, self.progress, self.oracle = check_seed(seed), progress, oracle
        self.start, self.acquisition, self.choose = problem, acquisition, choose
        with named("pool"):
            self.pool = Model.of(problem).inputs(pool)
        self.rows = row_count(self.pool)
        for name, value, least in (("batch", batch, 1), ("initial", initial, 0), ("draws", draws, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(name, f"found {value!r}", f"Pass a whole number from {least} up")
        if max(batch, initial) > self.rows:
            name = "batch" if batch > self.rows else "initial"
            found = f"found {max(batch, initial)} for a pool of {self.rows} rows"
            raise InputError(name, found, f"Pass at most {self.rows}, or a larger pool")
        if choose not in ("top", "stochastic"):
            raise InputError("choose", f"found {choose!r}", 'Pass "top" or "stochastic"')
        self.batch, self.initial, self.draws = batch, initial, draws
        self.method = method if method is not None else _default_method(problem)
        self._check_acquisition()
        with named("targets"):
            self.targets = None if targets is None else Model.of(problem).inputs(targets)
        self.labelled = torch.empty(0, dtype=torch.int64)
        self.waiting = torch.empty(0, dtype=torch.int64)
        self.history: list[dict[str, Any]] = []
        self._y = problem.y[:0]
        self._fitted: tuple[int, Posterior] | None = None
        self._folder: LoopFolder | None = None
        if out is not None:
            check_new(out)
            self._folder = LoopFolder.begin(out, self._facts(), self._state())

    @classmethod
    def resume(
        cls, out: str | os.PathLike[str], problem: Problem, pool: Any, *, oracle: Oracle | None = None,
        method: Method | None = None, acquisition: Callable[[Predictive], Tensor] | None = None, targets: Any = None,
        progress: bool | None = None,
    ) -> Self:  # fmt: skip
        """Goes on with a loop in a folder, with the settings that it has.

        Args:
            out: the folder.
            problem, pool: those that the loop was begun with; others are refused.
            oracle, targets, progress: as at the beginning.
            method: only for one that a folder cannot describe, such as a method of your own.
            acquisition: only for a function of your own.
        """
        folder, tensors = LoopFolder.open(out)
        facts = folder.manifest
        check_same(problem, facts, folder.name)
        settings = dict(facts["settings"])
        if method is None:
            method = from_spec(facts["record"]["settings"], kinds_of(*METHODS.values()))
        name = settings.pop("acquisition")
        if acquisition is None and name not in FITS:
            raise InputError("acquisition", f"the loop was begun with {name!r}", "Pass that function again")
        made = cls(
            problem, pool, acquisition or name, method=method, oracle=oracle, targets=targets, seed=facts["record"]["seed"],
            progress=progress, **settings,
        )  # fmt: skip
        check_facts(made._facts(), facts, folder.name)
        made._folder, made.history = folder, [dict(entry) for entry in facts["history"]]
        made.labelled, made.waiting = tensors["labelled"].clone(), tensors["waiting"].clone()
        made._y = tensors["labels"].clone().to(problem.y)
        return made

    # -- where it stands -----------------------------------------------------------------------------------------------
    @property
    def problem(self) -> Problem:
        """The problem with all labels so far."""
        return with_rows(self.start, self._inputs(self.labelled), self._y) if len(self.labelled) else self.start

    @property
    def posterior(self) -> Posterior:
        """Fitted to all labels so far; computed when first asked for."""
        if self._fitted is None or self._fitted[0] != len(self.labelled):
            seed = stream_seed(self.seed, "active fit", len(self.labelled))
            self._fitted = len(self.labelled), self.method.fit(self.problem, seed=seed, progress=self.progress)
        return self._fitted[1]

    @property
    def labels(self) -> Tensor:
        """The labels of the rows in `labelled`, in the form of the problem's y."""
        return as_given(self.start, self._y)

    def scores(self) -> Tensor:
        """The acquisition's score of every row of the pool, (N,), by the posterior as it is; "batch_bald" has BALD's."""
        predictive = self._predict(self.pool)
        if callable(self.acquisition):
            found = self.acquisition(predictive)
            if not isinstance(found, Tensor) or found.shape != (self.rows,):
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise InputError("acquisition", f"gave {shape}", f"It has to give scores ({self.rows},)")
        elif self.acquisition == "random":
            found = random(predictive, seed=stream_seed(self.seed, "active random", len(self.labelled)))
        elif self.acquisition == "epig":
            found = epig(predictive, self._predict(self._targets()))
        else:
            found = ACQUISITIONS["bald" if self.acquisition == "batch_bald" else self.acquisition](predictive)
        return found.detach().cpu()

    # -- asking and telling --------------------------------------------------------------------------------------------
    def ask(self) -> Tensor:
        """Places in the pool of the rows whose labels are wanted, (B,). The same ones until they have been told."""
        if len(self.waiting):
            return self.waiting.clone()
        open_rows = self._open()
        if not len(open_rows):
            raise InputError("pool", f"all of its {self.rows} rows have labels", "There is nothing left to ask for")
        if self.initial and not len(self.labelled):
            order = torch.randperm(len(open_rows), generator=stream(self.seed, "active initial"))
            chosen = open_rows[order[: self.initial]]
        else:
            chosen = self._chosen(open_rows, min(self.batch, len(open_rows)))
        self.waiting = chosen
        self._entry()["asked"] = chosen.tolist()
        self._save()
        return chosen.clone()

    def tell(self, rows: Any, labels: Any) -> None:
        """Adds labels of rows of the pool: those that were asked for, some of them, or others.

        Args:
            rows: their places in the pool, (B,).
            labels: one for each, in the form of the problem's y.
        """
        places = torch.as_tensor(rows, dtype=torch.int64).cpu().reshape(-1)
        if not len(places) or bool(((places < 0) | (places >= self.rows)).any()) or len(places.unique()) != len(places):
            raise InputError(
                "rows", f"found {places.tolist()[:10]}", f"Pass different places from 0 to {self.rows - 1}"
            )
        known = places[torch.isin(places, self.labelled)]
        if len(known):
            raise InputError("rows", f"{known.tolist()[:10]} have labels already", "Pass rows that have none")
        ready = prepared(self.start, len(places), labels)
        self.labelled = torch.cat([self.labelled, places])
        self._y = torch.cat([self._y, ready])
        self.waiting = self.waiting[~torch.isin(self.waiting, places)]
        self._save()

    def run(
        self, rounds: int | None = None, *, labels: int | None = None, evaluate: Evaluate | None = None,
        until: Callable[[dict[str, float]], bool] | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Asks the oracle round by round, and gives the history: labels, rows asked for, and figures of each state.

        Args:
            rounds: how many, counted from here. labels: until at least so many rows of the pool have one. One of the two is needed.
            evaluate: figures of the posterior, before the first round and after each: a number, or several by name.
            until: stops the loop when it gives True for the figures.
        """
        if self.oracle is None:
            raise InputError(
                "oracle", "there is none", "Pass one to ActiveLearner, or use ask() and tell(rows, labels)"
            )
        if (rounds is None) == (labels is None):
            raise InputError("rounds", f"found {rounds!r} beside labels={labels!r}", "Pass one of the two")
        goal = min(self.rows, labels if labels is not None else self._after(rounds or 0))
        show, self.progress = self.progress, False  # one line for the loop, none for the fits inside
        try:
            with Progress(f"active learning by {self._name()}", goal, show, first=len(self.labelled)) as line:
                while True:
                    figures = self._evaluated(evaluate)
                    done = len(self.labelled) >= goal or (until is not None and until(figures))
                    line.update(len(self.labelled), final=done, **figures)
                    if done:
                        return self.history
                    rows = self.ask()
                    self.tell(rows, self.oracle(rows, self._inputs(rows)))
        finally:
            self.progress = show

    # -- parts -----------------------------------------------------------------------------------------------------------
    def _chosen(self, open_rows: Tensor, count: int) -> Tensor:
        seed = stream_seed(self.seed, "active choice", len(self.labelled))
        if self.acquisition == "batch_bald":
            return batch_bald(self._predict(self.pool), count, rows=open_rows, seed=seed).rows
        kept = torch.full((self.rows,), -math.inf, dtype=torch.float64)
        kept[open_rows] = self.scores().double()[open_rows]
        return top(kept, count) if self.choose == "top" else stochastic(kept, count, seed=seed)

    def _predict(self, x: Inputs) -> Predictive:
        if self.acquisition == "random":  # looks at no prediction, so nothing is fitted for it
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

    def _open(self) -> Tensor:
        free = torch.ones(self.rows, dtype=torch.bool)
        free[self.labelled] = False
        return free.nonzero().flatten()

    def _after(self, rounds: int) -> int:
        done, left = len(self.labelled), rounds
        if left and len(self.waiting):
            done, left = done + len(self.waiting), left - 1
        elif left and self.initial and not done:
            done, left = self.initial, left - 1
        return done + left * self.batch

    def _evaluated(self, evaluate: Evaluate | None) -> dict[str, float]:
        """The figures of this state, computed where the history does not have them."""
        entry = self._entry()
        if evaluate is not None and entry["figures"] is None:
            found = evaluate(self.posterior)
            entry["figures"] = {
                k: float(v) for k, v in (found if isinstance(found, Mapping) else {"figure": found}).items()
            }
            self._save()
        return dict(entry["figures"] or {})

    def _entry(self) -> dict[str, Any]:
        if not self.history or self.history[-1]["labels"] != len(self.labelled):
            self.history.append({"labels": len(self.labelled), "figures": None, "asked": None})
        return self.history[-1]

    def _name(self) -> str:
        return (
            self.acquisition if isinstance(self.acquisition, str) else getattr(self.acquisition, "__name__", "function")
        )

    def _check_acquisition(self) -> None:
        if callable(self.acquisition):
            return
        theta = initial(self.start, "network", 1, 0)
        row = map_inputs(lambda t: t[:1], self.pool)
        check_fits(self.acquisition, Predictive(WeightDraws(Model.of(self.start), theta), row))

    def _facts(self) -> dict[str, Any]:
        """What a folder notes of the loop, to know it again."""
        settings = {
            "acquisition": self._name(), "batch": self.batch, "initial": self.initial, "choose": self.choose,
            "draws": self.draws,
        }  # fmt: skip
        return facts_of(self.start, self.method, self.seed, settings, self.pool, self.targets)

    def _state(self) -> dict[str, Tensor]:
        return {"labelled": self.labelled, "labels": self._y, "waiting": self.waiting}

    def _save(self) -> None:
        if self._folder is not None:
            self._folder.save(self._state(), self.history)

    def __repr__(self) -> str:
        return f"ActiveLearner({self._name()}: {len(self.labelled)} of {self.rows} rows of the pool have labels)"


def _default_method(problem: Problem) -> Method:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    return MCDropout() if any(isinstance(m, kinds) for m in problem.layout.module.modules()) else DeepEnsemble()
