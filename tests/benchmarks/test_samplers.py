"""The benchmark of samplers at sizes too small for meaningful timings, without its peers."""

from __future__ import annotations

import csv
import json
import math
import sys

import numpy as np
import pytest
import torch
from scipy.stats import norm
from uci_files import write_uci

import credibly as cr
from benchmarks.jax_client import JaxSide, PeerError
from benchmarks.samplers import measures, ours, settings
from benchmarks.samplers.__main__ import main
from benchmarks.samplers.compare import comparisons, entries
from benchmarks.samplers.peers import Peers
from benchmarks.samplers.posterior import load, predictions
from benchmarks.samplers.runs import Plan, merge, read, run_all, write


@pytest.fixture
def posterior(tmp_path):
    return load(write_uci(tmp_path), "yacht", 2)


def stored(sampler, ess, *, side="credibly", data="yacht", seed=0, device="cpu", comparable=True, rhat=1.01):
    """Return a finished run as the file has it."""
    about = {"data": data, "sampler": sampler, "side": side, "seed": seed, "device": device, "chains": 4}
    about |= {"budget": 10.0, "init": "fresh", "comparable": comparable, "seconds": 10.0, "warmup_seconds": 2.0}
    found = {"ess_worst": ess, "ess_median": 2 * ess, "ess_worst_per_second": ess / 10, "rhat_worst": rhat}
    found |= {"ess_median_per_second": ess / 5, "ess_worst_per_gradient": ess / 1e6, "rhat_median": 1.0}
    found |= {"compile": 1.0, "gradients": 1e6, "draws": 4, "log_likelihood": -1.0, "trace": [[0.0, 1.0], [1.0, 0.0]]}
    return {**about, **found}


def record_of(*runs):
    return {**read(None), "runs": {f"{r['data']}/{r['sampler']}/{r['seed']}": r for r in runs}}


class TestSettings:
    def test_every_entry_can_be_built(self, posterior):
        for entry in settings.ours(None).values():
            assert ours.method_of(entry, posterior).chains == 2

    def test_every_peer_has_a_library_and_quick_lengths(self):
        assert {settings.library(name) for name in settings.PEERS} == set(settings.LIBRARIES.values())
        assert {entry["kind"] for entry in settings.PEERS.values()} == set(settings.QUICK_PEERS)
        assert set(settings.ON_GPU) | set(settings.NOT_ON_GPU) <= set(settings.PEERS)

    def test_choice_by_name_and_by_device(self):
        assert list(settings.peers(["bde"])) == ["bde"]
        assert "nutpie" not in settings.peers(None, "cuda")
        assert settings.peers(["numpyro-nuts"], "cuda")["numpyro-nuts"]["chunk"] == 5
        with pytest.raises(SystemExit, match="must be among .* got metropolis"):
            settings.ours(["metropolis"])


class TestPosterior:
    def test_the_density_is_the_one_that_the_jax_side_writes_down(self, posterior):
        loc, scale = posterior.prior()
        generator = torch.Generator().manual_seed(1)
        theta = loc + scale * torch.randn(3, len(loc), generator=generator)
        x, y = posterior.problem.x.double(), posterior.problem.y.double().reshape(-1)
        found = []
        for point in theta.double():
            inner = x @ point[:150].reshape(50, 3).T + point[150:200]
            f = (inner * torch.sigmoid(inner)) @ point[200:250] + point[250]
            likelihood = norm.logpdf(y, f, math.exp(point[-1])).sum()
            found.append(likelihood + norm.logpdf(point, loc, scale).sum())
        ours_there = posterior.problem.log_density(theta).double()
        np.testing.assert_allclose(ours_there, found, rtol=1e-5)

    def test_predictions_are_those_of_the_network(self, posterior):
        draws = posterior.start.unsqueeze(1).repeat(1, 3, 1)
        found = predictions(posterior, draws, block=4)
        expected = posterior.problem.forward(posterior.start, posterior.x_test).flatten(1)
        torch.testing.assert_close(found["functions"][:, 2], expected.detach())
        torch.testing.assert_close(found["log_noise"], draws[..., -1])


