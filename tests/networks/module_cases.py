"""A registry of small networks of many kinds, each with data, and what every method is expected to do with it.

`tests/networks/test_module_table.py` fits every network by every method, `tools/module_table.py` writes the table of
the documentation from the same registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import credibly as cr

ROWS = 6
SAMPLING = {"chains": 2, "draws": 2, "warmup": 2, "init": "fresh", "compile": False, "step_size": 1e-4}
# The quickest settings that run everything a longer fit would.
QUICK: dict[str, dict[str, Any]] = {
    "mle": {"steps": 2},
    "map": {"steps": 2},
    "ensemble": {"members": 2, "steps": 2, "batch_size": 4},
    "dropout": {"steps": 2, "insert": "*"},
    "bbb": {"steps": 2, "batch_size": 4},
    "ivon": {"steps": 2, "batch_size": 4},
    "laplace": {"steps": 2},
    "swag": {"steps": 2, "rank": 2, "iterates": 2, "every": 1},
    "hmc": {**SAMPLING, "trajectory_length": 2e-4},
    "nuts": {**SAMPLING, "max_depth": 1},
    "chees": {**SAMPLING, "warmup": 20, "max_steps": 1},
    "mclmc": {**SAMPLING, "trajectory_length": 2e-4},
    "tempering": {**SAMPLING, "temperatures": (1.0, 2.0), "trajectory_length": 2e-4},
    "mile": {**SAMPLING, "trajectory_length": 2e-4, "init": "ensemble", "start_steps": 2},
    "sgld": {**SAMPLING, "thin": 1, "batch_size": 4},
    "sghmc": {**SAMPLING, "thin": 1, "batch_size": 4},
}
WORKS = "works"


@dataclass(frozen=True)
class Case:
    """One network with data.

    Attributes:
        name: as the table shows it.
        build: returns the network, x, y and the likelihood.
        options: further arguments of the problem.
        refused: the word that every method's refusal contains, if the problem is refused; "" if it is not.
        exceptions: methods that differ from the rest: the word that their refusal contains, or "works".
        settings: settings of methods that this network needs.
        note: a remark for the table.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Any, Tensor, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    exceptions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    note: str = ""

    def expected(self, method: str) -> str:
        """Return "works", or the word that the refusal of a method has to contain."""
        return self.exceptions.get(method, self.refused or WORKS)

    def problem(self) -> cr.Problem:
        """Build the network, from a fixed seed, and its problem."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net, x, y, likelihood = self.build()
        return cr.Problem(net, data=(x, y), likelihood=likelihood, prior=cr.priors.Normal(), **self.options)

    def fit(self, method: str, problem: cr.Problem) -> Any:
        """Fit the network by a method with the quickest settings, and return the predictive at its own inputs."""
        settings = {**QUICK[method], **self.settings.get(method, {})}
        return cr.METHODS[method](**settings).fit(problem, seed=0, progress=False).predict(problem.x)


CASES: dict[str, Case] = {}


def case(name: str, **facts: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function that builds a network."""

    def add(build: Callable[[], Any]) -> Callable[[], Any]:
        assert name not in CASES
        CASES[name] = Case(name, build, **facts)
        return build

    return add


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers from a fixed seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(features: int = 3) -> tuple[Tensor, Tensor]:
    """Return x (ROWS, features) and real targets (ROWS,)."""
    return noise(ROWS, features), noise(ROWS, seed=1)


def labels(classes: int = 3) -> Tensor:
    """Return labels (ROWS,), every class among them."""
    return torch.arange(ROWS) % classes


def tokens(length: int = 5, vocabulary: int = 7) -> Tensor:
    """Return integer tokens (ROWS, length)."""
    return torch.randint(vocabulary, (ROWS, length), generator=torch.Generator().manual_seed(2))


def images(channels: int = 2, side: int = 8) -> Tensor:
    """Return images (ROWS, channels, side, side)."""
    return noise(ROWS, channels, side, side)


def regression(net: nn.Module, x: Any = None) -> tuple[nn.Module, Any, Tensor, Any]:
    """Return a regression problem, on three features unless x is given."""
    own, y = rows()
    return net, own if x is None else x, y, cr.likelihoods.Gaussian(1.0)


def classification(net: nn.Module, x: Any, classes: int = 3) -> tuple[nn.Module, Any, Tensor, Any]:
    """Return a classification problem."""
    return net, x, labels(classes), cr.likelihoods.Categorical()
