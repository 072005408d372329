"""The command line on tables: from a file to predictions, metrics and pages, and its errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import credibly as cr
from conftest import undrawn
from credibly.tables import TableRun
from own_tables import (
    ENSEMBLE,
    HMC,
    MAP,
    QUICK,
    REGRESSION,
    RUN_FILES,
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

NO_DRAWING = pytest.mark.usefixtures("no_drawing")


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Return a folder with house.csv and an HMC run of it by the installed command."""
    place = tmp_path_factory.mktemp("house")
    write(diabetes(), place / "house.csv")
    found = command("fit", "house.csv", "--target", "progress", "--out", "run", *HMC, cwd=place)
    assert found.returncode == 0, found.stderr
    return place, found


@pytest.fixture(scope="module")
def cellar(tmp_path_factory):
    """Return a folder with wine.parquet and a run of it by an ensemble."""
    place = tmp_path_factory.mktemp("cellar")
    write(wine(), place / "wine.parquet")
    with undrawn():
        found = call("fit", place / "wine.parquet", "--target", "kind", "--out", place / "run", *ENSEMBLE)
    assert found.exit_code == 0, found.output
    return place, found


@NO_DRAWING
class TestFit:
    def test_describes_the_table_and_the_fit(self, house):
        place, found = house
        assert found.stderr == ""
        lines = found.stdout.splitlines()
        rows = "metrics from 32 of them, predicted by a fit to the others"
        assert lines[0] == f"house.csv: 160 training rows; {rows}."
        assert lines[1].startswith("Task: regression: ")
        assert any(re.match(r"  bmi: numeric, \d+ missing", line) for line in lines)
        assert any(line.startswith("  clinic: categorical, 3 categories") for line in lines)
        assert any(line.startswith("  year: left out, constant") for line in lines)
        assert "Method: hmc (requested)." in lines
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
        assert (results["rows"], results["held_out"], results["task"]) == (160, 32, "regression")
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
        reported = json.loads(found.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert reported == json.loads((tmp_path / "a" / "results.json").read_text())
        assert reported["classes"] == ["0", "1"]
        assert reported["why"] == "requested"
        assert 0.7 < reported["figures"]["accuracy"] <= 1
        found = call("fit", table, "--target", "benign", "--out", tmp_path / "b", *MAP, "--quiet")
        assert (found.stdout, found.stderr) == (f"{tmp_path / 'b' / 'report.html'}\n", "")

    @pytest.mark.parametrize("limit, chosen", [(None, "hmc"), (1000, "ensemble")])
    def test_auto_explains_its_choice(self, tmp_path, monkeypatch, limit, chosen):
        from credibly.tables import recipe

        if limit is not None:
            monkeypatch.setattr(recipe, "AFFORDABLE", limit)
        quick = {"hmc": {"draws": 10, "warmup": 20, "chains": 2}, "ensemble": {"steps": 20, "members": 2}}
        plain = recipe.settings_for
        monkeypatch.setattr(recipe, "settings_for", lambda name, *about: plain(name, *about) | quick[name])
        table = write(cancer(80), tmp_path / "cancer.csv")
        found = call("fit", table, "--target", "benign", "--out", tmp_path / "run", "--hidden", "4", *QUICK)
        assert found.exit_code == 0, found.output
        said = " ".join(found.stdout.split())
        assert f"Method: {chosen} (80 rows by 29 parameters is " in said
        why = json.loads((tmp_path / "run" / "results.json").read_text())["why"]
        assert why.startswith("80 rows by 29 parameters is ")
        page = (tmp_path / "run" / "report.html").read_text()
        assert why in page
        written = (tmp_path / "run" / "config.toml").read_text()
        assert f"# method: {why}" in written
        assert f'method = "{chosen}"' in written

    def test_parent_folders_are_created_and_removed_on_failure(self, tmp_path):
        table = write(cancer(60), tmp_path / "cancer.csv")
        out = tmp_path / "deep" / "down" / "run"
        refused(call("fit", table, "--target", "benign", "--out", out, *MAP, "--set", "steps=0"), "--set: steps")
        assert not (tmp_path / "deep").exists()
        assert call("fit", table, "--target", "benign", "--out", out, *MAP, "--quiet").exit_code == 0
        assert names(out) == RUN_FILES

    def test_an_empty_folder_may_be_used(self, tmp_path):
        table = write(cancer(60), tmp_path / "cancer.csv")
        (tmp_path / "run").mkdir()
        found = call("fit", table, "--target", "benign", "--out", tmp_path / "run", *MAP, "--quiet")
        assert found.exit_code == 0, found.output


@NO_DRAWING
class TestConfig:
    def test_the_stored_file_gives_the_same_run(self, house, monkeypatch):
        """The stored run was fitted by another process."""
        place, _ = house
        monkeypatch.chdir(place)
        found = call("fit", "--config", "run/config.toml", "--out", "again", "--json")
        assert (found.exit_code, found.stderr) == (0, "")
        first, again = (json.loads((place / name / "results.json").read_text()) for name in ("run", "again"))
        assert json.loads(found.stdout) == again
        assert again["figures"] == first["figures"]
        assert again["diagnostics"] == first["diagnostics"]
        assert torch.equal(cr.load(place / "run").draws, cr.load(place / "again").draws)
        one, two = ((place / name / "config.toml").read_text() for name in ("run", "again"))
        assert one.replace("requested", "") == two.replace("requested", "")

    def test_a_file_of_the_users_own_beside_its_table(self, tmp_path):
        (tmp_path / "data").mkdir()
        write(diabetes(60), tmp_path / "data" / "house.csv")
        (tmp_path / "data" / "mine.toml").write_text(
            'table = "house.csv"\ntarget = "progress"\nmethod = "map"\nhidden = 5\nholdout = 0.5\ndrop = ["age"]\n'
            'seed = 3\ntune = "none"\n[settings]\nsteps = 20\nlr = 0.02\n'
        )
        mine = tmp_path / "data" / "mine.toml"
        assert call("fit", "--config", mine, "--out", tmp_path / "a", "--quiet").exit_code == 0
        run = TableRun.load(tmp_path / "a")
        assert (run.config.hidden, run.config.seed, run.facts["held_out"]) == ((5,), 3, 30)
        assert "age" not in run.model.preparation.names
        assert (run.config.settings["steps"], run.config.settings["lr"]) == (20, 0.02)
        # Options override the file; the rest is kept.
        words = ("--hidden", "3,3", "--set", "steps=10", "--holdout", "0.2", "--method", "map")
        assert call("fit", "--config", mine, "--out", tmp_path / "b", "--quiet", *words).exit_code == 0
        run = TableRun.load(tmp_path / "b")
        assert (run.config.hidden, run.config.seed, run.facts["held_out"]) == ((3, 3), 3, 12)
        assert (run.config.settings["steps"], run.config.settings["lr"]) == (10, 0.02)
        # Another method has other settings.
        words = ("--method", "ensemble", "--set", "members=2", "--set", "steps=10")
        assert call("fit", "--config", mine, "--out", tmp_path / "c", "--quiet", *words).exit_code == 0
        assert TableRun.load(tmp_path / "c").config.settings["lr"] != 0.02
        # A table on the command line is relative to the current directory.
        other = write(diabetes(40), tmp_path / "other.csv")
        assert call("fit", other, "--config", mine, "--out", tmp_path / "d", "--quiet").exit_code == 0
        assert TableRun.load(tmp_path / "d").facts["rows"] == 40

    def test_a_table_that_has_changed_is_refused(self, tmp_path):
        table = write(cancer(60), tmp_path / "cancer.csv")
        assert call("fit", table, "--target", "benign", "--out", tmp_path / "run", *MAP, "--quiet").exit_code == 0
        write(cancer(61), table)
        words = ("fit", "--config", tmp_path / "run" / "config.toml", "--out", tmp_path / "new")
        refused(call(*words), "--config", "has changed since the run", "table_sha256")
        assert call(*words, table, "--quiet").exit_code == 0  # given explicitly, it is used

    @pytest.mark.parametrize(
        "text, words",
        [
            ("target = ", ("is not valid TOML", "Invalid value")),
            ('targt = "x"', ("unknown setting 'targt' in c.toml", "Did you mean 'target'?")),
            ("seed = true", ("seed in c.toml must be of type int, got True",)),
            ('seed = "x"', ("seed in c.toml must be of type int, got 'x'",)),
            ("drop = [1, 2]", ("--drop must be text", "got 1")),
            ('hidden = ["a"]', ("--hidden",)),
            ("settings = 3", ("settings in c.toml must be of type dict, got 3",)),
            ("[settings]\nnothing = 3", ("--set: MAP has no 'nothing'",)),
            ("[settings]\nsteps = [1]", ("--set: steps",)),
            ("zzz = 1", ("The settings are table, target",)),
            ('table = ""', ("table: missing",)),
        ],
    )
    def test_a_file_that_cannot_be_used(self, tmp_path, text, words):
        table = write(cancer(60), tmp_path / "cancer.csv")
        (tmp_path / "c.toml").write_text(text)
        named = () if "table" in text else (table,)
        found = call(
            "fit",
            *named,
            "--target",
            "benign",
            "--method",
            "map",
            "--config",
            tmp_path / "c.toml",
            "--out",
            tmp_path / "r",
        )
        refused(found, *words)
        assert not (tmp_path / "r").exists()


@NO_DRAWING
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
        assert "The table has no column bp: treated as missing in every row." in found.stdout
        assert "notes, such as: bp is missing; unknown category 'Mars' in clinic; age = 1e+06 is far" in " ".join(
            found.stdout.split()
        )
        assert found.stdout.splitlines()[-1] == "predictions.csv"
        reported = read(place / "predictions.csv")
        assert tuple(reported) == REGRESSION
        assert len(reported["mean"]) == 120
        parts = reported["std_aleatoric"] ** 2 + reported["std_epistemic"] ** 2
        np.testing.assert_allclose(reported["std"] ** 2, parts, rtol=1e-5)
        assert (reported["lower_90"] < reported["mean"]).all()
        assert (reported["mean"] < reported["upper_90"]).all()
        assert reported["ood"].min() >= 0
        assert reported["ood"].max() <= 1
        assert reported["ood"][7] > 0.99
        assert "Mars" in reported["notes"][2]
        assert "clinic" in reported["notes"][2]
        assert (reported["notes"][1] or "") == "" or "bp" in reported["notes"][1]

    def test_is_what_python_gives(self, house):
        place, _ = house
        found = call("predict", place / "run", place / "house.csv", "--out", place / "all.parquet", "--json")
        assert json.loads(found.stdout)["rows"] == 160
        reported = read(place / "all.parquet")
        from credibly.tables.files.reading import read_table

        run = TableRun.load(place / "run")
        predictive = run.model.predict_table(read_table(place / "house.csv"))
        np.testing.assert_array_equal(reported["mean"], predictive.mean.double().numpy())
        lower, upper = predictive.interval(0.9)
        np.testing.assert_array_equal(reported["lower_90"], lower.double().numpy())
        np.testing.assert_array_equal(reported["upper_90"], upper.double().numpy())
        np.testing.assert_array_equal(reported["std"], predictive.std.float().numpy())

    def test_classes(self, cellar):
        place, _ = cellar
        new = wine()
        del new["kind"]
        write(new, place / "new.csv")
        found = call("predict", place / "run", place / "new.csv", "--out", place / "p.csv")
        assert found.exit_code == 0, found.output
        reported = read(place / "p.csv")
        kinds = ["Barbera d'Asti", "Barolo", "Grignolino"]
        shares = [f"p_{kind}" for kind in kinds]
        entropies = [f"entropy_{part}" for part in ("total", "aleatoric", "epistemic")]
        assert list(reported) == ["prediction", *shares, *entropies, "ood", "notes"]
        p = np.stack([reported[name] for name in shares], 1)
        np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
        assert reported["prediction"] == [kinds[i] for i in p.argmax(1)]
        assert np.mean([a == b for a, b in zip(reported["prediction"], wine()["kind"])]) > 0.8
        total, *parts = (reported[name] for name in entropies)
        np.testing.assert_allclose(total, sum(parts), atol=1e-5)

    def test_two_classes_by_one_set_of_weights(self, tmp_path):
        table = write(cancer(), tmp_path / "cancer.csv")
        assert call("fit", table, "--target", "benign", "--out", tmp_path / "run", *MAP, "--quiet").exit_code == 0
        found = call("predict", tmp_path / "run", table, "--out", tmp_path / "p.csv", "--quiet")
        assert (found.exit_code, found.stdout, found.stderr) == (0, f"{tmp_path / 'p.csv'}\n", "")
        reported = read(tmp_path / "p.csv")
        np.testing.assert_allclose(reported["p_0"] + reported["p_1"], 1, atol=1e-6)
        assert set(reported["prediction"]) == {0, 1}
        assert reported["entropy_epistemic"].max() < 1e-6
        assert "ood" in reported  # present but empty: the method has no epistemic uncertainty
        assert all(value is None or np.isnan(value) for value in reported["ood"].tolist())

    def test_an_existing_file_is_kept_and_the_table_is_never_overwritten(self, house):
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
        refused(call("predict", run, tmp_path / "no.csv"), "table: no such file")
        write({"a": [1.0, 2.0]}, tmp_path / "other.csv")
        refused(call("predict", run, tmp_path / "other.csv", "--out", tmp_path / "p.csv"), "none of the columns", "age")
        (tmp_path / "other.csv").unlink()
        refused(call("predict", run, table, "--out", tmp_path / "p.txt"), "--out", ".csv")
        refused(call("predict", run, table, "--out", tmp_path / "no" / "p.csv"), "--out", "no such folder")
        refused(
            call("predict", run, table, "--out", tmp_path / "p.csv", "--draws", "0"),
            "--draws must be a positive integer, got 0",
        )
        refused(call("predict", tmp_path / "no", table, "--out", tmp_path / "p.csv"), "no such folder")
        refused(call("predict", place, table, "--out", tmp_path / "p.csv"), "it has no table.json")
        assert names(tmp_path) == []


def test_columns_and_classes_are_in_the_results_and_on_the_page(house, cellar):
    for (place, _), inputs in ((house, {"age", "bmi", "bp", "s5", "clinic"}), (cellar, None)):
        results = json.loads((place / "run" / "results.json").read_text())
        importance = results["importance"]["columns"]
        assert inputs is None or set(importance) == inputs
        losses = [one["loss"] for one in importance.values()]
        assert losses == sorted(losses, reverse=True)
        assert 1 <= len(results["effects"]) <= 6
        assert set(results["effects"]) <= set(importance)
        page = (place / "run" / "report.html").read_text()
        assert "Which columns matter?" in page
        assert "How do predictions depend on them?" in page
        assert ("Each class" in page) == ("by_class" in results and results["by_class"] is not None)


@NO_DRAWING
class TestClassWeight:
    def test_balanced_classes_raise_the_probability_of_the_rare_one(self, tmp_path):
        known = cancer(300)
        known["benign"] = np.where(np.arange(300) % 5 == 0, known["benign"], 1)
        write(known, tmp_path / "some.csv")
        mean = []
        for run, options in (("plain", ()), ("weighted", ("--class-weight", "balanced"))):
            linear = (*QUICK, "--method", "map", "--set", "steps=300", "--hidden", "none")
            found = call("fit", tmp_path / "some.csv", "--target", "benign", "--out", tmp_path / run, *linear, *options)
            assert found.exit_code == 0, found.output
            call("predict", tmp_path / run, tmp_path / "some.csv", "--out", tmp_path / f"{run}.csv")
            mean.append(read(tmp_path / f"{run}.csv")["p_0"].mean())
        assert mean[1] > mean[0] + 0.1
        assert 'class_weight = "balanced"' in (tmp_path / "weighted" / "config.toml").read_text()
        assert "Class weights" in (tmp_path / "weighted" / "report.html").read_text()
        again = call("fit", "--config", tmp_path / "weighted" / "config.toml", "--out", tmp_path / "again")
        assert again.exit_code == 0, again.output
        figures = [TableRun.load(tmp_path / run).figures for run in ("weighted", "again")]
        assert figures[0] == figures[1]

    def test_refusals(self, tmp_path):
        write(diabetes(40), tmp_path / "some.csv")
        fit = ("fit", tmp_path / "some.csv", "--target", "progress", "--out", tmp_path / "run", *MAP, "--class-weight")
        refused(call(*fit, "balanced"), "--class-weight: the target is a number, not a class")
        refused(call(*fit, "other"), "--class-weight must be 'balanced', got 'other'")
        assert not (tmp_path / "run").exists()


@NO_DRAWING
class TestEvaluate:
    def test_metrics_beside_the_baseline(self, house):
        place, _ = house
        found = call("evaluate", place / "run", place / "house.csv", "--json")
        assert found.exit_code == 0, found.output
        reported = json.loads(found.stdout)
        assert reported["rows"] == 160
        assert reported["figures"]["rmse"] < reported["baseline"]["rmse"]
        run = TableRun.load(place / "run")
        # The model has been fitted to the rows behind the metrics of its report, so it predicts them itself here.
        found = call("evaluate", place / "run", place / "run" / "held_out.parquet", "--json")
        rows = run.rows()[0]
        own = cr.evaluate(run.model.predict_table(rows), run.model.preparation.target_values(rows))
        assert json.loads(found.stdout)["figures"] == pytest.approx(own, rel=1e-6)
        words = call("evaluate", place / "run", place / "house.csv").output
        assert "hmc on 160 rows of house.csv" in words
        assert "no inputs" in words

    def test_columns_that_the_table_lacks(self, house, tmp_path):
        place, _ = house
        rows = diabetes()
        write({"progress": rows["progress"]}, tmp_path / "target.csv")
        refused(call("evaluate", place / "run", tmp_path / "target.csv"), "none of the columns", "age")
        del rows["bp"]
        write(rows, tmp_path / "less.csv")
        assert json.loads(call("evaluate", place / "run", tmp_path / "less.csv", "--json").stdout)[
            "missing_columns"
        ] == ["bp"]
        assert "no column bp: treated as missing in" in call("evaluate", place / "run", tmp_path / "less.csv").stdout

    def test_ends_in_a_verdict(self, house):
        """By the same checks as the report: on the held-out rows the findings are those of the fit."""
        place, _ = house
        rows = place / "run" / "held_out.parquet"
        reported = json.loads(call("evaluate", place / "run", rows, "--json").stdout)
        fitted = json.loads((place / "run" / "results.json").read_text())
        assert reported["assessment"]["verdict"] == fitted["assessment"]["verdict"]
        assert reported["assessment"]["sampling"] == fitted["assessment"]["sampling"]
        assert reported["verdict"][1] == fitted["verdict"][1]
        assert reported["verdict"][1].startswith("Sampling: ")
        words = call("evaluate", place / "run", rows).stdout
        assert "All metrics are on 32 rows of held_out.parquet" in words
        assert f"Predictions: {reported['assessment']['predictions']}." in words

    def test_classes(self, cellar):
        place, _ = cellar
        reported = json.loads(call("evaluate", place / "run", place / "wine.parquet", "--json").stdout)
        matrix = np.array(reported["confusion_matrix"])
        barolo = reported["by_class"]["Barolo"]
        at = list(reported["by_class"]).index("Barolo")
        assert matrix.sum() == 178
        assert barolo["recall"] == pytest.approx(matrix[at, at] / matrix[at].sum())
        assert barolo["precision"] == pytest.approx(matrix[at, at] / matrix[:, at].sum())
        recalls = [one["recall"] for one in reported["by_class"].values()]
        assert reported["figures"]["balanced_accuracy"] == pytest.approx(np.mean(recalls))
        words = call("evaluate", place / "run", place / "wine.parquet").stdout
        assert re.search(r"class +rows +recall +precision", words)

    def test_rows_without_a_target_are_left_out_and_counted(self, house, tmp_path):
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
        refused(call("evaluate", place / "run", tmp_path / "without.csv"), "no column 'progress'")

    def test_a_class_that_was_never_seen_is_refused(self, cellar, tmp_path):
        place, _ = cellar
        new = wine()
        new["kind"][3] = "Merlot"
        write(new, tmp_path / "new.csv")
        refused(call("evaluate", place / "run", tmp_path / "new.csv"), "Merlot")


@NO_DRAWING
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
        reported = call("report", place / "run", "--json").stdout
        assert json.loads(reported) == json.loads(results)

    def test_opens_the_page_on_request(self, cellar, monkeypatch):
        import webbrowser

        shown = []
        monkeypatch.setattr(webbrowser, "open", shown.append)
        call("report", cellar[0] / "run", "--open")
        assert shown == [(cellar[0] / "run" / "report.html").resolve().as_uri()]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    place = tmp_path_factory.mktemp("comparison")
    write(wine(), place / "wine.parquet")
    with undrawn():
        found = compare(place)
    assert found.exit_code == 0, found.output
    return place, found


def compare(place, *words):
    return call(
        "compare",
        place / "wine.parquet",
        "--target",
        "kind",
        "--out",
        place / "out",
        "--methods",
        "map,ensemble",
        "--hidden",
        "6",
        "--set",
        "map.steps=30",
        "--set",
        "ensemble.steps=30",
        "--set",
        "ensemble.members=3",
        *words,
    )


@NO_DRAWING
class TestCompare:
    def test_one_table_one_page_one_run_for_each_method(self, comparison):
        place, found = comparison
        assert names(place) == ["out", "wine.parquet"]
        assert names(place / "out") == ["ensemble", "index.html", "map", "results.json"]
        reported = json.loads((place / "out" / "results.json").read_text())
        assert list(reported["methods"]) == ["map", "ensemble"]
        for name in ("map", "ensemble"):
            # The held-out rows stay unseen, so there are no further fits.
            assert names(place / "out" / name) == [file for file in RUN_FILES if file != "folds"]
            own = json.loads((place / "out" / name / "results.json").read_text())
            assert own["figures"] == reported["methods"][name]["figures"]
            assert own["run"] == str(place / "out" / name)
            assert own["report"] == str(place / "out" / name / "report.html")
            (row,) = [line for line in found.stdout.splitlines() if line.startswith(f"{name} ")]
            assert f"{own['figures']['log_density']:.3f}" in row
            assert TableRun.load(place / "out" / name).config.method == name
        one, two = (TableRun.load(place / "out" / name) for name in ("map", "ensemble"))
        assert one.rows()[0].equals(two.rows()[0])  # the same rows were held out
        page = (place / "out" / "index.html").read_text()
        assert all(f'<th scope="row">{name}</th>' in page for name in ("map", "ensemble"))
        assert found.stdout.splitlines()[-1] == str(place / "out" / "index.html")

    def test_boosting_is_shown_beside_the_methods(self, comparison):
        from sklearn.ensemble import HistGradientBoostingClassifier

        place, found = comparison
        reported = json.loads((place / "out" / "results.json").read_text())
        run = TableRun.load(place / "out" / "map")
        held = run.rows()[0]
        columns, kinds = list(wine())[:-1], wine()["kind"]
        rows = np.stack([wine()[name] for name in columns], 1)
        at = np.stack([np.asarray(held[name]) for name in columns], 1)
        # The training rows are those that were not held out.
        train = np.array([not (row == at).all(1).any() for row in rows])
        model = HistGradientBoostingClassifier(random_state=0).fit(rows[train], kinds[train])
        accuracy = np.mean(model.predict(at) == np.asarray(held["kind"].to_pylist()))
        assert reported["boosting"]["bayesian"] is False
        assert reported["boosting"]["figures"]["accuracy"] == pytest.approx(accuracy)
        assert set(reported["boosting"]["figures"]) == set(reported["methods"]["map"]["figures"])
        (row,) = [line for line in found.stdout.splitlines() if line.startswith("boosting ")]
        assert row.rstrip().endswith("not Bayesian")
        assert f"{reported['boosting']['figures']['log_density']:.3f}" in row

    def test_only_a_reliable_method_is_recommended(self, comparison):
        place, found = comparison
        reported = json.loads((place / "out" / "results.json").read_text())
        reliable = {name: one["reliable"] for name, one in reported["methods"].items()}
        for name, one in reported["methods"].items():
            assert one["reliable"] == (not one["doubts"])
            (row,) = [line for line in found.stdout.splitlines() if line.startswith(f"{name} ")]
            assert row.split()[-1] == ("yes" if one["reliable"] else "no")
        said = " ".join(found.stdout.split())
        if any(reliable.values()):
            assert reliable[reported["recommended"]]
            assert f"Recommended: {reported['recommended']}, the reliable method" in said
        else:
            assert reported["recommended"] is None
            assert "No method is recommended: all are unreliable here" in said

    def test_only_a_comparison_is_replaced(self, comparison, tmp_path):
        place, _ = comparison
        shutil.copytree(place / "out", tmp_path / "out")
        shutil.copy(place / "wine.parquet", tmp_path)
        refused(compare(tmp_path), "--out", "is not empty", "--force")
        (tmp_path / "out" / "stale").mkdir()
        found = compare(tmp_path, "--force", "--methods", "map", "--json", "--set", "map.steps=31")
        error = json.loads(found.stdout)["error"]
        assert (found.exit_code, error["argument"], found.stderr) == (2, "--set", "")
        assert "ensemble.steps" in error["message"]
        assert "stale" in names(tmp_path / "out")
        found = call(
            "compare",
            tmp_path / "wine.parquet",
            "--target",
            "kind",
            "--out",
            tmp_path / "out",
            "--methods",
            "map",
            "--hidden",
            "6",
            "--set",
            "map.steps=31",
            "--force",
            "--json",
            "--no-baseline",
        )
        assert found.exit_code == 0, found.output
        plain = json.loads(found.stdout)
        assert list(plain["methods"]) == ["map"]
        assert "boosting" not in plain
        assert names(tmp_path / "out") == ["index.html", "map", "results.json"]
        assert TableRun.load(tmp_path / "out" / "map").config.settings["steps"] == 31
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "map").mkdir()
        found = call(
            "compare",
            tmp_path / "wine.parquet",
            "--target",
            "kind",
            "--out",
            tmp_path / "photos",
            "--force",
            "--methods",
            "map",
        )
        refused(found, "--out", "is not a comparison")
        assert names(tmp_path / "photos") == ["map"]

    @pytest.mark.parametrize(
        "words, said",
        [
            (("--methods", "map,nope"), ("nope",)),
            (("--methods", ""), ()),
            (("--set", "draws=3"), ("--set must be METHOD.NAME=VALUE", "got 'draws=3'")),
            (("--set", "hmc.draws=3"), ("--set", "map, ensemble")),
            (("--set", "map.nothing=3"), ("--set: MAP has no 'nothing'",)),
        ],
    )
    def test_refusals_before_any_work(self, comparison, tmp_path, words, said):
        shutil.copy(comparison[0] / "wine.parquet", tmp_path)
        refused(compare(tmp_path, *words), *said)
        assert names(tmp_path) == ["wine.parquet"]


