"""The ASGI application: its routes and what each of them returns."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from credibly.errors import InputError
from credibly.web.serve.abstention import abstention_facts, uncertainty_of
from credibly.web.serve.answers import TYPES, accepted_type, encode, strict_json
from credibly.web.serve.columns import describe_columns
from credibly.web.serve.errors import RequestError
from credibly.web.serve.guard import Guard, route_path
from credibly.web.serve.limits import TimeLimit, read_body
from credibly.web.serve.logs import event
from credibly.web.serve.metrics import ROWS, TEXT, Metrics
from credibly.web.serve.openapi import openapi
from credibly.web.serve.parameters import Parameters, parse_parameters
from credibly.web.serve.picture import picture
from credibly.web.serve.rows import JSON, Rows, parse_rows
from credibly.web.serve.runs import ServedRun, Slot, load_slots, named_folders
from credibly.web.serve.settings import Settings

# Bodies up to this size are parsed in the event loop; larger ones in a thread, so that other requests are not blocked.
SMALL = 8_192
# Rows with a higher score count as unusual in the metrics.
UNUSUAL = 0.99
PAGES = {
    "form.html": "text/html",
    "docs.html": "text/html",
    "form.js": "text/javascript",
    "docs.js": "text/javascript",
    "pictures.js": "text/javascript",
    "shared.js": "text/javascript",
    "style.css": "text/css",
}


async def no_icon(request: Request) -> Response:
    """Return an empty response."""
    return Response(status_code=204)


def make_app(runs: tuple[str | os.PathLike[str], ...], settings: Settings) -> Starlette:
    """Return the application, with all runs loaded."""
    metrics = Metrics()
    server = Server(runs, settings, metrics)
    routes = [
        Route("/", server.page("form.html"), methods=["GET"]),
        Route("/docs", server.page("docs.html"), methods=["GET"]),
        # The pages have no icon, but browsers request one anyway.
        Route("/favicon.ico", no_icon, methods=["GET"]),
        *(Route(f"/pages/{name}", server.page(name), methods=["GET"]) for name in PAGES if ".html" not in name),
        Route("/openapi.json", server.describe, methods=["GET"]),
        Route("/health", server.health, methods=["GET"]),
        Route("/ready", server.ready, methods=["GET"]),
        Route("/metrics", server.show_metrics, methods=["GET"]),
        Route("/runs", server.list_runs, methods=["GET"]),
    ]
    for prefix in ("", "/runs/{name}"):
        routes += [
            Route(f"{prefix}/columns", server.columns, methods=["GET"]),
            Route(f"{prefix}/predict", server.predict, methods=["POST"]),
            Route(f"{prefix}/picture", server.picture, methods=["POST"]),
        ]
    found = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, settings=settings, metrics=metrics)],
        lifespan=server.lifespan,
        exception_handlers={HTTPException: _not_found},
    )
    found.state.server = server
    return found


class Server:
    """The runs and the handlers of requests to them."""

    def __init__(self, runs: tuple[str | os.PathLike[str], ...], settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        # A prediction already uses all cores; the second thread is for parsing.
        self.computing = ThreadPoolExecutor(1, "predict")
        self.parsing = ThreadPoolExecutor(1, "parse")
        self.slots: dict[str, Slot] = load_slots(
            named_folders(runs),
            self.computing,
            batch_rows=settings.batch_rows,
            max_queue=settings.max_queue,
            observe=lambda rows: metrics.observe("credibly_batch_rows", rows, ROWS),
        )
        self.texts = {name: _page(name) for name in PAGES}

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Watch the run folders while the server runs."""
        for slot in self.slots.values():
            event("loaded", run=slot.name, version=slot.current.version)
        task = asyncio.create_task(self._watch()) if self.settings.watch else None
        yield
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self.computing.shutdown(wait=False, cancel_futures=True)
        self.parsing.shutdown(wait=False, cancel_futures=True)
        event("stopped")

    async def _watch(self) -> None:
        """Load folders that were replaced. The old run serves requests until the new one is loaded."""
        while True:
            await asyncio.sleep(self.settings.watch)
            for slot in self.slots.values():
                outcome = await asyncio.to_thread(slot.reload)
                if outcome == "unchanged":
                    continue
                self.metrics.add("credibly_reloads_total", run=slot.name, outcome=outcome)
                if outcome == "loaded":
                    event("reloaded", run=slot.name, version=slot.current.version)
                else:
                    event("reload failed", logging.WARNING, run=slot.name, problem=slot.problem)

    # -- predictions ---------------------------------------------------------------------------------------------------
    async def predict(self, request: Request) -> Response:
        """Return the predictions of rows."""
        slot = self._slot(request, "/predict")
        kind = accepted_type(request.headers.get("accept", ""))
        limit = TimeLimit(self.settings.timeout)
        run, asked, rows = await self._rows(request, slot, limit)
        columns, facts = await self._columns(slot, run, asked, rows, limit)
        body = await limit(self._run(encode, columns, kind, facts, small=len(rows) <= 10))
        return Response(body, media_type=TYPES[kind], headers={"X-Credibly-Version": run.version})

    async def picture(self, request: Request) -> Response:
        """Return the prediction of one row with the values that a picture of it needs."""
        slot = self._slot(request, "/picture")
        limit = TimeLimit(self.settings.timeout)
        run, asked, rows = await self._rows(request, slot, limit)
        if len(rows) != 1:
            raise InputError("rows", f"must be one row, got {len(rows):,}", "Use /predict for several")
        columns, facts = await self._columns(slot, run, asked, rows, limit)
        loop = asyncio.get_running_loop()
        facts |= await limit(loop.run_in_executor(self.computing, picture, run, rows))
        return Response(encode(columns, JSON, facts | {"levels": list(asked.levels)}), media_type=JSON)

    async def _columns(
        self, slot: Slot, run: ServedRun, asked: Parameters, rows: Rows, limit: TimeLimit
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the columns of a response, and facts on the run and the guarantee."""
        columns = await limit(slot.predict(asked, rows, run))
        facts: dict[str, Any] = {"run": slot.name, "version": run.version}
        if asked.risk is not None and run.reject is not None:
            loop = asyncio.get_running_loop()
            promised = asked.risk, asked.confidence, asked.tolerance
            selection = await limit(loop.run_in_executor(self.computing, run.reject.select, *promised))
            uncertain = uncertainty_of(columns, run.model.preparation)
            columns["abstain"] = uncertain >= selection.threshold
            facts["abstention"] = abstention_facts(selection)
        self._count(slot.name, columns)
        return columns, facts

    async def _rows(self, request: Request, slot: Slot, limit: TimeLimit) -> tuple[ServedRun, Parameters, Rows]:
        run = slot.current
        twice = [name for name in request.query_params if len(request.query_params.getlist(name)) > 1]
        if twice:
            raise InputError(twice[0], "must be given once, got several values")
        risk = self.settings.risk if run.reject is not None and run.reject.classes else None
        asked = parse_parameters(request.query_params, run.model, risk)
        if asked.risk is not None and run.reject is None:
            found = "the run has no held-out rows of a class or a number to guarantee it from"
            raise InputError("risk", found, "Leave it out")
        body = await limit(read_body(request, self.settings.max_bytes), "the body did not arrive")
        request.scope["credibly_fields"]["bytes"] = len(body)
        content_type = request.headers.get("content-type", "")
        parse = partial(parse_rows, strict=asked.strict, max_rows=self.settings.max_rows)
        rows: Rows = await limit(self._run(parse, body, content_type, run.model, small=len(body) <= SMALL))
        request.scope["credibly_fields"]["rows"] = len(rows)
        return run, asked, rows

    async def _run(self, work: Callable[..., Any], *arguments: Any, small: bool) -> Any:
        if small:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self.parsing, work, *arguments)

    def _count(self, run: str, columns: dict[str, Any]) -> None:
        notes, ood = columns["notes"], columns["ood"]
        self.metrics.add("credibly_rows_total", len(notes), run=run)
        self.metrics.add("credibly_rows_with_notes_total", sum(map(bool, notes)), run=run)
        unusual = sum(score is not None and float(score) > UNUSUAL for score in ood)
        self.metrics.add("credibly_rows_unusual_total", unusual, run=run)
        if "abstain" in columns:
            self.metrics.add("credibly_rows_abstained_total", int(columns["abstain"].sum()), run=run)

    def _slot(self, request: Request, path: str) -> Slot:
        name = request.path_params.get("name")
        request.scope["credibly_label"] = path if name is None else f"/runs/NAME{path}"
        if name is None and len(self.slots) == 1:
            name = next(iter(self.slots))
        if name is None:
            known = ", ".join(f"/runs/{quote(one)}{path}" for one in self.slots)
            raise RequestError(404, f"{path} is ambiguous, as there are {len(self.slots)} runs", advice=f"Use {known}")
        if name not in self.slots:
            known = ", ".join(map(repr, self.slots))
            raise RequestError(404, f"no run is named {name[:80]!r}", argument="name", advice=f"The runs are {known}")
        request.scope["credibly_fields"]["run"] = name
        return self.slots[name]

    # -- everything else -----------------------------------------------------------------------------------------------
    def page(self, name: str) -> Callable[[Request], Any]:
        """Return the handler of a page or a file that it needs."""

        async def handler(request: Request) -> Response:
            request.scope["credibly_label"] = route_path(request.scope)
            return Response(self.texts[name], media_type=PAGES[name])

        return handler

    async def describe(self, request: Request) -> Response:
        """Return the OpenAPI description."""
        request.scope["credibly_label"] = "/openapi.json"
        runs = {name: slot.current for name, slot in self.slots.items()}
        token = self.settings.token is not None
        return JSONResponse(strict_json(openapi(runs, token=token, max_rows=self.settings.max_rows)))

    async def columns(self, request: Request) -> Response:
        """Return the columns of a run."""
        slot = self._slot(request, "/columns")
        return JSONResponse(strict_json(slot.facts() | {"columns": describe_columns(slot.current)}))

    async def list_runs(self, request: Request) -> Response:
        """Return the list of runs."""
        request.scope["credibly_label"] = "/runs"
        return JSONResponse(strict_json({"runs": [slot.facts() for slot in self.slots.values()]}))

    async def health(self, request: Request) -> Response:
        """Report that the process is alive."""
        request.scope["credibly_label"] = "/health"
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Report whether runs are loaded, and how many replaced folders could not be loaded."""
        request.scope["credibly_label"] = "/ready"
        failed = sum(bool(slot.problem) for slot in self.slots.values())
        return JSONResponse({"status": "ready", "runs": len(self.slots), "failed_reloads": failed})

    async def show_metrics(self, request: Request) -> Response:
        """Return the metrics."""
        request.scope["credibly_label"] = "/metrics"
        for name, slot in self.slots.items():
            self.metrics.set("credibly_queue_rows", slot.batcher.rows, run=name)
            self.metrics.set("credibly_run_loaded_timestamp_seconds", round(slot.current.loaded, 3), run=name)
        return Response(self.metrics.text(), headers={"Content-Type": TEXT})


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        raise RequestError(405, f"method {request.method[:20]!r} is not allowed here", advice=f"Use {allowed}")
    raise RequestError(error.status_code, "no such address", advice="See /docs")


def _page(name: str) -> bytes:
    return (files("credibly.web.serve") / "pages" / name).read_bytes()
