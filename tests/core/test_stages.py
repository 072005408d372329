"""Stages: one progress line for work that is done in other modules."""

from __future__ import annotations

import re

import pytest

from credibly.core import stages
from credibly.core.stages import show_stages, stage


def lines(capsys):
    """Return the drawn lines without the bar and the time."""
    drawn = capsys.readouterr().err.replace("\n", "\r").split("\r")
    return [" ".join(re.sub(r"━+|\d+\.\ds *$", "", line).split()) for line in drawn if line.strip()]


def test_every_stage_is_shown_as_it_begins(capsys):
    with show_stages("report", ("predictions", "pictures", "page"), True):
        stage("pictures", "reliability diagram")
        stage("pictures", "trace")
        stage("page")
    assert lines(capsys) == [
        "report 0/3 predictions",
        "report 1/3 pictures reliability diagram",
        "report 1/3 pictures trace",
        "report 2/3 page",
        "report 3/3",
    ]


def test_earlier_and_unknown_stages_do_not_move_it_back(capsys):
    with show_stages("report", ("a", "b", "c"), True):
        stage("c")
        stage("a")
        stage("elsewhere")
    assert lines(capsys) == ["report 0/3 a", "report 2/3 c", "report 3/3"]


def test_nothing_is_shown_unless_asked_for(capsys):
    stage("pictures")
    with show_stages("report", ("a", "b"), False):
        stage("b")
    with show_stages("report", ("a", "b")):  # not a terminal
        stage("b")
    assert lines(capsys) == []


def failing_work():
    with show_stages("outer", ("a", "b"), True):
        with show_stages("inner", ("c",), False):
            stage("b")
        stage("b")
        raise ValueError("x")


def test_the_inner_task_has_its_own_line_and_an_error_ends_it(capsys):
    with pytest.raises(ValueError, match="x"):
        failing_work()
    assert lines(capsys) == ["outer 0/2 a", "outer 1/2 b"]
    assert stages._CURRENT.get() is None
