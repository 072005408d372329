"""Conformance tests for every method in METHODS. A new method is one row here."""

import dataclasses
import functools
import inspect
import pickle

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import (
    Bernoulli,
    Beta,
    Categorical,
    Gaussian,
    GaussianMixture,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Quantiles,
    Survival,
    from_distribution,
)

# One row per method: settings for a quick fit, and those for a longer one that has made progress.
SAMPLING = {"chains": 2, "draws": 6, "warmup": 20, "init": "fresh"}
QUICK = {
    "mle": {"steps": 60},
    "map": {"steps": 60},
    "ensemble": {"members": 3, "steps": 60},
    "dropout": {"steps": 60, "insert": "*"},
    "bbb": {"steps": 60},
    "ivon": {"steps": 60},
    "laplace": {"steps": 60},
    "swag": {"steps": 60, "rank": 3, "iterates": 6, "every": 5},
    "hmc": {**SAMPLING, "trajectory_length": 0.2, "max_steps": 8},
    "nuts": {**SAMPLING, "max_depth": 3},
    "chees": {**SAMPLING, "max_steps": 8},
    "mclmc": {**SAMPLING, "warmup": 40, "max_steps": 4},
    "tempering": {**SAMPLING, "temperatures": 2, "trajectory_length": 0.2, "max_steps": 8},
    "mile": {**SAMPLING, "warmup": 40, "max_steps": 4, "init": "ensemble", "start_steps": 60},
    "sgld": {**SAMPLING, "thin": 3},
    "sghmc": {**SAMPLING, "thin": 3},
}
LONGER = {
    **{name: {"steps": 400} for name in QUICK},
    "hmc": {"warmup": 40, "max_steps": 1000},
    "nuts": {"warmup": 40, "max_depth": 6},
    "chees": {"warmup": 60, "max_steps": 60},
    "mclmc": {"warmup": 80, "max_steps": 20},
    "tempering": {"warmup": 40, "max_steps": 1000},
    "mile": {"start_steps": 400},
    "sgld": {"warmup": 400, "step_size": 2e-4},
    "sghmc": {"warmup": 400, "step_size": 5e-3},
}
X, Y = randn(40, 3), randn(40, 3).sum(1) + 0.1 * randn(40, seed=1)
TASKS = {
    "regression": (lambda: mlp(3, 6, 1), Y, Gaussian(), (40,)),
    "two targets": (lambda: mlp(3, 6, 2), torch.stack([Y, -Y], 1), Gaussian(0.3), (40, 2)),
    "heteroscedastic": (lambda: mlp(3, 6, 2), Y, HeteroscedasticGaussian(), (40,)),
    "heteroscedastic student": (lambda: mlp(3, 6, 2), Y, HeteroscedasticStudentT(), (40,)),
    "binary": (lambda: mlp(3, 6, 1), (Y > 0).long(), Bernoulli(), (40,)),
    "classes": (lambda: mlp(3, 6, 3), (Y > 0).long() + (Y > 1).long(), Categorical(), (40, 3)),
    "counts": (lambda: mlp(3, 6, 1), Y.exp().round().clamp(max=9), Poisson(), (40,)),
    "overdispersed": (lambda: mlp(3, 6, 1), Y.exp().round().clamp(max=9), NegativeBinomial(), (40,)),
    "ordinal": (lambda: mlp(3, 6, 1), (Y > 0).long() + (Y > 1).long(), Ordinal(), (40, 3)),
    "proportions": (lambda: mlp(3, 6, 1), torch.sigmoid(Y), Beta(), (40,)),
    "mixture": (lambda: mlp(3, 6, 6), Y, GaussianMixture(2), (40,)),
    "quantiles": (lambda: mlp(3, 6, 3), Y, Quantiles((0.1, 0.5, 0.9)), (40,)),
    "own distribution": (
        lambda: mlp(3, 6, 2),
        Y,
        from_distribution(lambda out: torch.distributions.StudentT(4.0, out[..., 0], out[..., 1].exp())),
        (40,),
    ),
    "survival": (lambda: mlp(3, 6, 1), Y.exp() * torch.where(Y < 1, 1.0, -1.0), Survival(), (40,)),
}


def make(name, **kwargs):
    return cr.METHODS[name](**{**QUICK[name], **kwargs})


def problem(task="regression", **kwargs):
    net, y, likelihood, _ = TASKS[task]
    return cr.Problem(net(), data=(X, y), likelihood=likelihood, prior=cr.priors.Normal(), **kwargs)


@functools.cache
def fitted(name):
    """Return the quick regression of a method, fitted once for all tests of this file."""
    return make(name).fit(problem(), seed=0)


def test_every_method_has_a_row():
    assert set(QUICK) == set(cr.METHODS)


# These evaluate likelihoods by the code of MAP or HMC.
SIBLINGS = {"mle", "swag", "tempering", "chees", "mclmc", "mile"}
FITS = [
    pytest.param(name, task, marks=pytest.mark.nightly)
    if name in SIBLINGS and task not in ("regression", "classes", "mixture")
    else (name, task)
    for name in cr.METHODS
    for task in TASKS
]


@pytest.mark.parametrize("name, task", FITS)
def test_fits_and_predicts(name, task):
    _, y, _, shape = TASKS[task]
    posterior = fitted(name) if task == "regression" else make(name).fit(problem(task), seed=0)
    p = posterior.predict(X)
    assert p.mean.shape == p.variance.shape == shape
    assert p.log_prob(y).shape == (40,)
    assert p.sample(5).shape == (5, *y.shape)
    assert bool(torch.isfinite(p.log_prob(y)).all())
    assert bool((p.aleatoric >= 0).all())
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    chains, draws, dim = posterior.draws.shape
    assert chains * draws >= 1
    assert dim == posterior.layout.dim
    assert posterior.sample(4, seed=1).shape == (4, dim)


