"""Fitting MC-Dropout: rates, likelihoods, failures, saving and loading."""

import math

import pytest
import torch
from dropout_networks import (
    X32,
    Reader,
    X,
    Y,
    build,
    close_in_distribution,
    convolutional,
    dropped_mlp,
    f64,
    masks_of,
    seeded,
)
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.inference.training import loop
from credibly.inference.training.dropout_objective import DropoutObjective
from credibly.likelihoods import Bernoulli, Categorical, Gaussian
from credibly.posterior.dropout import DropoutPosterior


def test_rates_of_the_networks_own_layers_are_kept():
    posterior = cr.MCDropout(steps=3).fit(build(dropped_mlp()), seed=0)
    assert posterior.rates == {"0": 0.2, "3": 0.3}
    assert posterior.inserted == ()
    assert posterior.record.history["rates"] == posterior.rates


def test_inserted_dropout_has_a_small_default_rate():
    posterior = cr.MCDropout(steps=3, insert="*").fit(build(mlp(3, 6, 1, dtype=f64)), seed=0)
    assert (posterior.rates, posterior.inserted) == ({"0": 0.05, "2": 0.05}, ("0", "2"))
    posterior = cr.MCDropout(steps=3, insert=["2"], rate=0.3).fit(build(mlp(3, 6, 1, dtype=f64)), seed=0)
    assert (posterior.rates, posterior.inserted) == ({"2": 0.3}, ("2",))


@pytest.mark.parametrize("own", [0.0, 0.9])
def test_a_rate_overrides_those_of_the_layers(own):
    """Even a rate of zero, of a layer that was switched off."""
    posterior = cr.MCDropout(steps=3, rate=0.25).fit(build(dropped_mlp(first=own, second=own)), seed=0)
    assert posterior.rates == {"0": 0.25, "3": 0.25}
    masks = masks_of(posterior, X, 50, 0)["0.mask"]
    assert sorted(masks.unique().tolist()) == [0.0, 1 / 0.75]
    assert float(posterior.predict(X).epistemic.min()) > 0


def test_fitting_a_regression():
    problem = build(dropped_mlp(hidden=30, first=0.02, second=0.05), likelihood=Gaussian())
    posterior = cr.MCDropout(steps=600, lr=0.02).fit(problem, seed=0)
    p = posterior.predict(X)
    assert float((p.mean - Y).square().mean()) < 0.1 * float(Y.var())
    history = posterior.record.history
    assert set(history["parts"]) == {"misfit", "decay"}
    assert history["loss"][-1][0] == pytest.approx(history["parts"]["misfit"][-1][0] + history["parts"]["decay"][-1][0])
    assert history["loss"][-1][0] < history["loss"][0][0]
    scale = float(posterior.theta[-1].exp())
    assert p.aleatoric.tolist() == pytest.approx([scale**2] * 40)


@pytest.mark.parametrize("insert", [None, "*"])
def test_fitting_images_with_channels_dropped(insert):
    y = torch.arange(60) % 2
    x = randn(60, 36) + torch.cat([torch.ones(18), -torch.ones(18)]) * (2 * y.unsqueeze(1) - 1)  # bright in one half
    problem = cr.Problem(convolutional(2), (x, y), Categorical(), cr.priors.Normal())
    posterior = cr.MCDropout(steps=150, insert=insert, batch_size=30).fit(problem, seed=0)
    p = posterior.predict(x)
    assert p.mean.shape == (60, 2)
    torch.testing.assert_close(p.mean.sum(1), torch.ones(60))
    assert float((p.mean.argmax(1) == y).float().mean()) > 0.9
    assert float(p.epistemic.max()) > 1e-3
    assert set(posterior.rates) == ({"3", "7"} if insert is None else {"1", "3", "4", "7", "8"})


def test_fitting_sequences():
    x = randn(30, 7, 2)
    y = x[:, -1].sum(1)
    problem = cr.Problem(seeded(Reader), (x, y), Gaussian(0.2), cr.priors.Normal())
    assert problem.forward.looped
    posterior = cr.MCDropout(steps=120, lr=0.03).fit(problem, seed=0)
    p = posterior.predict(x)
    assert float((p.mean - y).square().mean()) < 0.3 * float(y.var())
    assert float(p.epistemic.min()) > 0


def test_fitting_binary_labels_and_dict_inputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop, self.head = nn.Linear(2, 4), nn.Linear(1, 4), nn.Dropout(0.1), nn.Linear(4, 1)

        def forward(self, left, right):
            return self.head(self.drop(torch.relu(self.a(left) + self.b(right))))

    x = {"left": X32[:, :2], "right": X32[:, 2:]}
    problem = cr.Problem(seeded(Pair), (x, (Y > 0).long()), Bernoulli(), cr.priors.Normal())
    posterior = cr.MCDropout(steps=100).fit(problem, seed=0)
    p = posterior.predict(x)
    assert float(((p.mean > 0.5) == (Y > 0)).double().mean()) > 0.9
    torch.testing.assert_close(posterior.predict({k: v[:3] for k, v in x.items()}).mean, p.mean[:3])


