"""Large networks on streams: the same weights as steps on the flat vector, with a last batch that is smaller."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credibly as cr
from conftest import randn
from credibly.inference.kernels import optimisers
from credibly.inference.sampling import module_langevin, sgmcmc, sgmcmc_stream
from credibly.inference.training import iterates, module_step, steps, stream_modules

f64 = torch.float64
X = randn(50, 3, 6, 6, dtype=f64)
Y = (X.mean((1, 2, 3)) > 0).long()


def streamed(batch=16, **kwargs):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(64, 2)).to(f64)
    loader = DataLoader(TensorDataset(X, Y), batch_size=batch, shuffle=True)
    return cr.Problem(net, cr.data.Stream(loader), cr.likelihoods.Categorical(), cr.priors.Normal(0.7), **kwargs)


@pytest.fixture
def by_module(monkeypatch):
    """Make every network large; return the modules that were trained or sampled."""
    made = []

    class Watched(module_step.ModuleStep):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    class WatchedChain(module_langevin.ModuleLangevin):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    def switch(on):
        large = 1 if on else 10**9
        for module in (module_step, iterates, module_langevin, sgmcmc):
            monkeypatch.setattr(module, "LARGE", large)
        monkeypatch.setattr(iterates, "CHUNK", 16)
        monkeypatch.setattr(stream_modules, "ModuleStep", Watched)
        monkeypatch.setattr(module_langevin, "ModuleLangevin", WatchedChain)
        monkeypatch.setattr(sgmcmc_stream, "ModuleLangevin", WatchedChain)
        return made

    return switch


CASES = {
    "mle": (cr.MLE(steps=10, optimiser="sgd", lr=0.05, compile=False), 1),
    "map": (cr.MAP(steps=10, compile=False), 1),
    "clipped": (cr.MAP(steps=10, clip_norm=0.1, warmup=3, compile=False), 1),
    "ensemble": (cr.DeepEnsemble(members=3, steps=10, compile=False), 3),
    "swag": (cr.SWAG(steps=10, sgd_lr=0.01, every=3, iterates=4, rank=3, compile=False), 2),
    "swag, averages": (cr.SWAG(steps=10, every=10, iterates=3, rank=2, compile=False), 2),
    "anchored": (cr.DeepEnsemble(members=2, steps=10, anchored=True, compile=False), 2),
    "sghmc": (cr.SGHMC(chains=2, draws=4, warmup=4, thin=2, step_size=1e-3, init="fresh"), 1),
    "sgld": (cr.SGLD(chains=2, draws=4, warmup=4, thin=2, step_size=1e-4, init="fresh"), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_modules_on_a_stream_equal_flat_steps(case, by_module):
    method, count = CASES[case]
    assert not by_module(False)
    batch = 1 if case == "swag, averages" else 16
    reference = method.fit(streamed(batch, temperature=0.5), seed=1)
    made = by_module(True)
    found = method.fit(streamed(batch, temperature=0.5), seed=1)
    assert len(made) == count
    values = [p.draws if hasattr(p, "draws") else p.phi for p in (found, reference)]
    torch.testing.assert_close(*values, rtol=1e-7, atol=1e-9)
    if "loss" in reference.record.history:
        losses = [torch.tensor(p.record.history["loss"]) for p in (found, reference)]
        torch.testing.assert_close(*losses)


def test_accumulated_own_optimisers_and_rates_by_group_are_those_of_one_batch():
    """Microbatches of a batch, torch's Adam and equal rates for all groups give the weights of the usual step."""
    reference = cr.MAP(steps=10, lr=1e-2).fit(streamed(), seed=1).draws
    rates = {"4.*": 1e-2, "*": 1e-2}
    for options in (
        {"accumulate": 3, "lr": 1e-2},
        {"lr": rates},
        {"optimiser": lambda p: torch.optim.Adam(p, lr=1e-2)},
    ):
        found = cr.MAP(steps=10, **options).fit(streamed(), seed=1).draws
        torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-8)


def test_learning_rates_by_group_differ_on_a_stream():
    start = streamed()
    before = start.layout.read(start.layout.module)
    after = cr.MAP(steps=5, lr={"0.*": 1e-12, "*": 1e-2}).fit(start, seed=1).draws.flatten()
    first = start.layout.entries[0]
    assert (after - before)[first.start : first.stop].abs().max() < 1e-10
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize("clip", [None, 0.05])
def test_adam_of_one_large_member_takes_one_pass(clip, monkeypatch):
    """Variational inference of a large network, which stays on the flat vector, against small steps."""
    problem = cr.Problem(
        nn.Linear(3, 2).to(f64), (X[:, 0, 0, :3], Y), cr.likelihoods.Categorical(), cr.priors.Normal(1.0), plan="looped"
    )
    method = cr.BayesByBackprop(steps=10, batch_size=16, clip_norm=clip, estimator="weights", compile=False)
    reference = method.fit(problem, seed=1).phi
    taken = []
    at_once = optimisers.Adam.update_at_once
    monkeypatch.setattr(optimisers.Adam, "update_at_once", lambda *args: (taken.append(1), at_once(*args)))
    monkeypatch.setattr(steps, "LARGE", 1)
    found = method.fit(problem, seed=1).phi
    assert len(taken) == 10
    torch.testing.assert_close(found, reference, rtol=1e-7, atol=1e-9)
