"""The command line on tables: from a file to predictions, figures and pages, and how it says no."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import credibly as cr
from credibly.cli.options import METHOD_NAMES
from credibly.methods import METHODS
from credibly.tables import TableRun
from own_tables import (
    ENSEMBLE,
    HMC,
    MAP,
    REGRESSION,
    SCRIPT,
    call,
    cancer,
    command,
    diabetes,
    names,
    read,
    refused,
    wine,
    write,
)

VERBS = ("demo", "fit", "predict", "evaluate", "compare", "report", "resume", "methods")
RUN_FILES = [
    "config.toml", "held_out.parquet", "posterior", "report.html", "results.json", "table.json", "training_sample.parquet",
]  # fmt: skip


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A folder with house.csv and a run of it by HMC, through the installed command."""
    place = tmp_path_factory.mktemp("house")
    write(diabetes(), place / "house.csv")
    found = command("fit", "house.csv", "--target", "progress", "--out", "run", *HMC, cwd=place)
    assert found.returncode == 0, found.stderr
    return place, found


@pytest.fixture(scope="module")
def cellar(tmp_path_factory):
    """A folder with wine.parquet and a run of it by an ensemble."""
    place = tmp_path_factory.mktemp("cellar")
    write(wine(), place / "wine.parquet")
    found = call("fit", place / "wine.parquet", "--target", "kind", "--out", place / "run", *ENSEMBLE)
    assert found.exit_code == 0, found.output
    return place, found


