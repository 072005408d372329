"""The engine's numbers: those of the library for fits, those of calculus and of sums over a grid inside HMC and VI."""

from __future__ import annotations

import itertools
import json
import math
import threading

import pytest
import torch

import credibly as cr
from credibly.posterior.draws import DrawsPosterior
from credibly.web.playground.densities import SHAPES
from credibly.web.playground.engine import Engine
from credibly.web.playground.protocol import OPTIONS

DATA = {"x": [[-1.2], [-0.4], [0.3], [1.1]], "y": [-0.8, -0.5, 0.4, 0.9]}
PLANE = {"x": [[-1.0, 0.2], [-0.4, -0.3], [0.3, 0.5], [1.1, 0.0]], "y": [0, 0, 1, 1]}
MODEL = {"hidden": [4], "activation": "tanh", "prior_scale": 2.0, "noise": 0.2}
TEMPERED = {**MODEL, "likelihood_temperature": 0.5, "prior_temperature": 2.0}
CLASSES = {
    "mle": cr.MLE,
    "map": cr.MAP,
    "ensemble": cr.DeepEnsemble,
    "dropout": cr.MCDropout,
    "bbb": cr.BayesByBackprop,
    "laplace": cr.Laplace,
    "sghmc": cr.SGHMC,
    "hmc": cr.HMC,
}
SETTINGS = {
    "ensemble": {"members": 3, "steps": 30},
    "dropout": {"rate": 0.2, "steps": 30},
    "bbb": {"steps": 30, "lr": 0.03},
    "sghmc": {"chains": 2, "warmup": 30, "draws": 6, "thin": 3},
    "hmc": {"chains": 2, "warmup": 20, "draws": 6},
}


def ask(engine_sent, **request):
    """Answers to one request, and to it alone, once it is done."""
    engine, sent = engine_sent
    sent.clear()
    engine.handle(json.dumps(request))
    engine.join()
    return list(sent)


@pytest.fixture
def engine():
    sent = []
    return Engine(sent.append), sent


def fit(method, scene="regression", model=MODEL, **more):
    options = SETTINGS.get(method, {"steps": 30})
    grid = {"x": [-2, 2, 9]} if scene == "regression" else {"x": [-2, 2, 5], "y": [-1, 1, 3]}
    data = DATA if scene == "regression" else PLANE
    panels = [{"method": method, "options": options}]
    return {
        "type": "fit",
        "id": 1,
        "scene": scene,
        "data": data,
        "model": model,
        "panels": panels,
        "grid": grid,
        **more,
    }


def by_library(method, scene="regression", model=MODEL, seed=0):
    """The posterior as a user of the library would get it."""
    data = DATA if scene == "regression" else PLANE
    x, y = torch.tensor(data["x"]), torch.tensor(data["y"])
    predicted = model["noise"] == "predicted"
    if scene == "classification":
        likelihood = cr.likelihoods.Bernoulli()
    else:
        scale = model["noise"]
        likelihood = cr.likelihoods.HeteroscedasticGaussian(floor=0.02) if predicted else cr.likelihoods.Gaussian(scale)
    temperatures = model.get("likelihood_temperature", 1.0), model.get("prior_temperature", 1.0)
    problem = cr.Problem(
        cr.zoo.mlp(x.shape[1], (4,), 2 if predicted else 1, activation="tanh"),
        data=(x, y.float() if scene == "regression" else y),
        likelihood=likelihood,
        prior=cr.priors.Normal(2.0, fan_in=True),
        temperature=cr.Tempering(*temperatures),
    )
    extra = {"insert": ("2",)} if method == "dropout" else {}
    return CLASSES[method](init="fresh", **SETTINGS.get(method, {"steps": 30}), **extra).fit(problem, seed=seed)


@pytest.mark.parametrize("method", OPTIONS)
def test_final_bands_are_the_library_s(engine, method):
    sent = ask(engine, **fit(method, seed=3))
    stages = [message["stage"] for message in sent]
    assert stages[0] == "draft"
    assert stages[-1] == "final"
    assert stages.count("final") == 1
    posterior = by_library(method, seed=3)
    p = posterior.predict(torch.linspace(-2, 2, 9).unsqueeze(1))
    for name in ("mean", "aleatoric", "epistemic"):
        assert sent[-1][name] == pytest.approx(getattr(p, name).tolist(), rel=2e-5, abs=1e-7), name
    assert sent[-1]["draws"] == p.draws
    assert len(sent[-1]["functions"]) == min(12, p.draws)
    if method in ("hmc", "sghmc"):
        values = p.functions().reshape(*posterior.shape[:2], -1)
        assert sent[-1]["rhat"] == pytest.approx(float(cr.diagnostics.rhat(values).max()), rel=1e-5)
        assert sent[-1]["diagnosis"]


