"""The candidate of small smooth networks is tried only on tables for which its fits end in time."""

import pytest

from credibly.tables.choices.smooth_candidate import FEWEST_MEMBERS, MEMBERS, affordable_members


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
