"""One table of the benchmark, and the folder that holds the tables: NAME.parquet, NAME.npz and tables.json.

A cache folder needs pyarrow and numpy alone, so the benchmark runs on machines without the packages that the tables
come from. NAME.parquet has the columns, NAME.npz the row numbers train_0, test_0, train_1, ..., and tables.json what
the columns mean. Nothing in it is executed when it is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

Array = npt.NDArray[Any]
Task = Literal["regression", "classes", "counts"]

INDEX = "tables.json"


@dataclass(frozen=True)
class Table:
    """A table with its splits.

    Attributes:
        name: unique name.
        about: the target in words.
        source: the package or collection that the rows come from.
        task: regression, classes or counts.
        target: name of the target column.
        categorical: names of the columns with categories, stored as strings.
        group: column of the entity that rows belong to; a split never divides an entity, and the column is no input.
        dropped: columns of the source that were left out, with the reason.
        columns: all rows: inputs, the target and the group column.
        splits: row numbers for training and for testing, one pair per split.
    """

    name: str
    about: str
    source: str
    task: Task
    target: str
    categorical: tuple[str, ...]
    group: str | None
    dropped: str
    columns: pa.Table
    splits: tuple[tuple[Array, Array], ...]

    @property
    def inputs(self) -> list[str]:
        """Names of the input columns."""
        return [name for name in self.columns.column_names if name not in (self.target, self.group)]

    @property
    def numeric(self) -> list[str]:
        """Names of the numeric input columns."""
        return [name for name in self.inputs if name not in self.categorical]

    def y(self) -> Array:
        """Return the target of all rows: floats, or strings for classes."""
        values = self.columns.column(self.target)
        if self.task == "classes":
            return np.array([str(value) for value in values.to_pylist()])
        return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)

    def about_columns(self) -> dict[str, Any]:
        """Return the entry of this table in tables.json."""
        return {
            "about": self.about, "source": self.source, "task": self.task, "target": self.target,
            "categorical": list(self.categorical), "group": self.group, "dropped": self.dropped,
            "rows": self.columns.num_rows, "inputs": len(self.inputs), "splits": len(self.splits),
        }  # fmt: skip


def write_cache(folder: Path, tables: list[Table]) -> None:
    """Write tables into a cache folder, beside those that it has."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / INDEX
    index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for table in tables:
        parquet.write_table(table.columns, folder / f"{table.name}.parquet", compression="zstd")
        rows = {f"train_{i}": train for i, (train, _) in enumerate(table.splits)}
        rows |= {f"test_{i}": test for i, (_, test) in enumerate(table.splits)}
        numbers: dict[str, Any] = {key: value.astype(np.int32) for key, value in rows.items()}
        np.savez_compressed(folder / f"{table.name}.npz", **numbers)
        index[table.name] = table.about_columns()
    path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def cached(folder: Path) -> list[str]:
    """Return the names of the tables in a cache folder, in the order in which they were written."""
    path = folder / INDEX
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def read_cache(folder: Path, name: str) -> Table:
    """Read one table of a cache folder."""
    about = json.loads((folder / INDEX).read_text(encoding="utf-8"))[name]
    with np.load(folder / f"{name}.npz", allow_pickle=False) as found:
        splits = tuple((found[f"train_{i}"], found[f"test_{i}"]) for i in range(about["splits"]))
    return Table(
        name=name, about=about["about"], source=about["source"], task=about["task"], target=about["target"],
        categorical=tuple(about["categorical"]), group=about["group"], dropped=about["dropped"],
        columns=parquet.read_table(folder / f"{name}.parquet"), splits=splits,
    )  # fmt: skip
