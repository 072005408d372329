"""A request that needs no data to be refused is refused before torch is imported, with one exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from credibly.cli.options import CHOICES
from own_tables import call, names, refused

# (arguments, a word of the message)
REFUSALS = (
    (("fit", "nope.csv", "--target", "y"), "no such file: 'nope.csv'"),
    (("fit", "folder", "--target", "y"), "is a folder"),
    (("fit", "notes.txt", "--target", "y"), "unknown suffix"),
    (("fit", "t.csv"), "--target: missing"),
    (("fit",), "table: missing"),
    (("fit", "t.csv", "--target", "y", "--out", "t.csv"), "is a file"),
    (("fit", "t.csv", "--target", "y", "--out", "t.csv/run"), "is a file"),
    (("fit", "t.csv", "--target", "y", "--out", "folder"), "already exists"),
    (("fit", "t.csv", "--target", "y", "--seed", "-1"), "--seed must be an integer from 0"),
    (("fit", "t.csv", "--target", "y", "--holdout", "1.5"), "--holdout must be a fraction"),
    (
        ("fit", "t.csv", "--target", "y", "--tune", "foo"),
        "--tune must be one of 'folds', 'none', 'rows', 'evidence', got 'foo'",
    ),
    (("fit", "t.csv", "--target", "y", "--task", "foo"), "--task must be one of 'auto', 'regression'"),
    (("fit", "t.csv", "--target", "y", "--class-weight", "foo"), "--class-weight must be"),
    (("fit", "t.csv", "--target", "y", "--transform", "foo"), "--transform must be"),
    (("fit", "t.csv", "--target", "y", "--inputs", "foo"), "--inputs must be"),
    (("compare", "t.csv", "--target", "y", "--task", "foo"), "--task must be"),
    (("fit", "--config", "nope.toml"), "--config: no such file"),
    (("fit", "--config", "folder"), "--config: 'folder' is a folder"),
    (("fit", "--config", "c.toml"), "no such file: 'gone.csv'"),
    (("compare", "nope.csv", "--target", "y"), "no such file: 'nope.csv'"),
    (("compare", "t.csv", "--target", "y", "--out", "folder"), "is not empty"),
    (("compare", "t.csv", "--target", "y", "--seed", "-1"), "--seed must be"),
    (("predict", "nope", "t.csv"), "RUN: no such folder: 'nope'"),
    (("predict", "t.csv", "t.csv"), "RUN: 't.csv' is a file"),
    (("predict", "folder", "t.csv"), "it has no table.json"),
    (("predict", "run", "nope.csv"), "no such file: 'nope.csv'"),
    (("predict", "run", "folder"), "is a folder"),
    (("predict", "run", "notes.txt"), "unknown suffix"),
    (("predict", "run", "t.csv", "--out", "folder"), "is a folder"),
    (("predict", "run", "t.csv", "--out", "nope/p.csv"), "no such folder: 'nope'"),
    (("predict", "run", "t.csv", "--out", "p.txt"), "unknown suffix"),
    (("predict", "run", "t.csv", "--out", "u.csv"), "already exists"),
    (("predict", "run", "t.csv", "--out", "t.csv", "--force"), "is the table itself"),
    (("predict", "run", "t.csv", "--level", "90"), "got '90'. For 90 % write 0.9"),
    (("predict", "run", "t.csv", "--level", "0.8,1"), "--level must be probabilities between 0 and 1"),
    (("predict", "run", "t.csv", "--level", "0.8,0.80"), "must be different levels, got 0.8 twice"),
    (("predict", "run", "t.csv", "--level", "nan"), "got 'nan'"),
    (("predict", "run", "t.csv", "--level", ","), "got none"),
    (("predict", "run", "t.csv", "--keep", ""), "--keep must be a list of columns"),
    (("predict", "run", "t.csv", "--keep", "a,,b"), "--keep must be a list of columns"),
    (("predict", "run", "t.csv", "--keep", '"a'), "--keep must be a list of columns"),
    (("predict", "run", "t.csv", "--draws", "0"), "--draws must be a positive integer"),
    (("evaluate", "nope", "t.csv"), "RUN: no such folder"),
    (("evaluate", "run", "nope.csv"), "no such file"),
    (("report", "nope"), "RUN: no such folder"),
    (("report", "folder"), "it has no table.json"),
    (("resume", "nope"), "RUN: no such folder"),
    (("resume", "t.csv"), "RUN: 't.csv' is a file"),
    (("resume", "run", "--problem", "nope.py:p"), "no such script"),
    (("study", "gap-regression", "--root", "nope"), "--root: no such folder"),
    (("bench", "uci", "--root", "nope"), "--root: no such folder"),
    (("bench", "uci", "--root", "t.csv"), "--root: 't.csv' is a file"),
    (("demo", "--seed", "-1"), "--seed must be"),
    (("demo", "--out", "t.csv"), "is a file"),
)
PROGRAM = """
import contextlib, io, json, sys
from credibly.cli import app
found = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(words, prog_name="credibly")
        except SystemExit as end:
            found.append((end.code, out.getvalue(), err.getvalue(), sorted({"torch", "pyarrow"} & set(sys.modules))))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a table, an empty run and a few things that are neither."""
    place = tmp_path_factory.mktemp("early")
    for name in ("t.csv", "u.csv", "notes.txt"):
        (place / name).write_text("x,y\n1,2\n")
    (place / "c.toml").write_text('table = "gone.csv"\ntarget = "y"\n')
    for name in ("folder", "run"):
        (place / name).mkdir()
    (place / "folder" / "file").touch()
    (place / "run" / "table.json").write_text("{}")
    return place


def test_refused_before_torch_is_imported(place):
    before = names(place)
    request = json.dumps([words for words, _ in REFUSALS])
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, request], cwd=place, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    for (words, said), (code, out, err, loaded) in zip(REFUSALS, json.loads(found.stdout), strict=True):
        assert (code, out, loaded) == (2, "", []), (words, err)
        assert said in err, (words, err)
        assert err.count("\n") == 1, (words, err)
    assert names(place) == before


def test_choices_are_those_of_the_library():
    from credibly.predictive import transforms
    from credibly.tables import config
    from credibly.tables.columns import scaling

    assert {
        "--task": ("auto", *config.TASKS),
        "--class-weight": config.CLASS_WEIGHTS,
        "--transform": ("auto", *transforms.CHOICES),
        "--inputs": ("auto", *scaling.KINDS),
        "--tune": config.TUNED,
    } == CHOICES


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to this user")
def test_without_permission(place, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    secret = tmp_path / "secret.csv"
    secret.write_text("x,y\n1,2\n")
    secret.chmod(0)
    refused(call("fit", place / "t.csv", "--target", "y", "--out", closed / "a" / "run"), "--out", "is not writable")
    refused(call("fit", secret, "--target", "y"), "table: cannot read")


def test_the_early_list_of_suffixes_is_that_of_the_writer():
    from credibly.tables.files.sources import WRITTEN
    from credibly.tables.files.writing import SUFFIXES

    assert SUFFIXES == WRITTEN
