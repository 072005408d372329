"""Configuration of a fit to a table: from options or a TOML file, and back to a TOML file that reproduces the run."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from credibly.core.checks import check_choice, check_integer, is_integer, is_real
from credibly.errors import InputError
from credibly.predictive.transforms import CHOICES
from credibly.tables.columns.scaling import KINDS
from credibly.tables.recipe import TASKS, Recipe
from credibly.tables.tuning import RULES

TUNED = ("folds", "none", *RULES)

CLASS_WEIGHTS = ("balanced",)


@dataclass(frozen=True)
class Config:
    """Configuration of a fit to a table.

    Attributes:
        table: file with a row per observation.
        target: column to predict.
        task: a task of `Recipe`, or "auto", which infers it from the target column.
        drop: columns to leave out.
        holdout: fraction of the rows whose predictions by a fit to the others give the metrics; 0 for metrics on the
            training rows; None for five folds, in which every row is predicted, or a tenth of many rows. The model
            itself is always fitted to all rows.
        seed: seed of the split and of the fit.
        method, hidden, activation, prior_scale, noise, inputs, embedding, settings, noise_floor: as in `Recipe`; None
            or "auto" is chosen by `tune`.
        device: "cpu", "cuda", ...; None for the CPU.
        table_sha256: checksum of the file that a stored run was fitted to. A file that has changed since is rejected;
            None skips the check.
        weight: column with the weights of the rows in the fit; None for ones.
        class_weight: "balanced" gives every class the same total weight in the fit; None for rows as they are.
        transform: of a regression target: "none", "log", "log1p", "power" or "logit", or "auto".
        order: levels of an ordinal target from low to high; () if they are numbers.
        event: column that holds 1 for an observed event and 0 for a censored time, for survival.
        na: cells that mark a missing value, beside the usual ones.
        group: column whose groups stay together in every split, such as customers; not an input.
        time: column with the time of the rows, of which the latest are predicted for the metrics.
        tune: how to choose what is left open: "folds" (see `credibly.tables.choices.search`), "rows" or "evidence" (see
            `credibly.tables.tuning`), or "none" for fixed defaults.
        conformal: whether intervals and prediction sets with a coverage guarantee are made from the folds.
    """

    table: str
    target: str
    task: str = "auto"
    drop: tuple[str, ...] = ()
    holdout: float | None = None
    seed: int = 0
    method: str = "auto"
    hidden: tuple[int, ...] | None = None
    activation: str = "silu"
    prior_scale: float | None = None
    noise: str | float = "auto"
    device: str | None = None
    table_sha256: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight: str | None = None
    class_weight: str | None = None
    transform: str = "auto"
    order: tuple[str, ...] = ()
    event: str | None = None
    na: tuple[str, ...] = ()
    group: str | None = None
    time: str | None = None
    inputs: str = "auto"
    embedding: bool | None = None
    tune: str = "folds"
    conformal: bool = True
    noise_floor: float = 0.0

    def __post_init__(self) -> None:
        check_choice("--task", self.task, ("auto", *TASKS))
        if self.class_weight is not None:
            check_choice("--class-weight", self.class_weight, CLASS_WEIGHTS)
        check_choice("--transform", self.transform, ("auto", *CHOICES))
        check_choice("--inputs", self.inputs, ("auto", *KINDS))
        check_choice("--tune", self.tune, TUNED)
        if self.holdout is not None and (not is_real(self.holdout) or not 0 <= self.holdout <= 0.9):
            raise InputError("--holdout", f"must be a fraction of the rows from 0 to 0.9, got {self.holdout!r}")
        check_integer("--seed", self.seed, least=0, most=2**63 - 1)
        if self.hidden is not None and not all(is_integer(width) and width >= 1 for width in self.hidden):
            raise InputError("--hidden", f"must be positive integers such as 50 or 50,50, got {list(self.hidden)}")
        roles = (self.weight, self.event, self.group, self.time)
        weight, event, group, time = (() if name is None else (name,) for name in roles)
        named: dict[str, tuple[str, ...]] = {
            "table": (self.table,), "--target": (self.target,), "--drop": self.drop, "--weight": weight,
            "--order": self.order, "--event": event, "--na": self.na, "--group": group, "--time": time,
        }  # fmt: skip
        for key, names in named.items():
            for name in names:
                if not isinstance(name, str) or not _is_text(name):
                    raise InputError(key, f"must be text that UTF-8 can encode, got {name!r}")
        self.recipe("counts" if self.noise == "poisson" else "regression")

    def recipe(self, task: str) -> Recipe:
        """Return the recipe for a task that has been determined, with fixed defaults for what is left open."""
        with as_options():
            return Recipe(
                task,
                (50,) if self.hidden is None else self.hidden,
                self.activation,
                self.prior_scale,
                "learned" if self.noise == "auto" else self.noise,
                self.method,
                dict(self.settings),
                bool(self.embedding),
                "standard" if self.inputs == "auto" else self.inputs,
                "none" if self.transform == "auto" else self.transform,
                self.noise_floor,
            )


@contextmanager
def as_options() -> Iterator[None]:
    """Re-raise the errors of a recipe with command-line options in place of its field names."""
    try:
        yield
    except InputError as error:
        option = {"settings": "--set"}.get(error.argument, f"--{error.argument.replace('_', '-')}")
        known = error.argument in ("task", "method", "activation", "prior_scale", "noise", "settings")
        raise InputError(option if known else error.argument, error.found, error.advice) from None


def _is_text(name: str) -> bool:
    """Return whether a name can be encoded; a file name in another encoding cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


