"""Levels of intervals."""

from __future__ import annotations

import pytest

import credibly as cr
from credibly.core.levels import check_levels, percent


@pytest.mark.parametrize(
    "level, text", [(0.9, "90"), (0.8, "80"), (0.975, "97.5"), (0.29, "29"), (0.999, "99.9"), (0.5, "50")]
)
def test_percent_has_no_rounding_noise(level, text):
    assert percent(level) == text


def test_levels_are_floats_in_the_given_order():
    assert check_levels("--level", ("0.95", 0.8)) == (0.95, 0.8)


@pytest.mark.parametrize("wrong", [(), (0,), (1,), (-0.1,), ("x",), (None,), (float("nan"),), (0.9, 0.9), (0.9, 1.5)])
def test_nonsense(wrong):
    with pytest.raises(cr.InputError, match="--level must be"):
        check_levels("--level", wrong)
