"""The engine of one page: it runs one request at a time in a thread; a newer request cancels it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from credibly import __version__
from credibly.errors import InputError, SamplingError, TrainingError
from credibly.web.playground.bands import probe
from credibly.web.playground.fits import Cancelled, FitRun, Panel
from credibly.web.playground.protocol import (
    MAX_BYTES,
    MAX_POINTS,
    OPTIONS,
    SCENES,
    CancelRequest,
    FitRequest,
    HMCRequest,
    ProbeRequest,
    Request,
    VIRequest,
    read,
    request_id,
)
from credibly.web.playground.trajectories import run_trajectories
from credibly.web.playground.variational import run_variational

Send = Callable[[dict[str, Any]], None]


def hello() -> dict[str, Any]:
    """Return the first message of an engine: its capabilities."""
    known = {"scenes": list(SCENES), "methods": list(OPTIONS), "points": MAX_POINTS}
    return {"type": "hello", "engine": f"credibly {__version__}", **known}


class Engine:
    """Answers the requests of one page through `send`, which may be called from any thread."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.panels: dict[int, Panel] = {}
        self.jobs: list[Job] = []
        self.lock = threading.Lock()
        self.wanted: ProbeRequest | None = None

    @property
    def newest(self) -> Job | None:
        """The job of the latest request."""
        return self.jobs[-1] if self.jobs else None

    def handle(self, text: str | bytes) -> None:
        """Start the work of a message, or answer immediately. Whatever goes wrong becomes an error message."""
        try:
            self._handle(read(text))
        except InputError as error:
            self.send({"type": "error", "id": _id(text), "message": str(error)})
        except Exception as error:
            # A bug: the page shows a sentence, the terminal the traceback.
            logging.getLogger(__name__).exception("a message could not be answered")
            self.send({"type": "error", "id": _id(text), "message": _sentence(error)})

    def _handle(self, request: Request) -> None:
        if isinstance(request, ProbeRequest):
            with self.lock:
                # Only the latest input counts. A running job answers between two steps; without one, answer here.
                waiting = self.wanted
                self.wanted = request if waiting is None or waiting == request else replace(request, panel=None)
                busy = self.newest is not None and not self.newest.done
            if not busy:
                self.answer()
            return
        self.stop()
        if not isinstance(request, CancelRequest):
            if isinstance(request, FitRequest):
                # A new dictionary: the thread of an older request may still hold the last one.
                self.panels = {i: p for i, p in self.panels.items() if i < len(request.panels)}
            job = Job(request, self)
            self.jobs = [*(other for other in self.jobs if not other.done), job]
            job.start()

    def answer(self) -> None:
        """Send the predictive of every panel at the latest probed input, if any."""
        with self.lock:
            request, self.wanted = self.wanted, None
        if request is None:
            return
        # A cancelled job may still be using the networks of its panels.
        at_work = {job.request.id for job in self.jobs[:-1] if not job.done}
        for index, panel in sorted(self.panels.items()):
            asked = request.panel in (None, index) and len(request.x) == (2 if panel.classes else 1)
            if asked and panel.request not in at_work:
                found = probe(panel.posterior, request.x, classes=panel.classes)
                self.send({"type": "probe", "id": request.id, "panel": index, "stage": panel.stage, **found})

    def stop(self) -> None:
        """Cancel the running job; its thread ends at the next step that checks for it."""
        if self.newest is not None:
            self.newest.cancel.set()

    def join(self) -> None:
        """Wait until the running request is done."""
        if self.newest is not None:
            self.newest.thread.join()


class Job:
    """A request that runs in its own thread."""

    def __init__(self, request: FitRequest | HMCRequest | VIRequest, engine: Engine) -> None:
        self.request, self.engine, self.panels = request, engine, engine.panels
        self.cancel = threading.Event()
        self.done = False
        # Not a daemon: an interpreter that ends while a thread is inside torch aborts. It is cancelled first.
        self.thread = threading.Thread(target=self.run, name=f"request {request.id}")

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, unless a newer request has arrived."""
        if self.cancel.is_set():
            raise Cancelled
        self.engine.send(message)

    def run(self) -> None:
        """Do the work; a failure becomes a readable message."""
        try:
            self.work()
        except Cancelled:
            pass
        except Exception as error:
            if not isinstance(error, (InputError, TrainingError, SamplingError)):
                # A bug: the page shows a sentence, the terminal the traceback.
                logging.getLogger(__name__).exception("request %s failed", self.request.id)
            if not self.cancel.is_set():
                self.engine.send({"type": "error", "id": self.request.id, "message": _sentence(error)})
        finally:
            self.finish()

    def work(self) -> None:
        """Run the request to its end."""
        request, cancelled = self.request, self.cancel.is_set
        if isinstance(request, FitRequest):
            FitRun(request, self.panels, self.send, cancelled, self.answer).run()
        elif isinstance(request, HMCRequest):
            run_trajectories(request, self.send, cancelled)
        else:
            run_variational(request, self.send, cancelled)

    def answer(self) -> None:
        """Answer a waiting probe, unless a newer job does."""
        if not self.cancel.is_set():
            self.engine.answer()

    def finish(self) -> None:
        """Answer pending probes, and leave later ones to the engine."""
        while True:
            with self.engine.lock:
                if self.engine.wanted is None or self.cancel.is_set():
                    self.done = True
                    return
            try:
                self.engine.answer()
            except Exception:
                # A bug; later probes must still find this job done.
                logging.getLogger(__name__).exception("a probe after request %s failed", self.request.id)


def _sentence(error: Exception) -> str:
    """Return the first line of an error, for the page."""
    return str(error).split("\n")[0][:300] or type(error).__name__


def _id(text: str | bytes) -> int | None:
    """Return the id of a message that was not understood, if it has one."""
    try:
        return request_id(json.loads(text)) if len(text) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        return None
