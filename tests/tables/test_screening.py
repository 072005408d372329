"""Warnings before a fit: each hazard is found, named by column and row of the file, and ordinary tables have none."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from credibly.tables.cells.conventions import Conventions, attach
from credibly.tables.cells.missing_codes import missing_code
from credibly.tables.columns.screening import screen
from credibly.tables.preparation import Preparation

ROWS = 300


def warnings(
    drop: tuple[str, ...] = (), rows: int = ROWS, known: Conventions | None = None, **columns: Any
) -> list[str]:
    """Return the warnings about a table with an ordinary input, a real target and the given columns."""
    rng = np.random.default_rng(1)
    plain = {"x": rng.normal(3, 2, rows), "y": rng.normal(size=rows)}
    table = pa.table(plain | columns)
    table = table if known is None else attach(table, known)
    order = rng.permutation(rows)
    train, held_out = np.sort(order[rows // 5 :]), np.sort(order[: rows // 5])
    return list(screen(table, Preparation.fit(table, "y", drop=drop, rows=train), [(train, held_out)]))


def test_an_ordinary_table_has_no_warnings() -> None:
    rng = np.random.default_rng(0)
    found = warnings(
        income=rng.lognormal(10, 2, ROWS),
        zeros=np.where(rng.random(ROWS) < 0.8, 0.0, rng.exponential(1000, ROWS)),
        age=rng.integers(18, 90, ROWS).astype(float),
        sex=rng.choice(["f", "m"], ROWS),
        town=rng.choice([f"town {i}" for i in range(30)], ROWS),
        code=[f"{i:04}x" for i in range(ROWS)],
        skewed=rng.standard_t(3, ROWS),
    )
    assert found == []


# -- leaks -------------------------------------------------------------------------------------------------------------
def test_copies_of_the_target() -> None:
    y = np.random.default_rng(2).normal(50, 3, ROWS)
    holes = pa.array([None if i % 7 == 0 else v for i, v in enumerate(y)])
    (copy, affine, near) = warnings(
        y=y, copy=holes, affine=7 - 1e9 * y, near=y + np.random.default_rng(3).normal(0, 0.01, ROWS),
        related=y + np.random.default_rng(3).normal(0, 0.1, ROWS),
    )  # fmt: skip
    assert copy == "copy is a copy of the target y; pass --drop copy unless it is known before y is"
    assert affine.startswith("affine has a correlation of -1.000000 with the target y")
    assert near.startswith("near has a correlation of 0.9999")


def test_values_that_stand_for_classes() -> None:
    y = np.random.default_rng(0).choice(["yes", "no", "maybe"], ROWS)
    code = {"yes": 3.0, "no": 1.0, "maybe": 2.0}
    found = warnings(y=y, code=[code[v] for v in y], word=[v.upper() for v in y], partly=[v[:1] == "y" for v in y])
    assert [warning.split(" matches")[0] for warning in found] == ["every value of code", "every value of word"]
    other = [*y[:-1], "yes" if y[-1] == "no" else "no"]
    assert warnings(y=y, word=other) == []


def test_a_threshold_that_gives_the_classes_away() -> None:
    grams = np.random.default_rng(0).normal(2900, 700, ROWS)
    low = np.where(grams < 2500, 1, 0)
    (found,) = warnings(y=low, grams=pa.array([None if i % 9 == 0 else g for i, g in enumerate(grams)]))
    assert found.startswith("grams alone separates the classes of the target y without an exception; pass --drop grams")
    three = np.digitize(grams, [2500, 3000])
    assert len(warnings(y=[f"level {k}" for k in three], grams=grams)) == 1
    low[0] = 1 - low[0]
    assert warnings(y=low, grams=grams) == []
    # A few rows may be separated by accident.
    few = np.argsort(np.argsort(grams)) < 4
    assert warnings(y=few, grams=grams) == []


# -- rows --------------------------------------------------------------------------------------------------------------
def test_twins_across_the_split_are_counted() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=ROWS), rng.normal(size=ROWS)
    x[200:260], y[200:260] = x[:60], y[:60]
    table = pa.table({"x": x, "w": ["a", "b"] * (ROWS // 2), "y": y})
    train, held_out = np.arange(0, 200), np.arange(200, ROWS)
    (found,) = screen(table, Preparation.fit(table, "y", rows=train), [(train, held_out)])
    assert found.startswith("60 rows repeat an earlier one, target included (row ")
    duplicates = "60 of 100 held-out rows have a duplicate among the training rows"
    assert f"{duplicates}, which makes the metrics look too good" in found
    train, held_out = np.arange(0, 270), np.arange(270, ROWS)
    (found,) = screen(table, Preparation.fit(table, "y", rows=train), [(train, held_out)])
    assert "60 rows repeat" in found
    assert "duplicate" not in found


def test_twins_across_folds_are_counted_in_all_of_them() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=ROWS), rng.normal(size=ROWS)
    x[1], y[1], x[11], y[11] = x[0], y[0], x[10], y[10]
    table, fold = pa.table({"x": x, "y": y}), np.arange(ROWS) % 5
    folds = [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(5)]
    (found,) = screen(table, Preparation.fit(table, "y"), folds)
    assert "; 4 of 300 cross-validated rows have a duplicate among the rows of their fit, which makes" in found


def test_a_repeated_row_is_named_by_its_numbers_in_the_file() -> None:
    x = np.random.default_rng(0).normal(size=ROWS)
    y = np.random.default_rng(1).normal(size=ROWS)
    x[9], y[9] = x[4], y[4]
    (found,) = warnings(x=x, y=y, known=Conventions(skipped=(7,)))
    assert "1 row repeats an earlier one, target included (row 11 = row 5)" in found


def test_rows_that_repeat_by_chance_are_no_hazard() -> None:
    rng = np.random.default_rng(0)
    table = pa.table(
        {"a": rng.choice(["x", "y"], 500), "b": rng.choice(["p", "q"], 500), "y": rng.choice(["0", "1"], 500)}
    )
    rows = np.arange(500)
    assert screen(table, Preparation.fit(table, "y"), [(rows[:400], rows[400:])]) == ()


def test_a_row_number_does_not_hide_twins() -> None:
    x = np.tile(np.random.default_rng(0).normal(size=ROWS // 2), 2)
    found = warnings(x=x, y=2 * x**2, nr=np.arange(ROWS) + 1.0)
    assert found[0] == "nr counts the rows (1, 2, 3, ...); pass --drop nr"
    assert found[1].startswith("150 rows repeat")


# -- columns -----------------------------------------------------------------------------------------------------------
def test_constant_columns() -> None:
    assert warnings(a=[1.0] * ROWS) == ["a has the same value in every training row and is left out"]
    (found,) = warnings(**{name: ["same"] * ROWS for name in "abcdefg"})
    assert found == "a, b, c, d, e and 2 more columns have the same value in every training row and are left out"
    assert warnings(drop=("a",), a=[1.0] * ROWS) == []


def test_identifiers() -> None:
    assert warnings(order_id=np.random.default_rng(0).permutation(ROWS) * 7.0) == [
        "order_id looks like an identifier: a different integer in every row; pass --drop order_id"
    ]
    assert warnings(size=np.random.default_rng(0).permutation(ROWS) * 7.0) == []
    assert warnings(n=np.arange(ROWS)[::-1] * 1.0)[0].startswith("n counts the rows (299, 298, 297, ...)")


def test_absurd_values_are_named_by_row() -> None:
    rng = np.random.default_rng(0)
    age, price = rng.normal(40, 10, ROWS), rng.lognormal(12, 0.4, ROWS)
    age[16], price[3], price[8] = 4000.0, 1e12, 1e13
    assert warnings(age=age, price=price, known=Conventions(skipped=(2,))) == [
        f"age is 4000 in row 18, where the median is {np.median(age):.6g}; check it",
        f"price is 1e+13 in row 10 (and 1 more), where the median is {np.median(price):.6g}; check it",
    ]
    y = rng.normal(size=ROWS)
    y[0] = -1e6
    assert warnings(y=y)[0].startswith("y is -1e+06 in row 1,")


def test_codes_of_missing_values() -> None:
    age = np.random.default_rng(0).normal(40, 3, ROWS)
    age[::20] = -999
    assert warnings(age=age) == [
        "age is -999 in 15 rows, far from all other values; if it means missing, pass --na -999"
    ]


# -- entities and time -------------------------------------------------------------------------------------------------
def test_entities_by_name() -> None:
    customers = [f"c{i}" for i in np.random.default_rng(0).integers(0, 30, ROWS)]
    (found,) = warnings(customer=customers)
    assert found.startswith("customer looks like an entity, with 10 rows for each of its 30 values")
    assert found.endswith("pass --group customer if new ones are to be predicted")
    assert warnings(PatientId=np.random.default_rng(0).integers(0, 30, ROWS) * 11.0)[0].startswith("PatientId looks")
    assert warnings(town=customers) == []
    assert warnings(drop=("customer",), customer=customers) == []


def test_entities_by_the_shape_of_a_panel() -> None:
    blocks = np.repeat(np.arange(50), 6)
    trait = np.random.default_rng(0).choice(["f", "m"], 50)[blocks]
    (found,) = warnings(who=blocks * 3.0, trait=trait)
    assert "--group who" in found
    assert warnings(who=np.random.default_rng(0).permutation(blocks) * 3.0, trait=trait) == []


def test_a_text_column_that_is_left_out_can_be_an_entity() -> None:
    names = [f"user {i // 2}" for i in range(ROWS)]
    assert any("--group user" in warning for warning in warnings(user=names))


def test_time_stamps() -> None:
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=i) for i in range(ROWS)]
    (found,) = warnings(day=pa.array(days))
    assert found.startswith("day looks like a time stamp")
    assert "pass --time day if later rows are to be predicted" in found
    years = np.random.default_rng(0).integers(1990, 2020, ROWS).astype(float)
    assert "--time year" in warnings(year=years)[0]
    assert warnings(weight=years) == []
    (both,) = warnings(day=pa.array(days), year=years)
    assert both.startswith("day and year look like time stamps")


@pytest.mark.parametrize("option", ["group", "time"])
def test_what_the_split_respects_is_not_mentioned(option: str) -> None:
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=i) for i in range(ROWS)]
    table = pa.table({
        "customer": [f"c{i}" for i in np.random.default_rng(0).integers(0, 30, ROWS)],
        "day": pa.array(days),
        "y": np.random.default_rng(1).normal(size=ROWS),
    })  # fmt: skip
    rows, known = np.arange(ROWS), Preparation.fit(table, "y")
    both = screen(table, known, [(rows[:200], rows[200:])])
    assert len(both) == 2
    one = screen(table, known, [(rows[:200], rows[200:])], **{option: {"group": "customer", "time": "day"}[option]})
    assert len(one) == 1
    assert f"--{option}" not in one[0]


@pytest.mark.parametrize(
    "values, code",
    [
        ([40, 199, 120, -999, 77], -999.0),
        ([0, 1, 2, -99, -99], -99.0),
        ([40, 199, 120, 9999, np.nan], 9999.0),
        ([-3, 199, 120, -999], None),  # others are negative too
        ([40, 199, 120, 999, 400], None),  # not far above the others
        ([1, 2, 3, -9], None),  # one digit
        ([1, 2, 3, -99.5], None),
        ([1, -99], None),
    ],
)
def test_what_is_a_code(values: list[float], code: float | None) -> None:
    assert missing_code(np.array(values, dtype=float)) == code