class TestFit:
    def test_says_what_it_found_and_how_good_it_is(self, house):
        place, found = house
        assert found.stderr == ""
        lines = found.stdout.splitlines()
        assert lines[0] == "house.csv: 128 rows to fit, 32 kept back."
        assert lines[1].startswith("Task: regression: ")
        assert any(re.match(r"  bmi: numeric, \d+ missing", line) for line in lines)
        assert any(line.startswith("  clinic: categorical, 3 categories") for line in lines)
        assert any(line.startswith("  year: left out, constant") for line in lines)
        assert "Method: hmc (asked for)." in lines
        assert lines[-1] == "run/report.html"
        figures = json.loads((place / "run" / "results.json").read_text())["figures"]
        (row,) = [line for line in lines if line.startswith("rmse ")]
        assert f"{figures['rmse']:.3f}" in row
        assert max(map(len, lines)) <= 100

    def test_leaves_a_run_folder_and_nothing_else(self, house):
        place, _ = house
        assert names(place / "run") == RUN_FILES
        assert not [name for name in names(place) if name.startswith((".", "run."))]
        results = json.loads((place / "run" / "results.json").read_text())
        assert results["run"] == "run"
        assert results["report"] == "run/report.html"
        assert (results["rows"], results["held_out"], results["task"]) == (128, 32, "regression")
        assert results["figures"]["rmse"] < results["baseline"]["rmse"]
        assert set(results["figures"]) == {"log_density", "rmse", "crps", "coverage", "width", "calibration_error"}
        assert results["verdict"]
        page = (place / "run" / "report.html").read_text()
        assert "progress" in page
        assert page.count("<svg") >= 5

    def test_json_and_quiet(self, tmp_path):
        table = write(cancer(), tmp_path / "cancer.csv")
        found = call("fit", table, "--target", "benign", "--out", tmp_path / "a", *MAP, "--json")
        assert (found.exit_code, found.stderr) == (0, "")
        told = json.loads(found.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert told == json.loads((tmp_path / "a" / "results.json").read_text())
        assert told["classes"] == ["0", "1"]
        assert told["why"] == "asked for"
        assert 0.7 < told["figures"]["accuracy"] <= 1
        found = call("fit", table, "--target", "benign", "--out", tmp_path / "b", *MAP, "--quiet")
        assert (found.stdout, found.stderr) == (f"{tmp_path / 'b' / 'report.html'}\n", "")

    @pytest.mark.parametrize("limit, chosen", [(None, "hmc"), (1000, "ensemble")])
    def test_auto_says_what_it_chose_and_why(self, tmp_path, monkeypatch, limit, chosen):
        from credibly import recipe

        if limit is not None:
            monkeypatch.setattr(recipe, "AFFORDABLE", limit)
        quick = {"hmc": {"draws": 10, "warmup": 20, "chains": 2}, "ensemble": {"steps": 20, "members": 2}}
        plain = recipe.settings_for
        monkeypatch.setattr(recipe, "settings_for", lambda name, layers=1: plain(name, layers) | quick[name])
        table = write(cancer(80), tmp_path / "cancer.csv")
        found = call("fit", table, "--target", "benign", "--out", tmp_path / "run", "--hidden", "4")
        assert found.exit_code == 0, found.output
        said = " ".join(found.stdout.split())
        assert f"Method: {chosen} (64 rows by 29 parameters is " in said
        why = json.loads((tmp_path / "run" / "results.json").read_text())["why"]
        assert why.startswith("64 rows by 29 parameters is ")
        page = (tmp_path / "run" / "report.html").read_text()
        assert why in page
        assert f'method = "{chosen}"  # {why}' in (tmp_path / "run" / "config.toml").read_text()

    def test_folders_on_the_way_are_made_and_go_again_if_it_fails(self, tmp_path):
        table = write(cancer(60), tmp_path / "cancer.csv")
        out = tmp_path / "deep" / "down" / "run"
        refused(call("fit", table, "--target", "benign", "--out", out, *MAP, "--set", "steps=0"), "--set: steps")
        assert not (tmp_path / "deep").exists()
        assert call("fit", table, "--target", "benign", "--out", out, *MAP, "--quiet").exit_code == 0
        assert names(out) == RUN_FILES

    def test_an_empty_folder_may_be_the_place(self, tmp_path):
        table = write(cancer(60), tmp_path / "cancer.csv")
        (tmp_path / "run").mkdir()
        found = call("fit", table, "--target", "benign", "--out", tmp_path / "run", *MAP, "--quiet")
        assert found.exit_code == 0, found.output


class TestConfig:
    def test_the_stored_file_gives_the_same_run(self, house):
        place, _ = house
        found = command("fit", "--config", "run/config.toml", "--out", "again", "--json", cwd=place)
        assert (found.returncode, found.stderr) == (0, "")
        first, again = (json.loads((place / name / "results.json").read_text()) for name in ("run", "again"))
        assert json.loads(found.stdout) == again
        assert again["figures"] == first["figures"]
        assert again["diagnostics"] == first["diagnostics"]
        assert torch.equal(cr.load(place / "run").draws, cr.load(place / "again").draws)
        one, two = ((place / name / "config.toml").read_text() for name in ("run", "again"))
        assert one.replace("asked for", "") == two.replace("asked for", "")

    def test_a_file_of_the_users_own_beside_its_table(self, tmp_path):
        (tmp_path / "data").mkdir()
        write(diabetes(60), tmp_path / "data" / "house.csv")
        (tmp_path / "data" / "mine.toml").write_text(
            'table = "house.csv"\ntarget = "progress"\nmethod = "map"\nhidden = 5\nholdout = 0.5\ndrop = ["age"]\n'
            "seed = 3\n[settings]\nsteps = 20\nlr = 0.02\n"
        )
        mine = tmp_path / "data" / "mine.toml"
        assert call("fit", "--config", mine, "--out", tmp_path / "a", "--quiet").exit_code == 0
        run = TableRun.load(tmp_path / "a")
        assert (run.config.hidden, run.config.seed, run.facts["held_out"]) == ((5,), 3, 30)
        assert "age" not in run.model.preparation.names
        assert (run.config.settings["steps"], run.config.settings["lr"]) == (20, 0.02)
        # Options win, and what they leave stays.
        words = ("--hidden", "3,3", "--set", "steps=10", "--holdout", "0.2", "--method", "map")
        assert call("fit", "--config", mine, "--out", tmp_path / "b", "--quiet", *words).exit_code == 0
        run = TableRun.load(tmp_path / "b")
        assert (run.config.hidden, run.config.seed, run.facts["held_out"]) == ((3, 3), 3, 12)
        assert (run.config.settings["steps"], run.config.settings["lr"]) == (10, 0.02)
        # Another method has other settings.
        words = ("--method", "ensemble", "--set", "members=2", "--set", "steps=10")
        assert call("fit", "--config", mine, "--out", tmp_path / "c", "--quiet", *words).exit_code == 0
        assert TableRun.load(tmp_path / "c").config.settings["lr"] == 0.01
        # A table on the command line is taken from where the command runs.
        other = write(diabetes(40), tmp_path / "other.csv")
        assert call("fit", other, "--config", mine, "--out", tmp_path / "d", "--quiet").exit_code == 0
        assert TableRun.load(tmp_path / "d").facts["rows"] == 20

    def test_a_table_that_has_changed_is_refused(self, tmp_path):
        table = write(cancer(60), tmp_path / "cancer.csv")
        assert call("fit", table, "--target", "benign", "--out", tmp_path / "run", *MAP, "--quiet").exit_code == 0
        write(cancer(61), table)
        words = ("fit", "--config", tmp_path / "run" / "config.toml", "--out", tmp_path / "new")
        refused(call(*words), "--config", "is not the file that the run was made from", "table_sha256")
        assert call(*words, table, "--quiet").exit_code == 0  # named anew, it is meant

    @pytest.mark.parametrize(
        "text, words",
        [
            ("target = ", ("is not TOML", "Invalid value")),
            ('targt = "x"', ("'targt', which is no setting", "Is it 'target'?")),
            ("seed = true", ("seed in c.toml is True",)),
            ('seed = "x"', ("seed in c.toml is 'x'", "int")),
            ("drop = [1, 2]", ("--drop: found 1",)),
            ('hidden = ["a"]', ("--hidden",)),
            ("settings = 3", ("settings in c.toml is 3",)),
            ("[settings]\nnothing = 3", ("--set: MAP has no 'nothing'",)),
            ("[settings]\nsteps = [1]", ("--set: steps",)),
            ("zzz = 1", ("The settings are table, target",)),
            ('table = ""', ("table: none was given",)),
        ],
    )
    def test_a_file_that_cannot_be_used(self, tmp_path, text, words):
        table = write(cancer(60), tmp_path / "cancer.csv")
        (tmp_path / "c.toml").write_text(text)
        named = () if "table" in text else (table,)
        found = call(
            "fit", *named, "--target", "benign", "--method", "map", "--config", tmp_path / "c.toml", "--out", tmp_path / "r"
        )  # fmt: skip
        refused(found, *words)
        assert not (tmp_path / "r").exists()


class TestPredict:
    def test_a_regression(self, house):
        place, _ = house
        new = diabetes(120)
        new["clinic"][2] = "Mars"
        new["age"][7] = 1e6
        del new["bp"]
        write(new, place / "new.csv")
        found = command("predict", "run", "new.csv", "--out", "predictions.csv", cwd=place)
        assert (found.returncode, found.stderr) == (0, "")
        assert "120 rows predicted." in found.stdout
        assert "The table has no column bp: filled as missing in every row." in found.stdout
        assert found.stdout.splitlines()[-1] == "predictions.csv"
        told = read(place / "predictions.csv")
        assert tuple(told) == REGRESSION
        assert len(told["mean"]) == 120
        np.testing.assert_allclose(told["std"] ** 2, told["aleatoric"] + told["epistemic"], rtol=1e-5)
        assert (told["lower_90"] < told["mean"]).all()
        assert (told["mean"] < told["upper_90"]).all()
        assert told["ood"].min() >= 0
        assert told["ood"].max() <= 1
        assert told["ood"][7] > 0.99
        assert "Mars" in told["notes"][2]
        assert "clinic" in told["notes"][2]
        assert (told["notes"][1] or "") == "" or "bp" in told["notes"][1]

    def test_is_what_python_gives(self, house):
        place, _ = house
        found = call("predict", place / "run", place / "house.csv", "--out", place / "all.parquet", "--json")
        assert json.loads(found.stdout)["rows"] == 160
        told = read(place / "all.parquet")
        from credibly.tables.reading import read_table

        run = TableRun.load(place / "run")
        predictive = run.model.predict_table(read_table(place / "house.csv"))
        np.testing.assert_array_equal(told["mean"], predictive.mean.double().numpy())
        lower, upper = predictive.interval(0.9)
        np.testing.assert_array_equal(told["lower_90"], lower.double().numpy())
        np.testing.assert_array_equal(told["upper_90"], upper.double().numpy())
        np.testing.assert_array_equal(told["std"], predictive.std.float().numpy())

    def test_classes(self, cellar):
        place, _ = cellar
        new = wine()
        del new["kind"]
        write(new, place / "new.csv")
        found = call("predict", place / "run", place / "new.csv", "--out", place / "p.csv")
        assert found.exit_code == 0, found.output
        told = read(place / "p.csv")
        kinds = ["Barbera d'Asti", "Barolo", "Grignolino"]
        shares = [f"p_{kind}" for kind in kinds]
        assert list(told) == ["prediction", *shares, "total", "aleatoric", "epistemic", "ood", "notes"]
        p = np.stack([told[name] for name in shares], 1)
        np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
        assert told["prediction"] == [kinds[i] for i in p.argmax(1)]
        assert np.mean([a == b for a, b in zip(told["prediction"], wine()["kind"])]) > 0.8
        np.testing.assert_allclose(told["total"], told["aleatoric"] + told["epistemic"], atol=1e-5)

    def test_two_classes_by_one_set_of_weights(self, tmp_path):
        table = write(cancer(), tmp_path / "cancer.csv")
        assert call("fit", table, "--target", "benign", "--out", tmp_path / "run", *MAP, "--quiet").exit_code == 0
        found = call("predict", tmp_path / "run", table, "--out", tmp_path / "p.csv", "--quiet")
        assert (found.exit_code, found.stdout, found.stderr) == (0, f"{tmp_path / 'p.csv'}\n", "")
        told = read(tmp_path / "p.csv")
        np.testing.assert_allclose(told["p_0"] + told["p_1"], 1, atol=1e-6)
        assert set(told["prediction"]) == {0, 1}
        assert told["epistemic"].max() < 1e-6
        assert "ood" in told  # there, and empty: the method has no such thing
        assert all(value is None or np.isnan(value) for value in told["ood"].tolist())

    def test_what_is_there_is_not_replaced_and_the_table_never(self, house):
        place, _ = house
        kept = place / "kept.csv"
        kept.write_text("mine\n")
        refused(call("predict", place / "run", place / "house.csv", "--out", kept), "--out", "kept.csv", "--force")
        assert kept.read_text() == "mine\n"
        found = call("predict", place / "run", place / "house.csv", "--out", kept, "--force", "--draws", "4", "--quiet")
        assert found.exit_code == 0
        assert len(read(kept)["mean"]) == 160
        before = (place / "house.csv").read_bytes()
        found = call("predict", place / "run", place / "house.csv", "--out", place / "house.csv", "--force")
        refused(found, "--out", "is the table itself")
        assert (place / "house.csv").read_bytes() == before

    def test_refusals(self, house, tmp_path):
        place, _ = house
        run, table = place / "run", place / "house.csv"
        refused(call("predict", run, tmp_path / "no.csv"), "table: there is no file")
        refused(call("predict", run, table, "--out", tmp_path / "p.txt"), "--out", ".csv")
        refused(call("predict", run, table, "--out", tmp_path / "no" / "p.csv"), "--out", "there is no folder")
        refused(call("predict", run, table, "--out", tmp_path / "p.csv", "--draws", "0"), "--draws: found 0")
        refused(call("predict", tmp_path / "no", table, "--out", tmp_path / "p.csv"), "there is no folder", code=1)
        refused(call("predict", place, table, "--out", tmp_path / "p.csv"), "it has no table.json", code=1)
        assert names(tmp_path) == []


class TestEvaluate:
    def test_figures_beside_those_of_no_inputs(self, house):
        place, _ = house
        found = call("evaluate", place / "run", place / "house.csv", "--json")
        assert found.exit_code == 0, found.output
        told = json.loads(found.stdout)
        assert told["rows"] == 160
        assert told["figures"]["rmse"] < told["baseline"]["rmse"]
        run = TableRun.load(place / "run")
        found = call("evaluate", place / "run", place / "run" / "held_out.parquet", "--json")
        assert json.loads(found.stdout)["figures"] == pytest.approx(run.figures, rel=1e-6)
        words = call("evaluate", place / "run", place / "house.csv").output
        assert "hmc on 160 rows of house.csv" in words
        assert "no inputs" in words

    def test_rows_without_a_target_are_left_out_and_said(self, house, tmp_path):
        place, _ = house
        some = diabetes(40)
        some["progress"] = [None if i < 5 else v for i, v in enumerate(some["progress"])]
        write(some, tmp_path / "some.csv")
        found = call("evaluate", place / "run", tmp_path / "some.csv")
        assert "on 35 rows" in found.stdout
        assert "5 rows without a target were left out." in found.stdout
        write(some | {"progress": [None] * 40}, tmp_path / "none.csv")
        refused(call("evaluate", place / "run", tmp_path / "none.csv"), "no row of none.csv has a 'progress'")
        del some["progress"]
        write(some, tmp_path / "without.csv")
        refused(call("evaluate", place / "run", tmp_path / "without.csv"), "there is no column 'progress'")

    def test_a_class_that_was_never_seen_is_refused(self, cellar, tmp_path):
        place, _ = cellar
        new = wine()
        new["kind"][3] = "Merlot"
        write(new, tmp_path / "new.csv")
        refused(call("evaluate", place / "run", tmp_path / "new.csv"), "Merlot")


class TestReport:
    def test_writes_the_same_page_again(self, cellar):
        place, _ = cellar
        page = place / "run" / "report.html"
        before = page.read_text()
        results = (place / "run" / "results.json").read_text()
        page.unlink()
        found = call("report", place / "run")
        assert (found.exit_code, found.stdout) == (0, f"{page}\n")
        assert page.read_text() == before
        told = call("report", place / "run", "--json").stdout
        assert json.loads(told) == json.loads(results)

    def test_opens_it_where_that_is_asked(self, cellar, monkeypatch):
        import webbrowser

        shown = []
        monkeypatch.setattr(webbrowser, "open", shown.append)
        call("report", cellar[0] / "run", "--open")
        assert shown == [(cellar[0] / "run" / "report.html").resolve().as_uri()]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    place = tmp_path_factory.mktemp("comparison")
    write(wine(), place / "wine.parquet")
    found = compare(place)
    assert found.exit_code == 0, found.output
    return place, found


def compare(place, *words):
    return call(
        "compare", place / "wine.parquet", "--target", "kind", "--out", place / "out", "--methods", "map,ensemble", "--hidden",
        "6", "--set", "map.steps=30", "--set", "ensemble.steps=30", "--set", "ensemble.members=3", *words,
    )  # fmt: skip


class TestCompare:
    def test_one_table_one_page_one_run_for_each_method(self, comparison):
        place, found = comparison
        assert names(place) == ["out", "wine.parquet"]
        assert names(place / "out") == ["ensemble", "index.html", "map", "results.json"]
        told = json.loads((place / "out" / "results.json").read_text())
        assert list(told["methods"]) == ["map", "ensemble"]
        for name in ("map", "ensemble"):
            assert names(place / "out" / name) == RUN_FILES
            own = json.loads((place / "out" / name / "results.json").read_text())
            assert own["figures"] == told["methods"][name]["figures"]
            assert own["run"] == str(place / "out" / name)
            assert own["report"] == str(place / "out" / name / "report.html")
            (row,) = [line for line in found.stdout.splitlines() if line.startswith(f"{name} ")]
            assert f"{own['figures']['log_density']:.3f}" in row
            assert TableRun.load(place / "out" / name).config.method == name
        one, two = (TableRun.load(place / "out" / name) for name in ("map", "ensemble"))
        assert one.rows()[0].equals(two.rows()[0])  # the same rows were kept back
        page = (place / "out" / "index.html").read_text()
        assert all(f'<th scope="row">{name}</th>' in page for name in ("map", "ensemble"))
        assert found.stdout.splitlines()[-1] == str(place / "out" / "index.html")

    def test_only_a_comparison_is_replaced(self, comparison, tmp_path):
        place, _ = comparison
        shutil.copytree(place / "out", tmp_path / "out")
        shutil.copy(place / "wine.parquet", tmp_path)
        refused(compare(tmp_path), "--out", "exists", "--force")
        (tmp_path / "out" / "stale").mkdir()
        found = compare(tmp_path, "--force", "--methods", "map", "--json", "--set", "map.steps=31")
        refused(found, "--set", "ensemble.steps")
        assert "stale" in names(tmp_path / "out")
        found = call(
            "compare", tmp_path / "wine.parquet", "--target", "kind", "--out", tmp_path / "out", "--methods", "map",
            "--hidden", "6", "--set", "map.steps=31", "--force", "--json",
        )  # fmt: skip
        assert found.exit_code == 0, found.output
        assert list(json.loads(found.stdout)["methods"]) == ["map"]
        assert names(tmp_path / "out") == ["index.html", "map", "results.json"]
        assert TableRun.load(tmp_path / "out" / "map").config.settings["steps"] == 31
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "map").mkdir()
        found = call(
            "compare", tmp_path / "wine.parquet", "--target", "kind", "--out", tmp_path / "photos", "--force", "--methods", "map"
        )  # fmt: skip
        refused(found, "--out", "is not a comparison, so it stays")
        assert names(tmp_path / "photos") == ["map"]

    @pytest.mark.parametrize(
        "words, said",
        [
            (("--methods", "map,nope"), ("nope",)),
            (("--methods", ""), ()),
            (("--set", "draws=3"), ("--set: found 'draws=3'", "METHOD.NAME=VALUE")),
            (("--set", "hmc.draws=3"), ("--set", "map, ensemble")),
            (("--set", "map.nothing=3"), ("--set: MAP has no 'nothing'",)),
        ],
    )
    def test_refusals_before_any_work(self, comparison, tmp_path, words, said):
        shutil.copy(comparison[0] / "wine.parquet", tmp_path)
        refused(compare(tmp_path, *words), *said)
        assert names(tmp_path) == ["wine.parquet"]


