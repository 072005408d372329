"""Steps on the module itself: the same weights as steps on the flat vector, and the settings that only they have."""

import copy

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.errors import InputError
from credibly.inference import module_leaves
from credibly.inference.training import loop, module_step
from credibly.likelihoods import Categorical, Gaussian

f64 = torch.float64
X = randn(40, 3, 6, 6, dtype=f64)
Y = (X.mean((1, 2, 3)) > 0).long()


class Tied(nn.Module):
    """A small convolutional network with a tied layer, an unused one and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.unused = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        h = self.norm(self.first(x)).relu().mean((2, 3)) * self.gain
        return self.head(self.b(torch.tanh(self.a(h))))


def problem(likelihood=None, prior=None, y=Y, **kwargs):
    torch.manual_seed(3)
    net = Tied().to(f64)
    return cr.Problem(net, (X, y), likelihood or Categorical(), prior or cr.priors.Normal(0.7, fan_in=True), **kwargs)


@pytest.fixture
def by_module(monkeypatch):
    """Make every network large; return the steps that were made."""
    made = []

    class Watched(module_step.ModuleStep):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    def switch(on):
        made.clear()
        monkeypatch.setattr(module_step, "LARGE", 1 if on else 10**9)
        monkeypatch.setattr(loop, "ModuleStep", Watched)
        return made

    return switch


CASES = {
    "map": (cr.MAP(steps=12, batch_size=16, compile=False), {}),
    "all rows": (cr.MAP(steps=8, batch_size=40, compile=False), {}),
    "mle, sgd": (cr.MLE(steps=12, batch_size=16, optimiser="sgd", lr=0.05, compile=False), {}),
    "plain sgd": (cr.MAP(steps=12, batch_size=16, optimiser="sgd", momentum=0.0, lr=0.05, compile=False), {}),
    "clipped": (cr.MAP(steps=12, batch_size=16, clip_norm=0.1, warmup=3, compile=False), {}),
    "moved prior": (cr.MAP(steps=12, batch_size=16, compile=False), {"prior": cr.priors.Normal(0.5, loc=0.3)}),
    "laplace prior": (cr.MAP(steps=12, batch_size=16, compile=False), {"prior": cr.priors.Laplace(0.5)}),
    "two priors": (
        cr.MAP(steps=12, batch_size=16, compile=False),
        {"prior": {"head.*": cr.priors.StudentT(), "*": cr.priors.Normal(2.0)}},
    ),
    "tempered, weighted": (
        cr.MAP(steps=12, batch_size=16, compile=False),
        {"temperature": 0.3, "sample_weight": torch.linspace(0.5, 2, 40)},
    ),
    "head alone": (cr.MAP(steps=12, batch_size=16, compile=False), {"random": "head.*"}),
    "learned noise": (
        cr.MAP(steps=12, batch_size=16, compile=False),
        {"likelihood": Gaussian("learned"), "y": randn(40, 2, dtype=f64)},
    ),
    "validation": (cr.MAP(steps=30, batch_size=8, validation=0.25, patience=2, lr=0.1, compile=False), {}),
    "ensemble": (cr.DeepEnsemble(members=3, steps=12, batch_size=16, compile=False), {}),
    "bootstrap": (cr.DeepEnsemble(members=2, steps=12, batch_size=16, bootstrap=True, compile=False), {}),
    "rotated": (
        cr.DeepEnsemble(members=3, steps=30, batch_size=8, validation=0.25, patience=2, lr=0.1, compile=False),
        {},
    ),
    "anchored": (
        cr.DeepEnsemble(members=2, steps=12, batch_size=16, anchored=True, compile=False),
        {"likelihood": Gaussian(0.4), "y": randn(40, 2, dtype=f64)},
    ),
    "swag": (cr.SWAG(steps=12, batch_size=8, sgd_lr=0.01, every=3, iterates=4, rank=3, compile=False), {}),
    "swag, averages": (cr.SWAG(steps=12, batch_size=8, every=3, iterates=4, rank=3, compile=False), {}),
}


def flat(posterior):
    return posterior.draws if hasattr(posterior, "draws") else posterior.phi


@pytest.mark.parametrize("case", CASES)
def test_module_steps_equal_flat_steps(case, by_module):
    method, options = CASES[case]
    assert not by_module(False)
    reference = method.fit(problem(**options), seed=1)
    made = by_module(True)
    found = method.fit(problem(**options), seed=1)
    assert made
    torch.testing.assert_close(flat(found), flat(reference), rtol=1e-7, atol=1e-9)
    history, expected = found.record.history, reference.record.history
    assert history["step"] == expected["step"]
    torch.testing.assert_close(torch.tensor(history["validation"]), torch.tensor(expected["validation"]))
    if case != "rotated":  # members that have stopped keep their last loss
        torch.testing.assert_close(torch.tensor(history["loss"]), torch.tensor(expected["loss"]))
        for name, values in expected["parts"].items():
            torch.testing.assert_close(torch.tensor(history["parts"][name]), torch.tensor(values))