@pytest.mark.parametrize(
    "scene, model", [("classification", MODEL), ("regression", {**TEMPERED, "noise": "predicted"})]
)
def test_classes_predicted_noise_and_temperatures(engine, scene, model):
    final = ask(engine, **fit("laplace", scene, model))[-1]
    p = by_library("laplace", scene, model)
    x, y = torch.linspace(-2, 2, 5), torch.linspace(-1, 1, 3)
    grid = (
        torch.tensor([[a, b] for b in y for a in x]) if scene == "classification" else torch.linspace(-2, 2, 9)[:, None]
    )
    expected = p.predict(grid)
    for name in ("mean", "aleatoric", "epistemic"):
        assert final[name] == pytest.approx(getattr(expected, name).tolist(), rel=1e-4, abs=1e-6), name


def test_the_probe_is_a_density_with_the_stated_moments(engine):
    ask(engine, **fit("hmc"))
    found = ask(engine, type="probe", id=1, x=[0.5])
    p = by_library("hmc").predict(torch.tensor([[0.5]]))
    assert len(found) == 1
    y, density = (torch.tensor(found[0][key], dtype=torch.float64) for key in ("y", "density"))
    assert found[0]["mean"] == pytest.approx(float(p.mean), rel=1e-5)
    assert found[0]["total"] == pytest.approx(found[0]["aleatoric"] + found[0]["epistemic"], rel=1e-5)
    assert float(torch.trapezoid(density, y)) == pytest.approx(1, abs=0.01)
    assert float(torch.trapezoid(density * y, y)) == pytest.approx(found[0]["mean"], abs=0.01)
    lower, upper = p.interval(0.9)
    assert (found[0]["lower"], found[0]["upper"]) == pytest.approx((float(lower), float(upper)), rel=1e-5)


def test_a_probe_with_an_infinite_variance_has_no_density(engine):
    """Predicted noise can overflow in single draws; the probe must not fail, nor leave later ones unanswered."""
    model = {**MODEL, "noise": "predicted"}
    ask(engine, **fit("map", model=model))
    machine, _ = engine
    posterior = machine.panels[0].posterior
    machine.panels[0].posterior = DrawsPosterior(
        posterior.model, torch.full_like(posterior.draws, 1e6), posterior.record
    )
    found = ask(engine, type="probe", id=1, x=[0.5])
    assert [(m["type"], m["aleatoric"], m["density"], m["y"]) for m in found] == [("probe", None, None, None)]


def test_a_newer_request_cancels(engine):
    machine, sent = engine
    long = fit("map", panels=[{"method": "bbb", "options": {"steps": 5000}}])
    seen = threading.Event()
    machine.send = lambda message: (sent.append(message), seen.set())
    machine.handle(json.dumps(long))
    first = machine.newest
    assert seen.wait(60)
    machine.handle(json.dumps(fit("map", id=2)))
    machine.join()
    first.thread.join(60)
    assert not first.thread.is_alive()
    ids = [message["id"] for message in sent]
    assert ids == sorted(ids)
    assert [m["id"] for m in sent if m["stage"] == "final"] == [2]


def test_a_failed_panel_does_not_stop_the_others(engine, monkeypatch):
    def broken(self, *arguments, **options):
        raise cr.TrainingError("the loss was not finite", step=1, member=0)

    monkeypatch.setattr(cr.MLE, "fit", broken)
    panels = [{"method": "mle", "options": {"steps": 3}}, {"method": "map", "options": {"steps": 3}}]
    sent = ask(engine, **fit("map", panels=panels))
    assert {m["panel"] for m in sent if m["type"] == "failed"} == {0}
    assert [m["panel"] for m in sent if m.get("stage") == "final"] == [1]
    assert "not finite" in next(m["message"] for m in sent if m["type"] == "failed")


HMC = {"type": "hmc", "id": 5, "step_size": 0.1, "trajectory_length": 1.0, "chains": 2, "trajectories": 5, "seed": 1}


