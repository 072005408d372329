"""Limits of a request: the size of its body and the time until its answer."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from credibly.web.serve.errors import RequestError


class TimeLimit:
    """The time left for a request, counted from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = asyncio.get_running_loop().time() + seconds

    async def __call__(self, work: Any, late: str = "") -> Any:
        """Await some work. Raise when the time is up: 408 with the message `late` if there is one, else 503."""
        try:
            async with asyncio.timeout_at(self.end):
                return await work
        except TimeoutError:
            found = f"{late or 'not answered'} within {self.seconds:g} s"
            advice = "" if late else "Send fewer rows, or try again later"
            raise RequestError(408 if late else 503, found, advice=advice) from None


async def read_body(request: Request, most: int) -> bytes:
    """Return the body. Raise as soon as it is known to be too large."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("", "identity"):
        found = f"content encoding {encoding[:40]!r} is not supported"
        raise RequestError(415, found, argument="Content-Encoding", advice="Send the body uncompressed")
    stated = request.headers.get("content-length", "")
    if stated.isdigit() and (len(stated) > 15 or int(stated) > most):
        raise _too_large(most)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(most: int) -> RequestError:
    message = f"the body must be at most {most:,} bytes, got more"
    return RequestError(413, message, argument="body", advice="Send the rows in several requests")
