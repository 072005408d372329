"""Preprocessing of tables: against scikit-learn's own pipeline, for arbitrary tables, and every error."""

from __future__ import annotations

import datetime
import json
import subprocess
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from credibly.errors import InputError, StoreError
from credibly.tables.preparation import Preparation
from warm_python import warm_python

RNG = np.random.default_rng(0)


def table(rows: int = 60, **columns: Any) -> pa.Table:
    """Return a table with an ordinary input, a real target and the given columns."""
    rng = np.random.default_rng(rows)
    plain = {"x": rng.normal(3, 2, rows), "y": rng.normal(size=rows)}
    return pa.table(plain | columns)


def kinds(known: Preparation) -> dict[str, tuple[str, str]]:
    return {name: (kind, note) for name, kind, note in known.columns}


def refused(argument: str, *words: str, data: pa.Table, target: str = "y", **options: Any) -> None:
    with pytest.raises(InputError) as caught:
        Preparation.fit(data, target, **options)
    assert caught.value.argument == argument, str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# -- inputs ------------------------------------------------------------------------------------------------------------
def test_inputs_are_those_of_the_scikit_learn_pipeline() -> None:
    count = 400
    holes = np.where(RNG.random(count) < 0.2, None, RNG.lognormal(size=count))
    weights = 1 / np.arange(1, 81)
    many = RNG.choice([f"level {i:02}" for i in range(80)], count, p=weights / weights.sum())
    colour = np.where(RNG.random(count) < 0.1, None, RNG.choice(["red", "green", "blue"], count))
    data = table(
        count, holes=pa.array(holes.tolist()), many=many, colour=pa.array(colour.tolist()), y=RNG.normal(size=count)
    )
    train = RNG.permutation(count)[:300]
    known = Preparation.fit(data, "y", rows=train)
    x, notes = known.transform(data)

    frame = data.to_pandas()
    frame["colour"] = frame["colour"].astype(object).where(frame["colour"].notna(), "~ missing")  # sorts last
    one_hot = OneHotEncoder(max_categories=51, handle_unknown="infrequent_if_exist", sparse_output=False)
    numeric = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    peer = ColumnTransformer([("n", numeric, ["x", "holes"]), ("c", one_hot, ["many", "colour"])]).fit(
        frame.iloc[train]
    )
    expected = peer.transform(frame)
    indicator = known.features.index("holes is missing")
    np.testing.assert_array_equal(x[:, indicator], frame["holes"].isna())
    rest = np.delete(x, indicator, axis=1)
    assert rest.dtype == np.float32
    np.testing.assert_array_equal(rest, expected.astype(np.float32))
    assert known.inputs == x.shape[1] == 2 + 1 + 51 + 4
    assert known.names == ("x", "holes", "many", "colour")
    assert known.numeric_names == ("x", "holes")
    assert known.text_names == ("many", "colour")
    assert all("unknown category" in note for _, note in notes)
    missing = sum(value is None for value in holes[train])
    assert kinds(known)["holes"] == ("numeric", f"{missing:,} missing, completed from similar rows")
    assert "50 categories; " in kinds(known)["many"][1]


