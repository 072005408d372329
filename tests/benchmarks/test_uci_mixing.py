"""The benchmark of mixing on UCI splits: its file, its analysis of modes, and one small run."""

from __future__ import annotations

import json
import math

import pytest
import torch
from scipy.stats import norm
from uci_files import write_uci

import credibly as cr
from benchmarks import uci_mixing
from credibly.inference.sampling import until
from credibly.posterior.model import Model
from credibly.storage.record import Record

SETTINGS = {"chains": 2, "warmup": 20, "draws": 8, "max_steps": 2, "init": "fresh", "compile": False}


def bias_only(values):
    """Return a posterior whose draws (chain, draw) are constant functions, with noise of 1, and its model."""
    net = torch.nn.Linear(1, 1)
    problem = cr.Problem(net, (torch.zeros(4, 1), torch.zeros(4)), cr.likelihoods.Gaussian(1.0), cr.priors.Normal(1.0))
    draws = torch.stack([torch.zeros_like(values), values], -1)
    return cr.DrawsPosterior(Model.of(problem), draws, Record(method="made")), Model.of(problem)


class TestModes:
    def test_chains_at_two_constants(self):
        jitter = 1e-3 * torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
        posterior, model = bias_only(torch.tensor([[-1.0], [3.0]]) + jitter)
        y = torch.full((4,), 10.0, dtype=torch.float64)
        found = uci_mixing.measured(posterior, model, torch.zeros(4, 1), y, 10.0, 2.0)
        # In units of the target the chains predict 10 - 2 and 10 + 6, with noise of 2.
        alone = [norm.logpdf(10, 8, 2), norm.logpdf(10, 16, 2)]
        assert found["chain_log_likelihoods"] == pytest.approx(alone, abs=5e-3)
        together = math.log(sum(math.exp(value) for value in alone) / 2)
        assert found["log_likelihood"] == pytest.approx(together, abs=5e-3)
        # The means 8 and 16 have a standard deviation of sqrt(32); the variance of the predictive is 2^2 + 4^2.
        assert found["between_worst"] == pytest.approx(math.sqrt(32 / 20), rel=1e-2)
        assert found["rmse"] == pytest.approx(2.0, rel=1e-2)
        assert found["rhat_worst"] > 1.5

    def test_equal_chains_are_mixed(self):
        posterior, model = bias_only(torch.randn(4, 400, generator=torch.Generator().manual_seed(0)))
        y = torch.zeros(4, dtype=torch.float64)
        found = uci_mixing.measured(posterior, model, torch.zeros(4, 1), y, 0.0, 1.0)
        assert found["rhat_worst"] < uci_mixing.RHAT
        # The mean of 400 draws of variance 1 over a predictive standard deviation of sqrt(2); four standard errors of
        # a standard deviation from four values.
        assert found["between_worst"] < (1 + 4 / math.sqrt(6)) * 0.05 / math.sqrt(2)


class TestFile:
    def test_a_stopped_write_loses_nothing_else(self, tmp_path):
        path = tmp_path / "splits.jsonl"
        uci_mixing.append(path, {"data": "a", "split": 0})
        with path.open("a") as file:
            file.write('{"data": "a", "spl')
        uci_mixing.append(path, {"data": "a", "split": 1})
        assert [one["split"] for one in uci_mixing.read(path)] == [0, 1]
        assert [p.name for p in tmp_path.iterdir()] == ["splits.jsonl"]

    def test_ranges(self):
        assert uci_mixing.splits_in("0-3,7") == [0, 1, 2, 3, 7]

    def test_choices_of_the_study(self):
        found = uci_mixing.chosen(uci_mixing.CHOICES)
        assert {name for name, _ in found} >= {"yacht", "energy", "boston", "concrete", "wine"}
        assert all(scale > 0 and noise in ("learned", "heteroscedastic", "student") for scale, noise in found.values())
        assert min(uci_mixing.earlier().values()) >= 1


class TestCommand:
    def test_runs_once_and_prints_the_modes(self, tmp_path, capsys, monkeypatch):
        # The first round meets the goal, so the time does not decide how many draws there are.
        monkeypatch.setattr(until, "RHAT", math.inf)
        monkeypatch.setattr(until, "ESS", 0.0)
        root, out = write_uci(tmp_path), tmp_path / "splits.jsonl"
        arguments = ["--root", str(root), "--sets", "yacht", "--splits", "0-19", "--budget", "1h", "--threads", "1"]
        arguments += ["--settings", json.dumps(SETTINGS), "--out", str(out)]
        uci_mixing.main(arguments)
        splits = uci_mixing.read(out)
        assert [one["split"] for one in splits] == [0, 1]
        assert all(one["draws"] == 8 and one["gradients"] > 0 and one["met"] for one in splits)
        printed = capsys.readouterr().out
        assert "0 of 2" in printed
        assert "yacht 1" in printed.split("Splits above")[1]
        before = out.read_text()
        uci_mixing.main(arguments)
        assert out.read_text() == before

    def test_bad_input(self, tmp_path, capsys):
        write_uci(tmp_path)
        with pytest.raises(SystemExit):
            uci_mixing.main(["--root", str(tmp_path), "--sets", "yacht", "--budget", "soon", "--out", "x"])
        assert "--budget must be a positive duration, got 'soon'" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            uci_mixing.main(["--out", "x"])
        assert "--root is required" in capsys.readouterr().err
