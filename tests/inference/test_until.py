"""Runs that continue until their chains agree, or until their budget is spent."""

import math

import pytest
import torch
from stopped_runs import Crash, StoppedRuns, begin, density, hmc, make, same, sg

import credibly as cr
from credibly.core.durations import to_seconds, to_text
from credibly.diagnostics.convergence import ess, rhat
from credibly.inference.sampling import until
from credibly.inference.sampling.budget import Budget

SCALES = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


def gaussian():
    return cr.Density(lambda w: -0.5 * (w / SCALES).square().sum(-1), 3, batched=True, dtype=torch.float64)


def two_modes(distance=30.0):
    """So far apart that no chain crosses."""
    return cr.Density(
        lambda w: torch.logaddexp(-0.5 * (w - distance).square().sum(-1), -0.5 * (w + distance).square().sum(-1)),
        2,
        batched=True,
        dtype=torch.float64,
    )


START = torch.tensor([[30.0, 30.0], [-30.0, -30.0]], dtype=torch.float64)


def test_it_goes_on_until_the_goal_is_met():
    method = cr.HMC(chains=4, draws=30, warmup=60, until="mixed", compile=False)
    posterior = method.fit(gaussian(), seed=0)
    found = posterior.record.history["until"]
    assert found["met"]
    assert len(found["rounds"]) > 1
    assert found["rounds"][-1]["draws"] == posterior.draws.shape[1] > 30
    assert float(rhat(posterior.draws).max()) == pytest.approx(found["rounds"][-1]["rhat"])
    least = min(float(ess(posterior.draws, kind).min()) for kind in ("bulk", "tail"))
    assert least == pytest.approx(found["rounds"][-1]["ess"])
    assert float(rhat(posterior.draws).max()) <= until.RHAT
    assert least >= until.ESS
    # Four standard errors of a standard deviation at this effective sample size.
    tolerance = 4 / math.sqrt(2 * until.ESS)
    torch.testing.assert_close(posterior.draws.flatten(0, 1).std(0), SCALES, rtol=tolerance, atol=0)


def test_chains_that_never_meet_end_with_a_verdict(monkeypatch, caplog):
    """Every round but the last counts as warm-up, and takes twice the iterations per draw."""
    monkeypatch.setattr(until, "ROUNDS", 4)
    method = cr.HMC(chains=2, draws=10, warmup=20, init=START, until="mixed", compile=False)
    posterior = method.fit(two_modes(), seed=0)
    found = posterior.record.history["until"]
    assert not found["met"]
    assert [r["discarded"] for r in found["rounds"]] == [True, True, True, False]
    assert posterior.draws.shape[1] == 10
    assert posterior.record.history["phases"][-1]["end"] == 20 + 10 * (1 + 2 + 4 + 8)
    assert "not mixed after" in caplog.text
    assert "Not mixed" in posterior.diagnostics().verdict


def test_trajectories_that_were_cut_become_longer(monkeypatch):
    monkeypatch.setattr(until, "ROUNDS", 3)
    method = cr.HMC(
        chains=2, draws=10, warmup=20, init=START, until="mixed", trajectory_length=50.0, max_steps=4, compile=False
    )
    history = method.fit(two_modes(), seed=0).record.history
    assert history["steps"] == 16
    assert history["trajectory_shortened"]


def test_draws_are_added_up_to_a_limit_and_then_taken_further_apart(monkeypatch):
    """A goal out of reach."""
    monkeypatch.setattr(until, "ESS", 1e9)
    monkeypatch.setattr(until, "ROUNDS", 4)
    method = cr.HMC(chains=4, draws=100, warmup=100, until="mixed", compile=False)
    posterior = method.fit(gaussian(), seed=0)
    rounds = posterior.record.history["until"]["rounds"]
    assert [r["draws"] for r in rounds] == [100, 200, 400, 100]
    assert [r["discarded"] for r in rounds] == [False, False, True, False]


def test_a_budget_ends_the_run():
    method = cr.HMC(chains=2, draws=10, warmup=20, init=START, until="mixed", budget=0.5, compile=False)
    posterior = method.fit(two_modes(), seed=0)
    found = posterior.record.history["until"]
    assert not found["met"]
    assert found["goal"]["seconds"] == 0.5
    assert found["rounds"][-1]["seconds"] >= 0.5
    assert posterior.draws.shape[1] == found["rounds"][-1]["draws"] > 0