def test_statistics_come_from_the_training_rows_only_and_in_any_order() -> None:
    data = table(100, colour=["red", "blue"] * 30 + ["teal"] * 40)
    rows = np.arange(60)
    known = Preparation.fit(data, "y", rows=rows)
    other = pa.table({"x": [*data["x"].to_pylist()[:60], *[1e9] * 40], "y": data["y"], "colour": data["colour"]})
    assert Preparation.fit(other, "y", rows=rows) == known
    assert Preparation.fit(data, "y", rows=np.arange(100) < 60) == known
    x = data["x"].to_numpy()[:60]
    np.testing.assert_allclose([known.used[0].mean, known.used[0].scale], [x.mean(), x.std()], rtol=1e-12)
    shuffled = Preparation.fit(data.slice(0, 60).take(RNG.permutation(60)), "y")
    np.testing.assert_allclose(shuffled.transform(data)[0], known.transform(data)[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([shuffled.y_mean, shuffled.y_std], [known.y_mean, known.y_std], rtol=1e-12)


def test_what_is_left_out_and_why() -> None:
    data = table(
        60,
        one=[7.0] * 60,
        same=["a"] * 60,
        nothing=pa.nulls(60, pa.float64()),
        blank=pa.array([""] * 60),
        code=[f"id-{i}" for i in range(60)],
        comment=[f"the room number {i} was cold" for i in range(60)],
        number=np.arange(60.0),
        flag=pa.array([None, 1.0] * 30),
        noise=1 + np.arange(60) % 2 * 1e-16,
        unwanted=np.arange(60.0),
        integer=pa.array(np.arange(60) % 7, pa.int8()),
    )
    known = Preparation.fit(data, "y", drop=["unwanted"])
    reported = kinds(known)
    assert reported["one"] == ("left out", "constant: 7 in every training row")
    assert reported["same"][0] == reported["nothing"][0] == reported["blank"][0] == reported["noise"][0] == "left out"
    assert "constant: 'a'" in reported["same"][1]
    assert "no value" in reported["nothing"][1]
    assert "no value" in reported["blank"][1]
    assert reported["code"][0] == "left out"
    assert "60 distinct values in 60 cells" in reported["code"][1]
    assert "identifier" in reported["code"][1]
    assert "--drop" in reported["code"][1]
    assert reported["comment"][0] == "left out"
    assert reported["comment"][1].startswith("looks like free text: 60 distinct values in 60 cells")
    assert reported["number"][0] == "numeric"
    assert "row number" in reported["number"][1]
    assert reported["unwanted"] == ("dropped", "as requested")
    assert known.names == ("x", "number", "flag", "integer")
    assert known.features == ("x", "number", "flag is missing", "integer")
    np.testing.assert_array_equal(known.transform(data)[0][:, 2], [1, 0] * 30)


def test_infinite_inputs_count_as_missing() -> None:
    known = Preparation.fit(table(60, z=[np.inf, -np.inf, *range(29), *range(29)]), "y")
    assert kinds(known)["z"] == ("numeric", "2 infinite, treated as missing")
    x, notes = known.transform(pa.table({"x": [3.0, 3.0], "z": [np.inf, 4.0]}))
    assert x[:, 2].tolist() == [1.0, 0.0]
    assert notes == [(0, "z = inf is not finite")]


# -- notes -------------------------------------------------------------------------------------------------------------
def test_unusual_cells_are_noted_by_row() -> None:
    known = Preparation.fit(table(60, colour=["red", "blue"] * 30), "y")
    low, high = known.used[0].low, known.used[0].high
    x, notes = known.transform(
        pa.table(
            {"colour": ["red", "teal", None, "blue"], "x": pa.array(["3", None, "1e9", "bad"]), "more": [1, 2, 3, 4]}
        )
    )
    assert known.features == ("x", "colour = blue", "colour = red")
    assert x[:, 1:].tolist() == [[0, 1], [0, 0], [0, 0], [1, 0]]
    assert notes == [
        (1, "x is missing"),
        (1, "unknown category 'teal' in colour"),
        (2, f"x = 1e+09 is far outside the training range [{low:.6g}, {high:.6g}]"),
        (2, "colour is missing"),
        (3, "x = 'bad' is not a number"),
    ]
    fill = np.float32((known.used[0].fill - known.used[0].mean) / known.used[0].scale)
    assert x[1, 0] == x[3, 0] == fill


def test_a_value_is_far_from_ten_standard_deviations_beyond_the_range() -> None:
    known = Preparation.fit(table(), "y")
    column = known.used[0]
    near = [column.low - 9.9 * column.scale, column.high + 9.9 * column.scale]
    assert known.transform(pa.table({"x": near}))[1] == []
    far = [column.low - 10.1 * column.scale, column.high + 10.1 * column.scale]
    assert [row for row, _ in known.transform(pa.table({"x": far}))[1]] == [0, 1]


def test_absent_columns_count_as_missing_in_every_row() -> None:
    data = table(60, colour=["red", "blue", None] * 20, z=[None, *range(59)])
    known = Preparation.fit(data, "y")
    assert known.missing_columns(["z", "y"]) == ["x", "colour"]
    x, notes = known.transform(pa.table({"z": [1.0, None]}))
    same, _ = known.transform(pa.table({"z": [1.0, None], "x": pa.nulls(2), "colour": pa.nulls(2, pa.string())}))
    np.testing.assert_array_equal(x, same)
    assert notes == [(0, "x is missing"), (0, "colour is missing"), (1, "x is missing"), (1, "colour is missing")]
    assert known.transform(pa.table({"other": [1, 2, 3]}))[0].shape == (3, known.inputs)


def test_unknown_and_rare_categories_are_other() -> None:
    names = [f"often {i:02}" for i in range(50)] * 4 + ["rare 1", "rare 2"]
    known = Preparation.fit(table(len(names), c=names), "y")
    x, notes = known.transform(pa.table({"x": [3.0] * 4, "c": ["rare 1", "new", "often 07", "rare 2"]}))
    other = known.features.index("c = other")
    assert x[:, other].tolist() == [1, 1, 0, 1]
    assert x[:, 1:].sum() == 4
    assert notes == [(1, "unknown category 'new' in c")]


def test_true_and_false_as_files_write_them() -> None:
    for values in (["True", "False"], [True, False], ["true", "false"]):
        known = Preparation.fit(table(60, flag=values * 30), "y")
        x, notes = known.transform(pa.table({"x": [3.0] * 3, "flag": ["TRUE", "false", "False"]}))
        assert x[:, 1:].tolist() == [[0, 1], [1, 0], [1, 0]]
        assert notes == []


def test_batches_and_chunks_and_dictionaries_are_one_table() -> None:
    data = table(60, colour=pa.array(["red", "blue", None] * 20).dictionary_encode())
    known = Preparation.fit(data, "y")
    whole = known.transform(data)[0]
    parts = [known.transform(b)[0] for b in data.to_batches(max_chunksize=7)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(known.transform(pa.Table.from_batches(data.to_batches(max_chunksize=7)))[0], whole)
    empty, notes = known.transform(data.slice(0, 0))
    assert empty.shape == (0, known.inputs)
    assert notes == []


# -- arbitrary tables --------------------------------------------------------------------------------------------------
number = st.none() | st.floats() | st.sampled_from([1.7e308, -1.7e308, 5e-324, 0.0, 1.0])
word = st.none() | st.sampled_from(["red", "blue", "", "NA", " red", "Red"]) | st.text(max_size=5)


@st.composite
def any_table(draw: st.DrawFn, least: int) -> pa.Table:
    rows = draw(st.integers(least, least + 20))
    return pa.table(
        {
            "n": pa.array(draw(st.lists(number, min_size=rows, max_size=rows)), pa.float64()),
            "c": pa.array(draw(st.lists(word, min_size=rows, max_size=rows)), pa.string()),
            "k": np.arange(rows) % 5.0,
            "y": np.arange(rows) * 0.5,
        }
    )


@settings(deadline=None, max_examples=150)
@given(train=any_table(10), new=any_table(0))
def test_inputs_are_finite_and_identical_after_serialisation(train: pa.Table, new: pa.Table) -> None:
    known = Preparation.fit(train, "y")
    again = Preparation.from_dict(json.loads(json.dumps(known.to_dict(), allow_nan=False)))
    assert again == known
    for data in (train, new, new.select(["k"])):
        x, notes = known.transform(data)
        assert np.isfinite(x).all()
        assert x.shape == (data.num_rows, known.inputs)
        assert x.tobytes() == again.transform(data)[0].tobytes()
        assert notes == again.transform(data)[1]
        assert notes == sorted(notes, key=lambda note: note[0])
        assert all(0 <= row < data.num_rows for row, _ in notes)
    assert not any("unknown" in note or "far" in note or "missing" in note for _, note in known.transform(train)[1])


@settings(deadline=None, max_examples=50)
@given(new=st.lists(st.text(max_size=5), min_size=1, max_size=10))
def test_every_unknown_category_is_noted(new: list[str]) -> None:
    known = Preparation.fit(table(60, c=["red", "blue", None] * 20), "y")
    x, notes = known.transform(pa.table({"x": [3.0] * len(new), "c": pa.array(new, pa.string())}))
    one = x[:, 1:].sum(1)
    reported = {row for row, note in notes if "unknown category" in note}
    assert reported == {row for row, total in enumerate(one) if total == 0}


# -- the target --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "values, task, classes",
    [
        ([True, False], "classification", ("false", "true")),
        (["no", "yes"], "classification", ("no", "yes")),
        ([0.0, 1.0], "classification", ("0", "1")),
        ([10.0, 9.0, -1.0], "classification", ("-1", "9", "10")),
        ([0.5, 1.0], "regression", None),
        (list(range(10)), "classification", tuple("0123456789")),
        (list(range(11)), "regression", None),
    ],
)
def test_the_task_is_inferred_from_the_target(values: list[Any], task: str, classes: tuple[str, ...] | None) -> None:
    count = 20 * len(values)
    data = table(count, y=values * 20)
    known = Preparation.fit(data, "y")
    assert (known.task, known.classes) == (task, classes)
    assert known.task_reason.startswith(f"{task}: y ")
    y = known.target_values(data)
    if classes:
        assert (known.y_mean, known.y_std) == (0.0, 1.0)
        assert y.dtype == np.int64
        assert [classes[i] for i in y[: len(values)]] == [str(v).lower().removesuffix(".0") for v in values]
        assert known.standardise(y) is y
    else:
        assert y.dtype == np.float64
        assert y.tolist() == values * 20
        assert known.standardise(y).mean() == pytest.approx(0, abs=1e-12)
        assert known.standardise(y).std() == pytest.approx(1)


def test_few_integers_in_few_rows_are_a_regression() -> None:
    assert Preparation.fit(table(59, y=(list(range(3)) * 20)[:59]), "y").task == "regression"
    assert Preparation.fit(table(60, y=list(range(3)) * 20), "y").task == "classification"
    assert Preparation.fit(table(10, y=[0, 1] * 5), "y").task == "classification"


def test_the_task_can_be_requested() -> None:
    data = table(60, y=[1.0, 2.0, 2.5] * 20)
    assert Preparation.fit(data, "y", task="classification").classes == ("1", "2", "2.5")
    known = Preparation.fit(table(60, y=[0, 1] * 30), "y", task="regression")
    assert (known.classes, known.y_mean, known.y_std) == (None, 0.5, 0.5)
    assert known.task_reason == "regression, as requested"


def test_rows_without_a_target_are_left_out_and_noted() -> None:
    data = table(60, y=[None, *range(59)])
    known = Preparation.fit(data, "y")
    assert known.notes == ("1 of 60 rows have no 'y' and are left out",)
    assert known.usable_rows(data).tolist() == list(range(1, 60))
    assert known.y_mean == 29.0
    assert known == Preparation.fit(data, "y", rows=np.arange(60))
    with pytest.raises(InputError, match=r"missing in 1 row\."):
        known.target_values(data)


def test_a_class_of_one_row_is_kept_and_noted() -> None:
    data = table(60, y=["a", "b"] * 29 + ["a", "odd"])
    known = Preparation.fit(data, "y", rows=np.arange(50))
    assert known.classes == ("a", "b", "odd")  # known from the held-out rows
    assert known.notes == ("only one row has the class 'odd'",)


def test_targets_of_another_file() -> None:
    known = Preparation.fit(table(60, y=["a", "b"] * 30), "y")
    assert known.text_names == ("y",)
    assert known.target_values(pa.table({"y": [" b", "a"]})).tolist() == [1, 0]
    with pytest.raises(InputError, match="unseen in training: 'c', 'd'.*The classes are a, b"):
        known.target_values(pa.table({"y": ["a", "d", "c", "d"]}))
    with pytest.raises(InputError, match="no column 'y'"):
        known.target_values(pa.table({"z": ["a"]}))
    real = Preparation.fit(table(), "y")
    assert real.usable_rows(pa.table({"y": ["1", "bad", None]})).tolist() == [0, 1]
    with pytest.raises(InputError, match="row 2: 'bad' is not a number"):
        real.target_values(pa.table({"y": ["1", "bad"]}))
    with pytest.raises(InputError, match="infinite"):
        real.target_values(pa.table({"y": [1.0, np.inf]}))


# -- errors ----------------------------------------------------------------------------------------------------------
def test_columns_that_are_not_there() -> None:
    data = table(house_price=np.arange(60.0))
    refused(
        "--target", "no column 'house_prise'", "Did you mean 'house_price'?", "x, y", data=data, target="house_prise"
    )
    refused("--target", "Did you mean 'house_price'?", data=data, target="HOUSE_PRICE")
    refused("--drop", "no column 'z'", data=data, drop=["x", "z"])
    refused("--drop", "is the target", data=data, drop="y")
    wide = pa.table({f"c{i}": [1.0] for i in range(30)})
    refused("--target", "and 20 more", data=wide, target="@@@")


def test_targets_that_cannot_be_predicted() -> None:
    refused("--target", "is 3.0 in every row", data=table(y=[3.0] * 60))
    refused("--target", "is 'a' in every row", data=table(y=["a"] * 60))
    refused("--target", "missing in 31 of 60 rows", data=table(y=[None] * 31 + list(range(29))))
    refused("--target", "missing in 60 of 60 rows", data=table(y=pa.nulls(60)))
    refused("--target", "infinite", data=table(y=[np.inf, *range(59)]))
    refused("--target", "5,000 distinct values", "identifier", data=table(5000, y=[f"t{i}" for i in range(5000)]))
    refused("--target", "101 distinct values", data=table(1010, y=[f"t{i}" for i in range(101)] * 10))
    refused("--task", "101 distinct values", "--task regression", data=table(101, y=range(101)), task="classification")
    refused("--task", "holds text such as 'n.a. 2'", data=table(y=["1"] * 59 + ["n.a. 2"]), task="regression")
    refused("--task", "'ranking'", data=table(), task="ranking")
    refused("--target", "dates", data=table(y=[datetime.date(2024, 1, 1 + i % 28) for i in range(60)]))
    refused("--target", "dates", data=table(y=[f"2024-01-{1 + i % 28:02}" for i in range(60)]))
    refused(
        "--target", "is the same in all training rows", data=table(y=[1.5] * 30 + list(range(30))), rows=np.arange(30)
    )
    refused("--target", "is the same in all training rows", data=table(y=["a"] * 30 + ["b"] * 30), rows=np.arange(30))
    refused("--target", "too large", data=table(y=[-1.7e308, 1.7e308] * 30), task="regression")


def test_tables_that_are_too_small() -> None:
    refused("table", "3 usable rows", "at least 10", data=table(3))
    refused("table", "9 usable rows", data=table(10, y=[None, *range(9)]))
    assert Preparation.fit(table(10), "y").inputs == 1
    refused("table", "no column is left", "constant", data=pa.table({"a": [1.0] * 20, "y": np.arange(20.0)}))
    refused("table", "only column", data=pa.table({"y": np.arange(20.0)}))


@pytest.mark.parametrize(
    "cell", ["1-2", "10-20-30", "May", "March of time", "192.168.1.1", "2024", "v1.2.3", "1.2.13", "99/99/2024"]
)
def test_text_that_is_no_date_is_a_category(cell: str) -> None:
    assert Preparation.fit(table(c=[cell, "other"] * 30), "y").names == ("x", "c")
    assert Preparation.fit(table(c=[cell] * 57 + ["a", "b", "c"]), "y").names == ("x", "c")


# -- serialisation -----------------------------------------------------------------------------------------------------
def test_a_modified_preparation_is_refused() -> None:
    plain = Preparation.fit(table(colour=["red", "blue"] * 30), "y").to_dict()
    assert Preparation.from_dict(plain).to_dict() == plain
    for key in plain:
        with pytest.raises(StoreError, match="preparation"):
            Preparation.from_dict({k: v for k, v in plain.items() if k != key})
    altered = json.loads(json.dumps(plain))
    altered["used"][0]["mean"] += 1
    with pytest.raises(StoreError, match="checksum"):
        Preparation.from_dict(altered)
    with pytest.raises(StoreError, match="version 2"):
        Preparation.from_dict(plain | {"version": 2})
    for strange in (None, [], "text", {}):
        with pytest.raises(StoreError, match="preparation"):
            Preparation.from_dict(strange)


def test_prediction_loads_no_scikit_learn() -> None:
    plain = json.dumps(Preparation.fit(table(colour=["red", "blue"] * 30), "y").to_dict())
    code = (
        "import json, sys, pyarrow as pa\nfrom credibly.tables.preparation import Preparation\n"
        "Preparation.from_dict(json.loads(sys.argv[1])).transform(pa.table({'x': [1.0], 'colour': ['teal']}))\n"
        "print([m for m in ('sklearn', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([warm_python(), "-c", code, plain], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_million_rows_take_well_under_a_second() -> None:
    count = 1_000_000
    columns = {f"c{i}": RNG.normal(size=count) for i in range(10)}
    data = pa.table(columns | {"y": columns["c0"]})
    known = Preparation.fit(data.slice(0, 1000), "y")
    best = np.inf
    for _ in range(3):
        start = time.process_time()
        _, notes = known.transform(data)
        best = min(best, time.process_time() - start)
    assert notes == []
    assert best < 1.0
