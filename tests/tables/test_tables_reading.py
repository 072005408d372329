"""Reading of tables: parsing of CSV and Parquet cells, streams against whole files, and every error."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from credibly.errors import InputError
from credibly.tables.cells.conventions import conventions_of
from credibly.tables.files import csv_files
from credibly.tables.files.reading import batches, count_rows, header, read_table


def put(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(folder: Path, text: str | bytes, name: str = "t.csv") -> dict[str, list[object]]:
    found: dict[str, list[object]] = read_table(put(folder, text, name)).to_pydict()
    return found


# -- cells -------------------------------------------------------------------------------------------------------------
def test_numbers_text_and_missing_cells(tmp_path: Path) -> None:
    text = "n,i,b,s,m\n1.5,1,true,x,\n 2e3 ,2,false, y ,NA\n,+3,true,,nan\n-inf,.5,true,NULL,?\n"
    path = put(tmp_path, text)
    table = read_table(path)
    assert [str(t) for t in table.schema.types] == ["double", "double", "string", "string", "double"]
    assert table.to_pydict() == {
        "n": [1.5, 2000.0, None, -np.inf],
        "i": [1.0, 2.0, 3.0, 0.5],
        "b": ["true", "false", "true", "true"],
        "s": ["x", "y", None, None],
        "m": [None] * 4,
    }
    assert header(path) == list("nibsm")
    assert count_rows(path) is None


@pytest.mark.parametrize("mark", ["", "NA", "N/A", "n/a", "N.A.", "nan", "NaN", "null", "?", '""', " NA ", "#DIV/0!"])
def test_missing_value_markers_do_not_turn_numbers_into_text(tmp_path: Path, mark: str) -> None:
    assert read(tmp_path, f"a,b\n1,x\n{mark},{mark}\n3,y\n") == {"a": [1.0, None, 3.0], "b": ["x", None, "y"]}


def test_a_column_of_numbers_followed_by_text_is_text(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(csv_files, "BLOCK", 512)
    path = put(tmp_path, "a,b\n" + "".join(f"{i},{i}\n" for i in range(2000)) + "late,1\n" * 4)
    table = read_table(path)
    assert table["a"].to_pylist() == [*map(str, range(2000)), *["late"] * 4]
    assert table["b"].to_pylist() == [*map(float, range(2000)), *[1.0] * 4]


def test_columns_named_as_text_stay_as_they_are_written(tmp_path: Path) -> None:
    path = put(tmp_path, "code,n\n007,1\n7,2\n")
    assert read_table(path, text=["code"]).to_pydict() == {"code": ["007", "7"], "n": [1.0, 2.0]}


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters_quotes_marks_and_line_ends(tmp_path: Path, delimiter: str) -> None:
    rows = [["first name", "x"], [f'a{delimiter}b "c"\nd', "1"], ["é", "2"]]
    with open(tmp_path / "t.csv", "w", encoding="utf-8-sig", newline="") as handle:
        csv.writer(handle, delimiter=delimiter, lineterminator="\r\n").writerows(rows)
    found = read_table(tmp_path / "t.csv").to_pydict()
    assert found == {"first name": [f'a{delimiter}b "c"\nd', "é"], "x": [1.0, 2.0]}


def test_decimal_commas(tmp_path: Path) -> None:
    path = put(tmp_path, "a;b\n1,5;x\n-2,25;y\n3;z\n")
    assert read_table(path)["a"].to_pylist() == [1.5, -2.25, 3.0]
    ((batch, notes),) = batches(path, ["a"], ["a"])
    assert batch.to_pydict() == {"a": [1.5, -2.25, 3.0]}
    assert notes == []


def test_an_empty_line_is_a_missing_value_in_a_table_of_one_column_only(tmp_path: Path) -> None:
    assert read(tmp_path, "a\n1\n\n3\n") == {"a": [1.0, None, 3.0]}
    assert read(tmp_path, "a,b\n1,2\n\n3,4\n") == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


def test_other_encodings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(tmp_path, "a,b\n1,Zoë\n".encode("utf-16")) == {"a": [1.0], "b": ["Zoë"]}
    assert caplog.text == ""
    assert read(tmp_path, "a,b\n1,Zoë €\n".encode("cp1252")) == {"a": [1.0], "b": ["Zoë €"]}
    assert "not UTF-8" in caplog.text


def test_a_letter_across_two_reads_is_still_utf8(tmp_path: Path) -> None:
    path = put(
        tmp_path, ("a,b\n" + "é" * 700_000 + ",1\n").encode()
    )  # an odd offset: every read of 1 MiB cuts a letter
    assert len(read_table(path)["a"][0].as_py()) == 700_000


def test_tsv_and_gzip(tmp_path: Path) -> None:
    assert read(tmp_path, "a\tb,c\n1\tx\n", "t.tsv") == {"a": [1.0], "b,c": ["x"]}
    path = put(tmp_path, gzip.compress(b"a,b\n1,x\n"), "t.csv.gz")
    assert read_table(path).to_pydict() == {"a": [1.0], "b": ["x"]}
    ((batch, _),) = batches(path, ["b", "absent"], [])
    assert batch.to_pydict() == {"b": ["x"]}


def test_parquet_types(tmp_path: Path) -> None:
    day = datetime.date(2024, 1, 2)
    pq.write_table(
        pa.table(
            {
                "i": pa.array([1, None, 3], pa.int16()),
                "f": pa.array([1.5, np.nan, None], pa.float32()),
                "d": pa.array([decimal.Decimal("1.25"), None, None]),
                "b": [True, False, None],
                "c": pa.array(["x", "y", "x"]).dictionary_encode(),
                "s": pa.array([" p ", "", "NA"], pa.large_string()),
                "day": [day, None, day],
                "none": pa.nulls(3),
            }
        ),
        tmp_path / "t.parquet",
    )
    assert read_table(tmp_path / "t.parquet").to_pydict() == {
        "i": [1.0, None, 3.0],
        "f": [1.5, None, None],
        "d": [1.25, None, None],
        "b": ["true", "false", None],
        "c": ["x", "y", "x"],
        "s": ["p", None, None],
        "day": [day, None, day],
        "none": [None, None, None],
    }
    assert count_rows(tmp_path / "t.parquet") == 3
    assert header(tmp_path / "t.parquet") == ["i", "f", "d", "b", "c", "s", "day", "none"]
    ((batch, notes),) = batches(tmp_path / "t.parquet", ["b", "day", "i", "s"], ["i", "day", "s"])
    assert batch.to_pydict() == {
        "i": [1.0, None, 3.0],
        "b": ["true", "false", None],
        "s": [None, None, None],
        "day": [None] * 3,
    }
    assert notes == [
        (0, "day = 2024-01-02 is not a number"),
        (0, "s = 'p' is not a number"),
        (2, "day = 2024-01-02 is not a number"),
    ]


# -- streams -----------------------------------------------------------------------------------------------------------
cell = st.one_of(
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(
        ["red", "a,b", 'say "x"', "two\nlines", "two\r\nlines", " x ", "é", "+1", "1e400", "-inf", "NA", "12a"]
    ),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(cell, cell, cell), min_size=1, max_size=40),
    size=st.integers(1, 50),
    block=st.integers(20, 700),
    suffix=st.sampled_from([".csv", ".parquet"]),
)
def test_a_stream_equals_the_whole_file(tmp_path, monkeypatch, rows, size, block, suffix) -> None:
    monkeypatch.setattr(csv_files, "BLOCK", block)
    path = tmp_path / f"t{suffix}"
    if suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as handle:
            csv.writer(handle).writerows([("a", "b", "c"), *rows])
    else:
        columns = {n: pa.array([r[i] for r in rows], pa.string()) for i, n in enumerate("abc")}
        pq.write_table(pa.table(columns), path, row_group_size=7)
    whole = read_table(path, text="abc").to_pydict()
    parts = list(batches(path, ["c", "a"], ["c"], rows=size))
    assert [b.num_rows for b, _ in parts[:-1]] == [size] * (len(parts) - 1)
    assert [v for b, _ in parts for v in b.column("a").to_pylist()] == whole["a"]
    got = [v for b, _ in parts for v in b.column("c").to_pylist()]
    reported = {k * size + row: note for k, (_, notes) in enumerate(parts) for row, note in notes}
    for row, (value, text) in enumerate(zip(got, whole["c"], strict=True)):
        if text is None:
            assert value is None
            assert row not in reported
        elif text in ("1e400", "-inf"):
            assert value is None
            assert "is not finite" in reported[row]
        elif text not in ("+1",) and not text[-1].isdigit():
            assert value is None
            assert reported[row] == f"c = {text!r} is not a number"
        else:
            assert value == float(text)
            assert row not in reported


def test_a_cell_that_is_no_number_costs_its_own_value_only(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(csv_files, "BLOCK", 4096)
    lines = [f"{i / 7},{i}" for i in range(3000)]
    lines[1500] = "broken,1500"
    path = put(tmp_path, "a,b\n" + "\n".join(lines))
    values, notes = [], []
    for k, (batch, reported) in enumerate(batches(path, ["a", "b"], ["a", "b"], rows=64)):
        values += batch.column("a").to_pylist()
        notes += [(64 * k + row, note) for row, note in reported]
    assert notes == [(1500, "a = 'broken' is not a number")]
    assert values == [None if i == 1500 else i / 7 for i in range(3000)]


def test_no_wanted_column_still_gives_the_rows(tmp_path: Path) -> None:
    path = put(tmp_path, "a,b\n1,2\n3,4\n5,6\n")
    assert [b.num_rows for b, _ in batches(path, ["z"], ["z"], rows=2)] == [2, 1]


def test_a_stream_holds_a_few_blocks_and_not_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(csv_files, "BLOCK", 1 << 17)
    path = tmp_path / "t.csv"
    with open(path, "w") as handle:
        handle.write("a,b,c\n")
        handle.writelines(f"{i}.25,{i}.5,red\n" for i in range(1_500_000))
    size = path.stat().st_size
    before, peak, rows = pa.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    for batch, _ in batches(path, ["a", "b", "c"], ["a", "b"], rows=4096):
        rows += batch.num_rows
        peak = max(peak, pa.total_allocated_bytes() - before)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 1_500_000
    assert size > 30_000_000
    assert peak < size / 4
    assert python < size / 4


# -- errors ----------------------------------------------------------------------------------------------------------
def refused(path: Path, *words: str) -> None:
    for reading in (lambda: read_table(path), lambda: list(batches(path, ["a"], ["a"]))):
        with pytest.raises(InputError) as caught:
            reading()
        assert caught.value.argument == "table"
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert caught.value.__cause__ is None or not isinstance(caught.value.__cause__, pa.ArrowException)


def test_files_that_do_not_exist_or_are_no_tables(tmp_path: Path) -> None:
    refused(tmp_path / "no.csv", "no such file")
    refused(tmp_path, "is a folder")
    (tmp_path / "folder.csv").mkdir()
    refused(tmp_path / "folder.csv", "is a folder")
    refused(put(tmp_path, "a\n1", "t.docx"), "suffix", ".parquet")
    for name in ("t.csv", "t.parquet", "t.csv.gz"):
        refused(put(tmp_path, "", name), "is empty")
    refused(put(tmp_path, " \n\n"), "is empty")
    refused(put(tmp_path, gzip.compress(b""), "t.csv.gz"), "is empty")


def test_header_only(tmp_path: Path) -> None:
    refused(put(tmp_path, "a,b"), "no rows")
    refused(put(tmp_path, "a,b\r\n"), "no rows")
    pq.write_table(pa.table({"a": pa.array([], pa.int8())}), tmp_path / "t.parquet")
    refused(tmp_path / "t.parquet", "no rows")


@pytest.mark.parametrize("row, count", [("5,6,7", 3), ("5", 1)])
def test_ragged_rows_are_named_by_line_and_counts(tmp_path: Path, row: str, count: int) -> None:
    text = 'a,b\n1,"two\nlines"\n\n3,4\n' + row + "\n7,8\n"
    refused(put(tmp_path, text), "line 6 ", f"has {count} cells", "header has 2")
    refused(put(tmp_path, gzip.compress(text.encode()), "t.csv.gz"), "line 6 ", f"has {count} cells")


def test_a_quote_that_is_never_closed_does_not_swallow_the_rest(tmp_path: Path) -> None:
    rows = "".join(f"{i},x\n" for i in range(50_000))
    refused(put(tmp_path, 'a,b\n1,"two\nlines"\n2,"x\n' + rows), "line 4", "never closed")
    assert read(tmp_path, 'a,b\n1,5" pipe\n2,x\n') == {"a": [1.0, 2.0], "b": ['5" pipe', "x"]}


def test_rows_longer_than_a_block(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(csv_files, "BLOCK", 64)
    path = put(tmp_path, "a,b\n" + "1,x\n" * 50 + "2," + "y" * 1000 + "\nbad,z\n")
    parts = list(batches(path, ["a", "b"], ["a"], rows=10))
    assert [v for b, _ in parts for v in b.column("a").to_pylist()] == [1.0] * 50 + [2.0, None]
    assert [notes for _, notes in parts] == [[]] * 5 + [[(1, "a = 'bad' is not a number")]]
    monkeypatch.setattr(csv_files, "LARGE", 128)
    refused(path, "a row of more than")


def test_binary_files(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    refused(put(tmp_path, noise), "binary")
    refused(put(tmp_path, noise, "t.parquet"), "Parquet")
    refused(put(tmp_path, noise, "t.csv.gz"), "gzip")
    refused(put(tmp_path, b"PK\x03\x04" + noise), "Excel")
    refused(put(tmp_path, gzip.compress(b"a,b\n1,2\n")), "gzip-compressed")
    refused(put(tmp_path, gzip.compress(b"a,b\n1,2\n" * 100)[:-9], "t.csv.gz"), "gzip")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "p.csv")
    refused(tmp_path / "p.csv", "a Parquet file")
    refused(put(tmp_path, b"a,b\n1,\x81\xff\n"), "encoding")


def test_names_of_columns(tmp_path: Path) -> None:
    refused(put(tmp_path, "a,b,a\n1,2,3\n"), "more than one", "'a'")
    refused(put(tmp_path, "a, a \n1,2\n"), "more than one", "'a'")
    refused(put(tmp_path, "a,,b\n0,1,2\n"), "column 2", "no name", "index=False")
    refused(put(tmp_path, ",,b\n0,1,2\n"), "column 2", "no name", "index=False")


def test_a_first_column_without_a_name_holds_names_of_rows(tmp_path: Path) -> None:
    file = put(tmp_path, '"","a","b"\n"1",3,x\n"2",4,y\n')
    found = read_table(file)
    assert found.to_pydict() == {"a": [3.0, 4.0], "b": ["x", "y"]}
    assert "column 1 has no name" in conventions_of(found).notes[0]
    ((block, _),) = batches(file, ["a", "b"], ["a"])
    assert block.to_pydict() == {"a": [3.0, 4.0], "b": ["x", "y"]}


def test_parquet_that_is_nested_or_broken(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [[1, 2], [3]]}), tmp_path / "t.parquet")
    refused(tmp_path / "t.parquet", "'a'", "list")
    pq.write_table(
        pa.table({"a": np.arange(10_000.0)}), tmp_path / "t.parquet", compression="none", use_dictionary=False
    )
    whole = (tmp_path / "t.parquet").read_bytes()
    refused(put(tmp_path, whole[:-100], "t.parquet"), "Parquet")
    refused(put(tmp_path, b"PARE" + whole[4:-4] + b"PARE", "t.parquet"), "Parquet")
    refused(put(tmp_path, whole[:4] + b"\xff" * 200 + whole[204:], "t.parquet"), "Parquet")


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(min_size=1, max_size=200),
        st.lists(
            st.sampled_from([b"a", b"b", b",", b";", b'"', b"\n", b"\r", b"1", b"-", b".", b" ", b"\xe9", b"NA"])
        ).map(b"".join),
    ),
    suffix=st.sampled_from(
        [
            ".csv",
            ".tsv",
            ".csv.gz",
            ".csv.xz",
            ".parquet",
            ".feather",
            ".arrow",
            ".jsonl",
            ".jsonl.bz2",
            ".zip",
            ".xlsx",
        ]
    ),
    packed=st.booleans(),
)
def test_any_bytes_are_a_table_or_refused(tmp_path, content, suffix, packed) -> None:
    path = put(tmp_path, gzip.compress(content) if packed and suffix == ".csv.gz" else content, f"t{suffix}")
    try:
        table = read_table(path)
    except InputError:
        return
    assert header(path) == table.column_names
    streamed = [b for b, _ in batches(path, table.column_names, [], rows=3)]
    assert sum(b.num_rows for b in streamed) == table.num_rows


def test_a_header_of_a_megabyte_and_a_first_cell_too_long_for_one(tmp_path: Path) -> None:
    names = [f"column number {i}" for i in range(60_000)]
    path = put(tmp_path, ",".join(names) + "\n" + ",".join(["1"] * len(names)) + "\n")
    assert header(path) == names
    refused(put(tmp_path, "a" * 200_000 + ",b\n1,2\n"), "first line")


def test_rows_have_to_be_positive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows"):
        batches(put(tmp_path, "a\n1\n"), ["a"], ["a"], rows=0)
