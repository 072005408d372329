"""`credibly serve`: predictions of run folders over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from credibly.cli.early_checks import check_run
from credibly.cli.error_handling import handle_errors
from credibly.cli.output import echo
from credibly.core.checks import check_integer


def run(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folders of `credibly fit`, each as FOLDER or NAME=FOLDER."),
    ],
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; anything but the default can be reached from other machines."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="CREDIBLY_TOKEN",
            show_envvar=False,
            help="Token that clients must send as `Authorization: Bearer TOKEN`. Other users of the machine can see"
            " options: prefer the environment variable CREDIBLY_TOKEN. (Default: none.)",
        ),
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(
            help="Default of the parameter risk for classes: fraction of accepted rows that may be wrong. (Default:"
            " none.)"
        ),
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Maximum number of rows per request.")] = 10_000,
    max_mb: Annotated[int, typer.Option("--max-mb", help="Maximum size of a request body, in MB.")] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request fails with an error.")] = 30.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings and errors only.")] = False,
) -> None:
    """Serve predictions over HTTP, with a form to try them.

    POST /predict takes rows as JSON or CSV and returns what `credibly predict`
    writes. The page at / is a form made from the columns of the table, /docs
    describes the interface. Several runs are at /runs/NAME/predict.

    credibly serve run/

    curl -H 'Content-Type: text/csv' --data-binary @new.csv localhost:8000/predict

    A run folder that is replaced while the server runs (`credibly fit --force`) is
    loaded without a pause. Ctrl-C finishes open requests, then stops. Logs are JSON
    lines on standard error, without the content of rows. Needs the
    optional dependencies of the extra "web".
    """
    with handle_errors():
        from credibly.web import check_extra

        check_extra("credibly serve")
        check_integer("--port", port, 0, 65535)
        check_integer("--max-mb", max_mb)
        for folder in folders:
            name, equals, rest = folder.partition("=")
            check_run(Path(rest if equals and name and not Path(folder).exists() else folder))
        from credibly.web.serve.server import is_loopback, listen, loopback_hosts, run_server
        from credibly.web.serve.settings import Settings, check_token

        if token is not None:
            check_token("--token", token)
        listening = listen(host, port)
        try:
            settings = Settings(
                token=token,
                risk=risk,
                max_rows=max_rows,
                max_bytes=max_mb << 20,
                timeout=timeout,
                hosts=loopback_hosts(host),
            )
            if token is None and not is_loopback(host):
                echo(
                    f"credibly: anyone who can reach {host} can request predictions. Set a token in CREDIBLY_TOKEN",
                    err=True,
                )
            from credibly.web.serve.app import make_app

            made = make_app(tuple(folders), settings)
            shown = f"[{host}]" if ":" in host else host
            echo(f"http://{shown}:{listening.getsockname()[1]}/")
            run_server(made, listening, quiet=quiet)
        finally:
            listening.close()
