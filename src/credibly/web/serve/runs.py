"""Run folders in the server: loaded into memory as a whole, so that a folder may be replaced at any time."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Hashable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from credibly.errors import InputError, StoreError
from credibly.posterior.base import Posterior
from credibly.posterior.draws import SampledPosterior
from credibly.tables.guarantee import guaranteed
from credibly.tables.model import TableModel
from credibly.tables.run import TableRun
from credibly.web.serve.abstention import RejectOption
from credibly.web.serve.batching import Batcher, Columns
from credibly.web.serve.errors import printable
from credibly.web.serve.parameters import Parameters
from credibly.web.serve.rows import Rows

if TYPE_CHECKING:
    from pyarrow import Table

# What changes when a run folder is replaced.
WATCHED = ("table.json", "posterior/manifest.json")
# Seconds after which a folder that could not be loaded is tried again, although its watched files are the same.
RETRY = 20.0


@dataclass(frozen=True, eq=False)
class ServedRun:
    """A loaded run folder; nothing is read from disk afterwards.

    Attributes:
        name: its name in addresses.
        run: the run.
        sample: some of its training rows.
        reject: thresholds for abstaining, from its held-out rows; None if it has none.
        block_rows: rows that are predicted at a time.
        identity: state of the folder when it was loaded, from `identity_of`.
        loaded: when, in seconds since 1970.
    """

    name: str
    run: TableRun
    sample: Table
    reject: RejectOption | None
    block_rows: int
    identity: Hashable
    loaded: float

    @property
    def model(self) -> TableModel:
        """The model of the table."""
        return self.run.model

    @cached_property
    def version(self) -> str:
        """A short name of this state of the folder, which changes with its content."""
        return str(self.run.facts["checksum"])[:12]

    def predict(self, asked: Parameters, rows: Rows) -> Columns:
        """Return the columns that `credibly predict` writes for the rows."""
        promise = partial(guaranteed, self.model, allow_empty=asked.allow_empty) if asked.guarantee else None
        return self.model.predict_columns(
            rows.inputs, rows.notes, levels=asked.levels, times=asked.times, promise=promise, draws=asked.draws
        )

    def blocks(self, rows: Rows) -> list[Rows]:
        """Return rows in blocks of the size in which a file is predicted."""
        step = self.block_rows
        return [
            Rows(rows.inputs[i : i + step], [(row - i, note) for row, note in rows.notes if i <= row < i + step])
            for i in range(0, len(rows), step)
        ]

    def key(self, asked: Parameters, rows: Rows) -> Hashable:
        """Return what requests must have in common to be predicted together."""
        # Rows with missing cells have another mixture, and complete rows in the same batch would round differently.
        own = (asked.levels, asked.times, asked.allow_empty, asked.draws, asked.guarantee)
        return self.version, own, bool(np.isnan(rows.inputs).any())


def load_run(name: str, folder: Path) -> ServedRun:
    """Load a run folder, and predict a row to see that it works. Raise `StoreError` if it is broken."""
    identity = identity_of(folder)
    run = TableRun.load(folder)
    model = run.model
    sample, kept = run.sample(), [_in_memory(one) for one in (model.posterior, *model.folds)]
    model = dataclasses.replace(
        model,
        posterior=kept[0],
        folds=tuple(kept[1:]),
        training_sample=None if model.training_sample is None else lambda: sample,
    )
    run = dataclasses.replace(run, model=model)
    if model.training_sample is not None:
        # Prepare them now rather than in the first request with a missing cell.
        _ = model.donors
    reject = RejectOption.of(run)
    inputs, notes = model.inputs(sample.slice(0, 1))
    found = ServedRun(name, run, sample, reject, model.block_rows(), identity, time.time())
    found.predict(Parameters(), Rows(inputs, notes))
    if identity_of(folder) != identity:
        raise StoreError(f"path: {name!r} was replaced while it was loaded")
    return found


def _in_memory(posterior: Posterior) -> Posterior:
    return posterior.in_memory() if isinstance(posterior, SampledPosterior) else posterior


def identity_of(folder: Path) -> Hashable:
    """Return what identifies the state of a run folder, without reading its files."""
    try:
        facts = [os.stat(folder / name) for name in WATCHED]
    except OSError as error:
        raise StoreError(f"path: cannot read {os.fspath(folder)!r} ({error.strerror})") from None
    return tuple((one.st_dev, one.st_ino, one.st_mtime_ns, one.st_size) for one in facts)


class Slot:
    """A slot for a run: the current one, its queue, and what went wrong when the folder was last replaced.

    Args:
        name: name in addresses.
        folder: the run folder.
        batcher: the queue of its requests.
    """

    def __init__(self, name: str, folder: Path, batcher: Batcher) -> None:
        self.name = name
        self.folder = folder
        self.batcher = batcher
        self.current = load_run(name, folder)
        self.problem = ""
        self._tried: Hashable = self.current.identity
        self._retry = 0.0

    async def predict(self, asked: Parameters, rows: Rows, run: ServedRun) -> Columns:
        """Return the columns of rows under a run: the one that was current when the request arrived."""
        blocks = run.blocks(rows)
        parts = [await self.batcher.predict(b, run.key(asked, b), partial(run.predict, asked)) for b in blocks]
        if len(parts) == 1:
            return parts[0]
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    def reload(self) -> str:
        """Load the folder if it changed. Return "loaded", "failed" (the old run stays) or "unchanged"."""
        try:
            identity = identity_of(self.folder)
        except StoreError as error:
            # Between two renames there may be no folder for a moment: reported if it lasts until the next look.
            failed = self._tried is None and not self.problem
            self.problem = self._shown(error) if self._tried is None else self.problem
            self._tried = None
            return "failed" if failed else "unchanged"
        if identity == self.current.identity:
            self._tried, self.problem = identity, ""
            return "unchanged"
        # The files of a folder that is being copied may not all be there yet.
        if identity == self._tried and time.monotonic() < self._retry:
            return "unchanged"
        self._tried, self._retry = identity, time.monotonic() + RETRY
        try:
            self.current = load_run(self.name, self.folder)
        # Whatever is wrong with the new folder, keep serving the old run.
        except Exception as error:
            before, self.problem = self.problem, self._shown(error)
            return "unchanged" if before == self.problem else "failed"
        self.problem = ""
        return "loaded"

    def _shown(self, error: Exception) -> str:
        """Return an error for clients, without the path of the folder."""
        return printable(f"{type(error).__name__}: {error}".replace(os.fspath(self.folder), self.name))

    def facts(self) -> dict[str, Any]:
        """Return the description of a run for `/runs`."""
        run, known = self.current.run, self.current.model.preparation
        calibration = self.current.model.calibration
        return {
            "name": self.name,
            "version": self.current.version,
            "loaded": round(self.current.loaded, 3),
            "target": known.target,
            "task": known.task,
            "classes": None if known.classes is None else list(known.classes),
            "method": run.config.method,
            "rows": run.facts["rows"],
            "metrics_on": run.facts["on"],
            "metrics": {name: _finite(value) for name, value in run.figures.items()},
            "guarantee": run.facts["guarantee"],
            "calibration_rows": None if calibration is None else calibration.rows,
            "reject_option": self.current.reject is not None,
            "problem": self.problem or None,
        }


def _finite(value: Any) -> Any:
    """Return a metric, or None for one that JSON cannot hold: a log density may be -inf."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return [value for part in parts for value in part]


def named_folders(runs: tuple[str | os.PathLike[str], ...]) -> dict[str, Path]:
    """Return run folders by name: that of the folder, or NAME of NAME=FOLDER. Raise if two have the same."""
    if not runs:
        raise InputError("runs", "must be at least one run folder, got none")
    found: dict[str, Path] = {}
    for run in runs:
        given = os.fspath(run)
        name, equals, rest = given.partition("=")
        folder = Path(rest if equals and not Path(given).exists() else given)
        name = name if equals and not Path(given).exists() else folder.resolve().name
        if not name or "/" in name or not name.isprintable():
            raise InputError("runs", f"{given!r} has no name", "Pass NAME=FOLDER")
        if name in found:
            raise InputError("runs", f"two folders are named {name!r}", "Pass NAME=FOLDER for one of them")
        found[name] = folder
    return found


def load_slots(folders: dict[str, Path], executor: Executor, **limits: Any) -> dict[str, Slot]:
    """Load all runs."""
    return {name: Slot(name, folder, Batcher(executor, **limits)) for name, folder in folders.items()}
