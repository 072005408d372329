"""Options shared by several commands, with their shell completion. Importing it does not load torch."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated

import typer

_METHOD_NAME = re.compile(r'^    name: ClassVar\[str\] = "(\w+)"$', re.MULTILINE)


def _method_names() -> list[str]:
    """Return the names in METHODS, from the source of the methods: importing them loads torch, for two seconds."""
    if "credibly.methods" in sys.modules:
        return list(sys.modules["credibly.methods"].METHODS)
    files = sorted((Path(__file__).parents[1] / "methods").glob("*.py"))
    return [name for file in files for name in _METHOD_NAME.findall(file.read_text(encoding="utf-8"))]


# Choices of options, in the order in which the library lists them: importing it would take seconds.
CHOICES = {
    "--task": ("auto", "regression", "classification", "counts", "ordinal", "proportion", "survival"),
    "--class-weight": ("balanced",),
    "--transform": ("auto", "none", "log", "log1p", "power", "logit"),
    "--inputs": ("auto", "standard", "quantile", "categories", "clipped"),
    "--tune": ("folds", "none", "rows", "evidence"),
}


def _complete(choices: tuple[str, ...], incomplete: str) -> list[str]:
    """Return the choices that start with what has been typed so far."""
    return [choice for choice in choices if choice.startswith(incomplete)]


def _methods(incomplete: str) -> list[str]:
    return _complete(("auto", *_method_names()), incomplete)


def _columns(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the columns of the table given earlier on the line."""
    # On an incomplete line the arguments are not assigned to parameters yet.
    for argument in [ctx.params.get("table"), *ctx.args]:
        if argument is not None and Path(str(argument)).is_file():
            return [name for name in _names(Path(str(argument))) if name.startswith(incomplete)]
    return []


