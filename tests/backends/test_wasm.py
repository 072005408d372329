"""The WebAssembly module of the playground against the library, in node."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import credibly as cr
from credibly import likelihoods, priors, zoo
from credibly.diagnostics.convergence import mcse, rhat
from credibly.inference.kernels.hmc import LEAPFROG
from credibly.problem import Tempering
from wasm_module import MODULE, call, needs_node

TOOL = Path(__file__).resolve().parents[2] / "tools" / "build_wasm.py"
# Rounding of float32 in sums over rows and layers: a few thousand operations of relative error 6e-8, which add up like
# a random walk, and one activation of relative error 1e-7 each.
CLOSE = 1e-5

CASES = {
    "gaussian": {"likelihood": "gaussian", "hidden": [7, 5], "activation": "tanh", "outputs": 1},
    "learned": {"likelihood": "gaussian", "hidden": [6], "activation": "silu", "outputs": 1, "learned": True},
    "predicted": {"likelihood": "heteroscedastic", "hidden": [5, 4], "activation": "relu", "outputs": 2},
    "classes": {"likelihood": "bernoulli", "hidden": [6, 3], "activation": "tanh", "outputs": 1, "inputs": 2},
    "linear": {"likelihood": "gaussian", "hidden": [], "activation": "tanh", "outputs": 1},
}
NOISE = {"gaussian": 0.3, "heteroscedastic": 0.02, "bernoulli": 1.0}
TEMPERATURES = (0.8, 1.3)
LIKELIHOODS = {
    "gaussian": lambda learned: likelihoods.Gaussian("learned" if learned else NOISE["gaussian"]),
    "heteroscedastic": lambda learned: likelihoods.HeteroscedasticGaussian(floor=NOISE["heteroscedastic"]),
    "bernoulli": lambda learned: likelihoods.Bernoulli(),
}


def given(name: str, rows: int = 37, temperatures: tuple[float, float] = TEMPERATURES) -> dict:
    """Return settings and data as the module takes them."""
    case = {"inputs": 1, "learned": False, **CASES[name]}
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, case["inputs"], generator=generator)
    y = torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(rows, generator=generator)
    settings = case | {"noise": NOISE[case["likelihood"]], "priorScale": 1.7, "fanIn": True}
    settings |= {"likelihoodTemperature": temperatures[0], "priorTemperature": temperatures[1]}
    labels = (y > 0).float() if case["likelihood"] == "bernoulli" else y
    return {"settings": settings, "x": x.tolist(), "y": labels.tolist()}


def problem(name: str, dtype: torch.dtype = torch.float64, **options) -> cr.Problem:
    """Return the same as a problem."""
    data = given(name, **options)
    settings = data["settings"]
    x, y = torch.tensor(data["x"], dtype=dtype), torch.tensor(data["y"], dtype=dtype)
    net = zoo.mlp(settings["inputs"], settings["hidden"], settings["outputs"], activation=settings["activation"])
    temperature = Tempering(settings["likelihoodTemperature"], settings["priorTemperature"])
    likelihood = LIKELIHOODS[settings["likelihood"]](settings["learned"])
    prior = priors.Normal(settings["priorScale"], fan_in=True)
    return cr.Problem(net.to(dtype), data=(x, y), likelihood=likelihood, prior=prior, temperature=temperature)


def points(name: str, count: int, seed: int = 0) -> Tensor:
    """Return the first of a dozen parameter vectors that float32 represents exactly, as float64."""
    dim = problem(name).dim
    return (0.7 * torch.randn(12, dim, generator=torch.Generator().manual_seed(seed))).double()[:count]


def grid(name: str) -> Tensor:
    inputs = CASES[name].get("inputs", 1)
    return torch.linspace(-3, 3, 9 * inputs).reshape(-1, inputs)


TARGETS = [-1.0, 0.0, 0.4]
# Rows of `given` with padding.
PADDED = 64
DROPOUT = {"steps": 3, "dropout": 0.3, "seed": 4, "members": 1}
LINEAR = {"chains": 4, "draws": 400, "warmup": 60, "seed": 7}
DEEP = {"chains": 4, "draws": 200, "warmup": 100, "seed": 7}


def requests() -> list[tuple[str, dict]]:
    calls: list[tuple[str, dict]] = []
    for name in CASES:
        base, theta = given(name), points(name, 12)
        calls.append(("density", base | {"theta": theta[0].tolist()}))
        move = {"theta": theta[0].tolist(), "momentum": points(name, 1, 1)[0].tolist(), "size": 0.01, "steps": 15}
        calls.append(("trajectory", base | move))
        options = {"steps": 40, "prior": True, "members": 2, "clipNorm": 0}
        calls.append(("training", base | {"theta": theta[:2].flatten().tolist(), "options": options}))
        at = {"grid": grid(name).tolist(), "targets": TARGETS, "chains": 3, "theta": theta.tolist()}
        calls.append(("predictive", base | at))
    start = {"theta": points("gaussian", 1)[0].tolist(), "options": DROPOUT, "draws": 400}
    sizes = [[step, layer, width * PADDED] for step in range(3) for layer, width in ((1, 7), (2, 5))]
    calls.append(("dropout", given("gaussian") | start | {"sizes": sizes}))
    calls.append(("slice", given("gaussian") | {"theta": points("gaussian", 3).tolist()}))
    calls.append(("sample", given("linear", temperatures=(1.0, 1.0)) | {"options": LINEAR, "keep": True}))
    deep = {"options": DEEP, "grid": grid("gaussian").tolist()}
    calls.append(("sample", given("gaussian", temperatures=(1.0, 1.0)) | deep))
    return calls


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The results of all requests, by name and in order, from one run of node."""
    found: dict[str, list] = {}
    calls = requests()
    for (name, _), result in zip(calls, call(calls, tmp_path_factory.mktemp("wasm")), strict=True):
        found.setdefault(name, []).append(result)
    return found


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@needs_node
@pytest.mark.parametrize("name", CASES)
def test_density_and_gradient(name, answers):
    found = answers["density"][list(CASES).index(name)]
    exact = problem(name).log_density_and_grad(points(name, 1))
    assert found["logLikelihood"] == pytest.approx(float(exact.log_likelihood), rel=CLOSE)
    assert found["logPrior"] == pytest.approx(float(exact.log_prior), rel=1e-9)
    scale = float(exact.gradient.abs().max())
    torch.testing.assert_close(tensor(found["gradient"]), exact.gradient[0], rtol=0, atol=CLOSE * scale)


