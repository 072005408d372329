"""Messy tables: formatted numbers, dates, placeholders, stray cells and totals, the same in whole files and streams."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from credibly.tables.cells.conventions import Conventions, attach, conventions_of
from credibly.tables.files.reading import batches, read_table
from credibly.tables.preparation import Preparation


def put(folder: Path, columns: dict[str, list[Any]], name: str = "t.csv", delimiter: str = ",") -> Path:
    rows = zip(*columns.values())
    lines = [delimiter.join(f'"{cell}"' for cell in row) for row in [list(columns), *rows]]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def counted(pattern: str, count: int = 200) -> list[str]:
    return [pattern.format(i) for i in range(count)]


def test_formatted_columns_are_numbers_with_a_remark(tmp_path: Path) -> None:
    prices = [f"${1000 + 7 * i:,}" for i in range(50)]
    path = put(tmp_path, {"price": prices, "rate": counted("{}.5%", 50), "name": ["a", "b"] * 25})
    table = read_table(path)
    assert table["price"].to_pylist() == [1000.0 + 7 * i for i in range(50)]
    assert table["rate"].to_pylist() == [i + 0.5 for i in range(50)]
    known = Preparation.fit(table, "price")
    assert known.notes == ("the target is read as numbers: $1,000 is 1000",)
    assert {name: note for name, _, note in known.columns}["rate"] == "read as numbers: 0.5% is 0.5"
    ((batch, notes),) = batches(path, ["price", "rate"], ["price", "rate"], conventions=known.conventions)
    assert notes == []
    assert batch.column("price").to_pylist() == table["price"].to_pylist()
    assert batch.column("rate").to_pylist() == table["rate"].to_pylist()


def test_a_column_with_its_own_decimal_mark_is_read_so_in_every_file(tmp_path: Path) -> None:
    path = put(tmp_path, {"a": ["1.234,50", *counted("2.{:03}")], "y": counted("{}.5", 201)})
    known = Preparation.fit(read_table(path), "y")
    assert known.conventions.decimals == {"a": ","}
    known = Preparation.from_dict(json.loads(json.dumps(known.to_dict())))
    # Alone, these cells could as well be decimal points.
    new = put(tmp_path, {"a": ["2.001", "3.500"], "y": ["1.5", "2.5"]}, "new.csv")
    ((batch, notes),) = batches(new, ["a", "y"], ["a", "y"], conventions=known.conventions)
    assert batch.to_pydict() == {"a": [2001.0, 3500.0], "y": [1.5, 2.5]}
    assert notes == []
    assert read_table(new, conventions=known.conventions)["a"].to_pylist() == [2001.0, 3500.0]
    assert read_table(new)["a"].to_pylist() == [2.001, 3.5]
    # Also beside more stray cells than the training table may have.
    new = put(tmp_path, {"a": ["2.001", "soon"], "y": ["1.5", "2.5"]}, "new.csv")
    assert read_table(new, conventions=known.conventions)["a"].to_pylist() == [2001.0, None]


def test_thousands_in_a_file_with_decimal_commas(tmp_path: Path) -> None:
    columns = {"a": ["1.234", "999", "2.000"], "b": ["1,5", "2,5", "3,25"], "c": ["1.5", "2.25", "1.125"]}
    path = put(tmp_path, columns, delimiter=";")
    table = read_table(path)
    expected = {"a": [1234.0, 999.0, 2000.0], "b": [1.5, 2.5, 3.25], "c": [1.5, 2.25, 1.125]}
    assert table.to_pydict() == expected
    ((batch, notes),) = batches(path, list("abc"), list("abc"), conventions=conventions_of(table))
    assert batch.to_pydict() == expected
    assert notes == []


@pytest.mark.parametrize("mark", ["-", "--", "none", "None", "missing", "unknown", ".", "n.a"])
def test_placeholders_are_missing_among_numbers_and_dates_but_not_among_words(tmp_path: Path, mark: str) -> None:
    path = put(tmp_path, {"n": ["1", mark, "3"], "d": ["2024-01-02", mark, "2024-01-03"], "w": ["x", mark, "y"]})
    table = read_table(path)
    assert table["n"].to_pylist() == [1.0, None, 3.0]
    assert table["d"].to_pylist() == [datetime.datetime(2024, 1, 2), None, datetime.datetime(2024, 1, 3)]
    assert table["w"].to_pylist() == ["x", mark, "y"]
    ((batch, notes),) = batches(path, ["n", "w"], ["n"])
    assert batch.to_pydict() == {"n": [1.0, None, 3.0], "w": ["x", mark, "y"]}
    assert notes == []


def test_further_markers_of_missing_values(tmp_path: Path) -> None:
    columns = {"n": ["1", "-999", "-999.0", "4"], "w": ["x", "unknown", "y", "-999"], "k": ["1", "gone", "3", "4"]}
    path = put(tmp_path, columns)
    rules = Conventions(("unknown", "-999", "gone"))
    expected = {"n": [1.0, None, None, 4.0], "w": ["x", None, "y", None], "k": [1.0, None, 3.0, 4.0]}
    table = read_table(path, conventions=rules)
    assert table.to_pydict() == expected
    assert conventions_of(table).na == rules.na
    ((batch, notes),) = batches(path, list("nwk"), list("nk"), conventions=rules)
    assert batch.to_pydict() == expected
    assert notes == []
    pq.write_table(pa.table({"n": [1, -999, 4], "w": ["x", "unknown", "y"]}), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet", conventions=rules).to_pydict() == {
        "n": [1, None, 4],
        "w": ["x", None, "y"],
    }
    ((batch, _),) = batches(tmp_path / "t.parquet", ["n", "w"], ["n"], conventions=rules)
    assert batch.to_pydict() == {"n": [1, None, 4], "w": ["x", None, "y"]}


# -- stray cells -------------------------------------------------------------------------------------------------------
def test_a_stray_cell_is_missing_and_named_by_its_row(tmp_path: Path) -> None:
    cells = counted("{}")
    cells[41] = "see below"
    table = read_table(put(tmp_path, {"n": cells, "y": counted("{}.5")}))
    assert table["n"].to_pylist() == [None if i == 41 else float(i) for i in range(200)]
    note = "row 42: n = 'see below' is not a number; treated as missing"
    assert conventions_of(table).notes == (note,)
    assert note in Preparation.fit(table, "y").notes


@pytest.mark.parametrize(
    "count, strays, numeric", [(400, 3, True), (400, 4, False), (199, 2, False), (200, 2, True), (60, 2, False)]
)
def test_how_many_stray_cells_a_numeric_column_may_have(tmp_path: Path, count: int, strays: int, numeric: bool) -> None:
    cells = [*counted("{}", count - strays), *["odd", "strange", "weird", "queer"][:strays]]
    table = read_table(put(tmp_path, {"n": cells, "y": counted("{}.5", count)}))
    assert pa.types.is_floating(table["n"].type) == numeric
    assert len(conventions_of(table).notes) == strays * numeric


@pytest.mark.parametrize(
    "numbers, stray, numeric",
    [
        (counted("{}.5", 44), "error", True),
        (counted("{}", 10), "x", True),
        (counted("{}", 9), "x", False),
        (["1", "2", "3"] * 15, "more", False),
        (["0", "1"] * 30, "other", False),
        (["7"] * 60, "none at all", False),
    ],
)
def test_one_stray_cell_in_a_small_table(tmp_path: Path, numbers: list[str], stray: str, numeric: bool) -> None:
    """It is missing among distinct numbers, and a category among few digits that repeat."""
    table = read_table(put(tmp_path, {"x": [*numbers[:3], stray, *numbers[3:]], "y": counted("{}", len(numbers) + 1)}))
    assert (table["x"].type == pa.float64()) == numeric
    notes = (f"row 4: x = '{stray}' is not a number; treated as missing",) if numeric else ()
    assert conventions_of(table).notes == notes


def test_codes_of_a_typed_file_stay_text_beside_a_word(tmp_path: Path) -> None:
    pq.write_table(pa.table({"code": [*(f"{i:03d}" for i in range(120)), "none left"]}), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet")["code"].type == pa.string()


def test_dates_with_stray_cells_are_timestamps(tmp_path: Path) -> None:
    cells = [f"{1 + i % 28:02}/03/2024" for i in range(60)]
    cells[5], cells[7] = "soon", "31/02/2024"
    table = read_table(put(tmp_path, {"d": cells, "y": counted("{}.5", 60)}))
    assert table["d"][0].as_py() == datetime.datetime(2024, 3, 1)
    assert [i for i, cell in enumerate(table["d"].to_pylist()) if cell is None] == [5, 7]
    known = conventions_of(table)
    assert known.notes == ("row 6: d = 'soon' is not a date (and 1 more); treated as missing",)
    assert known.days_first == {"d": True}
    new = put(tmp_path, {"d": ["03/04/2024"], "y": ["1"]}, "new.csv")
    assert read_table(new, conventions=known)["d"].to_pylist() == [datetime.datetime(2024, 4, 3)]


# -- totals ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", ["Total", "TOTALS:", "Grand total", "Sum", "average", "Subtotal"])
def test_a_row_of_totals_is_left_out(tmp_path: Path, label: str) -> None:
    columns = {"id": [*counted("{}", 20), label], "n": [*counted("{}.5", 20), "190"], "c": [*["x", "y"] * 10, ""]}
    table = read_table(put(tmp_path, columns))
    assert table.num_rows == 20
    assert table["id"].to_pylist() == [float(i) for i in range(20)]
    assert conventions_of(table).notes == (f"row 21 left out: {label!r} in id looks like a total",)


def test_a_total_in_between_is_left_out_among_numbers_but_not_among_words(tmp_path: Path) -> None:
    numbers = counted("{}", 20)
    numbers[9] = "Total"
    words = ["x", "y"] * 10
    words[9] = "Total"
    table = read_table(put(tmp_path, {"n": numbers, "w": words, "y": counted("{}.5", 20)}))
    assert table.num_rows == 19
    known = conventions_of(table)
    assert known.skipped == (9,)
    assert [known.file_row(row) for row in (0, 8, 9, 18)] == [1, 9, 11, 20]
    table = read_table(put(tmp_path, {"w": words, "y": counted("{}.5", 20)}))
    assert table.num_rows == 20  # a category
    words[9], words[19] = "y", "Total"
    assert read_table(put(tmp_path, {"w": words, "y": counted("{}.5", 20)})).num_rows == 19  # the last row
    assert read_table(tmp_path / "t.csv", text=["w"]).num_rows == 20  # known to be a category
    first = ["a"] * 20
    assert read_table(put(tmp_path, {"f": first, "w": words, "y": counted("{}.5", 20)})).num_rows == 20
    assert read_table(put(tmp_path, {"w": words[-5:], "y": counted("{}.5", 5)})).num_rows == 5


def test_rows_of_the_file_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        skipped = np.sort(rng.choice(30, 5, replace=False))
        kept = np.setdiff1d(np.arange(30), skipped)
        known = Conventions(skipped=tuple(skipped.tolist()))
        assert [known.file_row(row) for row in range(25)] == (kept + 1).tolist()


# -- typed files -------------------------------------------------------------------------------------------------------
def test_text_in_a_typed_file_is_converted_unless_it_is_digits_alone(tmp_path: Path) -> None:
    columns = {
        "code": ["007", "7", "12"],
        "price": ["$5", "$1,200", "-"],
        "real": ["1.5", "2", "3"],
        "w": ["a", "b", "c"],
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet")
    assert table.to_pydict() == columns | {"price": [5.0, 1200.0, None], "real": [1.5, 2.0, 3.0]}
    assert read_table(tmp_path / "t.parquet", text=["price"])["price"].to_pylist() == columns["price"]


def test_conventions_travel_with_the_table() -> None:
    known = Conventions(("x",), {"a": ","}, {"d": True}, {"a": "remark"}, ("note",), (3,))
    table = attach(pa.table({"a": [1.0, 2.0], "d": [1, 2]}), known)
    assert conventions_of(table.take(pa.array([1])).select(["a"])) == known
    assert Conventions.from_dict(json.loads(json.dumps(known.to_dict()))) == known
    assert known.rules() == Conventions(("x",), {"a": ","}, {"d": True})
    assert conventions_of(pa.table({"a": [1]})) == Conventions()


# -- streams -----------------------------------------------------------------------------------------------------------
cell = st.one_of(
    st.sampled_from(
        ["-", "none", "", "NA", "$5", "5%", "(7)", "1,234", "1.234", "1.234,5", "1,234.5", "1,5", "2.5", "x"]
    ),
    st.integers(-(10**6), 10**6).map(str),
    st.floats(-1e6, 1e6).map(lambda v: f"{v:,.2f}"),
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(cell, cell), min_size=1, max_size=30),
    delimiter=st.sampled_from(",;"),
    size=st.integers(1, 9),
)
def test_a_stream_reads_the_numbers_of_the_whole_file(
    tmp_path: Path, rows: list[tuple[str, str]], delimiter: str, size: int
) -> None:
    columns = {"a": [a for a, _ in rows], "b": [b for _, b in rows], "k": ["k"] * len(rows)}
    path = put(tmp_path, columns, delimiter=delimiter)
    table = read_table(path)
    numeric = [name for name in "ab" if pa.types.is_floating(table[name].type)]
    parts = list(batches(path, numeric, numeric, rows=size, conventions=conventions_of(table).rules()))
    for name in numeric:
        assert [v for batch, _ in parts for v in batch.column(name).to_pylist()] == table[name].to_pylist()
    # A stray cell that is missing in the whole file is also noted in the stream.
    assert sum(len(notes) for _, notes in parts) == len(conventions_of(table).notes)
