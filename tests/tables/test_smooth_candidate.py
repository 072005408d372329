"""The candidate of small smooth networks: on which tables it is tried, and what it has to gain on large ones."""

import math

import pytest

from credibly.tables.choices.search import ROWS, _margin
from credibly.tables.choices.smooth_candidate import (
    FEWEST_MEMBERS,
    MEMBERS,
    affordable_members,
    smooth_recipe,
    with_mean_first,
)
from credibly.tables.recipe import Recipe


@pytest.mark.parametrize("rows, inputs", [(300, 6), (1_600, 11), (11_000, 16), (41_000, 9)])
def test_tables_that_it_is_for(rows, inputs):
    assert FEWEST_MEMBERS <= affordable_members(rows, inputs) <= MEMBERS


@pytest.mark.parametrize("rows, inputs", [(8_000, 26), (100, 61), (10_000_000, 3)])
def test_tables_that_take_too_long(rows, inputs):
    assert affordable_members(rows, inputs) == 0


def test_more_inputs_never_have_more_members():
    found = [affordable_members(2_000, inputs) for inputs in range(1, 80)]
    assert found == sorted(found, reverse=True)
    assert found[0] == MEMBERS


def test_rows_that_short_fits_leave_out_count_for_the_wide_network():
    wide = Recipe(method="ensemble")
    smooth = smooth_recipe(wide, 4, prior_scale=True, inputs=True)
    assert [_margin(smooth, wide, rows) for rows in (100, ROWS)] == [0.0, 0.0]
    assert _margin(smooth, wide, 4 * ROWS) == pytest.approx(math.log(2))
    assert _margin(wide, wide, 4 * ROWS) == 0.0


def test_the_mean_is_fitted_first_only_where_small_networks_are_the_best():
    wide = Recipe(method="ensemble", noise="heteroscedastic")
    smooth = smooth_recipe(wide, 6, prior_scale=True, inputs=True)
    ((name, found),) = with_mean_first(smooth, 11_000, 16)
    assert name == "small smooth network, Gauss-Newton steps, mean first"
    assert found.settings["mean_first"] is True
    assert found.settings["steps"] > smooth.settings["steps"]
    assert found.settings["members"] == affordable_members(11_000, 16, 1.5) < affordable_members(11_000, 16)
    assert found.fitter(11_000, 600).mean_first
    assert not list(with_mean_first(wide, 11_000, 16))
    assert not list(with_mean_first(smooth, 10_000_000, 3))
    assert not list(with_mean_first(smooth_recipe(Recipe(), 6, prior_scale=True, inputs=True), 300, 6))
