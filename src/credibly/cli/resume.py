"""`credibly resume`: goes on with a run that was stopped."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from credibly.cli.error_handling import plainly
from credibly.cli.processes import speaks
from credibly.cli.user_script import problem_of
from credibly.errors import InputError, PeerError, StoreError

if TYPE_CHECKING:
    from credibly.inference.density import Density
    from credibly.posterior.base import SampledPosterior
    from credibly.problem import Problem

JUDGED_ROWS = 32  # training rows whose predictions the verdict looks at


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `fit(..., out=RUN)` began.")],
    problem: Annotated[
        str | None,
        typer.Option(
            metavar="SCRIPT.py:NAME",
            help="Your script, and the name in it of the problem or of a function that makes it. Needed for a network of"
            " your own class, a density, or data too large to be kept.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print nothing but the path: of the folder, or of a table's page.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Of a table's run: print one JSON object, for programs.")
    ] = False,
) -> None:
    """Go on with a run that was stopped, to the same draws as if it never had been.

    Ctrl-C, a lost machine, kill -9: the folder is whole after each of them, and
    this goes on from its last checkpoint. Stop it again with Ctrl-C. The folder is
    one of `credibly fit`, or of `fit(..., out=RUN)` in Python.
    """
    with plainly(shared=True):
        try:
            if problem is None and (folder / "table.json").is_file():
                _resume_table(folder, quiet, as_json)
            elif as_json:
                raise InputError("--json", f"{folder} is not the folder of `credibly fit`", "Leave it out")
            else:
                _resume(folder, problem, quiet)
        except KeyboardInterrupt:
            typer.echo(f"credibly: {_stopped(folder, problem)}", err=True)
            raise typer.Exit(130) from None
        except PeerError as error:
            error.add_note(_stopped(folder, problem).removeprefix("stopped. "))
            raise


def _resume(folder: Path, script: str | None, quiet: bool) -> None:
    from credibly.distributed import world
    from credibly.methods.resuming import go_on, sampled

    manifest = sampled(folder)
    ended = manifest["status"] == "complete"
    if quiet and ended:
        typer.echo(os.fspath(folder))
        return
    if not quiet:
        typer.echo(_what(manifest))
    if ended:
        typer.echo(f"It has ended already. Open it with credibly.load({os.fspath(folder)!r}).")
        return
    if not quiet:
        typer.echo(_how_far(manifest))
    mine = problem_of(script) if script is not None else None
    posterior, used = go_on(folder, mine, progress=False if quiet else None)
    if quiet or not speaks():
        typer.echo(os.fspath(folder))
        return
    typer.echo(f"Done. Open it with credibly.load({os.fspath(folder)!r}).")
    with world.alone():
        typer.echo(_verdict(posterior, used))


def _resume_table(folder: Path, quiet: bool, as_json: bool) -> None:
    from credibly.cli.fit import tell
    from credibly.storage.manifest import parse_manifest
    from credibly.tables.folder import read_facts
    from credibly.tables.run import resume_table

    silent = quiet or as_json
    inner, ended = folder / "posterior", read_facts(folder)["status"] == "complete"
    if not silent:
        if ended:
            typer.echo("It has ended already.")
        elif inner.is_dir() and (manifest := parse_manifest(inner)).get("streamed"):
            typer.echo(_what(manifest))
            typer.echo(_how_far(manifest))
    tell(resume_table(folder, progress=False if silent else None), quiet=quiet, as_json=as_json, open_page=False)


# -- what is told --------------------------------------------------------------------------------------------------------
def _what(manifest: dict[str, Any]) -> str:
    """One line on what the run is."""
    settings = manifest["record"]["settings"]
    method = str(settings.get("kind", manifest["record"]["method"])).split(".")[-1]
    chains, draws = settings.get("chains"), settings.get("draws")
    if manifest["kind"] == "density":
        of = f"the density {manifest['density']['name'] or '(without a name)'}, D = {manifest['density']['dim']:,}"
    else:
        sizes = [e["shape"] for e in manifest["layout"] if e["role"] != "fixed"]
        of = f"a network with D = {sum(math.prod(s) for s in sizes):,} random parameters on {manifest['record']['n']:,} rows"
    return f"{method}, {_count(chains, 'chain')} of {_count(draws, 'draw')}, seed {manifest['record']['seed']}: {of}."


def _how_far(manifest: dict[str, Any]) -> str:
    """One line on where it stands."""
    at = manifest["progress"]
    if manifest.get("state") is None:
        return "It was stopped before its first iteration."
    chains = at["chains"]
    parts = [
        f"{at['iteration']:,} of {at['of']:,} iterations are done (phase: {at['phase']})",
        f"{_count(chains[0]['draws'], 'draw')} a chain",
    ]
    if chains[0]["draws"] and "acceptance" in chains[0]:
        parts.append(f"acceptance {sum(c['acceptance'] for c in chains) / len(chains):.2f}")
        parts.append(_count(sum(c["divergences"] for c in chains), "divergence"))
    return f"{', '.join(parts)}."


def _stopped(folder: Path, script: str | None) -> str:
    """How far it came and how to go on."""
    from credibly.methods.resuming import sampled

    words = ["credibly", "resume", os.fspath(folder), *(["--problem", script] if script is not None else [])]
    try:
        manifest = sampled(folder / "posterior" if (folder / "table.json").is_file() else folder)
    except StoreError:
        return "stopped."
    at = manifest["progress"]
    done = (
        f"The folder holds {at['iteration']:,} of {at['of']:,} iterations"
        if manifest.get("state")
        else "Nothing is lost"
    )
    return f"stopped. {done}; go on with `{shlex.join(words)}`"


def _verdict(posterior: SampledPosterior, problem: Problem | Density | None) -> str:
    """Whether the draws can be used: by the predictions at some training rows where there is a network."""
    import textwrap

    from credibly.core.inputs import map_inputs
    from credibly.problem import Problem

    x, seen = None, ""
    if isinstance(problem, Problem):
        rows = min(JUDGED_ROWS, problem.n)
        picks = [round(i * (problem.n - 1) / max(1, rows - 1)) for i in range(rows)]
        x, seen = map_inputs(lambda t: t[picks], problem.x), f" (Judged at {_count(rows, 'training row')}.)"
    try:
        found = posterior.diagnostics(x)
    except InputError:
        return "There are too few draws for a verdict on them."
    return textwrap.fill(found.verdict + seen, 100)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
