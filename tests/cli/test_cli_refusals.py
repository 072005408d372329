"""Tables, options and run folders that the command line cannot use: one line, an exit code, nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import ClassVar

import numpy as np
import pytest

import credibly as cr
from credibly.methods import METHODS
from credibly.tables import TableRun
from own_tables import ENSEMBLE, MAP, RUN_FILES, call, diabetes, names, refused, wine, write

pytestmark = pytest.mark.usefixtures("no_drawing_in_module")


@pytest.fixture(scope="module")
def cellar(tmp_path_factory):
    """Return a folder with wine.parquet and a run of it by an ensemble."""
    place = tmp_path_factory.mktemp("cellar")
    write(wine(), place / "wine.parquet")
    found = call("fit", place / "wine.parquet", "--target", "kind", "--out", place / "run", *ENSEMBLE, "--quiet")
    assert found.exit_code == 0, found.output
    return place, found


class TestTablesThatCannotBeFitted:
    """Every error is one line with exit code 2, and nothing is left behind."""

    CASES: ClassVar = {
        "no such column": (diabetes(40), "price", ("--target: no column 'price'", "The table has age")),
        "nearly a column": (diabetes(40), "progres", ("Did you mean 'progress'?",)),
        "one value": (diabetes(40) | {"progress": [3.0] * 40}, "progress", ("--target", "in every row")),
        "many words": (
            {"x": np.arange(5000.0), "y": [f"name {i}" for i in range(5000)]},
            "y",
            ("--target", "5,000", "identifier"),
        ),
        "three rows": (diabetes(3), "progress", ("3 usable rows", "at least 10")),
        "target mostly missing": (
            diabetes(40) | {"progress": [1.0] * 9 + [None] * 31},
            "progress",
            ("missing in 31 of 40",),
        ),
        "only a target": ({"y": np.arange(40.0)}, "y", ("no column is left",)),
        "only constants": ({"x": [1] * 40, "y": np.arange(40.0)}, "y", ("no column is left",)),
        "words for numbers": (diabetes(40), "clinic", ("--task",)),
    }

    @pytest.mark.parametrize("suffix", ["csv", "parquet"])
    @pytest.mark.parametrize("case", CASES)
    def test_columns(self, tmp_path, case, suffix):
        columns, target, said = self.CASES[case]
        table = write(columns, tmp_path / f"t.{suffix}")
        task = ("--task", "regression") if case == "words for numbers" else ()
        refused(call("fit", table, "--target", target, "--out", tmp_path / "run", *task), *said)
        assert names(tmp_path) == [table.name]

    @pytest.mark.parametrize(
        "content, said",
        [
            (b"", "is empty"),
            (b"\n\n", "is empty"),
            (b"a,b,y\n", "no rows"),
            (b"a,b,y\n" + b"1,2,3\n" * 30 + b"1,2\n" + b"4,5,6\n", "line 32"),
            (os.urandom(50) + bytes(range(256)) * 20, "binary"),
            (b"PK\x03\x04" + bytes(200), "Excel"),
            (b"a,a,y\n" + b"1,2,3\n" * 30, "more than one column named 'a'"),
        ],
        ids=["nothing", "blank", "header", "ragged", "binary", "workbook", "twice"],
    )
    def test_files(self, tmp_path, content, said):
        table = tmp_path / "t.csv"
        table.write_bytes(content)
        refused(call("fit", table, "--target", "y", "--out", tmp_path / "run"), "table: ", said)
        assert names(tmp_path) == ["t.csv"]

    def test_no_table_no_target(self, tmp_path):
        refused(call("fit", "--out", tmp_path / "run"), "table: missing")
        refused(call("fit", tmp_path / "t.csv", "--out", tmp_path / "run"), "--target: missing")
        refused(call("fit", tmp_path / "t.csv", "--target", "y"), "no such file")
        refused(call("fit", tmp_path, "--target", "y"), "is a folder")

    @pytest.mark.parametrize(
        "words, said",
        [
            (("--method", "gibbs"), ("--method must be one of", "'hmc'", "got 'gibbs'")),
            (
                ("--task", "ranking"),
                ("--task must be one of 'auto', 'regression', 'classification', 'counts',", "got 'ranking'"),
            ),
            (("--holdout", "1"), ("--holdout must be a fraction of the rows from 0 to 0.9, got 1.0",)),
            (("--hidden", "ten"), ("--hidden must be widths such as 50 or 50,50, or none, got 'ten'",)),
            (("--noise", "loud"), ("--noise must be one of", "'student'", "got 'loud'")),
            (("--prior-scale", "0"), ("--prior-scale must be a positive number, got 0",)),
            (("--activation", "step"), ("--activation must be one of", "got 'step'")),
            (("--seed", "-3"), ("--seed must be an integer from 0 to 9223372036854775807, got -3",)),
            (("--device", "abacus"), ("--device: cannot use 'abacus'",)),
            (("--drop", "agee"), ("--drop: no column 'agee'", "Did you mean 'age'?")),
            (("--drop", "progress"), ("--drop", "is the target")),
            (("--set", "steps"), ("--set must be NAME=VALUE, such as draws=500, got 'steps'",)),
            (("--set", "stepps=3"), ("--set: MAP has no 'stepps'", "steps")),
            (("--set", "warmup=soon"), ("--set: warmup must be a non-negative number of steps, got 'soon'",)),
            (("--config", "no.toml"), ("--config: no such file: 'no.toml'",)),
        ],
    )
    def test_options(self, tmp_path, words, said):
        table = write(diabetes(40), tmp_path / "t.csv")
        refused(call("fit", table, "--target", "progress", "--out", tmp_path / "run", *MAP, *words), *said)
        assert names(tmp_path) == ["t.csv"]


class TestRunFolders:
    """Run folders that cannot be loaded, and occupied locations."""

    @pytest.fixture
    def run(self, cellar, tmp_path):
        shutil.copytree(cellar[0] / "run", tmp_path / "run")
        shutil.copy(cellar[0] / "wine.parquet", tmp_path)
        return tmp_path / "run"

    def calls(self, run):
        table = run.parent / "wine.parquet"
        return (
            ("predict", run, table, "--out", run.parent / "p.csv"),
            ("evaluate", run, table),
            ("report", run),
            ("resume", run),
        )

    def test_another_version(self, run):
        facts = json.loads((run / "table.json").read_text()) | {"format_version": 99}
        reported = {k: v for k, v in facts.items() if k != "checksum"}
        facts["checksum"] = hashlib.sha256(json.dumps(reported, sort_keys=True).encode()).hexdigest()
        (run / "table.json").write_text(json.dumps(facts))
        for words in self.calls(run):
            refused(call(*words), "has format 99", "reads 2", "config.toml", code=1)

    @pytest.mark.parametrize(
        "how", ["altered", "cut", "another", "binary", "no posterior", "posterior altered", "no rows"]
    )
    def test_modified(self, run, how):
        text = (run / "table.json").read_text()
        said = {
            "altered": "was modified",
            "cut": "truncated",
            "another": "is not a run of `credibly fit`",
            "binary": "truncated or corrupt",
            "no posterior": "there is no folder",
            "posterior altered": "was modified (its checksum does not match)",
            "no rows": "held_out.parquet",
        }
        if how == "altered":
            (run / "table.json").write_text(text.replace('"seed": 0', '"seed": 1', 1))
        elif how == "cut":
            (run / "table.json").write_text(text[: len(text) // 2])
        elif how == "another":
            (run / "table.json").write_text("[1, 2]")
        elif how == "binary":
            (run / "table.json").write_bytes(b"\xff\xfe\x00")
        elif how == "no posterior":
            shutil.rmtree(run / "posterior")
        elif how == "posterior altered":
            (file,) = (run / "posterior").glob("draws*.safetensors")
            file.write_bytes(file.read_bytes()[:-8] + bytes(8))
        else:
            (run / "held_out.parquet").unlink()
        for words in self.calls(run):
            if how == "no rows" and words[0] in ("predict", "evaluate"):
                continue  # they do not need the stored rows
            refused(call(*words), said[how], code=1)

    def test_an_occupied_folder(self, run):
        base = ("fit", run.parent / "wine.parquet", "--target", "kind", *MAP, "--quiet", "--out")
        before = (run / "table.json").read_bytes()
        refused(call(*base, run), "--out", "exists", "--force")
        assert (run / "table.json").read_bytes() == before
        assert call(*base, run, "--force").exit_code == 0
        assert TableRun.load(run).config.method == "map"
        assert names(run) == RUN_FILES
        assert names(run.parent) == ["run", "wine.parquet"]

    def test_what_is_not_a_run_is_never_replaced(self, run):
        base = ("fit", run.parent / "wine.parquet", "--target", "kind", *MAP, "--quiet", "--force", "--out")
        photos = run.parent / "photos"
        photos.mkdir()
        (photos / "holiday.jpg").write_bytes(b"x")
        refused(call(*base, photos), "--out", "is not a run of `credibly fit`")
        refused(call(*base, run.parent / "wine.parquet"), "--out", "is a file")
        assert names(photos) == ["holiday.jpg"]
        # Nor what is in the place of the staging folder.
        (run.parent / "run.new").mkdir()
        (run.parent / "run.new" / "mine.txt").write_text("x")
        refused(call(*base, run), "run.new is not a run")
        assert names(run.parent / "run.new") == ["mine.txt"]
        assert TableRun.load(run).config.method == "ensemble"

    def test_a_run_that_fails_leaves_the_earlier_one(self, run, monkeypatch):
        def broken(self, *args, **kwargs):
            raise cr.TrainingError("the loss is not finite", step=3, member=0)

        monkeypatch.setattr(METHODS["map"], "fit", broken)
        before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
        base = ("fit", run.parent / "wine.parquet", "--target", "kind", *MAP, "--out")
        refused(call(*base, run, "--force", "--quiet"), "the loss is not finite", code=1)
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
        assert names(run.parent) == ["run", "wine.parquet"]
        refused(call(*base, run.parent / "new", "--quiet"), "the loss is not finite", code=1)
        assert names(run.parent) == ["run", "wine.parquet"]

    @pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to this user")
    def test_a_folder_that_cannot_be_written_to(self, run):
        closed = run.parent / "closed"
        closed.mkdir(mode=0o555)
        base = ("fit", run.parent / "wine.parquet", "--target", "kind", *MAP, "--quiet", "--out")
        refused(call(*base, closed / "run"), "--out", "Permission denied", code=1)
        refused(
            call("predict", run, run.parent / "wine.parquet", "--out", closed / "p.csv"), "--out", "is not writable"
        )

    def test_a_run_in_use_is_not_replaced(self, run):
        from credibly.storage.run_folder import RunFolder

        base = ("fit", run.parent / "wine.parquet", "--target", "kind", *MAP, "--quiet", "--force", "--out")
        with RunFolder(run / "posterior", {}):
            refused(call(*base, run), "in use by process", code=1)
        assert TableRun.load(run).config.method == "ensemble"

    def test_resume_of_a_complete_run_reports_it_again(self, run):
        found = call("resume", run)
        assert found.exit_code == 0, found.output
        assert found.stdout.startswith("The run is already complete.\n")
        assert found.stdout.splitlines()[-1] == str(run / "report.html")
        reported = json.loads(call("resume", run, "--json").stdout)
        assert reported["figures"] == TableRun.load(run).figures
