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
    # Two masks of four values may be equal by chance.
    torch.manual_seed(0)
    with pytest.raises(cr.InputError, match="net: is not deterministic: two passes over the same rows differ by up to"):
        problem(RANDOM[name])


def test_dropout_modules_are_off_in_evaluation_and_accepted():
    assert problem(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))).n == 6
    assert problem(Changed(lambda x: F.dropout(x, training=False))).n == 6


class Recurrent(nn.Module):
    def __init__(self, layer, pick=lambda out: out[0][:, -1]):
        super().__init__()
        self.inner, self.head, self.pick = layer, nn.Linear(4, 1), pick

    def forward(self, x):
        return self.head(self.pick(self.inner(x)))


def encoder(**kwargs):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, **kwargs), 1, enable_nested_tensor=False)


MIXED = {
    "LSTM": (lambda: Recurrent(nn.LSTM(4, 4)), r"batch_first=True to LSTM \('inner'\)"),
    "GRU": (lambda: Recurrent(nn.GRU(4, 4)), r"batch_first=True to GRU \('inner'\)"),
    "encoder": (
        lambda: Recurrent(encoder(), lambda out: out[:, -1]),
        r"batch_first=True to TransformerEncoderLayer \('inner.layers.0'\)",
    ),
    "softmax": (
        lambda: Recurrent(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Softmax(0)), lambda out: out),
        "dim",
    ),
    "centred": (lambda: Recurrent(nn.Identity(), lambda out: (out - out.mean(0))[:, 0]), "statistics of the data"),
    "standardised": (lambda: Recurrent(nn.Identity(), lambda out: (out / out.std(0))[:, 0]), "statistics of the data"),
}


@pytest.mark.parametrize("name", MIXED)
def test_networks_that_mix_rows_are_refused(name):
    make, advice = MIXED[name]
    torch.manual_seed(0)
    with pytest.raises(cr.InputError, match=f"net: mixes rows: its output for one row .*{advice}"):
        problem(make(), randn(6, 3, 4))


def test_rows_that_are_mixed_are_found_where_the_first_rows_are_equal():
    with pytest.raises(cr.InputError, match="net: mixes rows"):
        problem(nn.Sequential(nn.Linear(2, 1), nn.Softmax(0)), torch.ones(6, 2))


@pytest.mark.parametrize("layer", [nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)])
def test_recurrent_layers_with_the_rows_first_are_accepted(layer):
    assert problem(Recurrent(layer), randn(6, 3, 4)).n == 6
    assert problem(Recurrent(encoder(batch_first=True), lambda out: out[:, -1]), randn(6, 3, 4)).n == 6


@pytest.mark.parametrize("forward", [lambda x: x.squeeze(), lambda x: x.mean(-1).squeeze()], ids=["plain", "mean"])
def test_outputs_that_lose_the_axis_of_a_single_row_are_refused(forward):
    class Squeezed(nn.Linear):
        def forward(self, x):
            return forward(super().forward(x))

    with pytest.raises(cr.InputError, match=r"net: returned shape \(\) for one row and \(2,\) for 2.*squeeze\(-1\)"):
        cr.Problem(Squeezed(2, 1), (randn(6, 2), randn(6)), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))


def test_networks_that_take_no_single_row_are_refused():
    class Pairs(nn.Linear):
        def forward(self, x):
            return super().forward(x) + x.view(-1, 2, 2).sum() * 0

    with pytest.raises(cr.InputError, match="net: cannot take one row alone .RuntimeError: shape"):
        problem(Pairs(2, 1))


def test_sequences_may_come_first_inside_a_network():
    class Transposed(Recurrent):
        def forward(self, x):
            return super().forward(x.transpose(0, 1))

    assert problem(Transposed(nn.LSTM(4, 4), lambda out: out[0][-1]), randn(6, 3, 4)).n == 6


def test_outputs_that_cancel_are_accepted():
    class Cancelled(nn.Linear):
        """As the difference of two equal functions, computed in two ways."""

        def forward(self, x):
            return super().forward(x) * 0 + 1e-8 * len(x)

    assert problem(Cancelled(2, 1)).n == 6


def test_rounding_that_depends_on_the_number_of_rows_is_accepted():
    class Rounded(nn.Linear):
        """As in low precision, where products with one row and with several are not summed in the same order."""

        def forward(self, x):
            out = super().forward(x)
            return out * 1.04 if len(x) == 1 else out

    assert problem(Rounded(2, 1)).n == 6


def test_outputs_as_long_as_the_longest_row_of_a_batch_are_accepted():
    class Padded(nn.Linear):
        def forward(self, x, lengths):
            return super().forward(x[:, : int(lengths.max())].unsqueeze(-1)).squeeze(-1)

    lengths = torch.tensor([3, 2, 3, 1, 2, 3])
    net = Padded(1, 1)
    given = cr.Problem(net, ((randn(6, 3), lengths), randn(6, 3)), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))
    assert given.n == 6
