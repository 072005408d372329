"""`credibly playground`: the page on which methods fit data that you draw, served on this machine."""

from __future__ import annotations

import importlib.util
import socket
from typing import Annotated

import typer

from credibly.cli.error_handling import handle_errors
from credibly.cli.output import echo
from credibly.core.checks import check_integer
from credibly.errors import InputError

NEEDED = ("starlette", "uvicorn", "websockets")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes any free one.")] = 8617,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any other than the default lets other machines use this one.")
    ] = "127.0.0.1",
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Open a page on which you draw data and watch every method fit them.

    Click to add points, and compare what MLE, MAP, ensembles, MC-Dropout, Bayes by
    Backprop, Laplace, SGHMC and HMC predict on them and far from any data.
    Further scenes show the trajectories of HMC and variational inference at work.
    Runs on this machine alone, until Ctrl-C.
    """
    with handle_errors():
        check_integer("--port", port, least=0)
        if port > 65535:
            raise InputError("--port", f"must be at most 65535, got {port}")
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise InputError("playground", f"needs {', '.join(missing)}", "pip install 'credibly[web]'")
        check_free(host, port)
        from credibly.web.playground.server import run_server

        if host not in LOOPBACK:
            echo(f"Warning: everybody who can reach {host} can use this machine's processor.", err=True)

        def ready(address: str) -> None:
            echo(f"The playground is at {address} (Ctrl-C stops it)")
            if open_page:
                import webbrowser

                webbrowser.open(address)

        run_server(host, port, ready)


def check_free(host: str, port: int) -> None:
    """Raise if nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            found = f"cannot listen on {host}:{port} ({error.strerror or error})"
            raise InputError("--port", found, "Choose another port, or 0 for any free one") from None