@NO_DRAWING
def test_paths_with_spaces_and_quotes(tmp_path):
    place = tmp_path / "my own' data"
    place.mkdir()
    table = write(cancer(60), place / "the table.csv")
    found = call("fit", table, "--target", "benign", "--out", place / "a run", *MAP, "--json")
    assert found.exit_code == 0, found.output
    assert call("fit", "--config", place / "a run" / "config.toml", "--out", place / "b", "--quiet").exit_code == 0
    assert Path(json.loads(found.stdout)["run"]) == place / "a run"


class TestUnusualNames:
    """No character in names of columns and classes has a meaning to the terminal, the page or a plot."""

    @pytest.mark.parametrize(
        "task, sign",
        [
            pytest.param("regression", "", marks=pytest.mark.nightly),
            ("classification", ""),
            ("regression", "$"),
        ],
    )
    def test_from_the_table_to_the_page(self, tmp_path, task, sign):
        known = diabetes(60)
        values = np.asarray(known["progress"])
        target = f"price [EUR] [/x] {sign}a_{{{sign} <i>&"
        columns = {f"{sign}x^{sign} [bold]": values + 1, "a,b\n;": np.asarray(known["bp"])}
        columns[target] = values if task == "regression" else np.where(values > 140, "\\frac [/b]", "<low> \u00e9")
        table = write(columns, tmp_path / "t [1].csv")
        brief = ("--set", "steps=10", "--set", "noise_from=training")
        found = call("fit", table, "--target", target, "--out", tmp_path / "run", *ENSEMBLE, *brief)
        assert found.exit_code == 0, (found.output, found.exception)
        assert "[/x]" in found.stdout
        page = (tmp_path / "run" / "report.html").read_text()
        assert "<i>" not in page
        assert "price [EUR]" in page
        found = call("predict", tmp_path / "run", table, "--out", tmp_path / "p.csv")
        assert found.exit_code == 0, (found.output, found.exception)
        if task == "classification":
            assert {"p_\\frac [/b]", "p_<low> \u00e9"} < set(read(tmp_path / "p.csv"))
        assert call("evaluate", tmp_path / "run", table).exit_code == 0
        words = ("--methods", "map", "--set", "map.steps=5", "--out", tmp_path / "c")
        found = call("compare", table, "--target", target, *words)
        assert found.exit_code == 0, (found.output, found.exception)
        assert "[/x]" in found.stdout
        with undrawn():  # as drawn above
            again = call("fit", "--config", tmp_path / "run" / "config.toml", "--out", tmp_path / "b", "--quiet")
        assert again.exit_code == 0, (again.output, again.exception)


def test_a_comparison_leads_to_the_page_of_each_method(comparison):
    place = comparison[0] / "out"
    addresses = re.findall(r'<a href="([^"#]+)"', (place / "index.html").read_text())
    assert addresses
    assert all((place / address).is_file() for address in addresses)
    assert {address.split("/")[0] for address in addresses} == {p.parent.name for p in place.glob("*/report.html")}


def test_numbers_are_not_truncated_on_a_narrow_terminal(comparison, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    place, _ = comparison
    reported = json.loads((place / "out" / "map" / "results.json").read_text())["figures"]
    lines = call("evaluate", place / "out" / "map", place / "out" / "map" / "held_out.parquet").stdout
    for key, value in reported.items():
        (line,) = [line for line in lines.splitlines() if line.startswith(f"{key.replace('_', ' ')} ")]
        assert f" {value:.3f} " in line
