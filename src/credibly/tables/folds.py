"""Fits to folds of a table: every row is predicted by a fit that has not seen it, for metrics and guarantees."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from credibly.core.progress import Progress
from credibly.core.threads import torch_threads
from credibly.distributed import world
from credibly.inference.method import Method
from credibly.inference.sampling.run import SamplingMethod
from credibly.methods import HMC, DeepEnsemble
from credibly.posterior.base import Posterior
from credibly.posterior.loading import load
from credibly.predictive.base import Predictive
from credibly.predictive.joined import JoinedPredictive
from credibly.tables.folder import FOLDS, is_saved
from credibly.tables.model import Array, TableModel
from credibly.tables.prepared import Prepared
from credibly.tables.threads import threads_for

# Maximum number of predicted rows that are stored, for metrics, plots and the guarantee.
MOST = 5_000


def fold_rows(prepared: Prepared) -> tuple[Array, Array]:
    """Return the rows behind the metrics, indices into the table, and the fold of each; a sample if there are many."""
    if not prepared.splits:
        return prepared.held_out, np.zeros(len(prepared.held_out), dtype=np.int64)
    rows = np.concatenate([predicted for _, predicted in prepared.splits])
    fold = np.repeat(np.arange(len(prepared.splits)), [len(predicted) for _, predicted in prepared.splits])
    order = np.argsort(rows, kind="stable")
    if len(order) > MOST:
        order = order[np.linspace(0, len(order) - 1, MOST).round().astype(int)]
    return prepared.train[rows[order]], fold[order]


def fit_folds(prepared: Prepared, folder: Path, progress: bool | None) -> None:
    """Fit every fold and store the posteriors, numbered, in `folder/folds`. Those that are there already are kept."""
    everyone, count = world.current(), len(prepared.splits)
    if not count:
        return
    with Progress("cross-validation" if count > 1 else "fit without the held-out rows", count, progress) as line:
        for k, (fitted, _) in enumerate(prepared.splits):
            line.update(k, final=True)
            place = folder / FOLDS / str(k)
            if everyone.gather(everyone.leader and is_saved(place))[0]:
                continue
            posterior = prepared.fold_fits.get(k)
            if posterior is None:
                problem, method = prepared.completed_problem(fitted), fold_method(prepared.method, count)
                with torch_threads(threads_for(problem, method)):
                    posterior = method.fit(problem, seed=prepared.config.seed, progress=False)
            if everyone.leader:
                # Of a process that was killed while it wrote.
                shutil.rmtree(place, ignore_errors=True)
                place.parent.mkdir(exist_ok=True)
                with world.alone():
                    posterior.save(place)
            everyone.barrier()
        line.update(count, final=True)


def fold_method(method: Method, folds: int) -> Method:
    """Return a shorter run of the method for one of several folds: predictions need fewer draws than diagnostics."""
    if folds > 1 and isinstance(method, SamplingMethod) and getattr(method, "until", None) is not None:
        # The time is that of the final fit.
        known: Any = method
        method = dataclasses.replace(known, until=None, budget=None)
    if folds > 1 and isinstance(method, HMC) and method.mass == "diagonal":
        # Whole trajectories, whose draws are nearly independent.
        warmup, draws = (
            min(n, max(least, n // part)) for n, least, part in ((method.warmup, 100, 2), (method.draws, 20, 4))
        )
        return dataclasses.replace(method, chains=min(4, method.chains), warmup=warmup, draws=draws, thin=1)
    if folds > 1 and isinstance(method, HMC):
        draws = min(method.draws, max(20, method.draws // 2))
        return dataclasses.replace(method, chains=min(4, method.chains), draws=draws, thin=min(2, method.thin))
    if folds > 1 and isinstance(method, DeepEnsemble):
        return dataclasses.replace(method, members=min(method.members, max(2, method.members // 5)))
    return method


def load_folds(folder: Path, count: int) -> tuple[Posterior, ...]:
    """Load the posteriors of the folds."""
    return tuple(load(folder / FOLDS / str(k)) for k in range(count))


def predict_unseen(model: TableModel, inputs: Array, fold: Array) -> Predictive:
    """Return the predictions of rows by the fits that have not seen them."""
    parts, places = [], []
    for k, posterior in enumerate(model.folds):
        own = np.flatnonzero(fold == k)
        if len(own):
            parts.append(dataclasses.replace(model, posterior=posterior).predict(inputs[own]))
            places.append(own)
    if len(parts) == 1:
        return parts[0]
    return JoinedPredictive(parts, torch.from_numpy(np.concatenate(places)))