class TestMeasures:
    def test_log_likelihood_is_that_of_the_mixture(self):
        f, s = (torch.tensor(v, dtype=torch.float64) for v in ([[0.0, 1.0], [2.0, 1.0]], [[0.1], [-0.3]]))
        y = torch.tensor([0.5, 0.2], dtype=torch.float64)
        expected = np.log(np.mean(norm.pdf(y, f, s.exp()), 0))
        np.testing.assert_allclose(measures.log_likelihood(f, s, y), expected, rtol=1e-12)

    def test_independent_draws_count_fully(self):
        values = np.random.default_rng(0).normal(size=(4, 500, 3))
        found = measures.measured(values, np.zeros((4, 500)), torch.zeros(3), 2.0, 10.0, 1e3)
        # The standard deviation of the estimated ESS of 2,000 independent draws is about a tenth of it.
        assert 1400 < found["ess_worst"] <= found["ess_median"] < 2600
        assert found["rhat_worst"] < 1.02
        assert found["ess_worst_per_second"] == found["ess_worst"] / 10
        assert found["ess_worst_per_gradient"] == found["ess_worst"] / 1e3
        # Draws N(0, 1) with noise of 1 are N(0, 2), at the target itself, in units twice as large.
        expected = norm.logpdf(0, 0, math.sqrt(2)) - math.log(2)
        assert found["log_likelihood"] == pytest.approx(expected, abs=4 * 0.2 / math.sqrt(2000))

    def test_chains_that_disagree_are_seen(self):
        values = np.random.default_rng(0).normal(size=(2, 100, 2))
        values[1, :, 1] += 10
        found = measures.measured(values, np.zeros((2, 100)), torch.zeros(2), 1.0, 1.0, 1.0)
        assert found["worst_row"] == 1
        assert found["rhat_worst"] > 1.5
        assert len(found["trace"]) == 2
        assert found["trace"][1][0] == pytest.approx(values[1, 0, 1], abs=1e-4)

    def test_stuck_and_diverged_chains_give_no_number(self):
        constant = np.repeat(np.arange(2.0)[:, None, None], 8, 1)
        assert measures.measured(constant, np.zeros((2, 8)), torch.zeros(1), 1.0, 1.0, 1.0)["rhat_worst"] is None
        diverged = measures.measured(np.full((2, 8, 1), np.nan), np.zeros((2, 8)), torch.zeros(1), 1.0, 1.0, 1.0)
        assert diverged["ess_worst"] is None
        json.dumps(diverged, allow_nan=False)


class TestOurs:
    def test_a_run_that_is_out_of_time_still_has_draws(self, posterior):
        entry = {**settings.QUICK_OURS["hmc"], "method": "hmc", "draws": 7, "max_steps": 3, "compile": False}
        arrays, info = ours.run(entry, posterior, 0, 1e-6)
        assert arrays["functions"].shape == (2, ours.LEAST, 8)
        # The start, the search for a step size and at most three gradients per iteration.
        assert 80 < info["gradients"] / 2 < 3 * 80 + 40
        assert 0 < info["warmup_seconds"] <= info["seconds"]

    def test_draws_are_those_of_fit(self, posterior):
        entry = {"method": "nuts", "warmup": 20, "draws": 20, "max_depth": 2, "compile": False}
        arrays, _ = ours.run(entry, posterior, 3, 1e-6)
        method = cr.NUTS(chains=2, warmup=20, draws=20, max_depth=2, compile=False, init=posterior.start)
        fitted = method.fit(posterior.problem, seed=3, progress=False)
        expected = predictions(posterior, fitted.draws)
        torch.testing.assert_close(arrays["functions"], expected["functions"])


class TestPeers:
    def test_without_an_interpreter_a_peer_is_left_out(self, posterior):
        with pytest.raises(PeerError, match="--bde"):
            Peers("python").run("bde", settings.PEERS["bde"], posterior, 0, 1.0)

    def test_packages_can_come_from_a_folder(self, tmp_path):
        (tmp_path / "jax.py").write_text(
            "import types\n__version__ = '0'\ndevices = lambda: [types.SimpleNamespace(platform='cpu')]\n"
        )
        about = tmp_path / "sklearn_contrib_bde-9.9.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sklearn-contrib-bde\nVersion: 9.9\n")
        side = JaxSide(sys.executable, wheels=tmp_path)
        try:
            assert side.versions["sklearn-contrib-bde"] == "9.9"
            assert not side.has("nutpie")
        finally:
            side.close()


