"""A fit whose processes were lost and started again by the launcher: the same command goes on with what it had begun."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

from credibly.distributed import world
from credibly.distributed.world import World
from credibly.errors import StoreError
from credibly.storage.manifest import parse_manifest
from credibly.tables.folder import beside, check_out, is_table_run, read_facts, swap
from credibly.tables.run import Prepared, TableRun, fit_table, resume_table, stored_config


def check_place(folder: Path, force: bool) -> None:
    """Refuses a place that is taken, before any work; what this command itself may have begun is looked at later."""
    everyone = world.current()
    again = _started_again(everyone)
    if everyone.leader and not (again and _begun(folder, force)):
        check_out(folder, force)


def fit_or_go_on(
    prepared: Prepared, out: str | os.PathLike[str], *, force: bool = False, progress: bool | None = None
) -> TableRun:
    """`fit_table`, or the rest of it where the same fit was begun before its processes were started again."""
    folder, everyone = Path(out), world.current()
    place = None
    if _started_again(everyone):
        found = _to_go_on_with(prepared, folder, force) if everyone.leader else None
        place = everyone.gather(None if found is None else os.fspath(found))[0]
    if place is None:
        return fit_table(prepared, folder, force=force, progress=progress)
    done = resume_table(place, progress=progress)
    if Path(place) == folder:
        return done
    if everyone.leader:
        swap(Path(place), folder)
    everyone.barrier()
    return TableRun.load(folder)


def _started_again(everyone: World) -> bool:
    """Whether the launcher has started this again: on any host, since each counts for itself; a single process too."""
    said = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return any(everyone.gather(everyone.restarts or (int(said) if said.isdigit() else 0)))


def _begun(folder: Path, force: bool) -> Path | None:
    """Where a fit to this place would have been begun; one that replaces another is made beside it."""
    place = beside(folder) if force else folder
    return place if is_table_run(place) else None


def _to_go_on_with(prepared: Prepared, folder: Path, force: bool) -> Path | None:
    """The folder of the same fit; one in which there is nothing to go on with yet is taken away."""
    place = _begun(folder, force)
    try:
        facts = None if place is None else read_facts(place)
    except StoreError:
        return None  # it is looked at again, and refused, as the place of a new fit
    if place is None or facts is None:
        return None
    if facts["config"] != json.loads(json.dumps(dataclasses.asdict(stored_config(prepared)))):
        return None
    try:
        parse_manifest(place / "posterior")
    except StoreError:
        shutil.rmtree(place, ignore_errors=True)
        return None
    return place
