"""Checks of paths and numbers on the command line that need no data. None of them loads torch or pyarrow.

The library checks again, for callers from Python. Here a bad path is refused before the second or two that importing
torch takes.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from credibly.cli.options import CHOICES
from credibly.cli.processes import is_distributed, is_restarted
from credibly.core.checks import check_choice, check_integer, is_real
from credibly.core.files import is_occupied
from credibly.errors import InputError
from credibly.storage.replacing import recover
from credibly.tables.files.sources import WRITTEN, source_of


def check_table(path: Path) -> None:
    """Raise unless the path is a readable file whose suffix is that of a table."""
    if path.exists() and not path.is_dir():
        check_file(path, "table")
    source_of(path)


def check_file(path: Path, argument: str, advice: str = "") -> None:
    """Raise unless the path is a readable file."""
    name = os.fspath(path)
    if path.is_dir():
        raise InputError(argument, f"{name!r} is a folder", "Pass a file")
    if not path.exists():
        raise InputError(argument, f"no such file: {name!r}", advice)
    if not os.access(path, os.R_OK):
        raise InputError(argument, f"cannot read {name!r} (Permission denied)", "Check its permissions")


def check_fit(table: Path | None, target: str | None, config: Path | None) -> None:
    """Raise unless options or a TOML file name a table to fit and a target."""
    if config is not None:
        check_file(config, "--config", "Pass a TOML file")
        table = table or _table_in(config)
    elif table is None or not os.fspath(table):
        raise InputError("table", "missing", "Pass a CSV or Parquet file, or a --config that names one")
    elif not target:
        raise InputError("--target", "missing", "Pass the column to predict: --target COLUMN")
    if table is not None:
        check_table(table)


def _table_in(config: Path) -> Path | None:
    """Return the table that a TOML file names, or None if it names none or cannot be read, which is reported later."""
    try:
        named = tomllib.loads(config.read_text(encoding="utf-8")).get("table")
    except (OSError, ValueError):
        return None
    return config.parent / named if isinstance(named, str) and named else None


def check_run(folder: Path) -> None:
    """Raise unless the folder is a run of `credibly fit`."""
    check_input_folder(folder, "RUN", "Pass the --out of `credibly fit`")
    if not (folder / "table.json").is_file():
        found = f"{os.fspath(folder)!r} is not a run of `credibly fit` (it has no table.json)"
        raise InputError("RUN", found, "Pass the --out of `credibly fit`")


def check_input_folder(folder: Path, argument: str, advice: str = "") -> None:
    """Raise unless the path is a readable folder."""
    name = os.fspath(folder)
    if not recover(folder) and not folder.exists():
        raise InputError(argument, f"no such folder: {name!r}", advice)
    if not folder.is_dir():
        raise InputError(argument, f"{name!r} is a file", advice or "Pass a folder")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise InputError(argument, f"cannot read {name!r} (Permission denied)", "Check its permissions")


def check_output_folder(folder: Path, force: bool = False) -> None:
    """Raise unless a run can be written to the folder, which is created with its parents if needed."""
    if folder.exists() and not folder.is_dir():
        raise InputError("--out", f"{folder} is a file", "Pass a folder")
    # After a restart by the launcher, the folder may hold the unfinished run of this same command.
    if is_occupied(folder) and not (force or is_distributed() or is_restarted()):
        raise InputError("--out", f"{folder} already exists", "Choose another folder, or pass --force to replace a run")
    _check_writable(next(parent for parent in (folder, *folder.absolute().parents) if parent.exists()))


def check_output_file(path: Path, force: bool = False) -> None:
    """Raise unless a table can be written to the path: a known suffix, in an existing folder, nothing there yet."""
    name = os.fspath(path)
    if path.is_dir():
        raise InputError("--out", f"{name!r} is a folder", "Pass a file name")
    if not path.name.lower().endswith(WRITTEN):
        raise InputError("--out", f"{name!r} has an unknown suffix", f"Pass one of {', '.join(WRITTEN)}")
    if (path.exists() or path.is_symlink()) and not force:
        raise InputError("--out", f"{name!r} already exists", "Choose another name, or pass --force to replace it")
    if not path.parent.is_dir():
        raise InputError("--out", f"no such folder: {os.fspath(path.parent)!r}", "Create it first")
    _check_writable(path.parent)


def _check_writable(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError("--out", f"{os.fspath(folder)!r} is a file", "Choose another folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError("--out", f"the folder {os.fspath(folder)!r} is not writable", "Choose another one")


def check_choices(**given: str | None) -> None:
    """Raise if an option with fixed choices, by the name of its parameter, is none of them."""
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is not None:
            check_choice(option, value, CHOICES[option])


def check_numbers(seed: int | None = None, holdout: float | None = None) -> None:
    """Raise if the seed or the held-out fraction is invalid for any table."""
    if seed is not None:
        check_integer("--seed", seed, least=0, most=2**63 - 1)
    if holdout is not None and (not is_real(holdout) or not 0 <= holdout <= 0.9):
        raise InputError("--holdout", f"must be a fraction of the rows from 0 to 0.9, got {holdout!r}")