@needs_node
@pytest.mark.parametrize("name", CASES)
def test_leapfrog_trajectory(name, answers):
    found, exact = answers["trajectory"][list(CASES).index(name)], problem(name)
    theta, momentum = points(name, 1), points(name, 1, 1)

    def evaluate(w: Tensor) -> tuple[Tensor, Tensor]:
        at = exact.log_density_and_grad(w)
        return at.log_density, at.gradient

    gradient, size = evaluate(theta)[1], torch.full((1, 1), 0.01, dtype=torch.float64)
    for _ in range(15):
        theta, momentum, gradient, _ = LEAPFROG.step(theta, momentum, gradient, size, None, evaluate)
    for key, expected in (("theta", theta), ("momentum", momentum)):
        scale = float(expected.abs().max())
        torch.testing.assert_close(tensor(found[key]), expected[0], rtol=0, atol=10 * CLOSE * scale)


@needs_node
@pytest.mark.parametrize("name", CASES)
def test_training_takes_the_steps_of_map(name, answers):
    found = answers["training"][list(CASES).index(name)]
    assert found["fine"]
    method = cr.DeepEnsemble(members=2, steps=40, init=points(name, 2))
    expected = method.fit(problem(name), seed=0, progress=False).draws[:, 0]
    # Adam divides gradients by their size, so the error of a small one counts fully, up to the learning rate.
    torch.testing.assert_close(tensor(found["theta"]).reshape(expected.shape), expected, rtol=0, atol=1e-3)


