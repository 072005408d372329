"""Numbers as people write them: every format, ambiguous ones decided over the column, and a round trip."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credibly.tables.cells.number_formats import decimal_mark, describe_format, fits, parse


def values(cells: list[str | None], default: str = ".") -> list[float | None]:
    column = pa.array(cells, pa.string())
    found, good = parse(column, decimal_mark(column.drop_null(), default))
    return [v if g else None for v, g in zip(found.tolist(), good)]


@pytest.mark.parametrize(
    "cell, value",
    [
        ("2,960.0", 2960.0),
        ("1,234,567", 1234567.0),
        ("12,34,567", 1234567.0),
        ("65.2%", 65.2),
        ("3 %", 3.0),
        ("$240,000", 240000.0),
        ("-$5", -5.0),
        ("$-5", -5.0),
        ("US$ 3.50", 3.5),
        ("€ 1234", 1234.0),
        ("1234 €", 1234.0),
        ("USD 1,000", 1000.0),
        ("5EUR", 5.0),
        ("(1,200)", -1200.0),
        ("($1,200.50)", -1200.5),
        ("$(7)", -7.0),
        ("(5%)", -5.0),
        ("1\u2009234", 1234.0),
        ("1\u202f234.5", 1234.5),
        ("1\u00a0234 567", 1234567.0),
        ("1'234.50", 1234.5),
        ("\u22125", -5.0),
        ("+1e3", 1000.0),
        ("-inf", -math.inf),
    ],
)
def test_a_number_with_decorations(cell: str, value: float) -> None:
    assert values([cell]) == [value]
    assert fits(pa.array([cell, None, "x"]), ".").tolist() == [True, False, False]


@pytest.mark.parametrize(
    "cell", ["1,23x", "1,2,3", "12,3456", "1,234.5.6", "(-5)", "--5", "$", "%", "()", "1,234 567", "5 kg", "1-2", "a1"]
)
def test_what_is_no_number(cell: str) -> None:
    assert not fits(pa.array([cell]), ".")[0]


def test_the_decimal_mark_is_decided_over_the_column() -> None:
    assert values(["€ 1.234,50", "€ 234", "€ 1.234"]) == [1234.5, 234.0, 1234.0]
    assert values(["1,234", "12,5"]) == [1.234, 12.5]  # 12,5 is no group of three
    assert values(["1,234", "2,345"]) == [1234.0, 2345.0]  # both are possible: as in the rest of the file
    assert values(["1,234", "2,345"], ",") == [1.234, 2.345]
    assert values(["1.234", "999"], ",") == [1234.0, 999.0]
    assert values(["1.234", "10.5"], ",") == [1.234, 10.5]
    assert values(["1.234.567", "1"]) == [1234567.0, 1.0]
    assert values(["1.5", "1,5", "2,5", None]) == [1.5, 1.5, 2.5, None]


def test_the_remark_shows_an_example() -> None:
    assert describe_format(pa.array(["1", "2.5"]), ".") == ""
    assert describe_format(pa.array(["7", "$240,000"]), ".") == ("read as numbers: $240,000 is 240000")
    assert "some cells have a % sign and some have none" in describe_format(pa.array(["5%", "0.05"]), ".")
    assert "some cells" not in describe_format(pa.array(["5%", "6%"]), ".")


@given(
    cents=st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=20),
    style=st.sampled_from(["{}", "${}", "{} €", "{}%", "USD {}"]),
    german=st.booleans(),
)
def test_formatted_amounts_are_read_back(cents: list[int], style: str, german: bool) -> None:
    texts = [f"{abs(c) // 100:,}.{abs(c) % 100:02}" for c in cents]
    if german:
        texts = [t.translate(str.maketrans(",.", ".,")) for t in texts]
    cells = [style.format(t) if c >= 0 else f"({style.format(t)})" for c, t in zip(cents, texts)]
    assert values(cells) == [c / 100 for c in cents]
