"""Shared fixtures: a model with a closed-form posterior, and the location of optional data."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os

# The problems are small, so threads cost more than they gain, here and in processes that tests start. OpenMP and
# OpenBLAS read these when they are loaded; with two threads each, two workers on two cores wait for one another.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
# torch's compiler takes the instruction sets that the processor reports, without compiling a program for each.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

from collections.abc import Iterator  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import credibly as cr  # noqa: E402
from credibly.backends.cpp import build, library  # noqa: E402
from tests import torchvision_operators  # noqa: E402

if TYPE_CHECKING:
    from credibly.demo.fits import DemoResult

torch.set_num_threads(1)

# The same examples in every run, so that results depend on the code only.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")

torchvision_operators.declare()


def pytest_configure(config: pytest.Config) -> None:
    """Compile the C++ library of a checkout whose sources have changed since it was installed."""
    if hasattr(config, "workerinput") or os.environ.get("CREDIBLY_NATIVE") == "0":
        return
    try:
        library.load(library.FOLDER)
    except library.Unusable:
        build.build(library.FOLDER, os.environ.get("CREDIBLY_VARIANTS", ""))


# Imports make hundreds of thousands of objects and hardly any garbage. Collections that walk through them while they
# are made and during every test, and copy them in every process that a test forks, would find nothing.
gc.disable()


@hypothesis.settings(max_examples=1, database=None)
@hypothesis.given(hypothesis.strategies.none())
def start_hypothesis(_: None) -> None:
    """Have hypothesis register its random generator, which it does with its first example.

    It searches for the references to the generator and warns if there are none. The search leaves out frozen objects:
    from Python 3.14 on, the dict that has the reference is one of them.
    """


def pytest_collection_finish() -> None:
    """Collect garbage from now on, except among what has been imported.

    The controller of xdist runs no tests and never gets here: it makes hardly any garbage.
    """
    start_hypothesis()
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 10, 20)  # torch's tracers make 100,000 objects at a time, of which few are garbage
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give workers long runs of consecutive tests, so that few fixtures of a module are set up in two of them."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


@dataclass(frozen=True)
class Conjugate:
    """Linear regression with known noise, whose (tempered) posterior has a closed form; in float64."""

    net: nn.Linear
    x: Tensor
    y: Tensor
    noise: float
    prior: float

    def problem(self, **kwargs: object) -> cr.Problem:
        return cr.Problem(
            self.net,
            data=(self.x, self.y),
            likelihood=cr.likelihoods.Gaussian(self.noise),
            prior=cr.priors.Normal(self.prior),
            **kwargs,
        )

    @property
    def design(self) -> Tensor:
        return torch.cat([self.x, torch.ones(len(self.x), 1, dtype=self.x.dtype)], 1)

    def exact(self, t_lik: float = 1.0, t_prior: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return mean (D,) and covariance (D, D) of the target density."""
        precision = self.design.T @ self.design / self.noise**2 / t_lik
        precision += torch.eye(self.design.shape[1], dtype=self.x.dtype) / self.prior**2 / t_prior
        covariance = torch.linalg.inv(precision)
        return covariance @ self.design.T @ self.y / self.noise**2 / t_lik, covariance


@pytest.fixture(scope="session")
def conjugate() -> Conjugate:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.3, 2.0]) + 0.5
    x[:, 2] += 0.8 * x[:, 0]  # correlated inputs: the posterior is not axis-aligned
    w = torch.tensor([1.5, -0.7, 0.2], dtype=torch.float64)
    y = x @ w + 0.9 + 0.5 * torch.randn(30, generator=generator, dtype=torch.float64)
    net = nn.Linear(3, 1).double()
    return Conjugate(net, x, y, noise=0.5, prior=0.7)


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate small networks in torch, without the C++ backend."""
    monkeypatch.setattr("credibly.backends.cpp.stack.library", lambda: None)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Put an empty SVG in place of every picture of a page, since matplotlib takes nine tenths of a small fit.

    For tests of everything but pictures, such as files and messages.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credibly.report.pictures._draw", lambda name, paint, size: "<svg></svg>")
        yield


@pytest.fixture(scope="class")
def no_drawing() -> Iterator[None]:
    """Draw no pictures in one test, or in all tests of a class."""
    with undrawn():
        yield


@pytest.fixture(scope="module")
def no_drawing_in_module() -> Iterator[None]:
    """Draw no pictures in a module, its fixtures included: those are set up before `no_drawing` is."""
    with undrawn():
        yield


@pytest.fixture(scope="session")
def quick_demo() -> DemoResult:
    """Return the quick demo of every method: half a minute of work, for all tests of the demo."""
    from credibly.demo.fits import run_demo

    return run_demo(quick=True)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the folder of real data is not at {folder}")
    return folder


def mlp(
    *sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32, activation: type[nn.Module] = nn.SiLU
) -> nn.Sequential:
    """Return a seeded MLP."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b), activation()]
        return nn.Sequential(*layers[:-1]).to(dtype)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
