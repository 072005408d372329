"""The playground's server: the page as static files, and one engine per WebSocket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from credibly.web.playground.engine import Engine, hello
from credibly.web.playground.protocol import MAX_BYTES, OPTIONS
from credibly.web.serve.server import LOOPBACK, loopback_hosts

STATIC = Path(__file__).parent / "static"
# Maximum number of open pages: each may keep a core busy.
MAX_SOCKETS = 16
# Bytes at which the connection is closed; a smaller message that is still too large gets an error message.
CLOSING_BYTES = 4 * MAX_BYTES
HEADERS = {
    b"content-security-policy": b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    b"connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-cache",
}


def make_app(hosts: tuple[str, ...] = LOOPBACK) -> Starlette:
    """Return the ASGI application.

    Sockets opened by a page of another origin are refused.

    Args:
        hosts: names that the Host header may have; any if empty. Listing those of a loopback address keeps
            other sites from reaching it under their own name.
    """
    sockets: set[WebSocket] = set()

    async def socket(websocket: WebSocket) -> None:
        if not same_origin(websocket):
            await websocket.close(1008, "this page may not use the playground")
            return
        await websocket.accept()
        if len(sockets) >= MAX_SOCKETS:
            text = f"at most {MAX_SOCKETS} pages can be open at once; close one and load this page again"
            await websocket.send_text(json.dumps({"type": "error", "id": None, "message": text}))
            await websocket.close(1013)
            return
        sockets.add(websocket)
        try:
            await serve_page(websocket)
        finally:
            sockets.discard(websocket)

    routes = [
        WebSocketRoute("/socket", socket),
        # The page has its own icon, but browsers request this one anyway.
        Route("/favicon.ico", no_icon),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, hosts=hosts)])


async def no_icon(request: Request) -> Response:
    """Return an empty response."""
    return Response(status_code=204)


async def serve_page(websocket: WebSocket) -> None:
    """Answer the requests of one page until it closes."""
    loop, outgoing = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()
    engine = Engine(lambda message: _put(loop, outgoing, message))
    await websocket.send_text(json.dumps(hello()))

    async def write() -> None:
        while True:
            await websocket.send_text(json.dumps(await outgoing.get(), allow_nan=False))

    writer = asyncio.create_task(write())
    try:
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                break
            await asyncio.to_thread(engine.handle, message.get("text") or message.get("bytes") or "")
    except (WebSocketDisconnect, RuntimeError):
        pass
    finally:
        engine.stop()
        writer.cancel()


def _put(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[dict[str, Any]], message: dict[str, Any]) -> None:
    """Hand a message of an engine's thread to the event loop; after the last page has closed it may be gone."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, message)


def same_origin(websocket: WebSocket) -> bool:
    """Return whether a socket was opened by the playground's own page: browsers always send the origin."""
    origin, host = websocket.headers.get("origin"), websocket.headers.get("host", "")
    try:
        return origin is not None and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def host_name(header: str) -> str | None:
    """Return the name in a Host header, in lower case and without brackets or port; None if it is malformed."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


class Guard:
    """Refuses requests for other hosts, and adds headers that keep the page to itself."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self.app, self.hosts = app, frozenset(host.strip("[]").lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request or socket."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        name = host_name(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
        if name is None or (self.hosts and name not in self.hosts):
            status, reason = (400, "malformed host") if name is None else (421, "unknown host")
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": reason})
            else:
                await PlainTextResponse(f"{reason}\n", status)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS.items()]
            await send(message)

        await self.app(scope, receive, with_headers)


class WarmUp:
    """A fit of every method in the background, so that the first click does not wait for imports and compilation."""

    def __init__(self) -> None:
        self.engine = Engine(lambda message: None)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, name="warm-up")
        self.thread.start()

    def run(self) -> None:
        """Fit the methods one after another."""
        small: dict[str, Any] = {"steps": 2, "warmup": 20, "draws": 4, "chains": 2, "members": 2}
        points = {"x": [[-1.0], [0.0], [1.0]], "y": [-0.5, 0.1, 0.8]}
        request = {"type": "fit", "id": 0, "scene": "regression", "data": points, "grid": {"x": [-2, 2, 21]}}
        for method, known in OPTIONS.items():
            if self.stopped.is_set():
                return
            panel = {"method": method, "options": {key: small[key] for key in known if key in small}}
            self.engine.handle(json.dumps({**request, "model": {"hidden": [4], "prior_scale": 1.0}, "panels": [panel]}))
            self.engine.join()

    def stop(self) -> None:
        """Stop as soon as the current fit has ended."""
        self.stopped.set()
        self.engine.stop()


def run_server(host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. `ready` is called with the page's address once it can be opened."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.servers:
                bound = self.servers[0].sockets[0].getsockname()[1]
                shown = f"[{host}]" if ":" in host else host
                ready(f"http://{shown}:{bound}/")

    # Fits are small: more threads would only contend with each other.
    torch.set_num_threads(1)
    app = make_app(loopback_hosts(host))
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", ws_max_size=CLOSING_BYTES)
    config.timeout_graceful_shutdown = 1
    warm = WarmUp()
    try:
        Server(config).run()
    finally:
        warm.stop()
