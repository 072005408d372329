"""The rows of a request: a body in JSON or CSV as inputs of the network, with notes on unusual cells.

Cells are read as `credibly predict` reads those of a file. In addition a strict request, the default, is rejected if a
column is absent or unknown or a cell does not fit its column, where `credibly predict` would continue without it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from credibly.errors import InputError
from credibly.tables.cells.date_formats import dates
from credibly.tables.cells.parsing import Notes, shown, whole_column
from credibly.tables.columns.dates import Date
from credibly.tables.files.reading import batches, header, record_batch
from credibly.tables.files.sources import Bytes
from credibly.web.serve.errors import RequestError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from credibly.tables.model import Array, TableModel
    from credibly.tables.preparation import Preparation

JSON, CSV = "application/json", "text/csv"
LENIENT = "or pass strict=false to treat it as missing"


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows to predict.

    Attributes:
        inputs: inputs of the network (N, P), with NaN for missing cells.
        notes: (row, note) for unusual cells.
        cells: the cells that the inputs were made from; None for part of a request, or several together.
    """

    inputs: Array
    notes: Notes
    cells: RecordBatch | None = None

    def __len__(self) -> int:
        return len(self.inputs)


def parse_rows(body: bytes, content_type: str, model: TableModel, *, strict: bool, max_rows: int) -> Rows:
    """Return the rows of a body. Raise `RequestError` or `InputError` if it cannot be read as such."""
    kind = media_type(content_type)
    if not body.strip():
        advice = 'Send rows such as [{"age": 31}] as application/json, or a header and rows as text/csv'
        raise RequestError(400, "the body is empty", advice=advice)
    if kind == JSON:
        block, notes = _from_json(body, model.preparation, strict, max_rows)
    elif kind == CSV:
        block, notes = _from_csv(body, model.preparation, strict, max_rows)
    else:
        found = f"content type {shown(kind)} is not supported" if kind else "the request has no content type"
        raise RequestError(415, found, argument="Content-Type", advice=f"Send {JSON} or {CSV}")
    if strict:
        _check_cells(block, notes, model.preparation)
    inputs, more = model.inputs(block)
    return Rows(inputs, [*notes, *more], block)


def media_type(header: str) -> str:
    """Return the media type of a Content-Type header, in lower case. Raise if its text is not UTF-8."""
    message = Message()
    message["content-type"] = header
    charset = message.get_content_charset("utf-8")
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise RequestError(
            415, f"charset {shown(charset)} is not supported", argument="Content-Type", advice="Use utf-8"
        )
    return message.get_content_type() if header.strip() else ""


def _from_json(body: bytes, known: Preparation, strict: bool, max_rows: int) -> tuple[RecordBatch, Notes]:
    records = _records(body)
    _check_count(len(records), max_rows)
    own = set(known.names)
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise InputError(f"rows[{number}]", f"must be an object of columns, got {_kind(record)}")
        if record.keys() != own:
            _check_names(f"rows[{number}]", record, known, strict)
    return record_batch(records, known.names, known.numeric_names, known.conventions)


def _records(body: bytes) -> list[Any]:
    try:
        found = json.loads(body.decode("utf-8-sig"), parse_constant=_not_json)
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8 (byte {error.start})", advice="Send JSON in UTF-8") from None
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply", advice="Send a list of flat objects") from None
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise RequestError(400, f"the body is not JSON ({where})", advice="Send a list of objects") from None
    # An integer of thousands of digits.
    except ValueError:
        raise RequestError(400, "the body has a number that is too long to read", advice="Send a smaller one") from None
    if isinstance(found, dict):
        if set(found) != {"rows"}:
            advice = 'Send {"rows": [...]} or the list itself; for a single row [{...}]'
            raise InputError(
                "body", f"must be a list of rows or have the key 'rows' alone, got {_listed(found)}", advice
            )
        found = found["rows"]
    if not isinstance(found, list):
        raise InputError("rows", f"must be a list of objects, got {_kind(found)}")
    return found


def _not_json(text: str) -> NoReturn:
    raise RequestError(400, f"the body has {text}, which JSON does not have", advice="Send null for a missing value")


def _from_csv(body: bytes, known: Preparation, strict: bool, max_rows: int) -> tuple[RecordBatch, Notes]:
    source = Bytes(Path("body"), ".csv", content=body)
    names = header(source)
    _check_names("body", dict.fromkeys(names), known, strict)
    # One row more than allowed, so that a body with too many rows is rejected before all are read.
    found = batches(source, known.names, known.numeric_names, max_rows + 1, conventions=known.conventions)
    block, notes = next(found)
    _check_count(block.num_rows, max_rows, exact=False)
    return block, notes


def _check_count(rows: int, most: int, *, exact: bool = True) -> None:
    if not rows:
        raise InputError("rows", "must be at least one row, got none")
    if rows > most:
        found = f"must be at most {most:,} rows, got {f'{rows:,}' if exact else 'more'}"
        raise RequestError(413, f"rows {found}", argument="rows", advice="Send them in several requests")


def _check_names(where: str, found: dict[str, Any], known: Preparation, strict: bool) -> None:
    """Raise if a strict request lacks a column or has an unknown one, or if any request has none of the columns."""
    absent = known.missing_columns(found)
    if len(absent) == len(known.names):
        raise InputError(where, f"has none of the columns of the training data ({_listed(absent)})")
    if not strict:
        return
    if absent:
        columns = "column" if len(absent) == 1 else "columns"
        raise InputError(where, f"lacks the {columns} {_listed(absent)}", f"Send null for a missing value, {LENIENT}")
    # Columns of the training table that are not inputs may be present, so that its rows can be sent unchanged.
    ignored = {name for name, _, _ in known.columns} | set(known.target_columns)
    extra = [name for name in found if name not in ignored]
    if extra:
        columns = "column" if len(extra) == 1 else "columns"
        advice = f"The columns are {_listed(list(known.names), 20)}. Leave it out, or pass strict=false to ignore it"
        raise InputError(where, f"has the unknown {columns} {_listed(extra)}", advice)


def _check_cells(block: RecordBatch, notes: Notes, known: Preparation) -> None:
    """Raise at the first cell that does not fit its column: text among numbers, an infinite number, no date."""
    wrong = list(notes)
    for column in known.used:
        if isinstance(column, Date) and (cells := whole_column(block, column.name)) is not None:
            wrong += [(row, f"{column.name} = {note}") for row, note in dates(cells, column.day_first)[1]]
    if wrong:
        row, note = min(wrong)
        name = note.split(" = ", 1)[0]
        raise RequestError(
            422, f"rows[{row}]: {note}", argument=name, advice=f"Send null for a missing value, {LENIENT}"
        )


def _listed(names: Any, most: int = 5) -> str:
    some = ", ".join(shown(str(name)) for name in list(names)[:most])
    return f"{some} and {len(names) - most:,} others" if len(names) > most else some or "no keys"


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