class TestTablesThatCannotBeFitted:
    """Every refusal is one line, exit code 2, and leaves nothing behind."""

    CASES: ClassVar = {
        "no such column": (diabetes(40), "price", ("--target: there is no column 'price'", "The table has age")),
        "nearly a column": (diabetes(40), "progres", ("Did you mean 'progress'?",)),
        "one value": (diabetes(40) | {"progress": [3.0] * 40}, "progress", ("--target", "in every row")),
        "many words": (
            {"x": np.arange(5000.0), "y": [f"name {i}" for i in range(5000)]}, "y", ("--target", "5,000", "identifier"),
        ),
        "three rows": (diabetes(3), "progress", ("3 usable rows", "at least 10")),
        "target mostly missing": (diabetes(40) | {"progress": [1.0] * 9 + [None] * 31}, "progress", ("missing in 31 of 40",)),
        "only a target": ({"y": np.arange(40.0)}, "y", ("no column is left",)),
        "only constants": ({"x": [1] * 40, "y": np.arange(40.0)}, "y", ("no column is left",)),
        "words for numbers": (diabetes(40), "clinic", ("--task",)),
    }  # fmt: skip

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
        refused(call("fit", "--out", tmp_path / "run"), "table: none was given")
        refused(call("fit", tmp_path / "t.csv", "--out", tmp_path / "run"), "--target: none was given")
        refused(call("fit", tmp_path / "t.csv", "--target", "y"), "there is no file")
        refused(call("fit", tmp_path, "--target", "y"), "is a folder")

    @pytest.mark.parametrize(
        "words, said",
        [
            (("--method", "gibbs"), ("--method: found 'gibbs'", "hmc")),
            (("--task", "ranking"), ("--task: found 'ranking'",)),
            (("--holdout", "1"), ("--holdout: found 1.0",)),
            (("--hidden", "ten"), ("--hidden: found 'ten'",)),
            (("--noise", "loud"), ("--noise: found 'loud'", "student")),
            (("--prior-scale", "0"), ("--prior-scale: found 0",)),
            (("--activation", "step"), ("--activation: found 'step'",)),
            (("--seed", "-3"), ("--seed: found -3",)),
            (("--device", "abacus"), ("--device: 'abacus' cannot be used",)),
            (("--drop", "agee"), ("--drop: there is no column 'agee'", "Did you mean 'age'?")),
            (("--drop", "progress"), ("--drop", "is the target")),
            (("--set", "steps"), ("--set: found 'steps'", "draws=500")),
            (("--set", "stepps=3"), ("--set: MAP has no 'stepps'", "steps")),
            (("--set", "warmup=soon"), ("--set: found", "soon")),
            (("--config", "no.toml"), ("--config: there is no file 'no.toml'",)),
        ],
    )
    def test_options(self, tmp_path, words, said):
        table = write(diabetes(40), tmp_path / "t.csv")
        refused(call("fit", table, "--target", "progress", "--out", tmp_path / "run", *MAP, *words), *said)
        assert names(tmp_path) == ["t.csv"]


