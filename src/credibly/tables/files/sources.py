"""Files that hold a table: the format by suffix, and their bytes out of gzip, bzip2, xz and zip."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from credibly.errors import InputError

# Formats by their suffix: text, typed and binary, and those that are read whole.
DELIMITED = (".csv", ".tsv")
TYPED = (".parquet", ".feather", ".arrow")
RECORDS = (".jsonl", ".ndjson", ".xlsx")
COMPRESSED = (".gz", ".bz2", ".xz")
SUFFIXES = (*DELIMITED, *TYPED, *RECORDS, ".csv.gz", ".zip")
KNOWN = f"{', '.join((*DELIMITED, *TYPED, *RECORDS))}, text also as .gz, .bz2 or .xz, or a .zip with one table"
# Formats that can be written, first those without types.
WRITTEN_AS_TEXT = (".csv", ".tsv", ".csv.gz")
WRITTEN = (*WRITTEN_AS_TEXT, ".parquet", ".feather", ".jsonl", ".xlsx")
# A zip member may claim this many times the size of its archive; beyond that it is refused if it is also this large.
RATIO = 100
LARGEST = 2 << 30

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True)
class Source:
    """A file that holds a table.

    Attributes:
        path: the file.
        suffix: its format, one of DELIMITED, TYPED and RECORDS.
        compression: one of COMPRESSED, ".zip" or "".
        member: name of the table within a zip archive; otherwise "".
    """

    path: Path
    suffix: str
    compression: str = ""
    member: str = ""

    @property
    def name(self) -> str:
        """Name of the file, as messages show it."""
        return self.path.name

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the table for reading bytes, decompressed. Raise `InputError` if it is truncated or corrupt."""
        try:
            if self.compression == ".zip":
                with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as handle:
                    yield handle
            else:
                with _OPENERS.get(self.compression, open)(self.path, "rb") as handle:
                    yield handle
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile) as error:
            raise self.corrupt(error) from None
        except OSError as error:
            # bzip2 raises it for corrupt content, without a number.
            if self.compression and error.errno is None:
                raise self.corrupt(error) from None
            raise

    def corrupt(self, error: Exception) -> InputError:
        """Return the error for a compressed file that cannot be read."""
        kind = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zip": "zip"}.get(self.compression, "zip")
        found = f"{self.name!r} is a truncated or corrupt {kind} file ({error})"
        return InputError("table", found, "Compress it again, or pass it uncompressed")

    def random_access(self) -> IO[bytes]:
        """Return the bytes as a file in which one can seek: in memory if the file is compressed."""
        if not self.compression:
            return open(self.path, "rb")
        with self.open() as handle:
            return io.BytesIO(handle.read())


@dataclass(frozen=True)
class Bytes(Source):
    """A table in memory, such as the body of a request. Its path is a name for messages: no file is opened."""

    content: bytes = b""

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the bytes for reading."""
        yield io.BytesIO(self.content)


def suffix_of(path: Path) -> tuple[str, str]:
    """Return the format and the compression that a file name stands for, both "" if it is not that of a table."""
    name = path.name.lower()
    if name.endswith(".zip"):
        return ".zip", ".zip"
    compression = next((c for c in COMPRESSED if name.endswith(c)), "")
    inner = name.removesuffix(compression)
    # Binary formats have built-in compression.
    text = (*DELIMITED, ".jsonl", ".ndjson")
    found = next((s for s in (text if compression else (*text, *TYPED, ".xlsx")) if inner.endswith(s)), "")
    return (found, compression) if found else ("", "")


def source_of(path: str | os.PathLike[str] | Bytes) -> Source:
    """Return the table in a file. Raise unless the file exists, is not empty and has the suffix of a table."""
    if isinstance(path, Bytes):
        return path
    file = Path(path)
    if file.is_dir():
        raise InputError("table", f"{os.fspath(path)!r} is a folder", "Pass a CSV or Parquet file")
    if not file.exists():
        raise InputError("table", f"no such file: {os.fspath(path)!r}")
    suffix, compression = suffix_of(file)
    if not suffix:
        old = "Save it as .xlsx or CSV" if file.suffix.lower() in (".xls", ".xlsb", ".ods") else f"Pass one of {KNOWN}"
        raise InputError("table", f"{file.name!r} has an unknown suffix", old)
    try:
        with open(file, "rb") as handle:
            if not handle.read(1):
                raise InputError("table", f"{file.name!r} is empty", "Pass a file with a header line and rows")
    except OSError as error:
        raise InputError("table", f"cannot read {os.fspath(path)!r} ({error.strerror})") from None
    if suffix == ".zip":
        return _zipped(file)
    return Source(file, suffix, compression)


def check_expansion(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Raise if the members of a zip archive claim to be absurdly larger than the archive."""
    claimed, size = sum(member.file_size for member in members), path.stat().st_size
    if claimed > LARGEST and claimed > RATIO * size:
        found = f"{path.name!r} unpacks to {claimed >> 20:,} MB, more than {RATIO} times its size"
        raise InputError("table", found, "If you trust it, unpack it and pass the table itself")


def _zipped(file: Path) -> Source:
    """Return the only table in a zip archive. Hidden files and folders in it do not count."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = [m for m in archive.infolist() if not m.is_dir() and not _hidden(m.filename)]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise Source(file, "", ".zip").corrupt(error) from None
    tables = [(m, suffix_of(Path(m.filename))) for m in members]
    tables = [(m, kind) for m, kind in tables if kind[0] and not kind[1]]
    if len(tables) != 1:
        listed = ", ".join(repr(m.filename) for m, _ in tables[:5])
        found = f"{len(tables)} tables ({listed})" if tables else "no table"
        raise InputError("table", f"{file.name!r} holds {found}", f"Pack one table, or pass one of {KNOWN}")
    (member, (suffix, _)) = tables[0]
    if member.flag_bits & 1:
        raise InputError("table", f"{file.name!r} is encrypted", "Unpack it and pass the table itself")
    check_expansion(file, [member])
    return Source(file, suffix, ".zip", member.filename)


def _hidden(name: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
