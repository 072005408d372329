"""Fits restarted by the launcher after a process was lost: the same command resumes its unfinished run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from credibly.distributed import world
from credibly.distributed.world import World
from credibly.errors import StoreError
from credibly.storage.replacing import replace_folder
from credibly.storage.sealed import read_facts
from credibly.tables.folder import check_out, is_table_run, staging_folder
from credibly.tables.prepared import Prepared, requested_config
from credibly.tables.run import TableRun, fit_table, resume_table


def check_out_or_begun(folder: Path, force: bool) -> None:
    """Raise if the folder is occupied, unless this command was restarted and may have begun the run in it."""
    everyone = world.current()
    restarted = _restarted(everyone)
    if everyone.leader and not (restarted and _begun(folder, force)):
        check_out(folder, force)


def fit_or_resume(
    prepared: Prepared,
    out: str | os.PathLike[str],
    choose: Callable[[Prepared], Prepared] = lambda prepared: prepared,
    *,
    force: bool = False,
    progress: bool | None = None,
) -> TableRun:
    """Fit a table, or resume the same fit if it was begun before its processes were restarted.

    `choose` selects the settings that were left open, and only for a new fit: a fit is recognised by the requested
    settings, not by the chosen ones, which may round differently the second time.
    """
    folder, everyone = Path(out), world.current()
    place = None
    if _restarted(everyone):
        found = _begun_fit(prepared, folder, force) if everyone.leader else None
        place = everyone.gather(None if found is None else os.fspath(found))[0]
    if place is None:
        if everyone.leader:
            check_out(folder, force)
        return fit_table(choose(prepared), folder, force=force, progress=progress)
    done = resume_table(place, progress=progress)
    if Path(place) == folder:
        return done
    if everyone.leader:
        replace_folder(Path(place), folder)
    everyone.barrier()
    return TableRun.load(folder)


def _restarted(everyone: World) -> bool:
    """Return whether the launcher has restarted any process. Every host keeps its own count."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return any(everyone.gather(everyone.restarts or (int(count) if count.isdigit() else 0)))


def _begun(folder: Path, force: bool) -> Path | None:
    """Return the run that a fit into this folder has begun, if any. A replacement is built beside the old run."""
    place = staging_folder(folder) if force else folder
    return place if is_table_run(place) else None


def _begun_fit(prepared: Prepared, folder: Path, force: bool) -> Path | None:
    """Return the folder of the same fit. Remove it if there is nothing to resume yet."""
    place = _begun(folder, force)
    try:
        facts = None if place is None else read_facts(place)
    except StoreError:
        # The folder is checked again, which raises.
        return None
    if place is None or facts is None:
        return None
    if facts.get("requested") != requested_config(prepared):
        return None
    if not facts["files"]:
        shutil.rmtree(place, ignore_errors=True)
        return None
    return place
