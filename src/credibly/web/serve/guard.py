"""What applies to every request: token, host, errors as JSON, logs, metrics, headers of the response."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import time
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from credibly.errors import InputError
from credibly.web.serve.errors import RequestError, printable
from credibly.web.serve.logs import event
from credibly.web.serve.metrics import SECONDS, Metrics
from credibly.web.serve.settings import Settings

# Routes that need no token: they reveal nothing about the runs.
OPEN = frozenset({"/", "/docs", "/health", "/ready"})
PAGES = "/pages/"
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
        b" base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
]
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


def route_path(scope: Scope) -> str:
    """Return the path of a request within the application, which may be mounted below a prefix of another one."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if path.startswith(f"{root}/") else path


class Guard:
    """ASGI middleware around the routes.

    The label of a request in logs and metrics is `scope["credibly_label"]`, which routes set; that of anything else is
    "other", as an address may hold what should not be logged.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, number = time.perf_counter(), secrets.token_hex(8)
        seen: dict[str, Any] = {"status": 499, "begun": False}
        scope["credibly_label"], scope["credibly_fields"] = "other", {}

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.update(status=message["status"], begun=True)
                own = [*HEADERS, (b"x-request-id", number.encode())]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        self.metrics.add("credibly_in_flight")
        try:
            await self._answer(scope, receive, send_guarded, seen, number)
        finally:
            seconds = time.perf_counter() - started
            self.metrics.add("credibly_in_flight", -1)
            label = scope["credibly_label"]
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.add("credibly_requests_total", path=label, method=method, status=str(seen["status"]))
            self.metrics.observe("credibly_request_seconds", seconds, SECONDS, path=label)
            fields = {"method": method, "path": label, "status": seen["status"], "seconds": round(seconds, 6)}
            event("request", id=number, **fields, **scope["credibly_fields"])

    async def _answer(self, scope: Scope, receive: Receive, send: Send, seen: dict[str, Any], number: str) -> None:
        try:
            self._check(scope)
            await self.app(scope, receive, send)
        except RequestError as error:
            await self._refuse(error, send, seen)
        except InputError as error:
            await self._refuse(RequestError.of(error), send, seen)
        except ClientDisconnect:
            seen["status"] = 499
        except asyncio.CancelledError:
            raise
        except Exception as error:
            event("error", logging.ERROR, error, id=number)
            found = RequestError(500, f"the server failed; its log has the error under id {number}")
            await self._refuse(found, send, seen)

    async def _refuse(self, error: RequestError, send: Send, seen: dict[str, Any]) -> None:
        if seen["begun"]:
            return
        body = json.dumps(error.content(), ensure_ascii=False).encode() + b"\n"
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        # The rest of the body is not read, so the connection cannot be reused.
        headers += [(b"connection", b"close")] if error.status in (408, 413) else []
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        if self.settings.hosts:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if name.lower() not in self.settings.hosts:
                found = f"host {printable(host[:80])!r} is not served here"
                raise RequestError(421, found, argument="Host", advice=f"Use {self.settings.hosts[0]}")
        token = self.settings.token
        path = route_path(scope)
        if token is None or path in OPEN or path.startswith(PAGES):
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # Compare in constant time, so that response times do not reveal a correct prefix.
        right = hmac.compare_digest(given.strip(), token.encode())
        if scheme.lower() != b"bearer" or not right:
            found = "the token is missing" if not given else "the token is wrong"
            advice = "Send the header Authorization: Bearer TOKEN"
            raise RequestError(
                401, found, argument="Authorization", advice=advice, headers={"WWW-Authenticate": "Bearer"}
            )
