"""CSV files as streams of columns: detects encoding, delimiter and decimal mark, and explains ragged rows."""

from __future__ import annotations

import codecs
import csv
import io
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.csv

from credibly.errors import InputError
from credibly.tables.cells.parsing import MISSING
from credibly.tables.files.sources import Bytes, Source

log = logging.getLogger(__name__)

DELIMITERS = ",;\t|"
# Bytes per block; Arrow reads some blocks ahead. A row must fit within two blocks, so files with long rows use the
# large size.
BLOCK = 1 << 20
LARGE = 1 << 26
SAMPLE = 1 << 22
# Control characters that mark a file as binary, and the bytes that Windows-1252 leaves undefined.
CONTROL = bytes(set(range(32)) - set(b"\t\n\r\f")) + b"\x7f"
UNDEFINED = b"\x81\x8d\x8f\x90\x9d"


@dataclass(frozen=True)
class Dialect:
    """The dialect of a CSV file.

    Attributes:
        names: column names, stripped of white space.
        raw: column names as they are in the file.
        encoding: text encoding.
        delimiter: delimiter between cells.
        decimal: decimal mark, "." or ",".
    """

    names: tuple[str, ...]
    raw: tuple[str, ...]
    encoding: str
    delimiter: str
    decimal: str


def dialect(source: Source) -> Dialect:
    """Detect the dialect of a file from its beginning. The encoding is checked over the whole file."""
    encoding, quotes = _encoding(source)
    with source.open() as handle:
        start = handle.read(SAMPLE)
    whole = codecs.getincrementaldecoder(encoding)(errors="replace").decode(start)
    text = whole[: whole.find("\n") + SAMPLE // 64]
    # The last line may be truncated.
    if len(text) < len(whole) or len(start) == SAMPLE:
        text = text[: text.rfind("\n") + 1] or text
    if not text.strip():
        raise InputError("table", f"{source.name!r} is empty", "Pass a file with a header line and rows")
    order = DELIMITERS if source.suffix != ".tsv" else "\t,;|"
    delimiter = max(order, key=lambda d: _agreement(text, d))
    # Usually an inch mark, which is fine; but an unclosed quote would turn the rest of the file into one cell.
    if quotes % 2:
        _check_closed(source, encoding, delimiter)
    records = list(_records(text, delimiter))
    if not records:
        raise InputError("table", f"the first line of {source.name!r} is not a header", "Start with column names")
    raw = tuple(records[0])
    return Dialect(tuple(n.strip() for n in raw), raw, encoding, delimiter, _decimal(records[1:], delimiter))


def blocks(
    source: Source,
    form: Dialect,
    columns: Collection[str],
    numeric: Collection[str] = (),
    na: Collection[str] = (),
    missing: Collection[str] = MISSING,
) -> Iterator[pa.RecordBatch]:
    """Yield blocks of a few megabytes with the given columns under their stripped names, missing cells null.

    Columns are text. Those in `numeric` are float64 up to the first block with a cell that is not a number, and text
    from there on, for the caller to parse cell by cell. Cells that equal one of `missing` or `na` are null.
    """
    done, size = 0, BLOCK
    while True:
        # After an error the file is read from the beginning again, without the rows that were yielded already.
        skip = done
        try:
            for batch in _stream(source, form, columns, numeric, (*missing, *na), size):
                known = min(skip, batch.num_rows)
                skip -= known
                if known < batch.num_rows:
                    yield batch.slice(known)
                    done += batch.num_rows - known
            return
        except (pa.ArrowException, OSError, UnicodeError) as error:
            if "conversion error to double" in str(error) and numeric:
                numeric = ()
            elif "straddling" in str(error) and size < LARGE:
                size = LARGE
            else:
                raise _explain(source, form, error) from None


def _stream(
    source: Source,
    form: Dialect,
    columns: Collection[str],
    numeric: Collection[str],
    missing: Collection[str],
    size: int,
) -> Iterator[pa.RecordBatch]:
    wanted = [(r, n) for r, n in zip(form.raw, form.names) if n in columns]
    # An empty line is a missing value if there is a single column, and not a row otherwise.
    parse = pa.csv.ParseOptions(
        delimiter=form.delimiter, newlines_in_values=True, ignore_empty_lines=len(form.names) > 1
    )
    convert = pa.csv.ConvertOptions(
        column_types={raw: pa.float64() if name in numeric else pa.string() for raw, name in wanted},
        include_columns=[raw for raw, _ in wanted],
        null_values=list(missing),
        strings_can_be_null=True,
        decimal_point=form.decimal,
    )
    # Arrow strips the byte order mark itself; any encoding name but "utf8" would send the text through a slow decoder.
    read = pa.csv.ReadOptions(block_size=size, encoding=form.encoding.replace("utf-8-sig", "utf8"))
    with _arrow_stream(source) as stream:
        for batch in pa.csv.open_csv(stream, read_options=read, parse_options=parse, convert_options=convert):
            yield batch.rename_columns([name for _, name in wanted])


@contextmanager
def _arrow_stream(source: Source) -> Iterator[Any]:
    """Open a file for Arrow, which decompresses gzip itself."""
    if isinstance(source, Bytes):
        with pa.BufferReader(source.content) as stream:
            yield stream
    elif source.compression in ("", ".gz"):
        with pa.input_stream(str(source.path), compression="gzip" if source.compression else None) as stream:
            yield stream
    else:
        with source.open() as handle, pa.PythonFile(handle, "r") as stream:
            yield stream


def no_rows(source: Source) -> InputError:
    """Return the error for a table without rows."""
    return InputError("table", f"{source.name!r} has a header but no rows")


def _explain(source: Source, form: Dialect, error: Exception) -> InputError:
    counts = re.search(r"Expected (\d+) columns, got (\d+)", str(error))
    if counts:
        expected, got, where = int(counts[1]), int(counts[2]), "a row"
        with source.open() as handle:
            rows = csv.reader(io.TextIOWrapper(handle, form.encoding, newline=""), delimiter=form.delimiter)
            with suppress(csv.Error, UnicodeError):
                for row in rows:
                    if row and len(row) != expected:
                        got, where = len(row), f"line {rows.line_num}"
                        break
        found = f"{where} of {source.name!r} has {got} cells, the header has {expected}"
        return InputError("table", found, "Fix that line; quote cells that contain the delimiter or a quote")
    if "Empty CSV" in str(error):
        return no_rows(source)
    if "straddling" in str(error):
        found = f"{source.name!r} has a row of more than {LARGE >> 20} MB"
        return InputError("table", found, "Look for a quote that is never closed")
    reason = str(error).splitlines()[0]
    return InputError("table", f"cannot read {source.name!r} as CSV ({reason})", "Save it again as CSV in UTF-8")


def _encoding(source: Source) -> tuple[str, int]:
    """Return the encoding and the number of quotes.

    The encoding is UTF-16 if a byte order mark says so, UTF-8 if the whole file decodes, and otherwise Windows-1252.
    """
    quotes = 0
    decoder, valid, windows, control = codecs.getincrementaldecoder("utf-8")(), True, True, False
    with source.open() as handle:
        start = handle.read(4)
        if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16", 0
        known = {b"PK\x03\x04": "an Excel workbook or zip archive", b"PAR1": "a Parquet file", b"%PDF": "a PDF"}
        if start in known or start[:2] == b"\x1f\x8b":
            kind = known.get(start, "gzip-compressed")
            raise InputError("table", f"{source.name!r} is {kind}, not CSV", "Save it as CSV, or fix its suffix")
        chunk = start + handle.read(1 << 20)
        first = True
        while chunk and not control:
            plain = chunk.isascii()
            quotes += chunk.count(b'"')
            # Most files are pure ASCII: past the first chunk only zero bytes are searched for.
            control = b"\0" in chunk if plain and not first else len(chunk.translate(None, CONTROL)) < len(chunk)
            if valid and not (plain and not first and decoder.getstate() == (b"", 0)):
                valid = _decodes(decoder, chunk)
            windows = windows and (plain or len(chunk.translate(None, UNDEFINED)) == len(chunk))
            first, chunk = False, handle.read(1 << 20)
    valid = valid and _decodes(decoder, b"", final=True)
    if control or not (valid or windows):
        what = "is a binary file, not a table" if control else "is text in an unknown encoding"
        raise InputError("table", f"{source.name!r} {what}", "Save it as CSV in UTF-8, or pass a Parquet file")
    if valid:
        return "utf-8-sig", quotes
    log.warning("%s is not UTF-8; read as Windows-1252 (Latin-1)", source.name)
    return "cp1252", quotes


def _check_closed(source: Source, encoding: str, delimiter: str) -> None:
    """Raise if a file ends inside quotes."""
    previous_limit, last = csv.field_size_limit(LARGE), 0
    try:
        with source.open() as handle:
            reader = csv.reader(io.TextIOWrapper(handle, encoding, newline=""), delimiter=delimiter, strict=True)
            for _ in reader:
                last = reader.line_num
    except csv.Error as error:
        if "end of data" in str(error):
            found = f"the row starting at line {last + 1} of {source.name!r} opens a quote that is never closed"
            raise InputError("table", found, "Close it, or double it if it is part of the cell") from None
    finally:
        csv.field_size_limit(previous_limit)


def _decodes(decoder: codecs.IncrementalDecoder, chunk: bytes, final: bool = False) -> bool:
    try:
        decoder.decode(chunk, final)
    except UnicodeDecodeError:
        return False
    return True


def _records(text: str, delimiter: str, count: int = 200) -> Iterator[list[str]]:
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        for row in reader:
            if row:
                yield row
                count -= 1
            if not count:
                return
    except csv.Error:
        return


def _agreement(text: str, delimiter: str) -> tuple[float, int]:
    """Score a delimiter: the fraction of rows as wide as the header, then the width; (0, 0) for a single column."""
    # Most delimiters do not occur at all.
    widths = [len(r) for r in _records(text, delimiter)] if delimiter in text else []
    if not widths or widths[0] < 2:
        return 0.0, 0
    return round(sum(w == widths[0] for w in widths) / len(widths), 1), widths[0]


def _decimal(records: list[list[str]], delimiter: str) -> str:
    if delimiter == ",":
        return "."
    cells = [c.strip() for r in records for c in r]
    commas = sum(re.fullmatch(r"[+-]?\d*,\d+([eE][+-]?\d+)?", c) is not None for c in cells)
    # 1.234 may be a decimal or a group of thousands, so it is no evidence for either.
    cells = [c for c in cells if not re.fullmatch(r"[+-]?[1-9]\d{0,2}(\.\d{3})+", c)]
    points = sum(re.fullmatch(r"[+-]?\d*\.\d+([eE][+-]?\d+)?", c) is not None for c in cells)
    return "," if commas > points else "."
