"""The CUDA kernel for small networks, emulated on a CPU with one thread per CUDA thread, against torch."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import credibly as cr
from credibly.backends.cpp.likelihood import noise_scales
from credibly.backends.cuda import api, spec
from credibly.backends.cuda.density import CudaDensity
from credibly.inference.kernels.hmc import INTEGRATORS
from credibly.inference.target import ProblemTarget

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
HERE = Path(__file__).parent
ENTRY = """
extern "C" void emulated(int blocks, size_t shared, const Arguments* args) {
  launch(blocks, THREADS, shared, trajectories, *args);
}
extern "C" int arguments_size() { return sizeof(Arguments); }
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


def spec_of(given: cr.Problem) -> spec.KernelSpec | None:
    return spec.kernel_spec(given.forward.small_stack, given.layout, given.x, given.y, given.likelihood, given.prior)


FLAGS = ("-O1", "-std=c++20", "-fPIC", "-pthread", "-Wno-unknown-pragmas")


@pytest.fixture(scope="module", autouse=True)
def header(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile the header of the emulation once: it takes most of the time of a kernel."""
    Emulated.header = tmp_path_factory.mktemp("emulation") / "emulated_cuda.h"
    shutil.copy(HERE / "emulated_cuda.h", Emulated.header)
    words = ["g++", *FLAGS, "-x", "c++-header", str(Emulated.header), "-o", f"{Emulated.header}.gch"]
    subprocess.run(words, check=True, timeout=300)


class Emulated(CudaDensity):
    """The kernel without a GPU, with the given warps per block and blocks per chain."""

    header: ClassVar[Path]

    def __init__(self, given: cr.Problem, folder: Path, warps: int, blocks: int, integrator: str) -> None:
        found = spec_of(given)
        assert found is not None
        target = ProblemTarget(given)
        scales = noise_scales(given.likelihood, given.layout, found.targets)[0]
        self.prepare(found, given.x, given.y, given.prior, target.weights, scales)
        self.warps, self.blocks = warps, blocks
        drifts = len(INTEGRATORS[integrator].drifts)
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        text = found.source(warps, blocks, drifts)
        source.write_text(f'#include "{self.header}"\n{text}\n{ENTRY}')
        subprocess.run(["g++", *FLAGS, "-shared", "-o", str(library), str(source)], check=True, timeout=300)
        self.library = ctypes.CDLL(str(library))

    def _launch(self, state: dict[str, Tensor], kicks: Any, drifts: Any) -> None:
        arguments = self.arguments(state, kicks, drifts, self.blocks)
        blocks, shared = ctypes.c_int(len(state["theta"]) * self.blocks), ctypes.c_size_t(self.spec.shared(self.warps))
        self.library.emulated(blocks, shared, ctypes.byref(arguments))


CASES = [
    # likelihood, hidden, rows, inputs, activation, dtype, warps, blocks, integrator
    pytest.param(("gaussian", (5,), 40, 3, "silu", torch.float64, 1, 1, "leapfrog"), marks=pytest.mark.nightly),
    ("gaussian", (50,), 70, 13, "silu", torch.float32, 2, 1, "leapfrog"),
    ("learned", (7, 6), 70, 4, "tanh", torch.float64, 2, 1, "minimum-error"),
    ("two", (33,), 33, 2, "sigmoid", torch.float64, 1, 1, "leapfrog"),
    ("each", (10, 40), 100, 5, "relu", torch.float64, 1, 2, "leapfrog"),
    ("heteroscedastic", (9,), 64, 34, "silu", torch.float64, 1, 2, "leapfrog"),
    ("categorical", (12, 3), 90, 6, "silu", torch.float64, 2, 1, "leapfrog"),
    ("bernoulli", (), 45, 6, "silu", torch.float64, 1, 1, "leapfrog"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_density_and_trajectories_match_torch(case: tuple[Any, ...], tmp_path: Path) -> None:
    name, hidden, rows, inputs, activation, dtype, warps, blocks, integrator = case
    given = problem(name, hidden, rows, inputs, activation, dtype, bias=name != "two")
    target, scheme = ProblemTarget(given), INTEGRATORS[integrator]
    density = Emulated(given, tmp_path, warps, blocks, integrator)
    generator = torch.Generator().manual_seed(2)
    theta = 0.5 * torch.randn(2, target.dim, generator=generator, dtype=dtype)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    value, gradient = target.likelihood_and_grad(theta)
    if integrator == "leapfrog":  # an evaluation is launched with the stages of leapfrog
        found = density.likelihood_and_grad(theta)
        assert torch.allclose(found[0], value, rtol=tolerance, atol=0)
        assert torch.allclose(found[1], gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max()))
    momentum = torch.randn(2, target.dim, generator=generator, dtype=dtype)
    size, mass = torch.tensor([1e-3, 2e-3], dtype=dtype), 0.5 + torch.rand(target.dim, generator=generator, dtype=dtype)
    steps = [3, 1]
    moved = [theta.clone(), momentum.clone(), gradient.clone(), torch.zeros(2, dtype=torch.float64)]
    density.run(moved, size, mass, steps, scheme.coefficients)
    for c in range(2):
        state = (theta[c : c + 1], momentum[c : c + 1], gradient[c : c + 1])
        for _ in range(steps[c]):
            step_size = size[c].reshape(1, 1)
            *state, lik = scheme.step(*state, step_size, mass, target.likelihood_and_grad)  # type: ignore[assignment]
        for mine, theirs in zip(moved, (*state, lik)):
            scale = float(theirs.abs().max())
            assert torch.allclose(mine[c], theirs[0], rtol=tolerance, atol=10 * tolerance * scale)


def fields_in_source(source: str) -> list[str]:
    """Names of the fields of `Arguments` in api.cu, in order."""
    body = source.split("struct Arguments {")[1].split("};")[0]
    return [re.findall(r"(\w+)(?:\[.*\])?;", line)[0] for line in body.strip().splitlines()]


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_arguments_struct_matches_the_one_in_the_kernel(integrator: str, tmp_path: Path) -> None:
    given = problem("gaussian", (3,), 20, 2, "silu", torch.float32)
    density = Emulated(given, tmp_path, 1, 1, integrator)
    struct = api.arguments_struct(len(INTEGRATORS[integrator].drifts))
    assert ctypes.sizeof(struct) == density.library.arguments_size()
    assert [field[0] for field in struct._fields_] == fields_in_source(spec.SOURCES[0].read_text())


def test_a_chain_is_bit_for_bit_identical_alone_and_beside_another(tmp_path: Path) -> None:
    given = problem("gaussian", (6,), 100, 3, "silu", torch.float32)
    density = Emulated(given, tmp_path, 2, 2, "leapfrog")
    theta = torch.randn(2, given.dim, generator=torch.Generator().manual_seed(3))
    together, alone = density.likelihood_and_grad(theta), density.likelihood_and_grad(theta[1:])
    assert torch.equal(together[0][1:], alone[0])
    assert torch.equal(together[1][1:], alone[1])


def test_unsupported_problems_are_left_to_torch() -> None:
    def found(net: torch.nn.Module, prior: Any = None) -> Any:
        data = (torch.randn(8, 2), torch.randn(8, 1))
        given = cr.Problem(net, data, cr.likelihoods.Gaussian(scale=1.0), prior or cr.priors.Normal(1.0))
        return spec_of(given)

    assert found(cr.zoo.mlp(2, (5,), 1)) is not None
    assert found(cr.zoo.mlp(2, (5,), 1), cr.priors.Laplace(1.0)) is None
    assert found(cr.zoo.mlp(2, (100, 100), 1)) is None  # too many gradient sums for the registers of a lane
    assert found(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))) is None
    assert found(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Tanh())) is None


@pytest.mark.parametrize("hidden, rows, inputs", [((50,), 455, 13), ((50, 50), 7000, 8), ((5,), 20, 3)])
def test_plan_gives_every_row_a_warp_and_fits_the_device(hidden: tuple[int, ...], rows: int, inputs: int) -> None:
    given = problem("gaussian", hidden, rows, inputs, "silu", torch.float32)
    found = spec_of(given)
    assert found is not None
    density = CudaDensity.__new__(CudaDensity)
    density.spec, density.padded, density._plans = found, -(-rows // 32) * 32, {}
    density.multiprocessors, density.max_shared = 132, 232_448
    for chains in (1, 2, 3, 16, 100, 132, 133, 512):
        warps, blocks = density.plan(chains)
        assert found.shared(warps) <= density.max_shared
        assert blocks == 1 or chains * blocks <= density.multiprocessors  # blocks that synchronise run at the same time
        assert warps <= spec.MAX_WARPS
        assert 32 * warps * (blocks - 1) < rows  # no block without rows
    used = [density.plan(chains)[1] for chains in (1, 16, 512)]
    assert used == sorted(used, reverse=True)
    assert used[-1] == 1


def test_blocks_that_synchronise_have_helper_warps(tmp_path: Path) -> None:
    given = problem("gaussian", (40,), 300, 12, "silu", torch.float64)  # more slots per block than a warp has lanes
    target, density = ProblemTarget(given), Emulated(given, tmp_path, 1, 10, "leapfrog")
    assert spec.block_warps(1, 10) == spec.MIN_BLOCK_WARPS < 10
    theta = torch.randn(1, given.dim, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    value, gradient = target.likelihood_and_grad(theta)
    found = density.likelihood_and_grad(theta)
    assert torch.allclose(found[0], value, rtol=1e-11, atol=0)
    assert torch.allclose(found[1], gradient, rtol=1e-11, atol=1e-11 * float(gradient.abs().max()))
