"""A learned noise from held-out rows: closed forms, brute force, and where it applies."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import credibly as cr
from credibly.inference.training.data import folds
from credibly.inference.training.held_out_noise import FOLDS, held_out_noise
from credibly.likelihoods import Bernoulli, Gaussian, StudentT
from credibly.priors.elementwise import Normal

FLAT = Normal(scale=1e3)


def problem(likelihood, rows=60, columns=30, targets=1, noise=1.0, seed=0, prior=10.0):
    """Return a linear model with nearly as many weights as it can determine, whose residuals are much too small."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns))
    y = x[:, :1] + noise * rng.normal(size=(rows, targets))
    torch.manual_seed(0)
    net = nn.Linear(columns, targets).double()
    return cr.Problem(net, (torch.from_numpy(x), torch.from_numpy(y)), likelihood, Normal(prior))


def unseen(given, parts=3, per_part=2):
    size = given.n // parts
    return [
        (part.held_out, range(k * per_part, (k + 1) * per_part)) for k, part in enumerate(folds(given, size, 0)[:parts])
    ]


def test_the_noise_of_one_member_is_the_root_mean_square_of_its_held_out_residuals():
    given = problem(Gaussian(scale_prior=FLAT))
    theta = 0.3 * torch.randn(3, given.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = unseen(given, per_part=1)
    residuals = torch.cat([(part.forward(theta[list(m)], part.x)[0] - part.y) for part, m in parts])
    expected = 0.5 * math.log(float(residuals.square().mean()))
    assert float(held_out_noise(given, theta, parts)) == pytest.approx(expected, abs=0.002)


@pytest.mark.parametrize("kind", [Gaussian, StudentT])
def test_several_members_are_judged_by_their_mixture(kind):
    given = problem(kind(scale_prior=Normal(1.0, loc=-1.0)))
    theta = 0.3 * torch.randn(6, given.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = unseen(given)

    def density(log_scale):
        at = theta.clone()
        at[:, -1] = log_scale
        each = [part.log_likelihood_rows(at[list(m)], part.x, part.y) for part, m in parts]
        mixture = sum(float((torch.logsumexp(rows, 0) - math.log(len(rows))).sum()) for rows in each)
        return mixture - 0.5 * (log_scale + 1) ** 2  # the prior of the log scale, N(-1, 1)

    grid = np.linspace(-1, 1, 401)
    assert float(held_out_noise(given, theta, parts)) == pytest.approx(max(grid, key=density), abs=0.005)


def test_every_target_has_its_own_noise():
    given = problem(Gaussian(per_target=True, scale_prior=FLAT), targets=2)
    given.y[:, 1] *= 10
    theta = torch.zeros(3, given.dim, dtype=torch.float64)
    found = held_out_noise(given, theta, unseen(given, per_part=1))
    assert found.tolist() == pytest.approx(given.y.square().mean(0).sqrt().log().tolist(), abs=0.003)


def test_map_with_held_out_noise_predicts_its_own_error():
    new = problem(Gaussian(), rows=2000, seed=100)
    ratios = {"training": [], "held-out": []}
    for seed in range(4):
        given = problem(Gaussian(scale_prior=FLAT), rows=80, seed=seed)
        fits = {f: cr.MAP(steps=500, noise_from=f).fit(given, progress=False) for f in ratios}
        # Only the noise differs.
        assert torch.equal(fits["training"].draws[..., :-1], fits["held-out"].draws[..., :-1])
        for name, fit in fits.items():
            error = float((fit.predict(new.x).mean - new.y).square().mean().sqrt())
            ratios[name].append(float(fit.draws[0, 0, -1].exp()) / error)
        assert fits["held-out"].record.history["held_out_noise"] == pytest.approx(fits["held-out"].draws[0, 0, -1:])
    assert np.mean(ratios["training"]) < 0.7
    assert np.mean(ratios["held-out"]) == pytest.approx(1, abs=0.1)


def test_with_validation_the_rows_held_out_by_training_are_used(monkeypatch):
    from credibly.inference.training import held_out_noise as module

    monkeypatch.setattr(module, "train", None)  # no further fits
    given = problem(Gaussian())
    for method in (
        cr.MAP(steps=60, validation=0.2, noise_from="held-out"),
        cr.DeepEnsemble(steps=60, members=4, validation=0.2, noise_from="held-out"),
        cr.DeepEnsemble(steps=60, members=4, validation=0.2, rotate=False, noise_from="held-out"),
    ):
        draws = method.fit(given, progress=False).draws[..., -1]
        assert bool((draws == draws[0, 0]).all())


def test_an_ensemble_without_validation_takes_folds():
    given = problem(Gaussian(scale_prior=FLAT), rows=80)
    joint, held = (
        cr.DeepEnsemble(steps=600, members=3, noise_from=f).fit(given, progress=False).draws[..., -1].exp().mean()
        for f in ("training", "held-out")
    )
    assert joint < 0.85 < 0.95 < held


@pytest.mark.parametrize("method", [cr.MAP, cr.MLE, cr.DeepEnsemble])
def test_without_a_learned_noise_nothing_changes(method):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(40, 3)))
    data = (x, (x[:, 0] > 0).long())
    given = cr.Problem(nn.Linear(3, 1).double(), data, Bernoulli(), Normal())
    a, b = (method(steps=30, noise_from=f).fit(given, progress=False).draws for f in ("training", "held-out"))
    assert torch.equal(a, b)