class TestRunFolders:
    """Folders that cannot be opened, and places that are taken."""

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
        facts = json.loads((run / "table.json").read_text()) | {"format_version": 2}
        told = {k: v for k, v in facts.items() if k != "checksum"}
        facts["checksum"] = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        (run / "table.json").write_text(json.dumps(facts))
        for words in self.calls(run):
            refused(call(*words), "has format 2", "reads 1", "config.toml", code=1)

    @pytest.mark.parametrize(
        "how", ["altered", "cut", "another", "binary", "no posterior", "posterior altered", "no rows"]
    )
    def test_altered(self, run, how):
        text = (run / "table.json").read_text()
        said = {
            "altered": "was altered",
            "cut": "cut short",
            "another": "not the folder",
            "binary": "cut short or altered",
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
                continue  # they need none of the rows that were kept
            refused(call(*words), said.get(how, "path: "), code=1)

    def test_a_place_that_is_taken(self, run):
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
        # Nor what lies where the new run is made.
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
            call("predict", run, run.parent / "wine.parquet", "--out", closed / "p.csv"), "--out", "cannot be written"
        )

    def test_a_run_in_use_is_not_replaced(self, run):
        from credibly.run_folder import RunFolder

        base = ("fit", run.parent / "wine.parquet", "--target", "kind", *MAP, "--quiet", "--force", "--out")
        with RunFolder(run / "posterior", {}):
            refused(call(*base, run), "in use by process", code=1)
        assert TableRun.load(run).config.method == "ensemble"

    def test_resume_of_a_run_that_has_ended_tells_it_again(self, run):
        found = call("resume", run)
        assert found.exit_code == 0, found.output
        assert found.stdout.startswith("It has ended already.\n")
        assert found.stdout.splitlines()[-1] == str(run / "report.html")
        told = json.loads(call("resume", run, "--json").stdout)
        assert told["figures"] == TableRun.load(run).figures


