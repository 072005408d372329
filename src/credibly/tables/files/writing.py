"""Writing of tables block by block: the file is complete or absent."""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq

from credibly.errors import InputError
from credibly.tables.files.json_lines import JsonLinesWriter
from credibly.tables.files.record_files import WorkbookWriter, excel_library
from credibly.tables.files.sources import WRITTEN

SUFFIXES = WRITTEN
# First characters by which a spreadsheet treats a cell as a formula.
FORMULA = ("=", "+", "-", "@", "\t", "\r")


class TableWriter:
    """Writer of a table in one of the formats SUFFIXES, which appears under its name only once it is complete.

    The path is checked in the constructor, before any work. Until the end the rows go to a hidden file beside it, which
    is removed on error.
    """

    def __init__(self, path: str | os.PathLike[str], *, force: bool = False, excel_safe: bool = False) -> None:
        self.path, self.excel_safe = Path(path), excel_safe
        name = os.fspath(path)
        self._suffix = next((s for s in SUFFIXES if self.path.name.lower().endswith(s)), "")
        if self.path.is_dir():
            raise InputError("--out", f"{name!r} is a folder", "Pass a file name")
        if not self._suffix:
            raise InputError("--out", f"{name!r} has an unknown suffix", f"Pass one of {', '.join(SUFFIXES)}")
        if self._suffix == ".xlsx":
            excel_library("--out", self.path.name)
        if (self.path.exists() or self.path.is_symlink()) and not force:
            raise InputError("--out", f"{name!r} already exists", "Choose another name, or pass --force to replace it")
        folder = self.path.parent
        if not folder.is_dir():
            raise InputError("--out", f"no such folder: {os.fspath(folder)!r}", "Create it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError("--out", f"the folder {os.fspath(folder)!r} is not writable", "Choose another one")
        self._part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        self._file: Any = None
        self._sink: Any = None
        self._writer: Any = None
        self._schema: Any = None

    def __enter__(self) -> Self:
        try:
            self._file = open(self._part, "wb")
        except OSError as error:
            raise InputError("--out", f"cannot write {os.fspath(self.path)!r} ({error.strerror})") from error
        return self

    def write(self, columns: Mapping[str, npt.NDArray[Any] | Sequence[Any]]) -> None:
        """Append rows. The first block determines names and types; None and NaN are missing values."""
        made = {name: as_array(values) for name, values in columns.items()}
        if self.excel_safe:
            made = {without_formula(name): without_formulas(column) for name, column in made.items()}
        if self._schema is None:
            self._open(pa.schema([(name, column.type) for name, column in made.items()]))
        elif list(made) != self._schema.names:
            raise ValueError(f"columns must be the same in every block: got {list(made)} after {self._schema.names}")
        ready = [made[field.name].cast(field.type) for field in self._schema]
        self._writer.write_table(pa.Table.from_arrays(ready, schema=self._schema))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._abandon()

    def _open(self, schema: Any) -> None:
        if self._suffix == ".parquet":
            self._writer = pq.ParquetWriter(self._file, schema)
        elif self._suffix == ".feather":
            self._writer = pa.ipc.new_file(self._file, schema)
        elif self._suffix == ".jsonl":
            self._writer = JsonLinesWriter(self._file)
        elif self._suffix == ".xlsx":
            self._writer = WorkbookWriter(self._file, schema.names)
        else:
            compressed = self._suffix == ".csv.gz"
            # Level 1: higher levels take several times as long for a few per cent of the size.
            self._sink = gzip.GzipFile("", "wb", 1, self._file, 0) if compressed else self._file
            delimiter = "\t" if self._suffix == ".tsv" else ","
            self._writer = csv_writer(self._sink, schema, delimiter)
        self._schema = schema

    def _finish(self) -> None:
        if self._writer is not None:
            if isinstance(self._writer, WorkbookWriter):
                self._writer.save()
            self._writer.close()
            if self._sink is not None and self._sink is not self._file:
                self._sink.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self.path)

    def _abandon(self) -> None:
        """Close all handles and remove the hidden file if it is still there."""
        for handle in (self._writer, self._sink, self._file):
            with suppress(Exception):
                if handle is not None:
                    handle.close()
        self._part.unlink(missing_ok=True)


def without_formula(text: str) -> str:
    """Return text that a spreadsheet does not evaluate: with an apostrophe before a first =, +, -, @, tab or return."""
    return f"'{text}" if text[:1] in FORMULA and text else text


def without_formulas(column: Any) -> Any:
    """Return a column whose texts a spreadsheet does not evaluate; numbers stay numbers."""
    import pyarrow.compute as pc

    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    return pc.replace_substring_regex(column, r"\A([=+\-@\t\r])", r"'\1")


def written(columns: Mapping[str, npt.NDArray[Any] | Sequence[Any]], suffix: str) -> bytes:
    """Return rows as the bytes of a file that `TableWriter` would write, of the format ".csv" or ".jsonl"."""
    made = {name: as_array(values) for name, values in columns.items()}
    table, out = pa.table(made), io.BytesIO()
    writer = JsonLinesWriter(out) if suffix == ".jsonl" else csv_writer(out, table.schema, ",")
    writer.write_table(table)
    writer.close()
    return out.getvalue()


def csv_writer(sink: Any, schema: Any, delimiter: str) -> Any:
    """Write the header of a CSV file and return a writer of its rows."""
    names = io.StringIO()
    csv.writer(names, delimiter=delimiter, lineterminator="\n").writerow(schema.names)
    # Arrow would quote every name.
    sink.write(names.getvalue().encode())
    form = pa.csv.WriteOptions(include_header=False, delimiter=delimiter, quoting_style="needed")
    return pa.csv.CSVWriter(sink, schema, write_options=form)


def as_array(values: Any) -> Any:
    """Return the values of a column as an Arrow array; None and NaN are missing values."""
    column = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
    # A column that is empty so far is text, since anything can be written as text later.
    return column.cast(pa.string()) if pa.types.is_null(column.type) else column