def test_tau_fixes_the_noise_scale():
    problem = build(dropped_mlp(outputs=2), (X, torch.stack([Y, -Y], 1)), Gaussian(per_target=True))
    posterior = cr.MCDropout(tau=7.0, steps=20).fit(problem, seed=0)
    assert posterior.theta[-2:].tolist() == [-0.5 * math.log(7.0)] * 2
    start = problem.layout.read(problem.layout.module)
    assert float((posterior.theta[:-2] - start).abs().max()) > 1e-2
    free = cr.MCDropout(steps=20).fit(problem, seed=0)
    assert free.theta[-2] != free.theta[-1]


def test_fits_depend_on_the_seed_alone():
    problem = build(dropped_mlp())
    a, b, c = (cr.MCDropout(steps=10, batch_size=8).fit(problem, seed=s) for s in (1, 1, 2))
    assert torch.equal(a.theta, b.theta)
    assert not torch.equal(a.theta, c.theta)
    full = [cr.MCDropout(steps=10, batch_size=40).fit(problem, seed=s).theta for s in (1, 2)]
    assert not torch.equal(*full)  # full batches differ in their masks


def poison(monkeypatch, after, member=0):
    """Make the log likelihood of one member NaN after the given number of calls."""
    calls = []
    plain = DropoutObjective.log_likelihood

    def poisoned(self, *args):
        calls.append(1)
        value = plain(self, *args)
        hurt = torch.arange(len(value)) == member
        return torch.where(hurt.unsqueeze(1), math.nan, value) if len(calls) > after else value

    monkeypatch.setattr(DropoutObjective, "log_likelihood", poisoned)
    monkeypatch.setattr(loop, "cpp_step", lambda *rest: None)


@pytest.mark.parametrize("concrete", [False, True])
def test_the_last_finite_parameters_are_kept(monkeypatch, tmp_path, concrete):
    poison(monkeypatch, 60)
    problem = build(dropped_mlp())
    with pytest.raises(cr.TrainingError, match="MC-Dropout: the loss of member 0 was not finite at step 61") as caught:
        cr.MCDropout(steps=100, concrete=concrete).fit(problem, seed=0, out=tmp_path / "run")
    kept = caught.value.posterior
    assert isinstance(kept, DropoutPosterior)
    assert kept.record.status == "partial"
    assert bool(torch.isfinite(kept.theta).all())
    assert float((kept.theta - problem.layout.read(problem.layout.module)).abs().max()) > 1e-2
    assert (kept.rates == {"0": 0.2, "3": 0.3}) == (not concrete)  # learned rates are those of the last check
    loaded = cr.load(tmp_path / "run", dropped_mlp())
    assert torch.equal(loaded.predict(X).mean, kept.predict(X).mean)
    assert loaded.record.status == "partial"


def test_a_grid_that_fails_names_the_member_and_keeps_it(monkeypatch, tmp_path):
    poison(monkeypatch, 60, member=1)
    with pytest.raises(cr.TrainingError, match="grid of 3: the loss of member 1 was not finite") as caught:
        cr.MCDropout(steps=100, rate=(0.1, 0.4, 0.5)).fit(build(dropped_mlp()), seed=0, out=tmp_path / "run")
    kept = caught.value.posterior
    assert isinstance(kept, DropoutPosterior)
    assert kept.rates == {"0": 0.4, "3": 0.4}
    assert torch.equal(cr.load(tmp_path / "run", dropped_mlp()).theta, kept.theta)


def test_a_failure_in_the_first_step_keeps_nothing(monkeypatch, tmp_path):
    poison(monkeypatch, 0)
    with pytest.raises(cr.TrainingError) as caught:
        cr.MCDropout(steps=100).fit(build(dropped_mlp()), seed=0, out=tmp_path / "run")
    assert caught.value.posterior is None
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{}, {"insert": "1"}, {"insert": "1", "concrete": True}], ids=str)
def test_saved_and_loaded(tmp_path, options):
    """Bit for bit, with inserted layers and learned rates, into a network with other weights and rates."""
    problem = build(dropped_mlp(first=0.2, second=0.3)[1:], likelihood=Gaussian())
    posterior = cr.MCDropout(steps=20, **options).fit(problem, seed=0)
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", dropped_mlp(second=0.6)[1:])
    assert loaded.rates == posterior.rates
    assert loaded.inserted == posterior.inserted == (("1",) if "insert" in options else ())
    assert (set(loaded.rates.values()) <= {0.05, 0.3}) == ("concrete" not in options)
    assert torch.equal(loaded.predict(X, seed=1).functions(), posterior.predict(X, seed=1).functions())
    assert torch.equal(loaded.sample(4), posterior.sample(4))
    assert loaded.record == posterior.record


def test_alpha_dropout_saved_and_loaded_with_another_rate(tmp_path):
    def net(rate):
        return seeded(
            lambda: nn.Sequential(nn.Linear(3, 6), nn.SELU(), nn.AlphaDropout(rate), nn.Linear(6, 1)).double()
        )

    posterior = cr.MCDropout(steps=5, rate=0.35).fit(build(net(0.1)), seed=0)
    assert posterior.masked[2].keep == 0.65
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", net(0.1))
    assert torch.equal(loaded.predict(X).functions(), posterior.predict(X).functions())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        module = posterior.module().train()
        module[2].p = 0.35
        torchs = module(X[:4].repeat(3000, 1)).reshape(3000, 4)
    close_in_distribution(posterior.predict(X[:4], passes=3000).functions(), torchs)