_TYPES: dict[str, tuple[type, ...]] = {
    "table": (str,), "target": (str,), "task": (str,), "drop": (list,), "weight": (str,), "na": (list,),
    "class_weight": (str,),
    "group": (str,), "time": (str,), "tune": (str,), "inputs": (str,), "embedding": (bool,),
    "conformal": (bool,),
    "holdout": (int, float), "seed": (int,),
    "method": (str,), "hidden": (list, int), "activation": (str,), "prior_scale": (int, float),
    "noise": (str, int, float), "noise_floor": (int, float),
    "transform": (str,), "order": (list,), "event": (str,), "device": (str,),
    "table_sha256": (str,), "settings": (dict,),
}  # fmt: skip


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings in a TOML file as fields of `Config`. A relative table path is relative to the file."""
    file = Path(path)
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("--config", f"no such file: {os.fspath(path)!r}", "Pass a TOML file") from None
    except OSError as error:
        raise InputError("--config", f"cannot read {os.fspath(path)!r} ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("--config", f"{os.fspath(path)!r} is not valid TOML ({error})") from None
    for key, value in found.items():
        if key not in _TYPES:
            near = get_close_matches(key, _TYPES, 1)
            advice = f"Did you mean {near[0]!r}?" if near else f"The settings are {', '.join(_TYPES)}"
            raise InputError("--config", f"unknown setting {key!r} in {file.name}", advice)
        if isinstance(value, bool) != (_TYPES[key] == (bool,)) or not isinstance(value, _TYPES[key]):
            types = " or ".join(kind.__name__ for kind in _TYPES[key])
            raise InputError("--config", f"{key} in {file.name} must be of type {types}, got {value!r}")
    for key in ("drop", "hidden", "order", "na"):
        if key in found:
            found[key] = tuple(found[key]) if isinstance(found[key], list) else (found[key],)
    # A code such as -999 may be written without quotes.
    if "na" in found:
        found["na"] = tuple(str(value) if is_real(value) else value for value in found["na"])
    # TOML has no null: "none" stands for None.
    if "settings" in found:
        found["settings"] = {k: None if v == "none" else v for k, v in found["settings"].items()}
    if found.get("table") and not Path(found["table"]).is_absolute():
        found["table"] = os.fspath(file.parent / found["table"])
    return found


def write_config(config: Config, remarks: Mapping[str, str] | None = None) -> str:
    """Return the settings as TOML text that `read_config` reads back, headed by remarks on individual settings."""
    import tomli_w

    lines = ["# The settings of this run. To reproduce it: credibly fit --config THIS_FILE --out NEW_FOLDER"]
    lines += [f"# {key}: {remark}" for key, remark in (remarks or {}).items()]
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    settings = values.pop("settings")
    values = {key: _toml_value(value) for key, value in values.items() if value is not None}
    if settings:
        values["settings"] = {key: _toml_value(value) for key, value in settings.items()}
    return "\n".join(lines) + "\n" + tomli_w.dumps(values)


def _toml_value(value: Any) -> Any:
    """Return a value that TOML can represent: None is "none", as TOML has no null; other objects are their text."""
    if value is None:
        return "none"
    if isinstance(value, (tuple, list)):
        return [_toml_value(v) for v in value]
    return value if isinstance(value, (bool, int, float)) else str(value)


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Parse settings of a method such as `draws=500`: values are TOML literals, anything else is a string."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not key.isidentifier() or not value:
            raise InputError("--set", f"must be NAME=VALUE, such as draws=500, got {pair!r}")
        try:
            found[key] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            found[key] = None if value.lower() == "none" else value
    return found
