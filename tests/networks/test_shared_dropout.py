"""Dropout layers that a forward pass calls several times have a mask for each call."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import credibly as cr
from conftest import randn
from credibly.networks.dropout_masks import DROPOUT, find_sites, masked_copy
from credibly.networks.shared_dropout import shared_dropout

X, Y = randn(12, 3), randn(12, 1, seed=1)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 1)
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        x = self.drop(torch.tanh(self.a(x)))
        return self.c(self.drop(torch.tanh(self.b(x))))


class Positions(nn.Module):
    """Dropout of a tensor that all rows share, beside an ordinary one."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(randn(5, 3))
        self.of_positions, self.of_rows, self.head = nn.Dropout(0.2), nn.Dropout(0.3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.of_rows(x.unsqueeze(1) + self.of_positions(self.positions)).mean(1))


class Growing(nn.Module):
    """Drops every step of a sequence by one layer."""

    def __init__(self):
        super().__init__()
        self.cell, self.drop = nn.Linear(2, 2), nn.Dropout(0.3)

    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            h = self.drop(torch.tanh(self.cell(h + step)))
        return h


def problem(net, x=X, y=Y, **options):
    torch.manual_seed(0)
    return cr.Problem(net(), (x, y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0), **options)


def test_every_call_has_its_own_mask():
    net = Shared().eval()
    calls = shared_dropout(net, DROPOUT, X)
    assert calls == {"drop": 2}
    module, rates = masked_copy(net, None, None, shared=calls)
    sites, shapes = find_sites(module, rates, X)
    assert [(s.name, s.layer, s.weights) for s in sites] == [
        ("drop.0", "drop", ("b.weight",)),
        ("drop.1", "drop", ("c.weight",)),
    ]
    assert shapes == {"drop.0": (5,), "drop.1": (4,)}
    first, second = (torch.rand(1, n) for n in (5, 4))
    found = functional_call(module, {"drop.0.mask": first, "drop.1.mask": second}, X)
    expected = net.c(torch.tanh(net.b(torch.tanh(net.a(X)) * first)) * second)
    torch.testing.assert_close(found, expected)


def test_a_pass_that_failed_does_not_shift_the_masks():
    net = Shared().eval()
    module, _ = masked_copy(net, None, None, shared={"drop": 2})
    with pytest.raises(RuntimeError):
        module.b.forward(module.drop(X))  # the second call never comes
    masks = {"drop.0.mask": torch.zeros(1, 5), "drop.1.mask": torch.ones(1, 4)}
    torch.testing.assert_close(functional_call(module, masks, X), functional_call(module, masks, X[:1]).expand(12, 1))


@pytest.mark.parametrize(
    "method",
    [cr.MCDropout(steps=5), cr.MCDropout(steps=5, rate={"drop": 0.2}), cr.MCDropout(steps=5, rate=(0.1, 0.2))],
    ids=["own", "by layer", "grid"],
)
def test_they_fit_and_load(method, tmp_path):
    posterior = method.fit(problem(Shared), seed=0, progress=False)
    assert list(posterior.rates) == ["drop.0", "drop.1"]
    if isinstance(method.rate, dict):
        assert list(posterior.rates.values()) == pytest.approx([0.2, 0.2])
    posterior.save(tmp_path / "run")
    again = cr.load(tmp_path / "run", Shared())
    assert torch.equal(again.predict(X).mean, posterior.predict(X).mean)
    assert posterior.predict(X).epistemic.min() > 0


def test_activations_are_only_kept_if_all_calls_come_after_the_body():
    method = cr.MCDropout(steps=2)
    assert not method.takes_activations(problem(Shared, random="c.*"))
    assert method.fit(problem(Shared, random="c.*"), seed=0, progress=False).rates.keys() == {"drop.0", "drop.1"}


def test_more_calls_than_in_the_fit_are_refused():
    x = randn(12, 3, 2)
    posterior = cr.MCDropout(steps=2).fit(problem(Growing, x, Y.expand(12, 2)), seed=0, progress=False)
    assert posterior.predict(x[:, :2]).mean.shape == (12, 2)
    with pytest.raises(cr.InputError, match="'drop' is called more often than in the fit"):
        posterior.predict(randn(12, 4, 2))


def test_dropout_without_an_axis_of_rows_stays_off_and_is_listed():
    posterior = cr.MCDropout(steps=2).fit(problem(Positions), seed=0, progress=False)
    assert list(posterior.rates) == ["of_rows"]
    assert posterior.record.history["dropout_off"] == {"no axis of rows": ["of_positions"]}
