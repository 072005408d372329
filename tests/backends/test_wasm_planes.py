"""Convergence measures and densities of two variables of the WebAssembly module against the library, in node."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from credibly.diagnostics.convergence import ess, rhat
from credibly.inference.kernels.hmc import LEAPFROG
from wasm_module import call, needs_node


def random_draws() -> list[tuple[int, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    walk = torch.randn(4, 51, generator=generator, dtype=torch.float64).cumsum(1)
    ties = torch.randint(4, (3, 40), generator=generator).double()
    apart = torch.randn(2, 10, generator=generator, dtype=torch.float64) + torch.tensor([[0.0], [5.0]])
    return [(4, walk), (3, ties), (2, apart), (1, walk[:1, :8])]


DRAWS = random_draws()
POINTS = torch.tensor([[0.3, -0.2], [-1.5, 2.0], [2.1, 0.4]], dtype=torch.float64)
ORBIT = {"start": [0.4, -0.3], "momentum": [0.7, -1.1], "stepSize": 0.1, "length": 1.15}


def modes(w: Tensor) -> Tensor:
    left, right = (-((w[0] - m) ** 2 + w[1] ** 2) / (2 * 0.6**2) for m in (-2.0, 2.0))
    return torch.logaddexp(left, right) - math.log(2)


SHAPES = {
    "banana": lambda w: -(w[0] ** 2) / 2 - 2 * (w[1] - w[0] ** 2 / 2 + 1) ** 2,
    "funnel": lambda w: -(w[1] ** 2) / (2 * 1.5**2) - w[0] ** 2 / (2 * torch.exp(w[1])) - w[1] / 2,
    "modes": modes,
}


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The results of all requests, by name and in order, from one run of node."""
    calls: list[tuple[str, dict]] = []
    for chains, values in DRAWS:
        calls.append(("convergence", {"chains": chains, "values": values.flatten().tolist()}))
    for name in SHAPES:
        calls.append(("plane", {"name": name, "points": POINTS.tolist()}))
        calls.append(("orbit", {"name": name, **ORBIT}))
        calls.append(("surface", {"name": name, "x": [-1, 2, 4], "y": [0, 1, 3]}))
    found: dict[str, list] = {}
    for (name, _), result in zip(calls, call(calls, tmp_path_factory.mktemp("wasm")), strict=True):
        found.setdefault(name, []).append(result)
    return found


@needs_node
@pytest.mark.parametrize("index", range(len(DRAWS)))
def test_convergence_is_that_of_the_library(index, answers):
    found, (_, values) = answers["convergence"][index], DRAWS[index]
    assert found["rhat"] == pytest.approx(float(rhat(values)), rel=1e-9)
    assert found["ess"] == pytest.approx(float(ess(values)), rel=1e-9)


@needs_node
@pytest.mark.parametrize("name", SHAPES)
def test_densities_of_two_variables(name, answers):
    for found, point in zip(answers["plane"][list(SHAPES).index(name)], POINTS):
        point = point.clone().requires_grad_()
        value = SHAPES[name](point)
        (gradient,) = torch.autograd.grad(value, point)
        assert found["logDensity"] == pytest.approx(value.item(), rel=1e-12)
        torch.testing.assert_close(tensor(found["gradient"]), gradient, rtol=1e-12, atol=1e-12)
    # On a grid, x varies fastest.
    at = [tensor([x, y]) for y in (0.0, 0.5, 1.0) for x in (-1.0, 0.0, 1.0, 2.0)]
    surface = tensor(answers["surface"][list(SHAPES).index(name)])
    torch.testing.assert_close(surface, torch.stack([SHAPES[name](w) for w in at]), rtol=1e-12, atol=1e-12)


@needs_node
@pytest.mark.parametrize("name", SHAPES)
def test_recorded_trajectory(name, answers):
    found = answers["orbit"][list(SHAPES).index(name)]

    def evaluate(w: Tensor) -> tuple[Tensor, Tensor]:
        w = w.detach().requires_grad_()
        value = SHAPES[name](w[0])
        return value.detach().reshape(1), torch.autograd.grad(value, w)[0]

    theta, momentum = tensor([ORBIT["start"]]), tensor([ORBIT["momentum"]])
    value, gradient = evaluate(theta)
    start = float(momentum.square().sum() / 2 - value)
    path, errors = [theta], [0.0]
    for _ in range(12):
        size = torch.full((1, 1), ORBIT["stepSize"], dtype=torch.float64)
        theta, momentum, gradient, value = LEAPFROG.step(theta, momentum, gradient, size, None, evaluate)
        path.append(theta)
        errors.append(float(momentum.square().sum() / 2 - value) - start)
    torch.testing.assert_close(tensor(found["path"]), torch.cat(path), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(tensor(found["energyError"]), tensor(errors), rtol=0, atol=1e-11)
    assert found["acceptance"] == pytest.approx(min(1.0, math.exp(-errors[-1])), rel=1e-9)
    assert found["accepted"] == (found["acceptance"] > 0.5)
