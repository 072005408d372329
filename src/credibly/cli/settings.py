"""The configuration of a fit, from command-line options and a TOML file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credibly.cli.options import split_names
from credibly.errors import InputError

if TYPE_CHECKING:
    from credibly.tables.config import Config


def config_from(file: Path | None, given: dict[str, Any], pairs: list[str] | None) -> Config:
    """Return the configuration in a file, overridden by the options given on the command line."""
    from credibly.tables.config import Config, parse_settings, read_config

    values: dict[str, Any] = read_config(file) if file is not None else {}
    if given.get("method") is not None and values.get("method", given["method"]) != given["method"]:
        # The settings in the file are those of another method.
        values.pop("settings", None)
    for key, value in given.items():
        if value is not None:
            values[key] = _PARSERS[key](value) if key in _PARSERS else value
    if given.get("table") is not None:
        # The checksum is that of the table in the stored run.
        values.pop("table_sha256", None)
    for key, advice in (
        ("table", "Pass a CSV or Parquet file, or a --config that names one"),
        ("target", "Pass the column to predict: --target COLUMN"),
    ):
        if not values.get(key):
            raise InputError(key if key == "table" else "--target", "missing", advice)
    values["settings"] = {**values.get("settings", {}), **parse_settings(pairs or [])}
    return Config(**values)


def _hidden(text: str) -> tuple[int, ...]:
    if text.strip().lower() in ("none", "0", "linear"):
        return ()
    try:
        return tuple(int(width) for width in split_names(text))
    except ValueError:
        raise InputError("--hidden", f"must be widths such as 50 or 50,50, or none, got {text!r}") from None


def _noise(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "hidden": _hidden,
    "noise": _noise,
    "drop": split_names,
    "order": split_names,
    "na": split_names,
    "table": str,
}
