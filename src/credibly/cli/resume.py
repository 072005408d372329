"""`credibly resume`: continues a run that was stopped."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from credibly.cli.early_checks import check_input_folder
from credibly.cli.error_handling import STOPPED, end, handle_errors
from credibly.cli.output import echo
from credibly.cli.processes import is_leader
from credibly.cli.user_script import check_reference, load_problem
from credibly.errors import InputError, PeerError, StoreError

if TYPE_CHECKING:
    from credibly.inference.density import Density
    from credibly.posterior.base import Posterior
    from credibly.problem import Problem

# Number of training rows at which the verdict examines predictions.
DIAGNOSED_ROWS = 32


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `credibly fit` or `fit(..., out=RUN)`.")],
    problem: Annotated[
        str | None,
        typer.Option(
            metavar="SCRIPT.py:NAME",
            help="Your script, and the name of the problem in it or of a function that returns it. Needed for a custom"
            " network class, a density, or data too large to be stored.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only the path of the folder, or of the page of a table.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; for runs of `credibly fit` only.")
    ] = False,
) -> None:
    """Resume a run that was stopped; the draws are identical to those of an uninterrupted run.

    The folder survives Ctrl-C, a lost machine and kill -9, and the run continues from
    its last checkpoint. Ctrl-C stops it again. The folder is one of `credibly fit`,
    or of `fit(..., out=RUN)` in Python.
    """
    with handle_errors(shared=True):
        check_input_folder(folder, "RUN", "Pass the --out of `credibly fit`, or the `out` of a fit in Python")
        if problem is not None:
            check_reference(problem)
        try:
            if problem is None and (folder / "table.json").is_file():
                _resume_table(folder, quiet, as_json)
            elif as_json:
                raise InputError("--json", f"{folder} is not a run of `credibly fit`", "Leave it out")
            else:
                _resume(folder, problem, quiet)
        except KeyboardInterrupt:
            end(_stopped(folder, problem), STOPPED, kind="Interrupted")
        except PeerError as error:
            error.add_note(_stopped(folder, problem).removeprefix("stopped. "))
            raise


def _resume(folder: Path, script: str | None, quiet: bool) -> None:
    from credibly.distributed import world
    from credibly.methods.resuming import resumable_manifest, resume_with_problem

    manifest = resumable_manifest(folder)
    complete = manifest["status"] == "complete"
    if quiet and complete:
        echo(os.fspath(folder))
        return
    if not quiet:
        echo(_describe(manifest))
    if complete:
        echo(f"The run is already complete. Load it with credibly.load({os.fspath(folder)!r}).")
        return
    if not quiet:
        echo(_progress(manifest))
    mine = load_problem(script) if script is not None else None
    posterior, used = resume_with_problem(folder, mine, progress=False if quiet else None)
    if quiet or not is_leader():
        echo(os.fspath(folder))
        return
    echo(f"Done. Load it with credibly.load({os.fspath(folder)!r}).")
    with world.alone():
        echo(_verdict(posterior, used))


def _resume_table(folder: Path, quiet: bool, as_json: bool) -> None:
    from credibly.cli.fit import report_run
    from credibly.storage.manifest import parse_manifest
    from credibly.storage.sealed import read_facts
    from credibly.tables.folder import saved_folds
    from credibly.tables.run import resume_table

    silent = quiet or as_json
    inner, facts = folder / "posterior", read_facts(folder)
    complete = facts["status"] == "complete"
    if not silent:
        if complete:
            echo("The run is already complete.")
        elif inner.is_dir() and _is_resumable(manifest := parse_manifest(inner)):
            echo(_describe(manifest))
            echo(_progress(manifest))
        elif not inner.is_dir():
            echo(f"{saved_folds(folder, facts)} of {_count(facts['folds'], 'fit')} to folds are done.")
    report_run(resume_table(folder, progress=False if silent else None), quiet=quiet, as_json=as_json, open_page=False)


def _is_resumable(manifest: dict[str, Any]) -> bool:
    return bool(manifest.get("streamed")) or manifest["kind"] == "training"


# -- messages --------------------------------------------------------------------------------------------------------
def _describe(manifest: dict[str, Any]) -> str:
    """Return a line that describes the run."""
    settings = manifest["record"]["settings"]
    if manifest["kind"] == "training":
        kind = str(settings.get("kind", manifest["record"]["method"])).split(".")[-1]
        return f"{kind}, seed {manifest['record']['seed']}: a network on {manifest['record']['n']:,} rows."
    method = str(settings.get("kind", manifest["record"]["method"])).split(".")[-1]
    chains, draws = settings.get("chains"), settings.get("draws")
    if manifest["kind"] == "density":
        of = f"the density {manifest['density']['name'] or '(without a name)'}, D = {manifest['density']['dim']:,}"
    else:
        sizes = [e["shape"] for e in manifest["layout"] if e["role"] != "fixed"]
        dim = sum(math.prod(s) for s in sizes)
        of = f"a network with D = {dim:,} random parameters on {manifest['record']['n']:,} rows"
    return f"{method}, {_count(chains, 'chain')} of {_count(draws, 'draw')}, seed {manifest['record']['seed']}: {of}."


def _progress(manifest: dict[str, Any]) -> str:
    """Return a line on the progress of the run."""
    if manifest["kind"] == "training":
        return _training_progress(manifest)
    at = manifest["progress"]
    if manifest.get("state") is None:
        return "It was stopped before the first iteration."
    chains = at["chains"]
    parts = [
        f"{at['iteration']:,} of {at['of']:,} iterations are done (phase: {at['phase']})",
        f"{_count(chains[0]['draws'], 'draw')} per chain",
    ]
    if chains[0]["draws"] and "acceptance" in chains[0]:
        parts.append(f"acceptance {sum(c['acceptance'] for c in chains) / len(chains):.2f}")
        parts.append(_count(sum(c["divergences"] for c in chains), "divergence"))
    return f"{', '.join(parts)}."


def _training_progress(manifest: dict[str, Any]) -> str:
    """Return a line on the progress of a fit that trains."""
    facts = manifest["training"].get("facts")
    if facts is None:
        return "It was stopped before the first step."
    stage = manifest["training"]["stage"]
    before = f" of training number {stage + 1}, after {_count(stage, 'training')}" if stage else ""
    return f"{facts['done']:,} of {facts['history']['steps_planned']:,} steps{before} are done."


def _stopped(folder: Path, script: str | None) -> str:
    """Return how far the run got and how to resume it."""
    from credibly.methods.resuming import resumable_manifest

    command = ["credibly", "resume", os.fspath(folder), *(["--problem", script] if script is not None else [])]
    try:
        manifest = resumable_manifest(folder / "posterior" if (folder / "table.json").is_file() else folder)
    except StoreError:
        if (folder / "table.json").is_file():
            return f"stopped. Finished fits to folds are kept; resume with `{shlex.join(command)}`"
        return "stopped."
    at = manifest.get("progress", {})
    done = "Nothing is lost"
    if manifest["kind"] == "training":
        done = f"So far: {_training_progress(manifest).removesuffix('.')}"
    elif manifest.get("state"):
        done = f"The folder holds {at['iteration']:,} of {at['of']:,} iterations"
    return f"stopped. {done}; resume with `{shlex.join(command)}`"


def _verdict(posterior: Posterior, problem: Problem | Density | None) -> str:
    """Return the verdict of the diagnostics, at some training rows if there is a network."""
    import textwrap

    from credibly.core.inputs import map_inputs
    from credibly.posterior.draws import SampledPosterior
    from credibly.problem import Problem

    if not isinstance(posterior, SampledPosterior) or not posterior.statistics:
        return f"{posterior!r}."

    x, y, basis = None, None, ""
    if isinstance(problem, Problem):
        rows = min(DIAGNOSED_ROWS, problem.n)
        picks = [round(i * (problem.n - 1) / max(1, rows - 1)) for i in range(rows)]
        x, likelihood = map_inputs(lambda t: t[picks], problem.x), problem.likelihood
        y = problem.y[picks] if likelihood.support == "class" else likelihood.restore(problem.y[picks])
        basis = f" (Based on predictions at {_count(rows, 'training row')}.)"
    try:
        found = posterior.diagnostics(x, y)
    except InputError:
        return "Too few draws for a verdict."
    return textwrap.fill(found.verdict + basis, 100)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
