"""`credibly verify`: checks that the files of a run are those that were written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli.console import to_json
from credibly.cli.early_checks import check_input_folder
from credibly.cli.error_handling import FAILED, handle_errors, json_is_written
from credibly.cli.output import echo


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `credibly fit` or `fit(..., out=RUN)`.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing; only set the exit code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that every file of a run is unchanged since it was written.

    A run folder stores checksums of its files, bound together by one over the whole
    run. This finds accidents: a truncated copy, a flipped bit, an edited number, a file
    of another run. It is not a signature: whoever can write to the folder can also
    compute new checksums.

    Exit code 0 if all files match, 1 otherwise.
    """
    with handle_errors():
        check_input_folder(folder, "RUN", "Pass the --out of `credibly fit`, or the `out` of a fit in Python")
        from credibly.storage.verifying import verify

        found = verify(folder)
        bad = [one for one in found if one.problem is not None]
        if as_json:
            files = {one.file: one.problem for one in found}
            echo(to_json({"run": os.fspath(folder), "intact": not bad, "files": files}))
            json_is_written()
        elif not quiet:
            for one in bad:
                echo(f"{one.file} {one.problem}")
            count = f"{len(found)} file{'' if len(found) == 1 else 's'}"
            ending = "all match their checksums" if not bad else f"{len(bad)} with a problem"
            echo(f"{os.fspath(folder)}: {count}, {ending}")
    if bad:
        raise typer.Exit(FAILED)
