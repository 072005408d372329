"""Options that several commands share, and what a shell completes them with. Nothing here loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# The names in METHODS, written out so that help and completion need not load them; a test holds the two together.
METHOD_NAMES = ("mle", "map", "ensemble", "dropout", "bbb", "hmc", "sgld", "sghmc")


def _methods(incomplete: str) -> list[str]:
    return [name for name in ("auto", *METHOD_NAMES) if name.startswith(incomplete)]


def _columns(ctx: typer.Context, incomplete: str) -> list[str]:
    """Columns of the table that is named earlier on the line."""
    table = ctx.params.get("table")
    try:
        with open(str(table), encoding="utf-8") as handle:
            names = handle.readline().strip().lstrip("\ufeff").replace(";", ",").replace("\t", ",").split(",")
    except (OSError, UnicodeDecodeError):
        return []
    return [name for name in (n.strip('" ') for n in names) if name.startswith(incomplete)]


TABLE = typer.Argument(
    metavar="TABLE", help="A CSV or Parquet file with a column for each quantity and a row for each case."
)
Target = Annotated[str | None, typer.Option(help="The column to predict.", autocompletion=_columns)]
Task = Annotated[str | None, typer.Option(help="regression or classification; by default seen from the target column.")]
Method = Annotated[
    str | None,
    typer.Option(
        help="One of `credibly methods`, or auto, which takes HMC where it ends in a minute or two and an ensemble elsewhere.",
        autocompletion=_methods,
    ),
]
Drop = Annotated[str | None, typer.Option(metavar="A,B", help="Columns to leave out, such as row numbers.")]
Holdout = Annotated[
    float | None,
    typer.Option(
        help="Share of the rows kept back, which the figures in the report are of; 0 fits all rows. (Default: 0.2.)"
    ),
]
Hidden = Annotated[
    str | None,
    typer.Option(metavar="50,50", help='Widths of the hidden layers; "none" for the linear model. [default: 50]'),
]
Noise = Annotated[
    str | None,
    typer.Option(
        help="Of a regression: learned, heteroscedastic (it depends on the inputs), student (heavy tails), or a number, in"
        " deviations of the target. (Default: learned.)"
    ),
]
PriorScale = Annotated[
    float | None, typer.Option(help="Deviation of the weights before division by the root of the fan-in. (Default: 1.)")
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
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no words but the result's path.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Open = Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser at the end.")]


def listed(words: str | None) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(w.strip() for w in (words or "").split(",") if w.strip())