class TestRuns:
    def test_finished_runs_stay_and_failed_ones_are_tried_again(self, tmp_path):
        root, out = write_uci(tmp_path), tmp_path / "results.json"
        entry = {"method": "hmc", "warmup": 20, "draws": 5, "max_steps": 2, "compile": False}
        plan = Plan(root, ("yacht",), {"hmc": entry}, {"bde": settings.PEERS["bde"]}, chains=2, budget=1e-6, repeats=1)
        plan = Plan(**{**plan.__dict__, "out": out})
        record = read(out)
        run_all(plan, record, Peers(None))
        first = read(out)
        done, failed = (first["runs"][plan.key("yacht", name, 0)] for name in ("hmc", "bde"))
        assert done["draws"] == ours.LEAST
        assert "no interpreter" in failed["error"]
        first["runs"][plan.key("yacht", "hmc", 0)]["draws"] = 123
        run_all(plan, first, Peers(None))
        assert read(out)["runs"][plan.key("yacht", "hmc", 0)]["draws"] == 123

    def test_files_are_merged(self, tmp_path):
        a, b = stored("hmc", 100), stored("nuts", 50)
        for name, run in (("a", a), ("b", b)):
            write({**record_of(run), "machine": {name: {}}}, tmp_path / name)
        found = merge([tmp_path / "a", tmp_path / "b"])
        assert {run["sampler"] for run in found["runs"].values()} == {"hmc", "nuts"}
        assert set(found["machine"]) == {"a", "b"}


class TestComparison:
    def test_our_best_exact_sampler_against_the_best_peer(self):
        runs = [
            *(stored("hmc", ess, seed=i) for i, ess in enumerate((300, 100, 200))),
            stored("nuts", 150),
            stored("mclmc", 10_000),
            stored("numpyro-nuts", 10, side="numpyro"),
            stored("blackjax-mclmc", 40, side="blackjax"),
            stored("bde", 9_000, side="sklearn-contrib-bde", comparable=False),
        ]
        worst, median = comparisons(entries(record_of(*runs)))
        assert (worst.ours.sampler, worst.peer.sampler, worst.row) == ("hmc", "blackjax-mclmc", "worst")
        assert worst.ratio == pytest.approx(5.0)
        assert not worst.met
        assert median.ratio == pytest.approx(5.0)

    def test_a_gpu_has_its_own_goal(self):
        runs = [stored("hmc", 60, device="cuda"), stored("numpyro-nuts", 10, side="numpyro", device="cuda")]
        assert all(one.met for one in comparisons(entries(record_of(*runs))))


class TestPage:
    def test_page_table_and_pictures(self, tmp_path, capsys):
        runs = [stored("hmc", 300), stored("numpyro-nuts", 10, side="numpyro", rhat=None)]
        failed = {k: v for k, v in stored("bde", 1, side="x").items() if k in ("data", "sampler", "seed", "device")}
        write(record_of(*runs, {**failed, "error": "not installed"}), tmp_path / "results.json")
        splits = [{"data": "yacht", "split": 0, "method": "hmc", "settings": {}, "budget": 1.0, "error": "too short"}]
        good = {"rhat_worst": 1.2, "rhat_median": 1.0, "ess_worst": 9.0, "log_likelihood": -1.0, "rmse": 1.0}
        good |= {"seconds": 1.0, "gradients": 1.0, "divergences": 0, "chain_log_likelihoods": [-1.0, -2.0]}
        splits.append({**splits[0], "split": 1, **good, "between_worst": 0.5, "between_median": 0.1})
        del splits[1]["error"]
        (tmp_path / "mixing").write_text("\n".join(map(json.dumps, splits)))
        (tmp_path / "study.csv").write_text("data,method,split,rhat\nyacht,hmc,1,2.0\nyacht,sghmc,1,9.0\n")
        folder = tmp_path / "page"
        stored_files = ["--results", str(tmp_path / "results.json"), "--mixing", str(tmp_path / "mixing")]
        main(["--page", str(folder), *stored_files, "--before", str(tmp_path / "study.csv")])
        text = (folder / "README.md").read_text()
        assert "hmc has 30 times the effective samples per second of the best peer, numpyro-nuts (goal 10: met)" in text
        assert {path.name for path in folder.glob("*.svg")} == {"ess.svg", "traces.svg", "rhat.svg"}
        assert "-1.500" in text  # the mean log-likelihood of the chains alone
        rows = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
        assert [row["error"] for row in rows].count("not installed") == 1
        assert "not run: yacht, bde" in capsys.readouterr().out

    def test_bad_input(self, tmp_path, capsys):
        with pytest.raises(SystemExit):
            main(["--budget", "1"])
        assert "--root is required" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["--root", str(tmp_path), "--budget", "0"])
        with pytest.raises(SystemExit, match="finished runs"):
            main(["--page", str(tmp_path / "page")])
