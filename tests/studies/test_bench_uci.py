"""The UCI benchmark: the protocol uses the training part alone, cells resume, metrics are aggregated correctly."""

import csv
import io
import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from credibly.cli import app
from credibly.errors import InputError, TrainingError
from credibly.methods import MCDropout
from studies import uci_bench, uci_cell
from studies.published import PUBLISHED
from uci_sets import make


def plan(tmp_path, **kwargs):
    known = {"names": ("mine",), "methods": ("map", "ensemble"), "splits": 2, "quick": True, "jobs": 1}
    return uci_bench.Plan(tmp_path / "data", tmp_path / "out", **known | kwargs)


@pytest.fixture
def root(tmp_path):
    return make(tmp_path / "data", "mine")


def check(cell, method):
    """Assert what holds for a cell of every method."""
    assert cell["method"] == method
    assert math.isfinite(cell["log_likelihood"])
    assert 0 < cell["rmse"] < 100
    assert ("rhat" in cell) == (method in ("sghmc", "hmc"))


# Dropout is checked by the test of its rates.
@pytest.mark.parametrize("method", [method for method in uci_cell.METHODS if method != "dropout"])
def test_every_method_runs_by_the_protocol(root, method):
    chosen = uci_cell.choose(root, "mine", 0, quick=True)
    check(uci_cell.run_cell(root, "mine", 0, method, chosen, quick=True), method)


@pytest.mark.parametrize("method", ["map", "dropout"])
@pytest.mark.nightly
def test_the_test_part_changes_no_prediction_and_no_choice(tmp_path, monkeypatch, method):
    """Other test rows give another RMSE with the same fit: fitting and tuning do not depend on them."""
    seen = []
    real = uci_cell.tune

    def watched(recipe, x, y, **kwargs):
        seen.append((x.copy(), y.copy()))
        return recipe, ()

    monkeypatch.setattr(uci_cell, "tune", watched)
    assert real is not watched
    fits = []
    problem = uci_cell.Recipe.problem

    def fitted(self, x, y, **kwargs):
        fits.append((x.copy(), y.copy()))
        return problem(self, x, y, **kwargs)

    monkeypatch.setattr(uci_cell.Recipe, "problem", fitted)

    def change(x, y, test):
        x[test[0]] *= 5
        y[test[0]] += 1000

    found = []
    for place, how in (("a", None), ("b", change)):
        folder = make(tmp_path / place, "mine", splits=1, change=how)
        chosen = uci_cell.choose(folder, "mine", 0)
        found.append(uci_cell.run_cell(folder, "mine", 0, method, chosen, quick=True))
    for (x, y), (x2, y2) in (seen, fits):
        assert np.array_equal(x, x2)
        assert np.array_equal(y, y2)
    assert found[1]["rmse"] > found[0]["rmse"] + 100


def test_the_best_held_out_rates_get_full_fits(root, monkeypatch):
    """All pairs are tried with short fits on small batches, then only the best of them with full fits."""
    fits = []
    real = MCDropout.fit

    def watched(self, problem, **kwargs):
        posterior = real(self, problem, **kwargs)
        fits.append((self, posterior))
        return posterior

    monkeypatch.setattr(MCDropout, "fit", watched)
    check(
        uci_cell.run_cell(root, "mine", 0, "dropout", uci_cell.choose(root, "mine", 0, quick=True), quick=True),
        "dropout",
    )
    (short, first), (whole, _) = fits
    scores = {str(trial["rate"]): trial["held_out_log_density"] for trial in first.record.history["grid"]}
    assert len(short.rate) == len(scores) == 5
    assert short.steps == whole.steps // 2
    worst_taken = min(scores[str(rate)] for rate in whole.rate)
    others = [score for rate, score in scores.items() if rate not in {str(taken) for taken in whole.rate}]
    assert len(whole.rate) == uci_cell.FINALISTS
    assert len(others) == 2
    assert max(others) <= worst_taken


def test_dropout_batches_have_at_most_half_the_rows():
    assert uci_cell.settings_of("dropout", 277)["batch_size"] == 138
    settings = uci_cell.settings_of("dropout", 41_157)
    assert settings["batch_size"] == 512
    assert uci_cell.short(settings)["batch_size"] == 128
    assert {"0": 0.0, "*": 0.005} in settings["rate"]
    assert {"0": 0.1, "*": 0.05} in settings["rate"]


def test_a_stopped_run_resumes_with_the_cells_on_disk(root, tmp_path, monkeypatch):
    first = plan(tmp_path)
    whole = uci_bench.run(first)
    kept = {p.name: p.read_bytes() for p in (first.out / "cells").iterdir()}
    (first.out / "cells" / "mine-01-map.json").unlink()
    calls = []
    real = uci_bench.run_cell

    def counted(*args, **kwargs):
        calls.append(args[1:4])
        return real(*args, **kwargs)

    monkeypatch.setattr(uci_bench, "run_cell", counted)
    again = uci_bench.run(first)
    assert calls == [("mine", 1, "map")]
    metrics = {
        key: [{k: v for k, v in cell.items() if k != "seconds"} for cell in cells] for key, cells in again.items()
    }
    assert metrics == {
        key: [{k: v for k, v in cell.items() if k != "seconds"} for cell in cells] for key, cells in whole.items()
    }
    assert set(kept) == {p.name for p in (first.out / "cells").iterdir()}
    with pytest.raises(InputError, match="cells of other settings"):
        uci_bench.run(plan(tmp_path, seed=1))


