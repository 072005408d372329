"""Dates as inputs: against Python's own calendar, day and month over the column, missing and impossible dates."""

from __future__ import annotations

import datetime
import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credibly.tables.cells.date_formats import dates, day_first, looks_like_dates
from credibly.tables.columns.dates import Date, fit_date
from credibly.tables.columns.encoders import fit_column
from credibly.tables.preparation import Preparation

DAY = datetime.date(2024, 3, 5)


def parsed(cell: str, days_first: bool = False) -> datetime.datetime | None:
    (value,), _ = dates(pa.array([cell]), days_first)
    found: datetime.datetime | None = value.item()
    return found


def encoded(known: Date, cells: pa.Array | None, rows: int | None = None) -> tuple[np.ndarray, list[tuple[int, str]]]:
    out = np.zeros((len(cells) if cells is not None else rows, len(known.features)), np.float32)
    return out, known.encode(cells, out)


# -- texts -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "cell, time",
    [
        ("2024-03-05", ""),
        ("2024/3/5", ""),
        ("2024-03-05T12:30:00Z", "12:30:00"),
        ("2024-03-05 12:30:00.123+02:00", "10:30:00.123000"),
        ("3/5/2024", ""),
        ("03/05/24 10:15", "10:15:00"),
        ("3/5/2024 10:15:00 PM", "22:15:00"),
        ("3/5/2024 12:05 am", "00:05:00"),
        ("5 March 2024", ""),
        ("05-Mar-24", ""),
        ("Mar 5, 2024", ""),
    ],
)
def test_texts_that_are_dates(cell: str, time: str) -> None:
    expected = datetime.datetime.combine(DAY, datetime.time.fromisoformat(time or "00:00"))
    assert parsed(cell) == expected
    assert looks_like_dates(pa.array([cell, "-", None]))


def test_months_are_their_first_day_and_years_have_a_century() -> None:
    assert parsed("2024-03") == parsed("March 2024") == datetime.datetime(2024, 3, 1)
    assert parsed("1/2/68") == datetime.datetime(2068, 1, 2)
    assert parsed("1/2/69") == datetime.datetime(1969, 1, 2)


@pytest.mark.parametrize("cell", ["31.02.2024", "2023-02-29", "2024-03-05 25:00", "2024-03-05 13:00 pm", "soon"])
def test_days_that_do_not_exist(cell: str) -> None:
    _, notes = dates(pa.array(["2024-01-01", cell, None, "-"]), True)
    assert notes == [(1, f"{cell!r} is not a date")]


@given(st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2068, 12, 31)), st.booleans())
def test_any_date_is_read_back(when: datetime.datetime, first: bool) -> None:
    text = when.strftime("%d/%m/%Y %H:%M:%S.%f" if first else "%m/%d/%Y %H:%M:%S.%f")
    assert parsed(text, first) == when
    assert parsed(when.isoformat(" ") if when.second or when.microsecond else when.isoformat()) == when
    assert parsed(when.strftime("%d %B %Y")) == datetime.datetime(when.year, when.month, when.day)


def test_day_and_month_are_decided_over_the_column() -> None:
    assert day_first(pa.array(["3/4/2024", "13/4/2024", None])) == (True, "")
    assert day_first(pa.array(["3/4/2024", "4/13/2024"])) == (False, "")
    assert day_first(pa.array(["03.04.2024"])) == (True, "")
    assert day_first(pa.array(["2024-03-04"])) == (False, "")
    order, note = day_first(pa.array(["3/4/2024", "5/6/2024"]))
    assert not order
    assert "3/4/2024 read as month/day" in note
    order, note = day_first(pa.array(["13/4/2024", "14/4/2024", "4/13/2024"]))
    assert order
    assert "some of the dates contradict" in note


def test_arrow_types_in_any_unit_and_zone() -> None:
    moment = datetime.datetime(2024, 3, 5, 12, 30, tzinfo=datetime.UTC)
    for kind in (pa.timestamp("s", "Europe/Oslo"), pa.timestamp("ns", "UTC"), pa.timestamp("us")):
        values, notes = dates(pa.array([moment, None], kind), False)
        assert values[0].item() == datetime.datetime(2024, 3, 5, 12, 30)
        assert np.isnat(values[1])
        assert notes == []
    for kind in (pa.date32(), pa.date64()):
        assert dates(pa.array([DAY], kind), False)[0][0].item() == datetime.datetime(2024, 3, 5)


