"""Running the application with uvicorn until a signal stops it."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

from credibly.errors import InputError
from credibly.web.serve.logs import event, write_logs

if TYPE_CHECKING:
    from starlette.applications import Starlette

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Seconds that requests in progress may take after a signal.
GRACE = 20
# Seconds that an idle connection stays open: longer than in proxies, which would otherwise reuse a closed one.
KEEP_ALIVE = 75


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a host."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_hosts(host: str) -> tuple[str, ...]:
    """Return the names that the Host header may have: those of this machine for a loopback address, else any."""
    return tuple(dict.fromkeys((host.lower(), "127.0.0.1", "localhost", "[::1]"))) if is_loopback(host) else ()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raise if the address cannot be used."""
    found = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio turns Nagle's algorithm off only for sockets with TCP's protocol number. With it, a response on an
        # open connection waits 40 ms for the client to acknowledge its header.
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(1024)
    except OSError as error:
        if found is not None:
            found.close()
        problem = f"cannot listen on {host}:{port} ({error.strerror})"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise InputError("--port", problem, "Pass another --port; 0 picks a free one") from None
        raise InputError("--host", problem) from None
    return found


def run_server(app: Starlette, listening: socket.socket, *, quiet: bool = False) -> None:
    """Serve requests until SIGINT or SIGTERM; those in progress are completed before it returns."""
    import uvicorn

    write_logs(logging.WARNING if quiet else logging.INFO)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
    )
    host, port = listening.getsockname()[:2]
    event("listening", address=f"{host}:{port}", process=os.getpid())
    # uvicorn raises the signal again once it has stopped; SIGTERM is then a normal exit.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    uvicorn.Server(config).run(sockets=[listening])
