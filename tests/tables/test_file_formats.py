"""Every file format reads as the same table, whole and streamed; broken and hostile files are refused."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from credibly.errors import InputError
from credibly.tables.cells.conventions import conventions_of
from credibly.tables.files import sources
from credibly.tables.files.reading import batches, count_rows, header, read_table
from credibly.tables.files.writing import TableWriter

DAYS = [datetime.datetime(2024, 1, 2) + datetime.timedelta(days=i) for i in range(30)]
COLUMNS: dict[str, list[Any]] = {
    "n": [None, *(i + 0.5 for i in range(29))],
    "w": ["a,b", "é", None] * 10,
    "d": DAYS,
}
CSV = "n,w,d\n" + "".join(f'{"" if n is None else n},"{w or ""}",{d:%Y-%m-%d}\n' for n, w, d in zip(*COLUMNS.values()))


def made(folder: Path, suffix: str) -> Path:
    path = folder / f"t{suffix}"
    table = pa.table(COLUMNS)
    if suffix == ".parquet":
        pq.write_table(table, path)
    elif suffix == ".feather":
        pa.feather.write_feather(table, path, chunksize=7)
    elif suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, 7)
    elif suffix in (".jsonl", ".ndjson", ".jsonl.gz"):
        rows = [
            {k: v.isoformat() if k == "d" else v for k, v in row.items() if v is not None} for row in table.to_pylist()
        ]
        text = "\n".join(json.dumps(row) for row in rows).encode()
        path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    elif suffix == ".xlsx":
        book = pytest.importorskip("openpyxl").Workbook()
        book.active.append(list(COLUMNS))
        for row in zip(*COLUMNS.values()):
            book.active.append(row)
        book.save(path)
    elif suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("folder/t.csv", CSV)
            archive.writestr("__MACOSX/folder/._t.csv", b"\0")
            archive.writestr("readme.txt", "about")
    else:
        pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(CSV.encode()))
    return path


SUFFIXES = [
    ".csv", ".csv.gz", ".csv.bz2", ".csv.xz", ".zip", ".parquet", ".feather", ".arrow", ".jsonl", ".ndjson",
    ".jsonl.gz", ".xlsx",
]  # fmt: skip


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_is_the_same_in_every_format(tmp_path: Path, suffix: str) -> None:
    path = made(tmp_path, suffix)
    table = read_table(path)
    assert set(table.column_names) == set(header(path)) == set(COLUMNS)
    assert {name: table[name].to_pylist() for name in COLUMNS} == COLUMNS
    assert count_rows(path) in (None, 30)
    parts = list(batches(path, ["n", "w"], ["n"], rows=8))
    assert [batch.num_rows for batch, _ in parts] == [8, 8, 8, 6]
    for name in ("n", "w"):
        assert [v for batch, _ in parts for v in batch.column(name).to_pylist()] == COLUMNS[name]
    assert [batch.num_rows for batch, _ in batches(path, ["absent"], [], rows=20)] == [20, 10]


def refused(path: Path, *words: str) -> None:
    for reading in (lambda: read_table(path), lambda: list(batches(path, ["n"], ["n"])), lambda: header(path)):
        with pytest.raises(InputError) as caught:
            reading()
        assert caught.value.argument == "table"
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("suffix", [".csv.bz2", ".csv.xz", ".zip", ".feather", ".arrow", ".xlsx", ".jsonl.gz"])
def test_truncated_and_corrupt_files(tmp_path: Path, suffix: str) -> None:
    path = made(tmp_path, suffix)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=path.name):
        read_table(path)
    path.write_bytes(np.random.default_rng(0).bytes(2000))
    refused(path, path.name)


def zipped(path: Path, **members: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def test_archives_with_no_table_or_several(tmp_path: Path) -> None:
    refused(zipped(tmp_path / "t.zip", **{"a.txt": "x"}), "no table", ".csv")
    refused(zipped(tmp_path / "t.zip", **{"a.csv": CSV, "b.csv": CSV}), "2 tables", "'a.csv', 'b.csv'")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST", 1 << 20)
    rows = "1" * 50
    path = zipped(tmp_path / "t.zip", **{"t.csv": "n\n" + f"{rows}\n" * 100_000})
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("unpacked"))
    refused(path, "more than 100 times its size", "unpack it")


def test_an_archive_that_is_encrypted(tmp_path: Path) -> None:
    path = zipped(tmp_path / "t.zip", **{"t.csv": CSV})
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + offset] |= 1
    path.write_bytes(content)
    refused(path, "is encrypted")


def test_json_lines_that_are_not_records(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for text, words in {
        '{"n": 1}\n\n{"n": 2': ("line 3", "is not JSON"),
        "[1, 2]\n": ("line 1", "is list"),
        '{"n": {"a": 1}}\n': ("line 1", "nested values in 'n'"),
        "\xff": ("line 1", "is not JSON"),
        '{"": 1}\n': ("column 1", "no name"),
    }.items():
        path.write_bytes(text.encode("latin-1"))
        refused(path, *words)
    path.write_text("\n")
    with pytest.raises(InputError, match="no rows"):
        read_table(path)


def test_json_values_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 1, "b": true}\n{"a": "2,500", "c": null, "b": false}\n{"a": 1e3, "b": null, "c": "x"}\n')
    assert read_table(path).to_pydict() == {
        "a": [1.0, 2500.0, 1000.0], "b": ["true", "false", None], "c": [None, None, "x"],
    }  # fmt: skip


def test_a_workbook_of_several_sheets(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    sheet = book.create_sheet("data")
    for row in ([], ["n", "d", "w", None], [1, DAYS[0], "=1+1", None], [], [2.5, DAYS[1], True]):
        sheet.append(row)
    sheet.cell(3, 3).data_type = "s"
    book.create_sheet("more").append(["z"])
    book.save(tmp_path / "t.xlsx")
    table = read_table(tmp_path / "t.xlsx")
    assert table.to_pydict() == {"n": [1.0, 2.5], "d": DAYS[:2], "w": ["=1+1", "true"]}
    assert conventions_of(table).notes == ("read from the sheet 'data', the first of 2",)
    sheet.cell(3, 4).value = 7
    book.save(tmp_path / "t.xlsx")
    refused(tmp_path / "t.xlsx", "column 4", "no name")
    openpyxl.Workbook().save(tmp_path / "t.xlsx")
    refused(tmp_path / "t.xlsx", "is empty")


def test_excel_without_the_library_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    refused(tmp_path / "t.xlsx", "openpyxl is not installed", 'pip install "credibly[excel]"')
    with pytest.raises(InputError, match=r"--out: .*pip install"):
        TableWriter(tmp_path / "out.xlsx")
    (tmp_path / "t.xls").write_bytes(b"\xd0\xcf")
    refused(tmp_path / "t.xls", "unknown suffix", "Save it as .xlsx")


def test_text_in_a_workbook_is_never_a_formula(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    with TableWriter(tmp_path / "t.xlsx") as writer:
        writer.write({"w": ["=1+1", "bell \a", "x"], "n": [np.inf, None, 1.5]})
    rows = list(openpyxl.load_workbook(tmp_path / "t.xlsx").active.iter_rows())
    assert [cell.value for cell in rows[1]] == ["=1+1", "inf"]
    assert rows[1][0].data_type == "s"
    assert [cell.value for cell in rows[2]] == [r"'bell \x07'", None]


def test_json_lines_are_valid_json(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "t.jsonl") as writer:
        writer.write({"x": np.array([0.1, np.inf, np.nan], np.float32), "w": ["é", None, "y"]})
    lines = (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines == ['{"x": 0.1, "w": "é"}', '{"x": "inf", "w": null}', '{"x": null, "w": "y"}']
