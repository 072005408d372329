"""Fits to tables from Python: the split, the configuration and its file, units, reproducibility, streams of rows."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import credibly as cr
from credibly.errors import InputError, StoreError
from credibly.tables import Config, TableRun, fit_table, model, prepare, recipe, resume_table
from credibly.tables.config import parse_settings, read_config, write_config
from credibly.tables.files.reading import read_table
from credibly.tables.fit_summary import FitSummary
from credibly.tables.missing import training_gaps
from credibly.tables.model import OOD_POINTS, fraction_below, quantile_levels
from credibly.tables.run import config_of
from credibly.tables.splitting import Rows, held_out_split
from credibly.tables.summarise import baseline, summarise
from credibly.tables.threads import SMALL, threads_for
from own_tables import cancer, diabetes, read, wine, write

QUICK = {"tune": "none", "holdout": 0.2}
HMC = {"draws": 12, "warmup": 20, "chains": 2, "thin": 1}


def fitted(place: Path, columns: dict, target: str, **kwargs: object) -> TableRun:
    table = write(columns, place / "table.csv")
    config = Config(str(table), target, **(QUICK | {"hidden": (5,), "method": "hmc", "settings": HMC} | kwargs))
    return fit_table(prepare(config), place / "run")


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("house"), diabetes(), "progress")


def split(rows, fraction, seed, strata=None):
    return held_out_split(Rows(rows, strata), fraction, seed)


class TestSplit:
    @given(rows=st.integers(1, 300), fraction=st.floats(0, 0.9), seed=st.integers(0, 2**40))
    def test_parts_are_all_rows_in_order_and_of_the_right_size(self, rows, fraction, seed):
        train, held = split(rows, fraction, seed)
        assert sorted([*train, *held]) == list(range(rows))
        assert list(train) == sorted(train)
        assert list(held) == sorted(held)
        assert len(held) == min(round(fraction * rows), rows - 1)
        again = split(rows, fraction, seed)
        assert all(np.array_equal(a, b) for a, b in zip((train, held), again))

    @given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=200), fraction=st.floats(0, 0.9))
    def test_the_split_is_stratified_with_a_training_row_per_class(self, labels, fraction):
        y = np.array(labels)
        train, held = split(len(y), fraction, 0, y)
        assert sorted([*train, *held]) == list(range(len(y)))
        for label in set(labels):
            count = int((y == label).sum())
            assert (y[held] == label).sum() == min(round(fraction * count), count - 1)
            assert (y[train] == label).sum() >= 1

    def test_another_seed_is_another_split_and_the_rows_are_mixed(self):
        parts = [split(1000, 0.2, seed)[1] for seed in range(3)]
        assert not np.array_equal(parts[0], parts[1])
        for held in parts:
            assert abs(held.mean() - 499.5) < 5 * 288.7 / math.sqrt(200)
            assert np.corrcoef(held[:-1] % 7, held[1:] % 7)[0, 1] < 0.3

    def test_a_target_in_the_order_of_the_file_has_all_classes_on_both_sides(self, tmp_path):
        table = write(wine(), tmp_path / "wine.csv")
        ready = prepare(Config(str(table), "kind", method="map"), refit=False)
        for part in (ready.train, ready.held_out):
            counts = np.unique(np.array(wine()["kind"])[part], return_counts=True)[1]
            np.testing.assert_allclose(counts / len(part), np.array([48, 59, 71]) / 178, atol=0.03)

    def test_statistics_come_from_the_training_rows(self, tmp_path):
        columns = {"x": np.arange(100.0), "y": np.arange(100.0) ** 2}
        ready = prepare(Config(str(write(columns, tmp_path / "t.csv")), "y", method="map"), refit=False)
        assert ready.preparation.y_mean == pytest.approx((ready.train.astype(float) ** 2).mean(), rel=1e-12)
        assert (len(ready.train), len(ready.held_out)) == (80, 20)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
WORD = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
NUMBER = st.floats(allow_nan=False) | st.integers(-(2**62), 2**62)
VALUE = st.none() | st.booleans() | NUMBER | TEXT.filter(lambda s: s != "none") | st.lists(NUMBER | TEXT, max_size=3)


class TestConfig:
    @settings(deadline=None)
    @given(
        table=TEXT,
        target=TEXT,
        drop=st.lists(TEXT, max_size=3),
        holdout=st.floats(0, 0.9),
        seed=st.integers(0, 2**62),
        method=st.sampled_from(["auto", "map", "hmc"]),
        hidden=st.lists(st.integers(1, 10**6), max_size=3),
        prior_scale=st.floats(1e-300, 1e300),
        noise=st.sampled_from(["learned", "student"]) | st.floats(1e-300, 1e300),
        device=st.none() | TEXT,
        digest=st.none() | TEXT,
        given=st.dictionaries(WORD | TEXT, VALUE, max_size=4),
        remark=TEXT,
    )
    def test_any_settings_survive_the_file(
        self,
        tmp_path_factory,
        table,
        target,
        drop,
        holdout,
        seed,
        method,
        hidden,
        prior_scale,
        noise,
        device,
        digest,
        given,
        remark,
    ):
        config = Config(
            "/" + table.replace("\0", ""),
            target,
            "auto",
            tuple(drop),
            holdout,
            seed,
            method,
            tuple(hidden),
            "silu",
            prior_scale,
            noise,
            device,
            digest,
            given,
        )
        plain = "".join(c for c in remark if c.isprintable())
        path = tmp_path_factory.mktemp("c") / "c.toml"
        path.write_text(write_config(config, {"method": plain}), encoding="utf-8")
        assert Config(**read_config(path)) == config

    def test_the_text_is_readable_toml_with_remarks(self):
        text = write_config(Config("a.csv", "y", settings={"draws": 3, "thin": None}), {"method": "because"})
        assert "# method: because" in text.splitlines()
        assert 'method = "auto"' in text.splitlines()
        assert "draws = 3" in text
        assert tomllib.loads(text)["settings"] == {"draws": 3, "thin": "none"}

    def test_a_file_of_an_earlier_version_still_loads(self, tmp_path):
        """Before tomli-w, lists were on one line and remarks followed their settings."""
        (tmp_path / "c.toml").write_text(
            "# The settings of this run: `credibly fit --config THIS_FILE --out NEW_FOLDER` makes it again.\n"
            'table = "/a.csv"\ntarget = "say \\"y\\"\\u0001"\ntask = "auto"\ndrop = ["a", "b"]\n'
            "holdout = 0.2\nseed = 0\n"
            'method = "auto"  # because\nhidden = [50]\nactivation = "silu"\nnoise = 1e-300\n\n'
            '[settings]\ndraws = 3\nthin = "none"\n"odd key" = [1, 2.5, "x"]\nflag = true\n'
        )
        chosen = {"draws": 3, "thin": None, "odd key": [1, 2.5, "x"], "flag": True}
        expected = Config(
            "/a.csv", 'say "y"\x01', drop=("a", "b"), holdout=0.2, hidden=(50,), noise=1e-300, settings=chosen
        )
        assert Config(**read_config(tmp_path / "c.toml")) == expected

    def test_the_table_is_looked_for_beside_the_file(self, tmp_path):
        (tmp_path / "c.toml").write_text('table = "sub/house.csv"\ntarget = "y"\nhidden = 7\n')
        found = read_config(tmp_path / "c.toml")
        assert found == {"table": str(tmp_path / "sub" / "house.csv"), "target": "y", "hidden": (7,)}
        (tmp_path / "c.toml").write_text('table = "/data/house.csv"')
        assert read_config(tmp_path / "c.toml") == {"table": "/data/house.csv"}

    def test_settings_that_are_none_give_the_same_run_again(self, tmp_path):
        """A setting that is None in the run but not by default is in the file."""
        run = fitted(tmp_path, cancer(60), "benign", settings=HMC | {"jitter": None})
        assert run.config.settings["jitter"] is None
        assert "step_size" not in run.config.settings
        again = fit_table(prepare(Config(**read_config(tmp_path / "run" / "config.toml"))), tmp_path / "again")
        assert torch.equal(again.model.posterior.draws, run.model.posterior.draws)
        assert again.config == run.config

    def test_a_name_that_cannot_be_encoded_is_refused(self):
        with pytest.raises(InputError, match="table must be text that UTF-8 can encode, got"):
            Config(os.fsdecode(b"caf\xe9.csv"), "y")

    def test_an_invalid_stored_configuration(self, house):
        with pytest.raises(StoreError, match="configuration"):
            config_of(house.facts | {"config": house.facts["config"] | {"sed": 1}})
        with pytest.raises(StoreError, match="configuration"):
            config_of({})


class TestParseSettings:
    @pytest.mark.parametrize(
        "pair, value",
        [
            ("a=3", 3),
            ("a=3.5", 3.5),
            ("a=1e-3", 1e-3),
            ("a=true", True),
            ("a=False", "False"),
            ("a=none", None),
            ("a = None", None),
            ("a=prior", "prior"),
            ('a="3"', "3"),
            ("a=[1, 2]", [1, 2]),
            ("a=x=y", "x=y"),
            ("a=1_000", 1000),
        ],
    )
    def test_values(self, pair, value):
        found = parse_settings([pair])
        assert found == {"a": value}
        assert type(found["a"]) is type(value)

    def test_the_last_one_counts(self):
        assert parse_settings(["a=1", "b=2", "a=3"]) == {"a": 3, "b": 2}

    @pytest.mark.parametrize("pair", ["a", "=1", "a=", "1a=2", "a b=2", ""])
    def test_refused(self, pair):
        with pytest.raises(InputError, match=f"--set must be NAME=VALUE, such as draws=500, got {pair!r}"):
            parse_settings([pair])

    @given(text=st.text(max_size=20))
    def test_any_text_is_read_or_refused(self, text):
        try:
            found = parse_settings([text])
        except InputError:
            return
        assert len(found) == 1


class TestFractionBelow:
    VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60).filter(lambda v: max(v) > 0)

    @given(values=VALUES, asked=st.lists(st.floats(0, 2e6), min_size=1, max_size=30))
    @example(values=[0.0, 2.225073858507e-311], asked=[5e-324])
    @example(values=[3.0], asked=[2.0, 3.0, 4.0])
    def test_is_a_fraction_and_monotone(self, values, asked):
        levels = quantile_levels(np.array(values))
        assert len(levels) == OOD_POINTS
        fractions = fraction_below(np.sort(np.array(asked)), levels)
        assert ((fractions >= 0) & (fractions <= 1)).all()
        assert (np.diff(fractions) >= 0).all()
        assert fraction_below(np.array([max(values) * 2]), levels) == 1

    def test_of_the_reference_itself(self):
        values = np.random.default_rng(0).exponential(size=5000)
        fractions = fraction_below(values, quantile_levels(values))
        exact = values.argsort().argsort() / 4999
        assert np.abs(fractions - exact).max() < 0.005

    def test_ties(self):
        levels = quantile_levels(np.array([1.0] * 50 + [2.0] * 50))
        below, at, between, top = fraction_below(np.array([0.5, 1.0, 1.5, 2.0]), levels)
        assert below == 0
        assert at == pytest.approx(0.5, abs=0.02)  # one of the kept quantiles on either side
        assert at <= between <= top == 1

    def test_without_epistemic_uncertainty_there_is_no_score(self):
        assert quantile_levels(np.zeros(30)) is None
        assert quantile_levels(np.array([0.1, np.nan])) is None


class TestUnits:
    @pytest.mark.parametrize(
        "noise", ["learned", pytest.param("student", marks=pytest.mark.nightly), "heteroscedastic"]
    )
    def test_another_unit_of_the_target_changes_nothing_else(self, tmp_path, noise, monkeypatch):
        # Student noise has no compiled sampler; an ensemble completes its gaps, here a small one.
        monkeypatch.setattr(training_gaps, "ENSEMBLE_PILOT", {"members": 2, "steps": 60})
        for name, scale, shift in (("a", 1.0, 0.0), ("b", 1000.0, 5.0)):
            (tmp_path / name).mkdir()
            fitted(tmp_path / name, diabetes(100, scale, shift), "progress", noise=noise)
        one, two = (TableRun.load(tmp_path / name / "run") for name in "ab")
        rows = read_table(tmp_path / "a" / "table.csv")
        p, q = (run.model.predict_table(rows) for run in (one, two))
        close = {"rtol": 2e-3, "atol": 2e-3}  # chains of float32 numbers that differ in their last bits
        scale = float(p.std.mean())
        torch.testing.assert_close((q.mean - 5) / 1000 / scale, p.mean / scale, **close)
        torch.testing.assert_close(q.std / 1000 / scale, p.std / scale, **close)
        for a, b in zip(p.interval(0.9), q.interval(0.9)):
            torch.testing.assert_close((b - 5) / 1000 / scale, a / scale, **close)
        assert one.figures["log_density"] - two.figures["log_density"] == pytest.approx(math.log(1000), abs=2e-3)
        assert two.figures["rmse"] == pytest.approx(1000 * one.figures["rmse"], rel=2e-3)
        assert two.figures["coverage"] == one.figures["coverage"]
        np.testing.assert_allclose(one.model.ood(p), two.model.ood(q), atol=0.02)

    def test_the_baseline_is_in_the_units_of_the_target(self, house):
        y = house.model.preparation.target_values(house.rows()[0])
        plain = baseline(house.model, y, house.sample())
        mean, std = house.model.preparation.y_mean, house.model.preparation.y_std
        normal = torch.distributions.Normal(*torch.tensor([mean, std], dtype=torch.float64))
        assert plain["log_density"] == pytest.approx(float(normal.log_prob(torch.tensor(y)).mean()), rel=1e-9)
        assert plain["rmse"] == pytest.approx(float(np.sqrt(((y - mean) ** 2).mean())), rel=1e-12)


class TestRuns:
    def test_the_same_settings_give_bit_for_bit_identical_runs(self, house, tmp_path):
        again = fit_table(prepare(Config(**read_config(house.path / "config.toml"))), tmp_path / "again")
        assert torch.equal(again.model.posterior.draws, house.model.posterior.draws)
        assert again.figures == house.figures
        other = dataclasses.replace(house.config, seed=1)
        assert fit_table(prepare(other), tmp_path / "other").figures != house.figures

    def test_a_loaded_run_predicts_like_the_fitted_one(self, house):
        opened = TableRun.load(house.path)
        rows = house.rows()[0]
        assert torch.equal(opened.model.predict_table(rows).mean, house.model.predict_table(rows).mean)
        assert opened.config == house.config
        np.testing.assert_array_equal(opened.model.ood_levels, house.model.ood_levels)
        assert torch.equal(cr.load(house.path).draws, house.model.posterior.draws)

    def test_no_rows_held_out(self, tmp_path):
        run = fitted(tmp_path, cancer(60), "benign", holdout=0, method="map", settings={"steps": 20})
        assert (run.facts["rows"], run.facts["held_out"], run.facts["on"]) == (60, 0, "training")
        facts = summarise(TableRun.load(run.path))
        assert isinstance(facts, FitSummary)
        assert (facts.on, len(facts.y), facts.ood) == ("training", 60, None)

    def test_the_summary_matches_the_stored_run(self, house):
        facts = summarise(house)
        assert facts.figures == house.figures
        assert facts.table == "table.csv"
        assert (facts.rows, facts.held_out, len(facts.y)) == (160, 32, 32)
        assert facts.parameters == house.model.posterior.draws.shape[-1]
        assert facts.ood.shape == facts.ood_far.shape == (32,)
        assert facts.diagnostics is not None
        assert facts.view is None

    def test_a_table_of_one_column_has_a_view(self, tmp_path):
        x = np.linspace(0, 9, 60)
        run = fitted(tmp_path, {"x": x, "y": np.sin(x)}, "y", method="ensemble", settings={"members": 3, "steps": 30})
        view = summarise(run).view
        assert view.names == ("x",)
        assert view.predict(np.array([[0.0], [100.0]])).mean.shape == (2,)

    def test_a_run_that_never_started(self, house, tmp_path):
        import shutil

        from credibly.storage.sealed import read_facts, write_facts

        shutil.copytree(house.path, tmp_path / "run")
        write_facts(tmp_path / "run", read_facts(tmp_path / "run") | {"status": "fitting"})
        with pytest.raises(StoreError, match="is not finished. Resume it with `credibly resume"):
            TableRun.load(tmp_path / "run")
        done = resume_table(tmp_path / "run")  # all draws were there
        assert done.figures == house.figures
        facts = read_facts(tmp_path / "run")
        files = {name: digest for name, digest in facts["files"].items() if "manifest" not in name}
        write_facts(tmp_path / "run", facts | {"status": "fitting", "files": files})
        shutil.rmtree(tmp_path / "run" / "posterior")
        with pytest.raises(StoreError, match="is not finished. Resume it with `credibly resume"):
            TableRun.load(tmp_path / "run")
        assert resume_table(tmp_path / "run").figures == house.figures
        # Killed before the files of the folder were complete.
        write_facts(tmp_path / "run", read_facts(tmp_path / "run") | {"status": "fitting", "files": {}})
        shutil.rmtree(tmp_path / "run" / "posterior")
        with pytest.raises(StoreError, match="Start again with `credibly fit --config"):
            resume_table(tmp_path / "run")

    @pytest.mark.parametrize("rows, chains, alone", [(100, 4, True), (100_000, 8, False)])
    def test_more_threads_only_where_they_pay(self, rows, chains, alone):
        layers = [types.SimpleNamespace(shape=(50, 8)), types.SimpleNamespace(shape=(50,))]
        problem = types.SimpleNamespace(n=rows, layout=types.SimpleNamespace(entries=layers))
        found = threads_for(problem, cr.HMC(chains=chains))
        assert found == (1 if alone else torch.get_num_threads())
        assert (chains * rows * 50 <= SMALL) is alone
        assert threads_for(problem, cr.MAP()) == 1  # a batch at a time


class TestStreams:
    def test_predictions_do_not_depend_on_the_block_size(self, house, tmp_path, monkeypatch):
        table = house.path.parent / "table.csv"
        whole = house.model.predict_file(table, tmp_path / "whole.parquet")
        assert whole.rows == 160
        monkeypatch.setattr(model, "CACHE_VALUES", 1)  # blocks of 256 rows
        big = {k: list(v) * 4 for k, v in diabetes().items()}
        write(big, tmp_path / "big.csv")
        house.model.predict_file(tmp_path / "big.csv", tmp_path / "big.parquet")
        one, four = read(tmp_path / "whole.parquet"), read(tmp_path / "big.parquet")
        for name, values in one.items():
            if name == "notes":
                assert four[name] == values * 4
            else:
                np.testing.assert_allclose(four[name], np.tile(values, 4), rtol=1e-5, err_msg=name)

    def test_some_of_the_draws(self, house, tmp_path):
        table = house.path.parent / "table.csv"
        house.model.predict_file(table, tmp_path / "a.parquet", draws=4)
        house.model.predict_file(table, tmp_path / "b.parquet")
        a, b = read(tmp_path / "a.parquet"), read(tmp_path / "b.parquet")
        assert not np.array_equal(a["mean"], b["mean"])
        assert np.corrcoef(a["mean"], b["mean"])[0, 1] > 0.8

    @pytest.mark.nightly
    def test_memory_does_not_grow_with_the_file(self, house, tmp_path):
        """Compares the peak memory of processes that predict many and few rows."""
        block = pa.table(diabetes())
        peaks = {}
        for rows in (100_000, 400_000):
            table = pa.concat_tables([block] * (rows // len(block) + 1)).slice(0, rows)
            pa.csv.write_csv(table, tmp_path / f"{rows}.csv")
            code = (
                "import resource, sys; from credibly.tables import TableRun\n"
                "done = TableRun.load(sys.argv[1]).model.predict_file(sys.argv[2], sys.argv[3], draws=4)\n"
                "print(done.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
            )
            words = [sys.executable, "-c", code, house.path, tmp_path / f"{rows}.csv", tmp_path / f"{rows}.parquet"]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            out = subprocess.run(
                [str(w) for w in words], capture_output=True, text=True, check=True, env=env
            ).stdout.split()
            assert int(out[0]) == rows
            peaks[rows] = int(out[1]) / 1024
        # The first shows what a full block takes; beyond that four times the rows take no more.
        assert peaks[400_000] - peaks[100_000] < 60, peaks


def test_recipe_defaults_are_those_of_a_config():
    """Defaults are the same from Python and from a table."""
    assert Config("t.csv", "y").recipe("regression") == recipe.Recipe()