def test_a_budget_in_iterations_ends_the_run_where_it_says():
    """Rounds of 20 draws: until iteration 40, from there to 80 with two iterations per draw, and then half of one."""
    method = cr.HMC(chains=2, draws=20, warmup=20, init=START, until="mixed", budget="103 iterations", compile=False)
    first, second = (method.fit(two_modes(), seed=0) for _ in range(2))
    found = first.record.history["until"]
    assert found["goal"] == {"rhat": until.RHAT, "ess": until.ESS, "seconds": None, "iterations": 103}
    assert not found["met"]
    assert [r["discarded"] for r in found["rounds"]] == [True, False, False]
    assert first.draws.shape[1] == 20 + (103 - 80) // 2
    assert torch.equal(first.draws, second.draws)


def test_budgets_as_text():
    assert [str(Budget.parse("budget", text)) for text in ("90s", "5_000 iterations", "1 iteration", 2)] == [
        "1.5 min", "5,000 iterations", "1 iterations", "2 s",
    ]  # fmt: skip


def test_a_budget_that_holds_no_draw_is_an_error():
    with pytest.raises(cr.SamplingError, match=r"budget: 1e-06 s ended in iteration 1, before the first draw"):
        hmc(until="mixed", budget=1e-6).fit(gaussian(), seed=0)


class TestResume(StoppedRuns):
    @pytest.mark.parametrize(
        "method, problem",
        [
            (hmc(until="mixed"), make),
            (hmc(until="mixed", budget="47 iterations"), make),
            (hmc(until="mixed", draws=4, max_steps=2), lambda seed=0: density()),
            (sg(cr.SGHMC, until="mixed"), make),
        ],
        ids=["hmc", "hmc with a budget", "hmc on a density", "sghmc"],
    )
    def test_a_stopped_run_resumes_bit_for_bit(self, tmp_path, tight, crash, monkeypatch, method, problem):
        monkeypatch.setattr(until, "ROUNDS", 3)
        known = method.fit(problem(), seed=1)
        begin(method, problem(), tmp_path / "run", crash, 1)
        for relay in range(1, 1000):
            crash(7)
            try:
                done = cr.resume(tmp_path / "run", problem(seed=relay))
                break
            except Crash:
                continue
        for posterior in (done, known):
            for one in posterior.record.history["until"]["rounds"]:
                assert one.pop("seconds") > 0
        same(done, known)
        assert len(done.record.history["until"]["rounds"]) == 3


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"until": "done"}, "until must be"),
        ({"budget": "10min"}, 'budget must be None without until="mixed"'),
        ({"until": "mixed", "budget": 0}, "budget must be a positive duration or number of iterations, got 0"),
        ({"until": "mixed", "budget": "soon"}, "budget must be a positive .*, got 'soon'"),
        ({"until": "mixed", "budget": math.nan}, "budget must be a positive duration or number of iterations, got nan"),
        ({"until": "mixed", "budget": "0 iterations"}, "budget must be a positive .*, got '0 iterations'"),
        ({"until": "mixed", "budget": "1.5 iterations"}, "budget must be a positive .*, got '1.5 iterations'"),
        (
            {"until": "mixed", "budget": "300 iterations", "warmup": 300, "thin": 1},
            "budget must be at least 301 iterations, the warm-up and one draw, got '300 iterations'",
        ),
    ],
)
@pytest.mark.parametrize("method", [cr.HMC, cr.SGHMC])
def test_bad_settings(method, settings, message):
    with pytest.raises(cr.InputError, match=message):
        method(**settings)


def test_other_schedules_are_refused():
    with pytest.raises(cr.InputError, match="until must be None with schedule='cyclical'"):
        cr.SGHMC(until="mixed", schedule="cyclical", draws=10, cycles=2)


@pytest.mark.parametrize(
    "text, value",
    [("90s", 90), ("10min", 600), ("1.5h", 5400), (" 2 hours ", 7200), ("30", 30), (12.5, 12.5), ("1d", 86400)],
)
def test_durations(text, value):
    assert to_seconds("budget", text) == value


def test_durations_as_text():
    assert [to_text(s) for s in (0.5, 90, 7200)] == ["0.5 s", "1.5 min", "2 h"]
