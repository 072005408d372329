"""Writing of tables: what is written is read back, and nothing is left of an unfinished file."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from credibly.errors import InputError
from credibly.tables.cells.number_formats import NUMBER
from credibly.tables.cells.parsing import MISSING
from credibly.tables.files import writing
from credibly.tables.files.reading import header, read_table
from credibly.tables.files.writing import TableWriter
from warm_python import warm_python

# Excel takes a library that is installed with the extra "excel" only.
SUFFIXES = [s for s in writing.SUFFIXES if s != ".xlsx" or importlib.util.find_spec("openpyxl")]


def is_text(value: str) -> bool:
    """Return whether a cell is certainly text: neither a number nor a missing-value marker, and already stripped."""
    return value == value.strip() and value not in MISSING and not re.match(NUMBER, value)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numbers=st.lists(st.none() | st.floats(allow_nan=False), min_size=1, max_size=30),
    words=st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"], include_characters=' ,;"\n'), min_size=1).filter(
            is_text
        ),
        min_size=1,
        max_size=30,
    ),
    suffix=st.sampled_from(SUFFIXES),
    blocks=st.integers(1, 4),
)
def test_what_is_written_is_read_back(tmp_path, numbers, words, suffix, blocks) -> None:
    count = min(len(numbers), len(words))
    floats = np.array([np.nan if v is None else v for v in numbers[:count]])
    short = np.where(np.abs(floats) < 1e30, floats, np.nan).astype(np.float32)
    path = tmp_path / f"t{suffix}"
    with TableWriter(path, force=True) as writer:
        for rows in np.array_split(np.arange(count), min(blocks, count)):
            writer.write({"x": floats[rows], "a name": [words[r] for r in rows], "f": short[rows]})
    table = read_table(path, text=["a name"])
    assert table["x"].to_pylist() == [None if np.isnan(v) else v for v in floats]
    assert table["a name"].to_pylist() == words[:count]
    again = np.array([np.nan if v is None else v for v in table["f"].to_pylist()], np.float32)
    assert np.array_equal(again, short, equal_nan=True)
    assert os.listdir(tmp_path) == [path.name]
    path.unlink()


def test_float32_is_written_with_the_digits_it_has(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "t.csv") as writer:
        writer.write({"x": np.array([0.1, 1 / 3, 2], np.float32), "k": np.array([1, 2, 3]), "s": ["a", None, "b,c"]})
    assert (tmp_path / "t.csv").read_text() == 'x,k,s\n0.1,1,"a"\n0.33333334,2,\n2,3,"b,c"\n'


def test_a_missing_value_in_the_only_column_is_a_row(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "t.csv") as writer:
        writer.write({"x": [None, "a", None]})
    assert read_table(tmp_path / "t.csv").to_pydict() == {"x": [None, "a", None]}


def test_notes_that_begin_empty(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "t.csv") as writer:
        writer.write({"x": [1.0], "notes": [None]})
        writer.write({"x": [2.0], "notes": ["age is missing"]})
    assert read_table(tmp_path / "t.csv").to_pydict() == {"x": [1.0, 2.0], "notes": [None, "age is missing"]}


def write_all(path: Path, blocks: Iterable[dict[str, Any]]) -> None:
    with TableWriter(path, force=True) as writer:
        for block in blocks:
            writer.write(block)


def test_blocks_have_the_same_columns(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="columns must be the same in every block"):
        write_all(tmp_path / "t.csv", [{"x": [1.0]}, {"y": [1.0]}])
    assert os.listdir(tmp_path) == []


# -- errors ----------------------------------------------------------------------------------------------------------
def test_paths_that_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("kept")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "dangling.csv").symlink_to(tmp_path / "nowhere" / "t.csv")
    for name, words in {
        "old.csv": "already exists.*--force",
        "dangling.csv": "already exists",
        "folder.csv": "is a folder",
        "t.docx": "suffix.*.parquet",
        "no/t.csv": "no such folder",
        "old.csv/t.csv": "no such folder",
    }.items():
        with pytest.raises(InputError, match=f"--out: .*{words}"):
            TableWriter(tmp_path / name)
    with pytest.raises(InputError, match="is a folder"):
        TableWriter(tmp_path / "folder.csv", force=True)
    assert (tmp_path / "old.csv").read_text() == "kept"


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(writing.os, "access", lambda *_: False)
    with pytest.raises(InputError, match="--out: .*is not writable"):
        TableWriter(tmp_path / "t.csv")


def test_a_hidden_file_that_cannot_be_made(tmp_path: Path) -> None:
    writer = TableWriter(tmp_path / ("x" * 250 + ".csv"))  # too long once the hidden name is made of it
    with pytest.raises(InputError, match="--out: cannot write"):
        writer.__enter__()


# -- atomic writes ----------------------------------------------------------------------------------------------
class FullDisk:
    """A file that accepts the given number of bytes."""

    def __init__(self, path: Path, mode: str, room: int) -> None:
        self.file, self.room, self.closed = open(path, mode), room, False  # noqa: SIM115

    def write(self, content: bytes) -> int:
        self.room -= len(content)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(content)

    def close(self) -> None:
        self.closed = True
        self.file.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("room", [0, 10, 100_000])
def test_a_full_disk_raises_and_leaves_nothing(tmp_path: Path, monkeypatch, suffix: str, room: int) -> None:
    monkeypatch.setattr(writing, "open", lambda path, mode: FullDisk(path, mode, room), raising=False)
    old = tmp_path / f"t{suffix}"
    old.write_text("kept")
    values = np.random.default_rng(0).normal(size=(5, 4_000))
    with pytest.raises(OSError, match="No space left") as caught:
        write_all(old, ({"x": block} for block in values))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == [old.name]
    assert old.read_text() == "kept"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_leaves_nothing(tmp_path: Path, suffix: str, kind: type[BaseException]) -> None:
    path = tmp_path / f"t{suffix}"

    def blocks() -> Iterator[dict[str, Any]]:
        yield {"x": np.arange(10.0)}
        assert not path.exists()
        assert len(os.listdir(tmp_path)) == 1
        raise kind

    with pytest.raises(kind):
        write_all(path, blocks())
    assert os.listdir(tmp_path) == []


def test_two_processes_do_not_share_a_hidden_file(tmp_path: Path) -> None:
    code = (
        "import sys; from credibly.tables.files.writing import TableWriter\n"
        "with TableWriter(sys.argv[1]) as w: w.write({'x': [2.0]})"
    )
    with TableWriter(tmp_path / "t.csv") as writer:
        writer.write({"x": [1.0]})
        subprocess.run([warm_python(), "-c", code, str(tmp_path / "t.csv")], check=True)
        assert read_table(tmp_path / "t.csv")["x"].to_pylist() == [2.0]
    assert read_table(tmp_path / "t.csv")["x"].to_pylist() == [1.0]
    assert os.listdir(tmp_path) == ["t.csv"]


def test_names_of_columns_with_marks_in_them(tmp_path: Path) -> None:
    names = ['p_"a"', "p_b,c", "p_ü"]
    for suffix in SUFFIXES:
        with TableWriter(tmp_path / f"t{suffix}") as writer:
            writer.write({name: pa.array([1.0]) for name in names})
        assert header(tmp_path / f"t{suffix}") == names