class TestHelpAndCompletion:
    def test_help_of_every_verb_loads_nothing_heavy(self):
        code = f"""
import sys
from credibly.cli import app
for verb in {VERBS!r}:
    try:
        app([verb, "--help"], prog_name="credibly")
    except SystemExit as end:
        assert not end.code
try:
    app(["--help"], prog_name="credibly")
except SystemExit as end:
    assert not end.code
heavy = {{"torch", "numpy", "pandas", "pyarrow", "sklearn", "matplotlib", "jinja2", "scipy"}} & set(sys.modules)
sys.exit(f"loaded {{heavy}}" if heavy else 0)
"""
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        for verb in VERBS:
            assert f"credibly {verb} " in found.stdout
        for default in ("0.2", "50", "learned", "silu"):
            assert f"(Default: {default}.)" in re.sub(r"[\s│]+", " ", found.stdout)

    def test_every_method_can_be_named(self):
        assert list(METHODS) == list(METHOD_NAMES)

    @pytest.mark.parametrize(
        "line, wanted, not_wanted",
        [
            ("credibly ", set(VERBS), set()),
            ("credibly fit wine.parquet --method h", {"hmc"}, {"map"}),
            ("credibly fit house.csv --target ", {"age", "bmi", "clinic", "progress"}, set()),
            ("credibly fit house.csv --target p", {"progress"}, {"age"}),
            ("credibly fit wine.parquet --target k", {"kind"}, {"ash"}),
            ("credibly fit house.csv --drop age,b", {"age,bmi", "age,bp"}, {"bmi"}),
            ("credibly compare house.csv --methods map,s", {"map,sgld", "map,sghmc"}, {"map,hmc"}),
            ("credibly fit house.csv --task r", {"regression"}, {"classification"}),
            ("credibly fit nothing.csv --target ", set(), {"age"}),
            ("credibly fit broken.parquet --target ", set(), {"age"}),
        ],
    )
    def test_completion(self, tmp_path, line, wanted, not_wanted):
        write(diabetes(12), tmp_path / "house.csv")
        write(wine(), tmp_path / "wine.parquet")
        (tmp_path / "broken.parquet").write_bytes(b"PAR1")
        env = os.environ | {
            "_CREDIBLY_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1),
        }  # fmt: skip
        found = subprocess.run([str(SCRIPT)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert (found.returncode, found.stderr) == (0, "")
        offered = set(found.stdout.split())
        assert wanted <= offered
        assert not offered & not_wanted

    def test_output_that_nobody_reads_is_no_error_of_ours(self):
        with subprocess.Popen(
            [str(SCRIPT), "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            process.stdout.close()
            err = process.stderr.read()
        assert "Traceback" not in err


def test_paths_with_spaces_and_quotes(tmp_path):
    place = tmp_path / "my own' data"
    place.mkdir()
    table = write(cancer(60), place / "the table.csv")
    found = call("fit", table, "--target", "benign", "--out", place / "a run", *MAP, "--json")
    assert found.exit_code == 0, found.output
    assert call("fit", "--config", place / "a run" / "config.toml", "--out", place / "b", "--quiet").exit_code == 0
    assert Path(json.loads(found.stdout)["run"]) == place / "a run"
