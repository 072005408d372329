"""Fewer draws: what is chosen, what is recorded, and that it beats thinning."""

import itertools

import pytest
import torch
from torch import nn

import credibly as cr
from credibly.export.compression import choose
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.model import Model
from credibly.storage.record import Record


@pytest.fixture(scope="module")
def posterior():
    """Draws of a network, most of them alike and a few of another mode."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 40).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
    likelihood = cr.likelihoods.Gaussian(0.2)
    problem = cr.Problem(net, data=(x, x.squeeze(1)), likelihood=likelihood, prior=cr.priors.Normal(1.0))
    centres = torch.randn(3, problem.layout.dim)[torch.tensor([0] * 14 + [1] * 4 + [2] * 2)]
    theta = centres + 0.05 * torch.randn(20, problem.layout.dim)
    return DrawsPosterior(Model.of(problem), theta.unsqueeze(0), Record(method="draws"))


def loss(log_density, chosen):
    """The divergence that the choice minimises, written out."""
    p, q = (density.exp().mean(0) for density in (log_density, log_density[list(chosen)]))
    return float((q / p - 1 - torch.log(q / p)).mean())


def test_the_choice_is_close_to_the_best_subset():
    """Brute force over all subsets."""
    torch.manual_seed(0)
    log_density = torch.randn(9, 60, dtype=torch.float64)
    every = sorted(loss(log_density, some) for some in itertools.combinations(range(9), 3))
    found = loss(log_density, choose(log_density, 3).tolist())
    # Of 84 subsets.
    assert found <= every[2]


def test_all_draws_are_all_draws(posterior):
    x = torch.linspace(-2, 2, 5).unsqueeze(1)
    same = posterior.compress(20, x)
    assert torch.equal(same.draws, posterior.draws)
    assert same.record.history["compressed"]["log_density_loss"] == pytest.approx(0, abs=1e-12)
    assert same.record.history["compressed"]["total_variation"] == pytest.approx(0, abs=1e-12)


def test_fewer_draws_lose_less_than_thinning(posterior):
    x = torch.linspace(-2, 2, 60).unsqueeze(1)
    # Each row from another draw of the weights.
    y = posterior.predict(x).sample(60, seed=5).diagonal()
    small = posterior.compress(5, x, y)
    lost = small.record.history["compressed"]
    before, after = (p.predict(x).log_prob(y).double().mean() for p in (posterior, small))
    assert (lost["from"], lost["draws"], lost["rows"]) == (20, 5, 60)
    assert lost["log_density_before"] == pytest.approx(float(before))
    assert lost["log_density_after"] == pytest.approx(float(after))
    assert 0 < lost["log_density_loss"] < 0.2
    assert 0 < lost["total_variation"] < 0.2
    thinned = []
    for seed in range(20):
        some = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:5]
        other = DrawsPosterior(posterior.model, posterior.draws[:, some], posterior.record)
        thinned.append(float(other.predict(x).log_prob(y).double().mean()))
    assert float(after) > sorted(thinned)[16]


def test_the_result_is_a_posterior_like_any_other(posterior, tmp_path):
    x = torch.linspace(-2, 2, 30).unsqueeze(1)
    small = posterior.compress(4, x)
    small.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)))
    assert torch.equal(loaded.predict(x).mean, small.predict(x).mean)
    assert loaded.record.history["compressed"] == small.record.history["compressed"]


@pytest.mark.parametrize("n", [0, 21, 1.5])
def test_bad_counts_are_refused(posterior, n):
    with pytest.raises(cr.InputError, match="^n must be"):
        posterior.compress(n, torch.zeros(3, 1))


def test_calibrated_posteriors_are_refused(posterior):
    calibrated = posterior.calibrate(torch.randn(20, 1), torch.randn(20))
    with pytest.raises(cr.InputError, match=r"Compress posterior\.posterior"):
        calibrated.compress(3, torch.zeros(3, 1))