def test_few_rows_have_a_fold_each():
    given = problem(Gaussian(), rows=FOLDS - 4, columns=1)
    assert bool(torch.isfinite(cr.MAP(steps=30, noise_from="held-out").fit(given, progress=False).draws).all())


@pytest.mark.parametrize("method", [cr.MAP, cr.DeepEnsemble, cr.Laplace])
def test_other_sources_of_the_noise_are_refused(method):
    with pytest.raises(cr.InputError, match="noise_from must be one of .*, got 'prior'"):
        method(noise_from="prior")


# -- by evidence -------------------------------------------------------------------------------------------------------
def test_laplace_noise_by_evidence_is_mackays_on_the_linear_model():
    given = problem(Gaussian(scale_prior=FLAT), prior=1.0)
    fitted = cr.Laplace(structure="full", noise_from="evidence", steps=1000).fit(given, progress=False)
    variance = float(fitted.loc[-1].exp()) ** 2
    design = torch.cat([given.x, torch.ones(given.n, 1, dtype=torch.float64)], 1)
    rss = float((given.forward(fitted.loc[None], given.x)[0] - given.y).square().sum())
    eigenvalues = torch.linalg.eigvalsh(design.T @ design) / variance
    determined = float((eigenvalues / (eigenvalues + 1)).sum())
    assert determined > 20
    assert variance == pytest.approx(rss / (given.n - determined), rel=1e-4)


def test_laplace_noise_by_evidence_rescales_the_curvature_too():
    given = problem(Gaussian(), prior=1.0)
    settings = {"structure": "kron", "steps": 300}
    moved = cr.Laplace(noise_from="evidence", **settings).fit(given, progress=False)
    again = cr.Laplace(start=moved.loc, **settings).fit(given, progress=False)
    a, b = (fit.predict(given.x[:5]) for fit in (moved, again))
    torch.testing.assert_close(a.epistemic, b.epistemic, rtol=1e-6, atol=1e-9)
    assert moved.log_evidence == pytest.approx(again.log_evidence, rel=1e-6)


@pytest.mark.parametrize("method", [cr.MAP, cr.DeepEnsemble])
def test_a_single_row_cannot_be_held_out(method):
    with pytest.raises(cr.InputError, match="noise_from must be 'training' with a single row, got 'held-out'"):
        method(steps=5, noise_from="held-out").fit(problem(Gaussian(), rows=1, columns=2), progress=False)
    assert method(steps=5, noise_from="held-out").fit(problem(Gaussian(0.3), rows=1, columns=2), progress=False)
