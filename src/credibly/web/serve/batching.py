"""Micro-batching: requests that wait while others are predicted are then predicted together.

There is no delay to collect requests: an idle server answers immediately, and a loaded one has larger batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from credibly.tables.cells.parsing import Notes
from credibly.web.serve.errors import RequestError
from credibly.web.serve.rows import Rows

Columns = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Job:
    """Rows that wait for a prediction.

    Attributes:
        rows: the rows.
        key: only jobs of the same key are predicted together.
        predict: returns the columns of rows; that of the first job of a batch is called for all of them.
        done: resolves to the columns.
    """

    rows: Rows
    key: Hashable
    predict: Callable[[Rows], Columns]
    done: asyncio.Future[Columns]


class Batcher:
    """A queue of jobs, predicted in a thread.

    Args:
        executor: where predictions are computed.
        batch_rows: maximum number of rows in a batch of several jobs.
        max_queue: maximum number of rows that may wait.
        observe: called with the number of rows of every batch.
    """

    def __init__(
        self, executor: Executor, *, batch_rows: int, max_queue: int, observe: Callable[[int], None] = lambda rows: None
    ) -> None:
        self.executor = executor
        self.batch_rows = batch_rows
        self.max_queue = max_queue
        self.observe = observe
        self.waiting: deque[Job] = deque()
        self.rows = 0
        self._task: asyncio.Task[None] | None = None

    async def predict(self, rows: Rows, key: Hashable, predict: Callable[[Rows], Columns]) -> Columns:
        """Return the columns of rows, once it is their turn. Raise at once if too many rows are waiting."""
        if self.rows and self.rows + len(rows) > self.max_queue:
            found = f"the server is busy: {self.rows:,} rows are waiting"
            raise RequestError(503, found, advice="Try again later", headers={"Retry-After": "1"})
        job = Job(rows, key, predict, asyncio.get_running_loop().create_future())
        self.waiting.append(job)
        self.rows += len(rows)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await job.done

    async def _work(self) -> None:
        while self.waiting:
            batch = self._next_batch()
            if batch:
                await self._predict(batch)

    async def _predict(self, batch: list[Job]) -> None:
        try:
            parts = await asyncio.get_running_loop().run_in_executor(self.executor, predict_together, batch)
        except Exception as error:
            # One job may have caused the error; retry each alone, so that the others do not fail with it.
            for job in batch if len(batch) > 1 else ():
                await self._predict([job])
            if len(batch) == 1 and not batch[0].done.done():
                batch[0].done.set_exception(error)
            return
        self.observe(sum(len(job.rows) for job in batch))
        for job, part in zip(batch, parts):
            # The client may have disconnected or the request timed out.
            if not job.done.done():
                job.done.set_result(part)

    def _next_batch(self) -> list[Job]:
        """Take the first job and those that can be predicted with it. Drop jobs whose client is gone."""
        batch: list[Job] = []
        others: deque[Job] = deque()
        count = 0
        while self.waiting:
            job = self.waiting.popleft()
            if job.done.done():
                self.rows -= len(job.rows)
            elif not batch or (job.key == batch[0].key and count + len(job.rows) <= self.batch_rows):
                self.rows -= len(job.rows)
                count += len(job.rows)
                batch.append(job)
            else:
                others.append(job)
        self.waiting = others
        return batch


def predict_together(batch: list[Job]) -> list[Columns]:
    """Return the columns of each job, predicted in one call."""
    if len(batch) == 1:
        return [batch[0].predict(batch[0].rows)]
    notes: Notes = []
    ends = np.cumsum([len(job.rows) for job in batch]).tolist()
    starts = [0, *ends[:-1]]
    for job, start in zip(batch, starts):
        notes += [(start + row, note) for row, note in job.rows.notes]
    columns = batch[0].predict(Rows(np.concatenate([job.rows.inputs for job in batch]), notes))
    return [{name: values[start:end] for name, values in columns.items()} for start, end in zip(starts, ends)]