def complete_columns(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the last name of a comma-separated list of columns."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _columns(ctx, last)]


def _method_list(incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _method_names() if name.startswith(last)]


def _tasks(incomplete: str) -> list[str]:
    return _complete(CHOICES["--task"], incomplete)


def _transforms(incomplete: str) -> list[str]:
    return _complete(CHOICES["--transform"], incomplete)


def _noises(incomplete: str) -> list[str]:
    return _complete(("learned", "heteroscedastic", "student", "heteroscedastic-student", "poisson"), incomplete)


def _rules(incomplete: str) -> list[str]:
    return _complete(CHOICES["--tune"], incomplete)


def _inputs(incomplete: str) -> list[str]:
    return _complete(CHOICES["--inputs"], incomplete)


def _names(table: Path) -> list[str]:
    """Return the columns of a file from its beginning; none on failure, as completion cannot report errors."""
    try:
        if table.suffix == ".parquet":
            from pyarrow.parquet import read_schema

            return list(read_schema(table).names)
        if table.suffix in (".feather", ".arrow"):
            from pyarrow.ipc import open_file

            return list(open_file(str(table)).schema.names)
        openers: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        opener = openers.get(table.suffix, open)
        with opener(table, "rt", encoding="utf-8-sig", newline="") as handle:
            first = handle.readline(1 << 16)
        if ".jsonl" in table.suffixes or ".ndjson" in table.suffixes:
            return list(json.loads(first))
        return [name.strip() for name in next(csv.reader([first], delimiter=max(",;\t|", key=first.count)), [])]
    except (OSError, EOFError, ValueError, csv.Error, lzma.LZMAError):
        return []


TABLE = typer.Argument(
    metavar="TABLE", help="CSV, Parquet, Excel, Feather or JSON lines file with a row per observation."
)
Target = Annotated[
    str | None,
    typer.Option(
        help="Column to predict, or several numeric ones separated by commas.", autocompletion=complete_columns
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        help="regression, classification, counts, ordinal (ordered classes), proportion (0 to 1) or survival (censored"
        " times). (Default: inferred from the target column.)",
        autocompletion=_tasks,
    ),
]
Transform = Annotated[
    str | None,
    typer.Option(
        help="Transform of a regression target before the fit: none, log (keeps predictions positive), log1p, power or"
        " logit; predictions are in the units of the target. (Default: none, or chosen by `fit --tune`.)",
        autocompletion=_transforms,
    ),
]
Order = Annotated[
    str | None,
    typer.Option(metavar="LOW,..,HIGH", help="Levels of an ordinal target from low to high, unless they are numbers."),
]
Event = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Column that holds 1 if the event was observed at the target time and 0 if the time is censored; makes the"
        " task survival.",
        autocompletion=_columns,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="One of `credibly methods`, or auto, which picks HMC when it should finish within about two minutes and a"
        " deep ensemble otherwise. (Default: auto.)",
        autocompletion=_methods,
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Methods to compare, such as map,ensemble,hmc. (Default: all.)",
        autocompletion=_method_list,
    ),
]
Drop = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Columns to leave out, such as row numbers.", autocompletion=complete_columns),
]
Weight = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Column with the weights of the rows in the fit, such as survey weights or counts; not an input.",
        autocompletion=_columns,
    ),
]
ClassWeight = Annotated[
    str | None,
    typer.Option(
        metavar="balanced",
        help="balanced: every class has the same total weight in the fit. Probabilities are then those of equally"
        " frequent classes. (Default: rows as they are.)",
    ),
]
Na = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Cells that mark a missing value, such as unknown,-999, beside the usual ones (empty, NA, n/a, null, ?;"
        " and -, none, missing among numbers).",
    ),
]
Holdout = Annotated[
    float | None,
    typer.Option(
        help="Fraction of the rows held out for the metrics, predicted by a fit to the others; 0 for none. The model is"
        " fitted to all rows in any case. (Default: five folds, in which every row is predicted.)"
    ),
]
HeldOut = Annotated[
    float | None,
    typer.Option(help="Fraction of the rows held out from every method, for the metrics; 0 for none. (Default: 0.2.)"),
]
Hidden = Annotated[
    str | None,
    typer.Option(
        metavar="50,50",
        help='Widths of the hidden layers; "none" for a linear model. (Default: 50, or chosen by `fit --tune`.)',
    ),
]
Noise = Annotated[
    str | None,
    typer.Option(
        help="Noise model of a regression: learned, heteroscedastic (depends on the inputs), student (heavy tails),"
        " heteroscedastic-student (both), or a known value in standard deviations of the target. (Default: learned, or"
        " chosen by `fit --tune`.)",
        autocompletion=_noises,
    ),
]
PriorScale = Annotated[
    float | None,
    typer.Option(
        help="Prior standard deviation of the weights times the square root of the fan-in. (Default: 1 for regression,"
        " 2 for classification, or chosen by `fit --tune`.)"
    ),
]
Tune = Annotated[
    str | None,
    typer.Option(
        help="How to choose settings not given (noise, prior scale, transforms, network): by cross-validation (folds),"
        " by marginal likelihood (evidence), by validation rows (rows), or not at all (none). (Default: folds.)",
        autocompletion=_rules,
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        help="Encoding of numeric columns: standard, quantile (normal scores), categories (an input for each value of"
        " columns with few), or auto. (Default: auto.)",
        autocompletion=_inputs,
    ),
]
Conformal = Annotated[
    bool | None,
    typer.Option(
        "--conformal/--no-conformal",
        help="Calibrate intervals and prediction sets on the folds, for a coverage guarantee. (Default: yes.)",
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Column whose groups stay together when rows are held out, such as customers, if new ones are to be"
        " predicted; not an input.",
        autocompletion=_columns,
    ),
]
Time = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Column with the time of the rows, if later rows are to be predicted: the latest are held out.",
        autocompletion=_columns,
    ),
]
Activation = Annotated[
    str | None, typer.Option(help="Activation function: silu, gelu, tanh, relu, ... (Default: silu.)")
]
Seed = Annotated[int | None, typer.Option(help="Random seed; the same seed gives the same results. (Default: 0.)")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ... (Default: cpu.)")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the method, such as draws=500 or members=20; repeatable.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with these settings, such as config.toml of a run; options override it."),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace an earlier run once the new one is complete; nothing else is replaced."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only the path of the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Open = Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")]


def split_names(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list of names."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())