# -- inputs ------------------------------------------------------------------------------------------------------------
def test_inputs_are_those_of_the_calendar() -> None:
    rng = np.random.default_rng(0)
    start = datetime.datetime(2019, 6, 1)
    moments = [start + datetime.timedelta(minutes=int(m)) for m in rng.integers(0, 3 * 365 * 24 * 60, 300)]
    column = pa.array(moments, pa.timestamp("us"))
    known = fit_date("when", column, False)
    assert isinstance(known, Date)
    assert known.features == [
        "when elapsed", "when year", "when month (sine)", "when month (cosine)", "when weekday (sine)",
        "when weekday (cosine)", "when hour (sine)", "when hour (cosine)",
    ]  # fmt: skip
    x, notes = encoded(known, column)
    assert notes == []
    elapsed = np.array([(m - min(moments)).total_seconds() for m in moments])
    years = np.array([m.year for m in moments])
    np.testing.assert_allclose(x[:, 0], (elapsed - elapsed.mean()) / elapsed.std(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x[:, 1], (years - years.mean()) / years.std(), rtol=1e-5)
    for row, m in zip(x, moments):
        length = (m.replace(day=28) + datetime.timedelta(days=4)).replace(day=1) - datetime.timedelta(days=1)
        phases = (
            (m.month - 1 + (m.day - 1) / length.day) / 12,
            m.weekday() / 7,
            (m - m.replace(hour=0, minute=0)).total_seconds() / 86400,
        )
        expected = [wave(2 * math.pi * phase) for phase in phases for wave in (math.sin, math.cos)]
        np.testing.assert_allclose(row[2:], expected, atol=1e-6)


def test_only_what_varies_is_an_input() -> None:
    mondays = [datetime.date(2024, 1, 1) + datetime.timedelta(days=7 * i) for i in range(30)]
    known = fit_date("d", pa.array(mondays), False)
    assert isinstance(known, Date)
    assert known.features == ["d elapsed", "d month (sine)", "d month (cosine)"]
    assert fit_date("d", pa.array([DAY] * 5), False) == ("left out", "constant: 2024-03-05 in every training row")
    single = fit_date("d", pa.array([DAY, None]), False)
    assert isinstance(single, Date)
    assert single.features == ["d is missing"]


def test_missing_dates_get_an_indicator_and_the_centre_of_the_cycles() -> None:
    cells = pa.array(["2024-01-01", "2024-02-10", "2024-03-25", "-", "never", None])
    known = fit_date("d", cells, False)
    assert isinstance(known, Date)
    assert known.features[-1] == "d is missing"
    assert known.note == "2024-01-01 to 2024-03-25; 2 missing; 1 not a date, treated as missing"
    x, notes = encoded(known, cells)
    assert notes == [(4, "d = 'never' is not a date")]
    assert x[:, -1].tolist() == [0, 0, 0, 1, 1, 1]
    assert x[3].tolist() == [x[1, 0], *[0] * (x.shape[1] - 2), 1]  # the median date
    absent, notes = encoded(known, None, 2)
    assert absent.tolist() == [x[3].tolist()] * 2
    assert notes == [(0, "d is missing"), (1, "d is missing")]


def test_missing_dates_are_noted_if_training_had_none() -> None:
    known = fit_date("d", pa.array([DAY + datetime.timedelta(days=i) for i in range(20)]), False)
    assert isinstance(known, Date)
    _, notes = encoded(known, pa.array(["2024-03-06", None, "x", "2034-01-01"]))
    assert notes == [
        (2, "d = 'x' is not a date"),
        (1, "d is missing"),
        (3, "d = 2034-01-01 is far outside the training range [2024-03-05, 2024-03-24]"),
    ]


def test_text_and_arrow_columns_become_the_same_inputs_and_survive_json() -> None:
    days = [DAY + datetime.timedelta(days=11 * i) for i in range(40)]
    y = np.arange(40.0)
    typed = Preparation.fit(pa.table({"d": pa.array(days), "y": y}), "y")
    known = Preparation.fit(pa.table({"d": [d.strftime("%d/%m/%Y") for d in days], "y": y}), "y")
    assert known.columns[0][1] == "date"
    assert known.numeric_names == known.text_names == ()
    for data in (pa.table({"d": pa.array(days)}), pa.table({"d": [d.strftime("%d/%m/%Y") for d in days]})):
        x, notes = known.transform(data)
        assert notes == []
        assert x.tobytes() == typed.transform(pa.table({"d": pa.array(days)}))[0].tobytes()
    again = Preparation.from_dict(json.loads(json.dumps(known.to_dict(), allow_nan=False)))
    assert again == known
    assert again.transform(data)[0].tobytes() == x.tobytes()


def test_times_of_day_and_durations_are_numbers() -> None:
    clock = pa.array([datetime.time(h, 30) for h in range(20)])
    known = fit_column("t", clock)
    assert known.kind == "numeric"
    assert (known.low, known.high) == (0.5, 19.5)
    spans = fit_column("t", pa.array([datetime.timedelta(minutes=m) for m in range(20)]))
    assert (spans.low, spans.high) == (0.0, 19 * 60.0)
