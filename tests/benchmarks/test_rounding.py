"""The tolerance of reduced precision: exact where nothing is cut, of the size of the format where it is."""

import pytest
import torch
from torch import nn

import credibly as cr
from benchmarks import rounding
from conftest import randn


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(5 * 16, 3)).double()
    return net, (randn(8, 2, 6, 6, dtype=torch.float64), torch.arange(8) % 3)


def test_mantissas_are_cut():
    values = torch.tensor([1 + 2**-10 + 2**-11, -(1 + 2**-12), 3.0, 0.0], dtype=torch.float64)
    assert rounding.truncated(values, 10).tolist() == [1 + 2**-10, -1.0, 3.0, 0.0]


def test_the_reference_is_the_gradient_of_the_likelihood(case):
    net, data = case
    problem = cr.Problem(net, data, cr.likelihoods.Categorical(), cr.priors.Normal(1.0))
    theta = problem.layout.read(net).unsqueeze(0)
    exact, _ = rounding.tolerance(net, data, "tf32")
    torch.testing.assert_close(exact, (problem.log_density_and_grad(theta).gradient + theta)[0])


def test_cutting_nothing_changes_nothing_and_parameters_are_restored(case):
    net, data = case
    before = [value.clone() for value in net.parameters()]
    exact = rounding.gradient_of_products(net, data)
    rounding.gradient_of_products(net, data, 3)
    assert torch.equal(rounding.gradient_of_products(net, data, 52), exact)
    assert all(map(torch.equal, before, net.parameters()))


def test_errors_scale_with_the_last_bit_of_a_smooth_network(case):
    net, data = case
    exact = rounding.gradient_of_products(net, data)
    errors = {bits: rounding.relative_error(rounding.gradient_of_products(net, data, bits), exact) for bits in (7, 13)}
    # Truncation loses up to 2^-bits of an operand; a product of few layers adds a few of these.
    assert all(0.1 * 2**-bits < error < 10 * 2**-bits for bits, error in errors.items())


def test_a_wrong_gradient_is_outside(case):
    net, data = case
    exact, limit = rounding.tolerance(net, data, "bf16")
    wrong = exact.clone()
    wrong[-3:] = 0  # no gradient of the last biases
    assert rounding.relative_error(wrong, exact) > limit > 0
