"""Options that several commands share, and what a shell completes them with. Nothing here loads torch."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Annotated

import typer


def _method_names() -> list[str]:
    """Return the names in METHODS. This loads torch, so only the completion of a method may call it."""
    from credibly.methods import METHODS

    return list(METHODS)


def _methods(incomplete: str) -> list[str]:
    return [name for name in ("auto", *_method_names()) if name.startswith(incomplete)]


def _columns(ctx: typer.Context, incomplete: str) -> list[str]:
    """Columns of the table that is named earlier on the line."""
    words = [ctx.params.get("table"), *ctx.args]  # while a line is not complete its arguments are not told apart
    for word in words:
        if word is not None and Path(str(word)).is_file():
            return [name for name in _names(Path(str(word))) if name.startswith(incomplete)]
    return []


def _column_list(ctx: typer.Context, incomplete: str) -> list[str]:
    """The same after the last comma."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _columns(ctx, last)]


def _method_list(incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _method_names() if name.startswith(last)]


def _tasks(incomplete: str) -> list[str]:
    return [name for name in ("auto", "regression", "classification") if name.startswith(incomplete)]


def _noises(incomplete: str) -> list[str]:
    return [name for name in ("learned", "heteroscedastic", "student") if name.startswith(incomplete)]


def _rules(incomplete: str) -> list[str]:
    return [name for name in ("rows", "evidence") if name.startswith(incomplete)]


def _names(table: Path) -> list[str]:
    """The columns of a file, as well as they can be told in no time; completion has no other way to fail than by nothing."""
    try:
        if table.suffix == ".parquet":
            from pyarrow.parquet import read_schema

            return list(read_schema(table).names)
        opener = gzip.open if table.suffix == ".gz" else open
        with opener(table, "rt", encoding="utf-8-sig", newline="") as handle:
            first = handle.readline(1 << 16)
        return [name.strip() for name in next(csv.reader([first], delimiter=max(",;\t|", key=first.count)), [])]
    except (OSError, ValueError, csv.Error):
        return []


TABLE = typer.Argument(
    metavar="TABLE", help="A CSV or Parquet file with a column for each quantity and a row for each case."
)
Target = Annotated[str | None, typer.Option(help="The column to predict.", autocompletion=_columns)]
Task = Annotated[
    str | None,
    typer.Option(help="regression or classification; by default seen from the target column.", autocompletion=_tasks),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="One of `credibly methods`, or auto, which takes HMC where it ends in a minute or two and an ensemble elsewhere.",
        autocompletion=_methods,
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Methods to compare, such as map,ensemble,hmc. By default all of them.",
        autocompletion=_method_list,
    ),
]
Drop = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Columns to leave out, such as row numbers.", autocompletion=_column_list),
]
Holdout = Annotated[
    float | None,
    typer.Option(
        help="Share of the rows kept back, which the figures in the report are of; 0 fits all rows. (Default: 0.2.)"
    ),
]
Hidden = Annotated[
    str | None,
    typer.Option(metavar="50,50", help='Widths of the hidden layers; "none" for the linear model. (Default: 50.)'),
]
Noise = Annotated[
    str | None,
    typer.Option(
        help="Of a regression: learned, heteroscedastic (it depends on the inputs), student (heavy tails), or a number, in"
        " deviations of the target. (Default: learned.)",
        autocompletion=_noises,
    ),
]
PriorScale = Annotated[
    float | None,
    typer.Option(
        help="Deviation of the weights before division by the root of the fan-in. (Default: 1, or 2 for classes.)"
    ),
]
Tune = Annotated[
    str | None,
    typer.Option(
        help="Choose the prior's scale and the noise first: by rows held back (rows), or with the width by evidence (evidence).",
        autocompletion=_rules,
    ),
]
Activation = Annotated[
    str | None, typer.Option(help="Between the layers: silu, gelu, tanh, relu, ... (Default: silu.)")
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same result. (Default: 0.)")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ... (Default: cpu.)")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the method, such as draws=500 or members=20; may be given again.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A TOML file with these settings, such as config.toml of a run; options here win over it."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace what an earlier run left there, once the new one is whole; nothing else is."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no words but the result's path.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Open = Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser at the end.")]


def listed(words: str | None) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(w.strip() for w in (words or "").split(",") if w.strip())
