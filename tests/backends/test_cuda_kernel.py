"""The CUDA kernel for small networks, run on a processor: a thread for each of its threads, against the density by torch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import credibly as cr
from credibly.backends.cpp.density import noise_scales
from credibly.backends.cuda import density as gpu
from credibly.inference.kernels.hmc import INTEGRATORS
from credibly.inference.target import ProblemTarget

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
HERE = Path(__file__).parent
ENTRY = """
extern "C" void emulated(int blocks, size_t shared, Data* data, REAL* theta, REAL* momentum, REAL* gradient, double* log_likelihood,
                         const REAL* size, const REAL* inverse_mass, const int* steps, REAL* partial, double* values, unsigned* counters) {
  launch(blocks, THREADS, shared, trajectories, *data, theta, momentum, gradient, log_likelihood, size, inverse_mass, steps, partial,
         values, counters);
}
"""
LIKELIHOODS: dict[str, Any] = {
    "gaussian": cr.likelihoods.Gaussian(scale=0.5),
    "learned": cr.likelihoods.Gaussian(scale="learned"),
    "two": cr.likelihoods.Gaussian(scale=(0.5, 2.0)),
    "each": cr.likelihoods.Gaussian(scale="learned", per_target=True),
    "heteroscedastic": cr.likelihoods.HeteroscedasticGaussian(),
    "categorical": cr.likelihoods.Categorical(),
    "bernoulli": cr.likelihoods.Bernoulli(),
}


def problem(
    name: str, hidden: tuple[int, ...], rows: int, inputs: int, activation: str, dtype: torch.dtype, bias: bool = True
) -> cr.Problem:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, inputs, generator=generator, dtype=dtype)
    targets = 2 if name in ("two", "each") else 1
    outputs = {"heteroscedastic": 2, "categorical": 3}.get(name, targets)
    y: Tensor = torch.randn(rows, targets, generator=generator, dtype=dtype)
    if name == "categorical":
        y = torch.randint(3, (rows,), generator=generator)
    if name == "bernoulli":
        y = torch.randint(2, (rows, 1), generator=generator).to(dtype)
    net = cr.zoo.mlp(inputs, hidden, outputs, activation).to(dtype)
    if not bias:
        net[0] = torch.nn.Linear(inputs, hidden[0], bias=False, dtype=dtype)
    temperature = cr.Tempering(likelihood=2.0, prior=0.5)
    return cr.Problem(net, (x, y), LIKELIHOODS[name], cr.priors.Normal(0.7), temperature=temperature)


class Emulated(gpu.GpuDensity):
    """The kernel without a GPU, with so many warps and blocks."""

    def __init__(self, given: cr.Problem, folder: Path, warps: int, group: int, integrator: str) -> None:
        form = gpu.form_of(given.forward.small, given.layout, given.x, given.y, given.likelihood, given.prior)
        assert form is not None
        target = ProblemTarget(given)
        scales = noise_scales(given.likelihood, given.layout, form.targets)[0]
        self.prepare(form, given.x, given.y, given.prior, target.weights, scales)
        self.warps, self.group = warps, group
        drifts = len(INTEGRATORS[integrator].drifts)
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        text = form.source(warps, group, drifts)
        source.write_text(f'#include "{HERE / "emulated_cuda.h"}"\n{text}\n{ENTRY}')
        flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
        subprocess.run(["g++", *flags, "-o", str(library), str(source)], check=True, timeout=300)
        self.function = ctypes.CDLL(str(library)).emulated

    def _launch(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, log_likelihood: Tensor, size: Tensor, inverse_mass: Tensor | None,
        steps: Any, kicks: Any, drifts: Any,
    ) -> None:  # fmt: skip
        room = self._room(len(theta), self.group)
        data, places, kept = self.arguments(
            theta, momentum, gradient, log_likelihood, size, inverse_mass, steps, kicks, drifts, room
        )
        blocks, shared = ctypes.c_int(len(theta) * self.group), ctypes.c_size_t(self.form.shared(self.warps))
        self.function(blocks, shared, ctypes.byref(data), *places)
        assert kept


CASES = [
    # likelihood, hidden, rows, inputs, activation, dtype, warps, blocks, integrator
    ("gaussian", (5,), 40, 3, "silu", torch.float64, 1, 1, "leapfrog"),
    ("gaussian", (50,), 70, 13, "silu", torch.float32, 2, 1, "leapfrog"),
    ("learned", (7, 6), 70, 4, "tanh", torch.float64, 2, 1, "minimum-error"),
    ("two", (33,), 33, 2, "sigmoid", torch.float64, 1, 1, "leapfrog"),
    ("each", (10, 40), 100, 5, "relu", torch.float64, 1, 2, "leapfrog"),
    ("heteroscedastic", (9,), 64, 34, "silu", torch.float64, 1, 2, "leapfrog"),
    ("categorical", (12, 3), 90, 6, "silu", torch.float64, 2, 1, "leapfrog"),
    ("bernoulli", (), 45, 6, "silu", torch.float64, 1, 1, "leapfrog"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_kernel_has_the_density_and_the_trajectories_of_torch(case: tuple[Any, ...], tmp_path: Path) -> None:
    name, hidden, rows, inputs, activation, dtype, warps, group, integrator = case
    given = problem(name, hidden, rows, inputs, activation, dtype, bias=name != "two")
    target, scheme = ProblemTarget(given), INTEGRATORS[integrator]
    density = Emulated(given, tmp_path, warps, group, integrator)
    generator = torch.Generator().manual_seed(2)
    theta = 0.5 * torch.randn(2, target.dim, generator=generator, dtype=dtype)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    value, gradient = target.likelihood_and_grad(theta)
    if integrator == "leapfrog":  # an evaluation has the stages of a leapfrog
        found = density.likelihood_and_grad(theta)
        assert torch.allclose(found[0], value, rtol=tolerance, atol=0)
        assert torch.allclose(found[1], gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max()))
    momentum = torch.randn(2, target.dim, generator=generator, dtype=dtype)
    size, mass = torch.tensor([1e-3, 2e-3], dtype=dtype), 0.5 + torch.rand(target.dim, generator=generator, dtype=dtype)
    steps = [3, 1]
    moved = [theta.clone(), momentum.clone(), gradient.clone(), torch.zeros(2, dtype=torch.float64)]
    density.run(*moved, size, mass, steps, scheme.kicks, scheme.drifts)
    for c in range(2):
        state = (theta[c : c + 1], momentum[c : c + 1], gradient[c : c + 1])
        for _ in range(steps[c]):
            *state, lik = scheme.step(*state, size[c].reshape(1, 1), mass, target.likelihood_and_grad)  # type: ignore[assignment]
        for mine, theirs in zip(moved, (*state, lik)):
            scale = float(theirs.abs().max())
            assert torch.allclose(mine[c], theirs[0], rtol=tolerance, atol=10 * tolerance * scale)


def test_a_chain_has_the_same_bits_alone_and_beside_another(tmp_path: Path) -> None:
    given = problem("gaussian", (6,), 100, 3, "silu", torch.float32)
    density = Emulated(given, tmp_path, 2, 2, "leapfrog")
    theta = torch.randn(2, given.dim, generator=torch.Generator().manual_seed(3))
    together, alone = density.likelihood_and_grad(theta), density.likelihood_and_grad(theta[1:])
    assert torch.equal(together[0][1:], alone[0])
    assert torch.equal(together[1][1:], alone[1])


def test_what_the_kernel_does_not_know_is_left_to_torch() -> None:
    def form(net: torch.nn.Module, prior: Any = None) -> Any:
        data = (torch.randn(8, 2), torch.randn(8, 1))
        given = cr.Problem(net, data, cr.likelihoods.Gaussian(scale=1.0), prior or cr.priors.Normal(1.0))
        return gpu.form_of(given.forward.small, given.layout, given.x, given.y, given.likelihood, given.prior)

    assert form(cr.zoo.mlp(2, (5,), 1)) is not None
    assert form(cr.zoo.mlp(2, (5,), 1), cr.priors.Laplace(1.0)) is None
    assert form(cr.zoo.mlp(2, (100, 100), 1)) is None  # too many sums for the registers of a lane
    assert form(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))) is None
    assert form(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Tanh())) is None


@pytest.mark.parametrize("hidden, rows, inputs", [((50,), 455, 13), ((50, 50), 7000, 8), ((5,), 20, 3)])
def test_plan_gives_every_row_a_warp_and_asks_for_no_more_than_there_is(
    hidden: tuple[int, ...], rows: int, inputs: int
) -> None:
    given = problem("gaussian", hidden, rows, inputs, "silu", torch.float32)
    form = gpu.form_of(given.forward.small, given.layout, given.x, given.y, given.likelihood, given.prior)
    assert form is not None
    density = gpu.GpuDensity.__new__(gpu.GpuDensity)
    density.form, density.padded, density._plans = form, -(-rows // 32) * 32, {}
    density.processors, density.most_shared = 132, 232_448
    for chains in (1, 2, 3, 16, 100, 132, 133, 512):
        warps, group = density.plan(chains)
        assert form.shared(warps) <= density.most_shared
        assert group == 1 or chains * group <= density.processors  # blocks that meet have to run at the same time
        assert warps <= gpu.MOST_WARPS
        assert 32 * warps * (group - 1) < rows  # no block without rows
    busy = [density.plan(chains)[1] for chains in (1, 16, 512)]
    assert busy == sorted(busy, reverse=True)
    assert busy[-1] == 1


def test_blocks_that_meet_have_helpers_that_add_up(tmp_path: Path) -> None:
    given = problem("gaussian", (40,), 300, 12, "silu", torch.float64)  # more slots than a share of a warp
    target, density = ProblemTarget(given), Emulated(given, tmp_path, 1, 10, "leapfrog")
    assert gpu.team(1, 10) == gpu.HELPERS < 10
    theta = torch.randn(1, given.dim, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    value, gradient = target.likelihood_and_grad(theta)
    found = density.likelihood_and_grad(theta)
    assert torch.allclose(found[0], value, rtol=1e-11, atol=0)
    assert torch.allclose(found[1], gradient, rtol=1e-11, atol=1e-11 * float(gradient.abs().max()))
