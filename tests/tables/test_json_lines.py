"""JSON lines are what `json.dumps` would write row by row, and columns of records what each record holds."""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credibly.tables.files.json_lines import json_lines
from credibly.tables.files.record_files import as_text, record_columns

WORDS = ["a", 'b"\\', "é\n\x01", "\u2028", "null", ""]


def row_by_row(table: pa.Table) -> bytes:
    short = [c.cast(pa.string()).cast(pa.float64()) if pa.types.is_float32(c.type) else c for c in table.columns]
    lines = []
    for row in pa.Table.from_arrays(short, names=table.column_names).to_pylist():
        plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        lines.append(json.dumps(plain, ensure_ascii=False, default=as_text) + "\n")
    return "".join(lines).encode()


def test_floats_of_any_size_have_the_shortest_digits():
    rng, n = np.random.default_rng(0), 5_000
    exponents = rng.uniform(-8, 20, n)
    table = pa.table(
        {
            "any bits": rng.integers(0, 2**64, n, dtype=np.uint64).view(np.float64),
            "any single bits": rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32),
            "normal": rng.normal(size=n),
            "single": rng.normal(size=n).astype(np.float32),
            "missing": pa.array(rng.normal(size=n), mask=rng.random(n) < 0.3),
            "magnitudes": 10.0**exponents,
            "single magnitudes": (10.0**exponents).astype(np.float32),
            "powers": 10.0 ** np.round(exponents),
            "integral": np.round(100 * rng.normal(size=n)),
            "zeros": np.where(rng.random(n) < 0.5, -0.0, 0.0),
        }
    )
    assert json_lines(table) == row_by_row(table)
    assert json_lines(table.slice(7, 3)) == row_by_row(table.slice(7, 3))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.none() | st.floats(allow_nan=False),
            st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
            st.none() | st.integers(-(2**62), 2**62),
            st.none() | st.booleans(),
            st.none() | st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1)),
        ),
        max_size=20,
    )
)
def test_cells_of_every_type(rows):
    types = [pa.float64(), pa.string(), pa.int64(), pa.bool_(), pa.timestamp("us")]
    columns = list(zip(*rows)) or [()] * len(types)
    names = ["x", 'a "name"', "é", "b", "t"]
    table = pa.table({name: pa.array(cells, kind) for name, cells, kind in zip(names, columns, types)})
    assert json_lines(table) == row_by_row(table)


def test_chunks_dictionaries_and_other_types():
    words = pa.array([WORDS[i % len(WORDS)] for i in range(12)])
    table = pa.table({"w": words.dictionary_encode(), "l": [[1, 2], None] * 6, "n": pa.nulls(12)})
    table = pa.concat_tables([table, table])
    assert json_lines(table) == row_by_row(table)


@pytest.mark.parametrize("names", [["x"], ["x", "w"], ["w", "x", "absent"]])
def test_columns_of_records_with_and_without_gaps(names):
    complete: list[dict[str, Any]] = [{"x": 1, "w": "a", "more": 0}, {"x": 2.5, "w": None, "more": 0}]
    for records in (complete, [*complete, {"w": "b"}], [*complete, {"x": None, "w": "b"}]):
        found = record_columns(records, names, {"x"})
        kept = [name for name in names if any(name in record for record in records)]
        assert {name: column.to_pylist() for name, column in found.items()} == {
            name: [record.get(name) for record in records] for name in kept
        }
        assert "x" not in kept or found["x"].type == pa.float64()
