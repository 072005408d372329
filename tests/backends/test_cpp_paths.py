"""Microcanonical paths in C++ against those in torch."""

import pytest
import torch
from torch import nn

import credibly as cr
from credibly.backends.cpp.library import library
from credibly.inference.target import to_target

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ backend is not available")


def sampler(dtype=torch.float64, *, adjusted=False, fan_in=True, integrator="minimum-error"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, 0]) + 0.2 * torch.randn(60, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)
    problem = cr.Problem(
        net, (x.to(dtype), y.to(dtype)), cr.likelihoods.Gaussian("learned"), cr.priors.Normal(1.5, fan_in=fan_in),
        temperature=cr.Tempering(1.3, 0.8),
    )  # fmt: skip
    settings = {"chains": 3, "draws": 4, "warmup": 40, "step_size": 0.3, "trajectory_length": 2.0, "init": "prior"}
    method = cr.MCLMC(adjusted=adjusted, integrator=integrator, compile=True, **settings)
    found = method.sampler(to_target(problem), 0)
    generator = torch.Generator().manual_seed(1)
    found.start(torch.randn(3, problem.dim, generator=generator, dtype=torch.float64).to(dtype))
    assert found.target.backend.name == "cpp"
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fan_in": False},
        {"adjusted": True},
        {"adjusted": True, "integrator": "leapfrog"},
    ],
    ids=["with noise", "equal prior scales", "without noise", "leapfrog"],
)
def test_a_path_equals_that_in_torch(settings):
    ours = sampler(**settings)
    state, size, steps = ours.state, 0.3, 9
    natively = ours._follow_native(state, size, steps, lambda: False)
    in_torch = ours._follow(state, size, steps, lambda: False)
    for mine, theirs in zip(natively[0], in_torch[0]):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    # Sums of energy errors and of their squares.
    for mine, theirs in zip(natively[1:], in_torch[1:]):
        assert float(theirs.abs().min()) > 1e-6
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def test_float32_paths_have_the_energy_errors_of_float64():
    single, double = (sampler(dtype, adjusted=True) for dtype in (torch.float32, torch.float64))
    start = double.state
    rounded = type(start)(*(v.float() if v.ndim == 2 else v for v in start))
    exact = double._follow_native(start, 0.3, 4, lambda: False)
    found = single._follow_native(rounded, 0.3, 4, lambda: False)
    torch.testing.assert_close(found[1], exact[1], rtol=1e-3, atol=1e-3)


def test_a_path_out_of_the_density_has_an_infinite_error():
    ours = sampler()
    error = ours._follow_native(ours.state, 1e160, 3, lambda: False)[1]
    assert bool((error == torch.inf).all())


def test_paths_do_not_depend_on_the_length_of_calls(monkeypatch):
    ours = sampler()
    whole = ours._follow_native(ours.state, 0.3, 8, lambda: False)
    monkeypatch.setattr(type(ours.target.backend.density), "steps_per_call", lambda self, chains: 3)
    parts = ours._follow_native(ours.state, 0.3, 8, lambda: False)
    assert all(torch.equal(a, b) for a, b in zip(whole[0], parts[0]))
    torch.testing.assert_close(whole[1], parts[1], rtol=1e-12, atol=1e-12)
