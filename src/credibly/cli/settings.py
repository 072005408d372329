"""From the options of the command line and a TOML file to the settings of a fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credibly.cli.options import listed
from credibly.errors import InputError

if TYPE_CHECKING:
    from credibly.tables.config import Config


def config_from(file: Path | None, given: dict[str, Any], pairs: list[str] | None) -> Config:
    """The settings in a file, with those given on the command line in their place."""
    from credibly.tables.config import Config, parse_settings, read_config

    values: dict[str, Any] = read_config(file) if file is not None else {}
    if given.get("method") is not None and values.get("method", given["method"]) != given["method"]:
        values.pop("settings", None)  # they are another method's
    for key, value in given.items():
        if value is not None:
            values[key] = _FORMS[key](value) if key in _FORMS else value
    if given.get("table") is not None:
        values.pop("table_sha256", None)  # the file of the stored run is not the one that is meant
    for key, advice in (
        ("table", "Name a CSV or Parquet file, or a --config that does"),
        ("target", "Name the column to predict: --target COLUMN"),
    ):
        if not values.get(key):
            raise InputError(key if key == "table" else "--target", "none was given", advice)
    values["settings"] = {**values.get("settings", {}), **parse_settings(pairs or [])}
    return Config(**values)


def _hidden(text: str) -> tuple[int, ...]:
    if text.strip().lower() in ("none", "0", "linear"):
        return ()
    try:
        return tuple(int(word) for word in listed(text))
    except ValueError:
        raise InputError("--hidden", f"found {text!r}", "Pass widths, such as 50 or 50,50, or none") from None


def _noise(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


_FORMS: dict[str, Callable[[Any], Any]] = {"hidden": _hidden, "noise": _noise, "drop": listed, "table": str}
