"""The settings of a fit to a table: from the command line, from a TOML file, and back into one that gives the same run."""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from credibly.errors import InputError
from credibly.tables.recipe import TASKS, Recipe


@dataclass(frozen=True)
class Config:
    """What a fit to a table is made of.

    Attributes:
        table: the CSV or Parquet file. target: the column to predict.
        task: "auto" (from the column), "regression" or "classification".
        drop: columns that are left out.
        holdout: the share of the rows that is kept back to be predicted; 0 fits all of them.
        seed: of the split and of everything random in the fit.
        method, hidden, activation, prior_scale, noise, settings: as in `Recipe`.
        device: "cpu", "cuda", ...; None for the processor.
        table_sha256: of the file a stored run was made from; a file that has changed since is refused. None for no check.
    """

    table: str
    target: str
    task: str = "auto"
    drop: tuple[str, ...] = ()
    holdout: float = 0.2
    seed: int = 0
    method: str = "auto"
    hidden: tuple[int, ...] = (50,)
    activation: str = "silu"
    prior_scale: float | None = None
    noise: str | float = "learned"
    device: str | None = None
    table_sha256: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.task not in ("auto", *TASKS):
            raise InputError("--task", f"found {self.task!r}", f"Pass auto, {' or '.join(TASKS)}")
        number = isinstance(self.holdout, (int, float)) and not isinstance(self.holdout, bool)
        if not number or not 0 <= self.holdout <= 0.9:
            raise InputError(
                "--holdout", f"found {self.holdout!r}", "Pass a share of the rows from 0 to 0.9, such as 0.2"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InputError("--seed", f"found {self.seed!r}", "Pass a whole number from 0 to 2**63 - 1")
        if any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in self.hidden):
            raise InputError("--hidden", f"found {list(self.hidden)}", "Pass widths from 1 up, such as 50 or 50,50")
        for key, names in (("table", (self.table,)), ("--target", (self.target,)), ("--drop", self.drop)):
            for name in names:
                if not isinstance(name, str) or not _is_text(name):
                    raise InputError(key, f"found {name!r}", "Pass a name that is text in UTF-8")
        self.recipe("regression")

    def recipe(self, task: str) -> Recipe:
        """The recipe, for a task that is known by now."""
        with as_options():
            return Recipe(
                task, self.hidden, self.activation, self.prior_scale, self.noise, self.method, dict(self.settings)
            )


@contextmanager
def as_options() -> Iterator[None]:
    """Refusals of a recipe name its fields; here they name the options that a user knows them by."""
    try:
        yield
    except InputError as error:
        option = {"settings": "--set"}.get(error.argument, f"--{error.argument.replace('_', '-')}")
        known = error.argument in ("task", "method", "activation", "prior_scale", "noise", "settings")
        raise InputError(option if known else error.argument, error.found, error.advice) from None


def _is_text(name: str) -> bool:
    """Whether a name can be written into a file; that of a file in another encoding cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


_FORMS: dict[str, tuple[type, ...]] = {
    "table": (str,), "target": (str,), "task": (str,), "drop": (list,), "holdout": (int, float), "seed": (int,),
    "method": (str,), "hidden": (list, int), "activation": (str,), "prior_scale": (int, float), "noise": (str, int, float),
    "device": (str,), "table_sha256": (str,), "settings": (dict,),
}  # fmt: skip


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a TOML file, as fields of `Config`. Its table is looked for beside the file unless it is absolute."""
    file = Path(path)
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("--config", f"there is no file {os.fspath(path)!r}", "Name a TOML file") from None
    except OSError as error:
        raise InputError(
            "--config", f"{os.fspath(path)!r} cannot be read ({error.strerror})", "Name a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("--config", f"{os.fspath(path)!r} is not TOML ({error})", "Mend the line it names") from None
    for key, value in found.items():
        if key not in _FORMS:
            near = get_close_matches(key, _FORMS, 1)
            advice = f"Is it {near[0]!r}?" if near else f"The settings are {', '.join(_FORMS)}"
            raise InputError("--config", f"{file.name} has {key!r}, which is no setting", advice)
        if isinstance(value, bool) or not isinstance(value, _FORMS[key]):
            forms = " or ".join(form.__name__ for form in _FORMS[key])
            raise InputError("--config", f"{key} in {file.name} is {value!r}", f"Its type has to be {forms}")
    for key in ("drop", "hidden"):
        if key in found:
            found[key] = tuple(found[key]) if isinstance(found[key], list) else (found[key],)
    if "settings" in found:  # TOML has no word for None
        found["settings"] = {k: None if v == "none" else v for k, v in found["settings"].items()}
    if found.get("table") and not Path(found["table"]).is_absolute():
        found["table"] = os.fspath(file.parent / found["table"])
    return found


def write_config(config: Config, remarks: Mapping[str, str] | None = None) -> str:
    """The settings as TOML text that `read_config` reads back; remarks stand behind the settings they are for."""
    lines = ["# The settings of this run: `credibly fit --config THIS_FILE --out NEW_FOLDER` makes it again."]
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    settings = values.pop("settings")
    for key, value in values.items():
        if value is not None:
            remark = f"  # {remarks[key]}" if remarks and key in remarks else ""
            lines.append(f"{key} = {_toml(value)}{remark}")
    if settings:
        lines += [
            "",
            "[settings]",
            *(f"{_key(key)} = {_toml(value)}" for key, value in settings.items()),
        ]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if plain else _quoted(name)


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_toml(v) for v in value)}]"
    return _quoted(str(value))


def _quoted(text: str) -> str:
    """A TOML basic string."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(c, c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}") for c in text) + '"'


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Settings of a method from the command line, `draws=500`: numbers, true/false, lists and words as TOML has them."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not key.isidentifier() or not value:
            raise InputError("--set", f"found {pair!r}", "Pass NAME=VALUE, such as draws=500")
        try:
            found[key] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            found[key] = None if value.lower() == "none" else value
    return found
