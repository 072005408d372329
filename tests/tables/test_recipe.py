"""The recipe: every method runs with its defaults, auto explains its choice, and invalid values are refused."""

import json

import numpy as np
import pytest
import torch

import credibly as cr
from credibly.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    StudentT,
)
from credibly.networks.zoo import ACTIVATIONS
from credibly.tables.recipe import AFFORDABLE, NOISES, SLOWER, TASKS, Recipe, settings_for

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Z = X[:, 0] - 0.5 * X[:, 1] ** 2
Y = (Z - Z.mean()) / Z.std()

SAMPLING = {"chains": 2, "warmup": 20, "draws": 4, "thin": 1}
QUICK = {name: {"steps": 40} for name in cr.METHODS} | dict.fromkeys(("hmc", "nuts", "sgld", "sghmc"), SAMPLING)
QUICK["chees"] = {**SAMPLING, "max_steps": 10}
QUICK["mclmc"] = {**SAMPLING, "warmup": 40, "max_steps": 10}
QUICK["tempering"] = {**SAMPLING, "temperatures": 2, "max_steps": 10}
QUICK["mile"] = {**QUICK["mclmc"], "start_steps": 40}


@pytest.mark.parametrize("task", ["regression", "two classes", "three classes"])
@pytest.mark.parametrize("hidden", [(), (5, 4)])
@pytest.mark.parametrize("method", cr.METHODS)
def test_every_method_runs_with_its_defaults(method, hidden, task):
    classes = {"regression": None, "two classes": 2, "three classes": 3}[task]
    kind = "regression" if classes is None else "classification"
    labels = Y if classes is None else np.digitize(Y, [0.0] if classes == 2 else [-0.5, 0.5])
    recipe = Recipe(kind, hidden=hidden, method=method, settings=QUICK[method])
    problem = recipe.problem(X, labels, classes=classes)
    if method == "dropout" and not hidden:  # a linear model has no hidden units to drop
        with pytest.raises(cr.InputError, match="dropout needs a hidden layer"):
            recipe.fitter(problem.n, problem.dim).fit(problem, seed=0)
        return
    posterior = recipe.fitter(problem.n, problem.dim).fit(problem, seed=0, progress=False)
    p = posterior.predict(torch.from_numpy(X).float())
    assert posterior.record.method == method
    assert bool(torch.isfinite(p.mean).all())
    assert p.mean.shape == ((40, 3) if classes == 3 else (40,))


@pytest.mark.parametrize("method", cr.METHODS)
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_settings_are_those_of_the_method_and_plain_values(method, layers):
    settings = settings_for(method, layers)
    made = cr.METHODS[method](**settings)
    assert all(getattr(made, k) == v for k, v in settings.items())
    assert json.loads(json.dumps(settings)) == settings  # they go into a file
    assert "compile" not in settings  # whether that pays is each method's own rule


def test_gradients_are_clipped_sooner_where_noisy_weights_predict_a_variance():
    def clip(method, **given):
        return Recipe(method=method, **given).fitter(10, 10).clip_norm

    assert clip("bbb", noise="heteroscedastic") == 10
    assert clip("bbb") == clip("ensemble", noise="heteroscedastic") == 100
    assert clip("bbb", noise="heteroscedastic", settings={"clip_norm": 3.0}) == 3


def test_settings_are_a_copy_and_can_be_overridden():
    settings_for("hmc")["chains"] = 99
    assert settings_for("hmc")["chains"] == 8
    fitter = Recipe(method="hmc", settings={"chains": 3}).fitter(10, 10)
    assert (fitter.chains, fitter.refresh) == (3, settings_for("hmc")["refresh"])
    assert settings_for("of a later version") == {}


def test_dropout_acts_before_the_last_layer():
    for hidden in ((4,), (4, 4), (4, 4, 4)):
        recipe = Recipe(hidden=hidden, method="dropout", settings={"steps": 5})
        problem = recipe.problem(X, Y)
        posterior = recipe.fitter(40, problem.dim).fit(problem, seed=0, progress=False)
        last = [e.name for e in problem.layout.entries if e.name.endswith("weight")][-1].partition(".")[0]
        assert [name.partition(".")[0] for name in posterior.rates] == [last]