@needs_node
def test_dropout_takes_the_steps_of_mc_dropout(answers):
    """The same three Adam steps on the negative ELBO, in torch and float64, with the module's own uniform numbers."""
    found, exact = answers["dropout"][0], problem("gaussian")
    rate, keep = DROPOUT["dropout"], 1 - DROPOUT["dropout"]
    theta = points("gaussian", 1)[0].clone().requires_grad_()
    decay = 1 / exact.prior.std.square() / TEMPERATURES[1]
    shapes = [(7, 1), (5, 7), (1, 5)]
    starts = [entry.start for entry in exact.layout.entries[::2]]
    for (rows, columns), start in list(zip(shapes, starts))[1:]:
        decay[start : start + rows * columns] /= keep

    def layer(values: Tensor, index: int) -> Tensor:
        (rows, columns), start = shapes[index], starts[index]
        weight = theta[start : start + rows * columns].reshape(rows, columns)
        return values @ weight.T + theta[start + rows * columns : start + rows * columns + rows]

    optimiser = torch.optim.Adam([theta], lr=0.01, eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda t: 0.5 * (1 + math.cos(math.pi * t / 3)))
    n = len(exact.y)
    for step in range(3):
        values = torch.tanh(layer(exact.x, 0))
        for index in (1, 2):
            uniform = tensor(found["numbers"][2 * step + index - 1]).reshape(-1, PADDED)[:, :n].T
            values = layer(values * (uniform < 1 - rate) / keep, index)
            values = torch.tanh(values) if index == 1 else values
        residual = (exact.y.reshape(-1) - values[:, 0]) / NOISE["gaussian"]
        loss = (0.5 * residual.square().sum() / TEMPERATURES[0] + 0.5 * (decay * theta.square()).sum()) / n
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    # Adam divides gradients by their size, so the error of a small one counts fully, up to the learning rate.
    torch.testing.assert_close(tensor(found["theta"]), theta.detach(), rtol=0, atol=1e-4)
    # Passes keep weights with probability `keep`, scaled to the same mean; biases and the first layer stay.
    passes, trained = tensor(found["passes"]).reshape(400, -1), tensor(found["theta"])
    ratio = passes / trained
    masked = torch.zeros(len(trained), dtype=torch.bool)
    for (rows, columns), start in list(zip(shapes, starts))[1:]:
        masked[start : start + rows * columns] = True
    assert bool((ratio[:, ~masked] == 1).all())
    torch.testing.assert_close(ratio[:, masked].amax(0), torch.full_like(trained[masked], 1 / keep))
    # 12 masked inputs, 400 passes: the kept fraction has a standard error of sqrt(0.3 0.7 / 4800) = 0.0066.
    columns = [starts[1] + i for i in range(7)] + [starts[2] + i for i in range(5)]
    assert float((ratio[:, columns] > 0).double().mean()) == pytest.approx(keep, abs=4 * 0.0066)


@needs_node
@pytest.mark.parametrize("name", CASES)
def test_predictions(name, answers):
    found, exact = answers["predictive"][list(CASES).index(name)], problem(name)
    # Draws of three chains in turn, [draw][chain].
    chains = points(name, 12).reshape(4, 3, -1).transpose(0, 1)
    posterior = cr.DrawsPosterior(cr.posterior.model.Model.of(exact), chains, cr.storage.record.Record(method="hmc"))
    p = posterior.predict(grid(name).double())
    for key in ("mean", "total", "aleatoric", "epistemic"):
        expected = getattr(p, key).flatten().double()
        torch.testing.assert_close(tensor(found[key]), expected, rtol=10 * CLOSE, atol=CLOSE)
    functions = tensor(found["functions"]).reshape(4, 3, -1).transpose(0, 1)
    expected = p.functions().double().reshape(functions.shape)
    torch.testing.assert_close(functions, expected, rtol=CLOSE, atol=CLOSE)
    # Of the module's own numbers: the two middle ones are equally far from the median, up to rounding.
    assert found["rhat"] == pytest.approx(float(rhat(functions).max()), rel=1e-9)
    if exact.likelihood.ordered:
        for key, end in zip(("lower", "upper"), p.interval(0.9)):
            torch.testing.assert_close(tensor(found[key]), end.flatten().double(), rtol=10 * CLOSE, atol=10 * CLOSE)
        at = posterior.predict(grid(name)[:1].double().expand(len(TARGETS), -1))
        density = at.log_prob(tensor(TARGETS)).exp().double()
        torch.testing.assert_close(tensor(found["density"]), density, rtol=1e-3, atol=CLOSE)


