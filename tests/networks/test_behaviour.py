"""Networks that are no functions of weights and inputs are refused when the problem is built."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credibly as cr
from conftest import randn


def problem(net, x=None):
    x = randn(6, 2) if x is None else x
    return cr.Problem(net, (x, randn(6, 1, seed=1)), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))


class Changed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.body, self.change = nn.Linear(2, 1), change

    def forward(self, x):
        return self.body(self.change(x))


IN_PLACE = {
    "subtraction": Changed(lambda x: x.sub_(1)),
    "assignment": Changed(lambda x: x.__setitem__(0, 0.0) or x),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_networks_that_edit_their_input_are_refused_and_the_data_stay(name):
    x = randn(6, 2)
    before = x.clone()
    with pytest.raises(cr.InputError, match=r"net: edits its input in place: x changed.*x\.clone\(\)"):
        problem(IN_PLACE[name], x)
    assert torch.equal(x, before)


def test_in_place_operations_on_own_tensors_are_fine():
    x = randn(6, 2)
    before = x.clone()
    # Modules are copied with inplace=False.
    made = problem(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1)), x)
    cr.MAP(steps=2, compile=False).fit(made).predict(x).mean  # noqa: B018 - a property that computes
    assert torch.equal(x, before)
    assert problem(nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))).n == 6


RANDOM = {
    "functional dropout": Changed(F.dropout),
    "noise": Changed(lambda x: x + torch.randn_like(x)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_networks_are_refused(name):
    with pytest.raises(cr.InputError, match="net: is not deterministic: two passes over the same rows differ by up to"):
        problem(RANDOM[name])


def test_dropout_modules_are_off_in_evaluation_and_accepted():
    assert problem(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))).n == 6
    assert problem(Changed(lambda x: F.dropout(x, training=False))).n == 6
