"""Memory that runs out on the way, low precision that overflows, and graphs that cannot be captured."""

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.core.cuda_graphs import Replayed
from credibly.errors import SamplingError, TrainingError
from credibly.inference.footprint import smaller_run
from credibly.inference.sampling.sgmcmc import SGMCMCSampler
from credibly.inference.training.steps import Step

X, Y = randn(40, 3), randn(40, 3).sum(1)


def problem(**kwargs):
    return cr.Problem(mlp(3, 4, 1), (X, Y), cr.likelihoods.Gaussian(0.3), cr.priors.Normal(), **kwargs)


def test_a_sampler_that_runs_out_of_memory_keeps_its_draws(monkeypatch):
    method = cr.SGHMC(chains=8, draws=6, warmup=4, thin=2, step_size=1e-3, batch_size=20, init="fresh", compile=False)
    whole = method.fit(problem(), seed=0)
    plain = SGMCMCSampler.advance

    def advance(self, stop):
        if self.done >= 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        return plain(self, stop)

    monkeypatch.setattr(SGMCMCSampler, "advance", advance)
    with pytest.raises(SamplingError, match="4 instead of 8 or batch_size=10") as error:
        method.fit(problem(), seed=0)
    assert "Tried to allocate 2.00 GiB" in str(error.value)
    assert "stopped after 12 of 16 iterations" in str(error.value)
    assert torch.equal(error.value.posterior.draws, whole.draws[:, :4])


def test_training_that_runs_out_of_memory_keeps_its_members(monkeypatch):
    plain = Step.advance

    def advance(self, theta, rows, t, active):
        if t == 30:
            raise torch.OutOfMemoryError("out of memory")
        plain(self, theta, rows, t, active)

    monkeypatch.setattr(Step, "advance", advance)
    with pytest.raises(TrainingError, match=r"out of memory at step 31 .*Use 2 instead of 4 or batch_size=10") as error:
        cr.BayesByBackprop(members=4, steps=40, batch_size=20, compile=False).fit(problem(), seed=0)
    assert error.value.posterior.components == 4


def test_what_would_fit_follows_from_the_sizes(monkeypatch):
    """With room for three chains of eight, and for a sixth of the batch at eight chains."""
    given = problem()
    state, row = 6 * given.dim * 4, 2 * given.forward.row_width * 4
    monkeypatch.setattr(given.layout, "device", torch.device("cuda"))
    memory = type("Properties", (), {"total_memory": 3.5 * (state + 600 * row) / 0.8})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    rows = int((3.5 * (state + 600 * row) - 8 * state) / (8 * row))
    assert smaller_run(given, 8, 600) == f"3 instead of 8 or batch_size={rows}"


def test_low_precision_is_named_where_the_loss_is_lost():
    low = problem(precision="bf16")
    bad = torch.full((1, low.dim), 1e30)
    with pytest.raises(TrainingError, match=r"at step 1\. .*The network runs in bf16: precision=None"):
        cr.MAP(steps=5, init=bad, compile=False).fit(low, seed=0)
    method = cr.SGHMC(chains=1, draws=2, warmup=2, thin=1, step_size=1e6, init="fresh", compile=False)
    with pytest.raises(SamplingError, match="precision=None in Problem: the network runs in bf16"):
        method.fit(low, seed=0)


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why(monkeypatch):
    """A CPU cannot capture anything, so the first call fails as a network with data-dependent control flow does."""
    total = torch.zeros(())
    step = Replayed(lambda fixed, value: fixed.add_(value), torch.device("cpu"))
    for _ in range(3):
        step((total,), (torch.ones(()),))
    assert float(total) == 3
    assert step.failed
    assert len(step.reasons) == 1