def test_auto_picks_hmc_where_it_is_affordable_and_explains_why():
    auto = Recipe()
    assert auto.method == "auto"
    name, why = auto.resolved(1000, AFFORDABLE // 1000)
    assert name == "hmc"
    assert why.startswith("1,000 rows by 4,000 parameters is small enough")
    name, why = auto.resolved(1001, AFFORDABLE // 1000)
    assert name == "ensemble"
    assert why.startswith("1,001 rows by 4,000 parameters is too large for HMC")
    assert isinstance(auto.fitter(1000, 4000), cr.HMC)
    assert isinstance(auto.fitter(10_000, 4000), cr.DeepEnsemble)
    for name in cr.METHODS:
        assert Recipe(method=name).resolved(10**9, 10**9) == (name, "requested")


@pytest.mark.parametrize(
    "noise, kind, outputs",
    [
        ("learned", Gaussian, 1),
        ("student", StudentT, 1),
        ("heteroscedastic", HeteroscedasticGaussian, 2),
        ("heteroscedastic-student", HeteroscedasticStudentT, 2),
        (0.2, Gaussian, 1),
    ],
)
def test_noise_models(noise, kind, outputs):
    recipe = Recipe(noise=noise, hidden=(4,))
    for y, targets in ((Y, 1), (np.stack([Y, -Y], 1), 2)):
        problem = recipe.problem(X, y)
        assert type(problem.likelihood) is kind
        assert problem.likelihood.squeeze is (targets == 1)
        assert problem.layout.module(torch.zeros(1, 3)).shape == (1, targets * outputs)
        own = 0 if outputs == 2 or noise == 0.2 else targets
        assert problem.dim - problem.layout.network_dim == own  # each target has a scale of its own
    assert {"learned", "student", "heteroscedastic", "heteroscedastic-student", "poisson"} == set(NOISES)
    if noise == 0.2:
        assert problem.likelihood.scale == 0.2


def test_targets_of_unequal_noise_have_unequal_scales():
    y = np.stack([Y, RNG.normal(size=40)], 1)
    recipe = Recipe(method="map", hidden=(8,), prior_scale=0.5, settings={"steps": 800})
    problem = recipe.problem(X, y)
    posterior = recipe.fitter(40, problem.dim).fit(problem, seed=0, progress=False)
    clean, noisy = posterior.predict(torch.from_numpy(X).float()).aleatoric[0].sqrt().tolist()
    assert 2 * clean < noisy


def test_label_models():
    two, three = (Recipe("classification").problem(X, np.arange(40) % k, classes=k) for k in (2, 3))
    assert isinstance(two.likelihood, Bernoulli)
    assert two.layout.module(torch.zeros(1, 3)).shape == (1, 1)
    assert isinstance(three.likelihood, Categorical)
    assert three.layout.module(torch.zeros(1, 3)).shape == (1, 3)


def test_a_problem_follows_the_seed_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, same, other = (Recipe().problem(X, Y, seed=s).layout for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.read(first.module), same.read(same.module))
    assert not torch.equal(first.read(first.module), other.read(other.module))


def test_prior_scale_is_before_the_fan_in():
    problem = Recipe(hidden=(4,), prior_scale=3.0).problem(X, Y)
    draws = problem.prior.sample(4000, torch.Generator().manual_seed(0))
    scales = {k: float(v.std()) for k, v in problem.layout.split(draws)[0].items()}
    assert scales == pytest.approx(
        {"0.weight": 3 / 3**0.5, "0.bias": 3.0, "2.weight": 3 / 4**0.5, "2.bias": 3.0}, rel=0.05
    )


def test_refuses_what_it_cannot_use():
    activations = ", ".join(repr(name) for name in ACTIVATIONS)
    methods = ", ".join(repr(name) for name in ("auto", *cr.METHODS))
    for wrong, message in (
        ({"task": "ranking"}, f"task must be one of {', '.join(map(repr, TASKS))}, got 'ranking'"),
        ({"method": "gibbs"}, f"method must be one of {methods}, got 'gibbs'"),
        ({"activation": "step"}, f"activation must be one of {activations}, got 'step'"),
        ({"prior_scale": 0.0}, "prior_scale must be a positive number, got 0.0"),
        ({"prior_scale": float("nan")}, "prior_scale must be a positive number, got nan"),
        (
            {"noise": "none"},
            "noise must be one of 'learned', 'heteroscedastic', 'student', 'heteroscedastic-student', 'poisson' or a "
            "positive number, got 'none'",
        ),
        ({"noise": -1.0}, "noise must be a positive number, got -1.0"),
        ({"settings": [("steps", 3)]}, "settings must be a dict of settings of the method, got [('steps', 3)]"),
    ):
        with pytest.raises(cr.InputError) as caught:
            Recipe(**wrong)
        assert str(caught.value).startswith(message)
    with pytest.raises(cr.InputError, match="settings: MAP has no 'members'. It has accumulate, batch_size, callback"):
        Recipe(method="map", settings={"members": 3}).fitter(10, 10)
    with pytest.raises(cr.InputError, match="settings: HMC has no 'steps'"):
        Recipe(settings={"steps": 3}).fitter(10, 10)
    with pytest.raises(cr.InputError, match="members must be a positive integer, got 0"):
        Recipe(method="ensemble", settings={"members": 0}).fitter(10, 10)
    with pytest.raises(cr.InputError, match="hidden must be a positive integer, got 0"):
        Recipe(hidden=(0,)).problem(X, Y)


def test_the_prior_is_wider_for_classes():
    assert Recipe(task="regression").scale == 1.0
    assert Recipe(task="classification").scale == 2.0
    assert Recipe(task="classification", prior_scale=0.7).scale == 0.7


def test_hmc_for_smaller_tables_where_the_cpp_backend_does_not_apply():
    assert Recipe().resolved(AFFORDABLE, 1)[0] == "hmc"
    for task in ("counts", "ordinal", "proportion", "survival"):
        assert Recipe(task=task).resolved(AFFORDABLE // SLOWER, 1)[0] == "hmc"
        assert Recipe(task=task).resolved(AFFORDABLE // SLOWER + 1, 1)[0] == "ensemble"
