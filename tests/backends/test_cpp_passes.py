"""Dropout passes in C++ match the PyTorch path under the same masks."""

import pytest
import torch
from torch import nn

import credibly as cr
from credibly.backends.cpp.library import library
from credibly.posterior.dropout import MaskDraws

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
# Sums of at most 60 products in another order, relative to the largest number.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-14}


def posterior(rates, widths=(5, 9, 8, 3), activation=nn.ReLU, bias=True, dtype=torch.float32, insert=None):
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for position, rate in enumerate(rates):
        layers += [nn.Dropout(rate)] if rate is not None else []
        layers += [nn.Linear(widths[position], widths[position + 1], bias=bias)]
        layers += [activation()] if position < len(rates) - 1 else []
    x = torch.randn(20, widths[0], dtype=dtype)
    y = torch.randn(20, widths[-1], dtype=dtype)
    net = nn.Sequential(*layers).to(dtype)
    options = {} if insert is None else {"insert": insert, "rate": 0.3}
    return cr.MCDropout.from_trained(net, (x, y), cr.likelihoods.Gaussian(0.5, targets=widths[-1]), **options)


def both(fitted, rows=700, passes=40):
    """Outputs of both paths under the same masks."""
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(fitted.theta.dtype)
    source = MaskDraws(fitted, x, passes, 3, per_row=False)
    assert source.plan.cpp_stack is not None
    found = source.outputs(x, 0, passes)
    return found, source.forward.apply(source.masks, x).reshape(found.shape), source, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rates",
    [(0.05, 0.05, 0.05), (0.1, 0.3, 0.2), (0.8, 0.5, 0.1), (None, 0.2, None), (0.2, None, 0.4), (None, None, 0.3)],
)
def test_matches_pytorch(rates, dtype):
    found, wanted, _, _ = both(posterior(rates, dtype=dtype))
    assert found.std(0).max() > 0.01  # the masks do something
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype] * float(wanted.abs().max()))


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Tanh, nn.Sigmoid])
def test_other_activations_and_no_bias(activation):
    found, wanted, _, _ = both(posterior((0.1, 0.1, 0.1), activation=activation, bias=False))
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[torch.float32] * float(wanted.abs().max()))


def test_one_layer():
    found, wanted, _, _ = both(posterior((0.3,), widths=(5, 2)))
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[torch.float32] * float(wanted.abs().max()))


def test_inserted_dropout():
    found, wanted, source, _ = both(posterior((None, None, None), insert="*"))
    assert len(source.sites) == 3
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[torch.float32] * float(wanted.abs().max()))


def test_independent_of_threads_and_other_passes():
    found, _, source, x = both(posterior((0.1, 0.1, 0.1)))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(source.outputs(x, 0, 40), found)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(source.outputs(x, 10, 30), found[10:30])


def test_predictions_of_a_seed(monkeypatch):
    fitted = posterior((0.1, 0.1, 0.1))
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(2))
    fast = fitted.predict(x, seed=7)
    mean, variance = fast.mean, fast.variance
    monkeypatch.setattr("credibly.posterior.dropout.MIN_MASKED_OUTPUTS", 2**40)
    plain = fitted.predict(x, seed=7)
    torch.testing.assert_close(mean, plain.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance, plain.variance, rtol=1e-5, atol=1e-5)
    assert not torch.equal(fast.functions(), plain.functions())  # two different paths


@pytest.mark.parametrize(
    "layers",
    [
        [nn.AlphaDropout(0.2), nn.Linear(5, 1)],
        [nn.Linear(5, 4), nn.Dropout(0.2), nn.ReLU(), nn.Linear(4, 1)],
        [nn.Linear(5, 4), nn.Dropout(0.2), nn.Dropout(0.2), nn.Linear(4, 1)],
        [nn.Linear(5, 1), nn.Dropout(0.2)],
        [nn.Linear(5, 4), nn.GELU(), nn.Dropout(0.2), nn.Linear(4, 1)],
    ],
    ids=["alpha", "before an activation", "two in a row", "at the end", "another activation"],
)
def test_unsupported_layers_stay_in_pytorch(layers):
    x = torch.randn(300, 5, generator=torch.Generator().manual_seed(2))
    fitted = cr.MCDropout.from_trained(nn.Sequential(*layers), (x, x[:, :1]), cr.likelihoods.Gaussian(0.5))
    source = MaskDraws(fitted, x, 20, 3, per_row=False)
    assert source.plan.cpp_stack is None
    assert source.outputs(x, 0, 20).shape == (20, 300, 1)