@needs_node
def test_plane_through_three_networks(answers):
    found, theta, exact = answers["slice"][0], points("gaussian", 3), problem("gaussian")
    corners = tensor(found["corners"])
    torch.testing.assert_close(torch.cdist(corners, corners), torch.cdist(theta, theta), rtol=1e-6, atol=1e-6)
    values = tensor([value["logDensity"] for value in found["values"]])
    torch.testing.assert_close(values, exact.log_density(theta), rtol=CLOSE, atol=0)
    # The gradient on the plane is that of all weights along the plane's axes, here the first.
    axis = (theta[1] - theta[0]) / (theta[1] - theta[0]).norm()
    slope = exact.log_density_and_grad(theta).gradient @ axis
    along = tensor([value["gradient"][0] for value in found["values"]])
    torch.testing.assert_close(along, slope, rtol=0, atol=CLOSE * float(slope.abs().max()) * 10)


@needs_node
def test_hmc_of_a_linear_model_against_its_exact_posterior(answers):
    found = answers["sample"][0]
    assert found["fine"]
    assert found["divergences"] == 0
    draws = tensor(found["draws"]).reshape(LINEAR["draws"], LINEAR["chains"], 2).transpose(0, 1)
    data = given("linear")
    features = torch.cat([tensor(data["x"]), torch.ones(len(data["x"]), 1, dtype=torch.float64)], 1)
    noise, prior = NOISE["gaussian"] ** 2, data["settings"]["priorScale"] ** 2
    covariance = torch.linalg.inv(features.T @ features / noise + torch.eye(2, dtype=torch.float64) / prior)
    mean = covariance @ features.T @ tensor(data["y"]) / noise
    # Four standard errors: one run in 8,000 would miss by chance, and the seed is fixed.
    assert bool(((draws.mean((0, 1)) - mean).abs() < 4 * mcse(draws)).all())
    assert bool(((draws.std((0, 1)) - covariance.diagonal().sqrt()).abs() < 4 * mcse(draws, "sd")).all())
    assert float(rhat(draws).max()) < 1.05


@needs_node
def test_hmc_of_a_network_against_the_library(answers):
    found = answers["sample"][1]
    assert found["fine"]
    functions = tensor(found["functions"]).reshape(DEEP["draws"], DEEP["chains"], -1).transpose(0, 1)
    same = problem("gaussian", torch.float32, temperatures=(1.0, 1.0))
    method = cr.HMC(chains=4, draws=200, warmup=100, init="fresh")
    fitted = method.fit(same, seed=1, progress=False)
    expected = fitted.predict(grid("gaussian")).functions().double().reshape(*functions.shape)
    error = (mcse(functions).square() + mcse(expected).square()).sqrt()
    gap = functions.mean((0, 1)) - expected.mean((0, 1))
    # Nine correlated inputs: 4.5 standard errors of each.
    assert float((gap / error).abs().max()) < 4.5
    spread = (mcse(functions, "sd").square() + mcse(expected, "sd").square()).sqrt()
    gap = functions.std((0, 1)) - expected.std((0, 1))
    assert float((gap / spread).abs().max()) < 4.5


# -- the committed file ------------------------------------------------------------------------------------------------
@functools.cache
def tool():
    spec = importlib.util.spec_from_file_location("build_wasm", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_module_has_its_digest():
    digest, name = MODULE.with_suffix(".wasm.sha256").read_text().split()
    assert (digest, name) == (hashlib.sha256(MODULE.read_bytes()).hexdigest(), MODULE.name)


def test_module_imports_nothing_and_is_small():
    assert MODULE.stat().st_size < 200_000
    content = MODULE.read_bytes()
    sections, at = [], 8
    while at < len(content):
        kind, at = content[at], at + 1
        size = shift = 0
        while True:
            byte, at = content[at], at + 1
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        sections.append(kind)
        at += size
    # Section 2 lists imports: without any, the module can reach nothing but its own memory.
    assert 2 not in sections


@needs_node
def test_build_gives_the_same_results(tmp_path, answers):
    lack = tool().missing()
    if lack:
        pytest.skip(f"the module cannot be built here: {lack}")
    built = tool().build(tmp_path / "built")
    if built.read_bytes() == MODULE.read_bytes():
        return
    # Another compiler: the same results up to rounding.
    calls = [c for c in requests() if c[0] in ("density", "trajectory", "predictive")]
    order = {name: iter(answers[name]) for name in ("density", "trajectory", "predictive")}
    for (name, _), found in zip(calls, call(calls, tmp_path, built)):
        expected = next(order[name])
        for key, value in expected.items():
            torch.testing.assert_close(tensor(found[key]), tensor(value), rtol=1e-4, atol=1e-5)