@pytest.mark.parametrize("name", cr.METHODS)
def test_fitting_helps(name):
    """The fit is better than the initial network, by the density it approximates."""
    likelihood = Gaussian(scale_prior=cr.priors.Normal(1.0, -1.0))
    p = cr.Problem(mlp(3, 6, 1), data=(X, Y), likelihood=likelihood, prior=cr.priors.Normal())
    posterior = make(name, **LONGER[name]).fit(p, seed=0)
    start = torch.cat([p.layout.read(p.layout.module), torch.tensor([-1.0])])
    assert bool((p.log_density(posterior.draws[:, 0]) > p.log_density(start) + 10).all())
    assert float((posterior.predict(X).mean - Y).square().mean()) < 0.5 * float(Y.var())


@pytest.mark.parametrize("name", cr.METHODS)
def test_the_seed_determines_the_fit(name):
    fields = {f.name for f in dataclasses.fields(cr.METHODS[name])}
    smaller = {"batch_size": 8} if "batch_size" in fields else {}
    a, b, c = (make(name, **smaller).fit(problem(), seed=s) for s in (4, 4, 5))
    assert torch.equal(a.draws, b.draws)
    assert not torch.equal(a.draws, c.draws)


@pytest.mark.parametrize("name", cr.METHODS)
def test_everything_can_be_pickled(name):
    p, posterior = problem(), fitted(name)
    predictive = posterior.predict(X)
    again = pickle.loads(pickle.dumps((p, posterior, predictive)))
    theta = posterior.draws[0, :1]
    assert torch.equal(again[0].log_density(theta), p.log_density(theta))
    assert torch.equal(again[1].predict(X).variance, predictive.variance)
    assert torch.equal(again[2].variance, predictive.variance)
    assert again[1].record == posterior.record


@pytest.mark.parametrize("name", cr.METHODS)
def test_diagnostics_are_of_chains(name):
    posterior = fitted(name)
    if posterior.kind == "draws" and posterior.draws.shape[1] >= 4:
        assert posterior.diagnostics(X).verdict
    else:
        with pytest.raises(cr.InputError, match="chains"):
            posterior.diagnostics(X)


@pytest.mark.parametrize("name", cr.METHODS)
def test_notebooks_show_tables(name):
    p, posterior = problem(), fitted(name)
    text = posterior._repr_html_()
    assert f'<td style="text-align: left">{name}</td>' in text
    assert f"{p.dim:,} in {len(p.layout.entries)} tensors" in text
    predictive = posterior.predict(X)
    assert f"<td>{float(predictive.mean[4]):.4g}</td>" in predictive._repr_html_()


@pytest.mark.parametrize("name", cr.METHODS)
def test_saved_loaded_and_saved_by_fit(name, tmp_path):
    posterior = make(name).fit(problem(), seed=0, out=tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 6, 1, seed=8))
    assert torch.equal(loaded.predict(X).mean, posterior.predict(X).mean)
    assert torch.equal(loaded.predict(X).log_prob(Y), posterior.predict(X).log_prob(Y))
    assert loaded.record.method == name
    with pytest.raises(cr.StoreError, match="out: .* already exists"):
        make(name).fit(problem(), seed=0, out=tmp_path / "run")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) if n == "mile" else n for n in cr.METHODS])
def test_float64_and_a_looped_forward_pass(name):
    double = cr.Problem(mlp(3, 6, 1), data=(X, Y), likelihood=Gaussian(), prior=cr.priors.Normal(), dtype=torch.float64)
    batched = make(name).fit(double, seed=0)
    assert batched.draws.dtype == torch.float64
    looped = cr.Problem(
        mlp(3, 6, 1), data=(X, Y), likelihood=Gaussian(), prior=cr.priors.Normal(), dtype=torch.float64, plan="looped"
    )
    torch.testing.assert_close(make(name).fit(looped, seed=0).draws, batched.draws, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", cr.METHODS)
def test_invalid_arguments(name, tmp_path):
    method = make(name)
    with pytest.raises(cr.InputError, match="problem must be a credibly.Problem.*, got Linear"):
        method.fit(torch.nn.Linear(1, 1), seed=0)
    for seed in (-1, 1.5, True):
        with pytest.raises(cr.InputError, match=f"seed must be a non-negative integer .*got {seed!r}"):
            method.fit(problem(), seed=seed)
    posterior = fitted(name)
    with pytest.raises(cr.InputError, match=r"x: the network cannot take rows of x \(4,\)"):
        posterior.predict(randn(5, 4))
    with pytest.raises(cr.InputError, match="x: has 1 values that are NaN or infinite, the first at \\[2, 0\\]"):
        posterior.predict(torch.where(torch.arange(5).unsqueeze(1) * 3 + torch.arange(3) == 6, torch.nan, 1.0))


@pytest.mark.parametrize("name", cr.METHODS)
def test_settings_are_recorded(name):
    """A method is a frozen dataclass with a docstring for tables, and the record holds its settings."""
    cls = cr.METHODS[name]
    assert cls.name == name
    assert inspect.getdoc(cls)
    method = make(name)
    setting, value = next(iter(QUICK[name].items()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(method, setting, value)
    settings = fitted(name).record.settings
    assert settings["kind"] == f"methods.{cls.__name__}"
    assert {k: settings[k] for k in QUICK[name]} == QUICK[name]