@pytest.mark.nightly
def test_two_processes_give_the_cells_of_one(root, tmp_path):
    def metrics(cells):
        return {key: [(c["rmse"], c["log_likelihood"]) for c in found] for key, found in cells.items()}

    one = uci_bench.run(plan(tmp_path))
    two = uci_bench.run(uci_bench.Plan(root, tmp_path / "two", ("mine",), ("map", "ensemble"), 2, quick=True, jobs=2))
    assert metrics(one) == metrics(two)


def cells(values, method="hmc", name="concrete"):
    return {
        (name, method): [{"split": i, "log_likelihood": v, "rmse": -v, "method": method} for i, v in enumerate(values)]
    }


def test_tables_contain_means_standard_errors_and_published_results():
    table = uci_bench.table_of(cells([-3.0, -2.0, -1.0]), "log_likelihood", 3)
    row = dict(zip([c.title for c in table.columns], table.rows[0]))
    assert row["hmc"] == f"-2.000 ± {1 / math.sqrt(3):.3f}"
    assert row["Splits"] == 3
    assert row["MC-Dropout, grid (2018)"] == "-2.937 ± 0.025"
    assert PUBLISHED["ensemble"]["yacht"] == ((1.58, 0.48), (-1.18, 0.21))


@pytest.mark.parametrize("shift, word", [(0.5, "ahead of"), (-0.5, "behind"), (0.0, "tied with")])
def test_findings_follow_from_paired_differences(shift, word):
    noise = [0.02, -0.01, 0.015, -0.02, 0.01]
    base = [-3.0, -2.0, -4.0, -1.0, -2.5]
    found = cells([b + shift + n for b, n in zip(base, noise)]) | cells(base, "map")
    assert any(
        f"HMC is {word} the best other method, map (difference {shift + 0.003:+.3f} ±" in line
        for line in uci_bench.findings(found)
    )


def test_findings_on_published_columns():
    ahead = cells([-2.0, -2.1], "dropout")
    behind = cells([-3.5, -3.6], "dropout")
    assert "on 1 of 1." in uci_bench.findings(ahead)[0]
    assert "behind on concrete" in uci_bench.findings(behind)[0]


def test_the_command_writes_its_tables(root, tmp_path):
    out = tmp_path / "bench"
    words = ["bench", "uci", "--root", str(root), "--splits", "2", "--methods", "map,hmc", "--quick", "--jobs", "1"]
    done = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert {"README.md", "results.csv", "uci.svg", "index.html"} <= {p.name for p in out.iterdir()}
    rows = list(csv.DictReader(io.StringIO((out / "results.csv").read_text())))
    assert {(r["data"], r["method"], r["split"]) for r in rows} == {
        ("mine", m, s) for m in ("map", "hmc") for s in "01"
    }
    stored = json.loads((out / "cells" / "mine-00-map.json").read_text())
    assert float(next(r for r in rows if r["method"] == "map" and r["split"] == "0")["rmse"]) == stored["rmse"]
    assert "| mine | 2 |" in (out / "README.md").read_text()


@pytest.mark.parametrize("every", [False, True])
def test_a_failed_fit_is_reported_and_the_run_continues(root, tmp_path, monkeypatch, every):
    real = uci_cell.run_cell

    def failing(folder, name, split, method, chosen, **options):
        if every or (method, split) == ("map", 1):
            raise TrainingError("MAP: the loss was not finite", step=3, member=0)
        return real(folder, name, split, method, chosen, **options)

    monkeypatch.setattr(uci_bench, "run_cell", failing)
    mine = plan(tmp_path, methods=("map", "ensemble"))
    found = uci_bench.run(mine)
    uci_bench.write_all(found, mine, "the command")
    text = (mine.out / "README.md").read_text()
    assert f"mine: map failed on {2 if every else 1} of 2 splits. MAP: the loss was not finite" in text
    assert ("| mine | 2 |" in text) == (not every)
    rows = list(csv.DictReader(io.StringIO((mine.out / "results.csv").read_text())))
    assert sum(bool(r["error"]) for r in rows) == (4 if every else 1)


def test_the_picture_of_differences_leaves_out_sets_without_the_last_method():
    drawn = uci_bench._picture(cells([-3.0, -2.0]) | cells([-3.1, -2.2], "map") | cells([5.0, 6.0], "map", "naval"))
    assert drawn.alt == "Log-likelihood of map, hmc on concrete, as differences from hmc."


@pytest.mark.parametrize(
    "words, message",
    [
        (["--data", "other"], "--data must be 'mine', got 'other'"),
        (["--methods", "magic"], "--methods must be one of 'map', 'dropout'"),
        (["--methods", "magic"], "got 'magic'"),
        (["--splits", "0"], "--splits must be a positive integer, got 0"),
    ],
)
def test_bad_input_is_refused(root, tmp_path, words, message):
    done = CliRunner().invoke(app, ["bench", "uci", "--root", str(root), "--out", str(tmp_path / "o"), *words])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "o").exists()


def test_a_root_without_data_and_a_malformed_split_are_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = CliRunner().invoke(app, ["bench", "uci", "--root", str(empty), "--out", str(tmp_path / "o")])
    assert done.exit_code == 2
    assert "train_idx" in done.stderr

    def overlap(x, y, test):
        test[1, 0] = 10_000

    folder = make(tmp_path / "bad", "mine", change=overlap)
    done = CliRunner().invoke(app, ["bench", "uci", "--root", str(folder), "--out", str(tmp_path / "o"), "--quick"])
    assert done.exit_code == 2
    assert "test_idx[1]" in done.stderr