@pytest.mark.parametrize("density", ["banana", "funnel", "modes"])
def test_trajectories_are_leapfrog(engine, density):
    """Positions of leapfrog obey q[n+1] - 2 q[n] + q[n-1] = h^2 grad log p(q[n]), whatever the momentum was."""
    sent = ask(engine, density=density, **HMC)
    paths = [m for m in sent if m["type"] == "trajectory"]
    assert len(paths) == 10
    log_p = SHAPES[density]
    for one in paths:
        path = torch.tensor(one["path"], dtype=torch.float64)
        assert path.shape == (11, 2)
        inner = path[1:-1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(log_p(inner).sum(), inner)
        # Paths are sent with six digits.
        torch.testing.assert_close(path[2:] - 2 * path[1:-1] + path[:-2], 0.01 * gradient, atol=4e-5, rtol=0)
        # Velocity at an inner point is a central difference, exactly.
        momentum = (path[2:] - path[:-2]) / 0.2
        energy = 0.5 * momentum.square().sum(1) - log_p(path[1:-1])
        errors = torch.tensor(one["energy_error"], dtype=torch.float64)
        torch.testing.assert_close(energy - energy[0], errors[1:-1] - errors[1], atol=2e-3, rtol=0)
        assert one["acceptance"] == pytest.approx(math.exp(-max(0.0, one["energy_error"][-1])))
    for chain in (0, 1):
        own = [m for m in paths if m["chain"] == chain]
        for before, after in itertools.pairwise(own):
            assert after["path"][0] == before["path"][-1 if before["accepted"] else 0]
    finished = sent[-1]
    assert finished["acceptance"] == pytest.approx(sum(m["acceptance"] for m in paths) / 10)
    assert finished["gradients"] == 100


@pytest.mark.parametrize("length, step, steps", [(1.1, 0.1, 11), (0.6, 0.2, 3), (0.05, 2.0, 1), (10.0, 0.01, 400)])
def test_steps_of_a_trajectory(engine, length, step, steps):
    """The page's number, and that of `HMC` up to the limit."""
    sent = ask(engine, density="banana", **{**HMC, "trajectory_length": length, "step_size": step, "trajectories": 1})
    assert sent[-1]["gradients"] == 2 * steps


def test_the_plane_is_a_slice_of_the_posterior(engine):
    """The origin of the plane is a MAP fit, so no point near it has a higher density; large steps diverge."""
    sent = ask(
        engine, density="network", data=DATA, model=MODEL, **{**HMC, "step_size": 2.0, "trajectory_length": 20.0}
    )
    surface = sent[0]
    assert surface["type"] == "surface"
    x, y = (torch.linspace(*surface[key]) for key in ("x", "y"))
    values = torch.tensor(surface["log_density"]).reshape(len(y), len(x))
    row, column = int(y.abs().argmin()), int(x.abs().argmin())
    near = values[row - 2 : row + 3, column - 2 : column + 3]
    assert float(near.max() - values[row, column]) < 1.0
    assert sent[-1]["divergences"] == sum(m["divergent"] for m in sent if m["type"] == "trajectory") > 0


VI = {"type": "vi", "id": 6, "data": DATA, "noise": 0.3, "prior_scale": 1.0, "start": [0.8, 0.8], "steps": 300}


@pytest.mark.parametrize("family", ["mean-field", "full-rank"])
def test_variational_numbers_agree_with_each_other(engine, family):
    sent = ask(engine, family=family, **VI)
    surface, final, finished = sent[0], sent[-2], sent[-1]
    assert final["stage"] == "final"
    assert any(m.get("stage") == "running" for m in sent)
    # KL(q || p) = F + log evidence: the left side by sums over a grid, F by draws of q.
    assert final["kl_to_posterior"] == pytest.approx(final["free_energy"] + surface["log_evidence"], abs=0.15)
    running = [m for m in sent if m["type"] == "q"]
    # A full-rank q starts from a mean field: the steps of both count, without a pause in between.
    passed = [m["step"] for m in sent if m["type"] in ("q", "progress")]
    assert final["step"] == final["steps"] == (300 if family == "mean-field" else 600)
    assert passed == sorted(passed)
    assert all(b - a <= 15 for a, b in itertools.pairwise(passed))
    assert final["kl_to_posterior"] < running[0]["kl_to_posterior"]
    assert (final["covariance"][0][1] == 0) == (family == "mean-field")
    # The posterior is the same at (a, b) and (-a, -b), and the moments minimise KL(p || q), as q does KL(q || p).
    moments = finished["moments"]
    assert moments["mean"] == pytest.approx([0, 0], abs=1e-6)
    assert moments["kl_from_posterior"] < final["kl_from_posterior"]
    assert moments["kl_to_posterior"] > final["kl_to_posterior"]
    posterior = torch.tensor(surface["log_density"]).reshape(81, 81)
    torch.testing.assert_close(posterior, posterior.flip(0, 1), atol=1e-4, rtol=1e-4)


def test_probes_during_fits(engine):
    """Networks are not safe to use from two threads: probes that arrive while panels are fitted wait for a pause."""
    machine, sent = engine
    panels = [{"method": "laplace", "options": {"steps": 50}}, {"method": "hmc", "options": SETTINGS["hmc"]}]
    for number in range(8):
        machine.handle(json.dumps(fit("map", id=number, panels=panels)))
        for place in range(5):
            machine.handle(json.dumps({"type": "probe", "id": number, "x": [0.1 * place]}))
        if number % 4 == 3:
            machine.join()
    machine.handle(json.dumps({"type": "probe", "id": 7, "x": [1.5]}))
    assert [m for m in sent if m["type"] in ("error", "failed")] == []
    last = sent[-2:]
    assert [(m["panel"], m["x"], m["stage"]) for m in last] == [(0, [1.5], "final"), (1, [1.5], "final")]
