"""Splits of rows at random, by group and by time."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import credibly as cr
from credibly.tables.config import Config
from credibly.tables.prepared import prepare
from credibly.tables.splitting import (
    FOLDS,
    LATEST,
    Rows,
    check_groups,
    choice_folds,
    folds_of,
    held_out_split,
    requested_split,
)
from own_tables import write


@given(rows=st.integers(FOLDS, 200), seed=st.integers(0, 2**40))
def test_every_row_is_predicted_once_by_a_fit_to_all_the_others(rows, seed):
    folds = folds_of(Rows(rows), seed)
    assert sorted(np.concatenate([predicted for _, predicted in folds])) == list(range(rows))
    for fitted, predicted in folds:
        assert sorted([*fitted, *predicted]) == list(range(rows))
        assert abs(len(predicted) - rows / FOLDS) < 1


def test_folds_have_the_classes_in_proportion():
    strata = np.repeat([0, 1, 2], [50, 30, 5])
    for _, predicted in folds_of(Rows(85, strata), 0):
        assert np.bincount(strata[predicted], minlength=3).tolist() == [10, 6, 1]


@given(labels=st.lists(st.integers(0, 12), min_size=30, max_size=120), seed=st.integers(0, 2**40))
def test_groups_are_never_on_both_sides(labels, seed):
    groups = np.array(labels)
    for fitted, predicted in [
        *folds_of(Rows(len(groups), groups=groups), seed),
        held_out_split(Rows(len(groups), groups=groups), 0.3, seed),
    ]:
        assert not set(groups[fitted]) & set(groups[predicted])
        assert len(fitted) + len(predicted) == len(groups)


def test_folds_of_groups_have_about_the_same_size():
    groups = np.repeat(np.arange(40), np.arange(1, 41))
    sizes = [len(predicted) for _, predicted in folds_of(Rows(len(groups), groups=groups), 3)]
    assert max(sizes) - min(sizes) <= 10


def test_later_rows_are_predicted_from_earlier_ones():
    times = np.random.default_rng(0).permutation(100).astype(float)
    ((fitted, predicted),) = folds_of(Rows(100, times=times), 0)
    assert len(predicted) == LATEST * 100
    assert times[fitted].max() < times[predicted].min()


@given(times=st.lists(st.integers(0, 40), min_size=20, max_size=120).filter(lambda t: sorted(t)[len(t) // 2] > min(t)))
def test_a_choice_predicts_later_rows_several_times_over(times):
    folds = choice_folds(Rows(len(times), times=np.array(times, float)), 0, 4)
    assert 1 <= len(folds) <= 4
    when, before = np.array(times), np.inf
    for fitted, predicted in folds:
        assert when[fitted].max() < when[predicted].min()
        assert when[predicted].max() < before
        # All rows before these are fitted.
        assert len(fitted) == (when < when[predicted].min()).sum()
        before = when[predicted].min()


def test_a_choice_without_times_has_the_folds_of_the_table():
    for ours, theirs in zip(choice_folds(Rows(50), 3, 4), folds_of(Rows(50), 3, 4), strict=True):
        np.testing.assert_array_equal(ours[1], theirs[1])


def test_distinct_times_have_parts_of_equal_size():
    folds = choice_folds(Rows(200, times=np.arange(200.0)), 0, 4)
    assert [len(predicted) for _, predicted in folds] == [30, 30, 30, 30]
    assert [len(fitted) for fitted, _ in folds] == [170, 140, 110, 80]


def test_rows_of_the_same_time_stay_together():
    times = np.repeat([1.0, 2.0, 3.0], [50, 10, 40])
    fitted, predicted = held_out_split(Rows(100, times=times), 0.2, 0)
    assert set(times[fitted]) == {1.0, 2.0}
    assert set(times[predicted]) == {3.0}


def test_one_time_cannot_be_split():
    with pytest.raises(cr.InputError, match="--time"):
        held_out_split(Rows(10, times=np.ones(10)), 0.2, 0)


def test_too_few_groups():
    with pytest.raises(cr.InputError, match=r"--group: 'customer' has 1 group in 10 rows, at least 5"):
        check_groups("--group", "customer", np.zeros(10))


@given(
    sizes=st.lists(st.integers(1, 60), min_size=FOLDS, max_size=12),
    fraction=st.floats(0.001, 0.2),
    seed=st.integers(0, 2**40),
    grouped=st.booleans(),
)
def test_a_holdout_that_is_too_small_is_refused_with_the_least_one(sizes, fraction, seed, grouped):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    rows = Rows(len(labels), groups=labels) if grouped else Rows(len(labels))
    try:
        assert len(requested_split(rows, fraction, seed)[1])
    except cr.InputError as error:
        assert not len(held_out_split(rows, fraction, seed)[1])
        least = float(re.search(r"Pass at least ([\d.]+),", str(error))[1])
        assert least > fraction
        assert len(requested_split(rows, least, seed)[1])


def test_holding_nothing_out_on_request():
    assert not len(requested_split(Rows(20), 0.0, 0)[1])


def test_a_small_holdout_of_a_table_is_refused_before_the_fit(tmp_path):
    groups = np.repeat(np.arange(5), 20)
    table = write({"x": np.arange(100.0) % 7, "g": groups, "y": np.arange(100.0) % 11}, tmp_path / "t.csv")
    found = r"--holdout: 0\.05 would hold out none of 100 rows, whose groups stay together.*at least 0\.1,"
    for refit in (True, False):
        with pytest.raises(cr.InputError, match=found):
            prepare(Config(str(table), "y", group="g", holdout=0.05, method="map"), refit=refit)
