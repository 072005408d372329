"""Dropout as masks: every kind of layer against torch's in training mode, insertion, and what each mask drops."""

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import credibly as cr
from conftest import mlp, randn
from credibly.networks.dropout_masks import MaskedDropout, MaskedInput, Site, find_sites, masked_copy, repeated_width
from credibly.posterior.dropout import draw_masks, set_rates

f64 = torch.float64
# layer, shape of a batch, shape of a row's mask
KINDS = {
    "rows": (nn.Dropout(0.3), (40, 7), (7,)),
    "images": (nn.Dropout(0.3), (6, 3, 4, 5), (3, 4, 5)),
    "1d": (nn.Dropout1d(0.4), (20, 5, 6), (5, 1)),
    "2d": (nn.Dropout2d(0.2), (20, 5, 4, 3), (5, 1, 1)),
    "3d": (nn.Dropout3d(0.5), (20, 5, 3, 2, 2), (5, 1, 1, 1)),
    "alpha": (nn.AlphaDropout(0.3), (40, 7), (7,)),
    "alpha images": (nn.AlphaDropout(0.1), (6, 3, 4, 5), (3, 4, 5)),
    "feature alpha": (nn.FeatureAlphaDropout(0.4), (20, 5, 3, 2, 2), (5, 1, 1, 1)),
}


def in_training(layer, x, seed=5):
    """Return the output of torch's layer in training mode, from a given state of the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return copy.deepcopy(layer).train()(x)


def sites_of(net, x, insert=None, rate=None):
    module, rates = masked_copy(net.eval(), insert, rate)
    return find_sites(module, rates, x)


# -- the layers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_with_torchs_mask_the_output_is_torchs(kind):
    """The mask that torch drew is read off ones. With that mask the output is that of the layer in training mode."""
    layer, shape, row = KINDS[kind]
    x = randn(*shape, seed=1, dtype=f64)
    probe = in_training(layer, torch.ones(shape, dtype=f64))
    kept = probe > (probe.max() + probe.min()) / 2
    if any(size == 1 for size in row):  # a channel is dropped as a whole, so one value shows it
        kept = kept[(..., *(slice(1) for _ in row[1:]))]
    assert 0 < float(kept.double().mean()) < 1
    module, rates = masked_copy(nn.Sequential(layer).eval(), None, None)
    (site,), shapes = find_sites(module, rates, x)
    assert shapes == {"0": row}
    assert kept.shape == (shape[0], *row)
    out = functional_call(module, {site.mask: kept.double() * site.gain}, x)
    torch.testing.assert_close(out, in_training(layer, x), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_drawn_here_drop_as_often_as_torchs(kind):
    layer, shape, row = KINDS[kind]
    sites, shapes = sites_of(nn.Sequential(layer), randn(*shape))
    count = 40_000 // math.prod(row)
    masks = draw_masks(sites, shapes, count, 3, torch.ones((), dtype=f64))["0.mask"]
    assert masks.shape == (count, 1, *row)
    gain = 1.0 if "alpha" in kind else 1 / (1 - layer.p)
    assert sorted(masks.unique().tolist()) == [0.0, gain]
    error = math.sqrt(layer.p * (1 - layer.p) / masks.numel())
    assert float((masks == 0).double().mean()) == pytest.approx(layer.p, abs=4 * error)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_alpha_dropout_keeps_mean_and_variance(rate):
    """For zero-mean, unit-variance inputs (the output of SELU), at any rate; `set_rates` sets the layer's rate."""
    module, rates = masked_copy(nn.Sequential(nn.AlphaDropout(0.3)).eval(), None, None)
    set_rates(module, {"0": rate})
    x = randn(200_000, 1, dtype=f64)
    x = (x - x.mean()) / x.std()
    kept = (torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=f64) > rate).double()
    out = functional_call(module, {"0.mask": kept}, x)
    assert float(out.mean()) == pytest.approx(0, abs=4.5 / math.sqrt(len(x)))
    assert float(out.var()) == pytest.approx(1, abs=4.5 * math.sqrt(8 / len(x)))  # its fourth moment stays below 9
    assert rates == {"0": 0.3}


def test_a_copy_with_ones_for_masks_is_the_network_in_eval_mode():
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.4), nn.Linear(5, 2))
    module, _ = masked_copy(net.eval(), None, None)
    assert torch.equal(module(randn(4, 3)), net(randn(4, 3)))
    assert isinstance(module[2], MaskedDropout)


# -- rates and insertion -----------------------------------------------------------------------------------------------
def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(16, 2),
    )


@pytest.mark.parametrize(
    "insert, rate, expected",
    [
        (None, None, {"2": 0.2, "5": 0.4}),
        (None, 0.3, {"2": 0.3, "5": 0.3}),
        ("0", None, {"2": 0.2, "5": 0.4, "0": 0.05}),
        ("0", 0.3, {"2": 0.3, "5": 0.3, "0": 0.3}),
        (["0", "6"], None, {"2": 0.2, "5": 0.4, "0": 0.05, "6": 0.05}),
        ("*", None, {"2": 0.2, "5": 0.4, "0": 0.05, "3": 0.05, "6": 0.05}),
        (["0", "*"], None, {"2": 0.2, "5": 0.4, "0": 0.05, "3": 0.05, "6": 0.05}),
    ],
)
def test_which_sites_drop_and_at_which_rate(insert, rate, expected):
    assert masked_copy(convolutional(), insert, rate)[1] == expected


def test_patterns_match_names_of_linear_and_convolution_layers_only():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleDict({"first": nn.Conv1d(2, 4, 1), "norm": nn.LayerNorm(4)})
            self.rnn = nn.LSTM(4, 4, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 1)

    assert set(masked_copy(Net(), "*", None)[1]) == {"body.first", "head"}
    assert set(masked_copy(Net(), "body.*", None)[1]) == {"body.first"}
    for pattern in ("rnn", "attention*", "body.norm", "Head"):
        with pytest.raises(cr.InputError, match=r"insert: pattern .* matches no .*These layers are body\.first, head"):
            masked_copy(Net(), ["head", pattern], None)


def test_insertion_leaves_names_values_and_the_original_alone():
    net = convolutional()
    before = copy.deepcopy(net.state_dict())
    kinds = [type(layer) for layer in net]
    module, _ = masked_copy(net, "*", 0.1)
    assert [type(layer) for layer in net] == kinds
    assert not any(name.endswith("mask") for name, _ in net.named_buffers())
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in net.named_parameters()]
    for state in (net.state_dict(), module.state_dict()):
        assert list(state) == list(before)
        assert all(torch.equal(state[k], before[k]) for k in before)
    with torch.no_grad():
        module[0].weight.add_(1.0)
    assert torch.equal(net[0].weight, before["0.weight"])


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(4, 2), (6, 4)),
        (nn.Linear(4, 2, bias=False), (6, 3, 4)),
        (nn.Conv1d(4, 2, 3), (6, 4, 5)),
        (nn.Conv2d(4, 2, 3, padding=1), (6, 4, 5, 5)),
        (nn.Conv3d(4, 2, 2), (6, 4, 3, 3, 3)),
    ],
)
def test_inserted_dropout_acts_on_the_inputs_of_the_layer(layer, shape):
    x = randn(*shape)
    module, rates = masked_copy(nn.Sequential(layer, nn.ReLU()), "0", 0.25)
    (site,), shapes = find_sites(module, rates, x)
    assert (site.name, site.mask, site.gain, site.direct) == ("0", "0.mask", 4 / 3, True)
    assert shapes == {"0": shape[1:]}
    assert isinstance(module[0], MaskedInput)
    assert isinstance(module[0], type(layer))
    mask = in_training(nn.Dropout(0.25), torch.ones(shape))
    torch.testing.assert_close(functional_call(module, {"0.mask": mask}, x), F.relu(layer(x * mask)))
    assert torch.equal(module(x), F.relu(layer(x)))


def test_a_network_that_is_one_layer():
    module, rates = masked_copy(nn.Linear(3, 1), "*", None)
    (site,), shapes = find_sites(module, rates, randn(2, 3))
    assert site == Site("", 0.05, ("weight",), True)
    assert (site.mask, shapes) == ("mask", {"": (3,)})
    assert isinstance(masked_copy(nn.Dropout(0.5), None, None)[0], MaskedDropout)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_rates_outside_the_open_interval(rate):
    with pytest.raises(cr.InputError, match=f"rate must be strictly between 0 and 1, got {re.escape(repr(rate))}"):
        masked_copy(mlp(2, 3, 1), "*", rate)


def test_a_layer_that_drops_everything_needs_another_rate():
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(1.0), nn.Linear(3, 1))
    with pytest.raises(cr.InputError, match=r"rate: layer '1' drops with probability 1\.0.* fix the layer"):
        masked_copy(net, None, None)
    assert masked_copy(net, None, 0.2)[1] == {"1": 0.2}


def test_a_layer_that_drops_nothing_is_no_site_unless_it_is_asked_for():
    net = nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 3), nn.Dropout(0.1), nn.Linear(3, 1))
    module, rates = masked_copy(net, None, None)
    assert rates == {"2": 0.1}
    assert type(module[0]) is nn.Dropout
    assert masked_copy(net, None, 0.2)[1] == {"0": 0.2, "2": 0.2}
    assert masked_copy(net, None, None, include=["0"])[1] == {"0": 0.0, "2": 0.1}
    assert masked_copy(net, "*", 0.2, only=["2", "3"])[1] == {"2": 0.2, "3": 0.2}


# -- the sites ---------------------------------------------------------------------------------------------------------
class Backwards(nn.Module):
    """A network that calls its layers in a different order than it lists them."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 1)
        self.late = nn.Dropout(0.2)
        self.first = nn.Linear(2, 3)
        self.early = nn.Dropout(0.1)

    def forward(self, x):
        return self.last(self.late(torch.tanh(self.first(self.early(x)))))


def test_sites_are_in_the_order_of_a_forward_pass_with_their_weights():
    sites, shapes = sites_of(Backwards(), randn(2, 2))
    assert sites == (Site("early", 0.1, ("first.weight",), True), Site("late", 0.2, ("last.weight",), True))
    assert shapes == {"early": (2,), "late": (3,)}
    sites, shapes = sites_of(convolutional(), randn(2, 1, 6, 6), insert="0")
    assert sites == (
        Site("0", 0.05, ("0.weight",), True),
        Site("2", 0.2, ("3.weight",), True),
        Site("5", 0.4, ("6.weight",), True),
    )
    assert shapes == {"0": (1, 6, 6), "2": (4, 1, 1), "5": (16,)}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.mean, self.spread = nn.Dropout(0.3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        x = self.drop(x)
        return torch.cat([self.mean(x), self.spread(x)], 1)


def test_two_heads_behind_one_dropout_are_both_dropped():
    assert sites_of(Heads(), randn(2, 3))[0] == (Site("drop", 0.3, ("mean.weight", "spread.weight"), True),)


@pytest.mark.parametrize(
    "layers, expected",
    [
        # something is between the mask and the weight
        ([nn.Dropout(0.1), nn.Tanh(), nn.Linear(3, 1)], [("2.weight", False)]),
        ([nn.Dropout(0.1), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 1)], [("3.weight", False), ("3.weight", True)]),
        (
            [nn.Dropout(0.1), nn.Flatten(), nn.Linear(3, 1)],
            [("2.weight", True)],
        ),  # flat rows stay flat
        ([nn.Linear(3, 1), nn.Dropout(0.1)], [(None, False)]),  # nothing after it
        ([nn.Dropout(0.1), nn.Linear(3, 3), nn.Linear(3, 1)], [("1.weight", True)]),
    ],
    ids=["tanh", "two", "flatten", "end", "next only"],
)
def test_whether_a_weight_acts_on_the_dropped_values_directly(layers, expected):
    sites, _ = sites_of(nn.Sequential(*layers), randn(2, 3))
    assert [(s.weights[0] if s.weights else None, s.direct) for s in sites] == expected


def test_the_output_of_a_layer_with_inserted_dropout_is_not_dropped():
    sites, _ = sites_of(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), randn(2, 3), insert="0")
    assert sites == (Site("0", 0.05, ("0.weight",), True),)


def test_inserted_behind_a_dropout_layer_both_drop_the_same_weight():
    sites, _ = sites_of(nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 1)), randn(2, 3), insert="*")
    assert sites == (Site("0", 0.1, ("1.weight",), True), Site("1", 0.05, ("1.weight",), True))


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(self.fc(self.drop(x)))


def test_a_weight_that_is_used_again_without_dropout_is_not_direct():
    assert sites_of(Repeated(), randn(2, 3))[0] == (Site("drop", 0.3, ("fc.weight",), False),)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **kwargs):
        super().__init__()
        self.drop, self.rnn, self.head = nn.Dropout(0.3), kind(3, 4, batch_first=True, **kwargs), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(self.drop(x))[0][:, -1, :4])


def test_before_a_recurrent_or_attention_layer_its_input_weights_are_dropped_not_the_next_linears():
    assert sites_of(Recurrent(), randn(2, 5, 3))[0] == (Site("drop", 0.3, ("rnn.weight_ih_l0",), False),)
    both = sites_of(Recurrent(nn.GRU, bidirectional=True, num_layers=2), randn(2, 5, 3))[0]
    assert both == (Site("drop", 0.3, ("rnn.weight_ih_l0", "rnn.weight_ih_l0_reverse"), False),)

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.mix = nn.Dropout(0.3), nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            x = self.drop(x)
            return self.head(self.mix(x, x, x)[0])

    assert sites_of(Attending(), randn(2, 5, 4))[0] == (Site("drop", 0.3, ("mix.in_proj_weight",), False),)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(3, 3), nn.Dropout(0.3), nn.Linear(3, 1)

    def forward(self, x):
        return self.b(self.drop(self.a(self.drop(x))))


class TimeFirst(Twice):
    def forward(self, x):
        return self.b(self.drop(self.a(x).transpose(0, 1)).transpose(0, 1))


class Unused(Twice):
    def forward(self, x):
        return self.b(self.a(x))


class Flat(Twice):
    def forward(self, x):
        return self.b(self.a(x)) + self.drop(x[:, 0]).unsqueeze(1)


@pytest.mark.parametrize(
    "net, x, message",
    [
        (
            TimeFirst(),
            randn(2, 5, 3),
            r"net: dropout 'drop' acts on shape \(5, 2, 3\).* inputs of shape \(rows, features",
        ),
        (Flat(), randn(2, 3), r"net: dropout 'drop' acts on shape \(2,\)"),
    ],
    ids=["time first", "flat"],
)
def test_sites_that_masks_do_not_support(net, x, message):
    with pytest.raises(cr.InputError, match=message):
        sites_of(net, x)


def test_a_layer_that_is_not_called_is_no_site():
    assert sites_of(Unused(), randn(2, 3)) == ((), {})
    sites, shapes = sites_of(Unused(), randn(2, 3), insert="b")
    assert ([site.name for site in sites], shapes) == (["b"], {"b": (3,)})


def test_hooks_of_the_trial_pass_are_removed():
    for net, x in ((Backwards(), randn(2, 2)), (Twice(), randn(2, 3))):
        module, rates = masked_copy(net, None, None)
        try:
            find_sites(module, rates, x)
        except cr.InputError:
            pass
        else:
            repeated_width(module, "early", x)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_the_width_of_what_a_forward_pass_recomputes():
    net = nn.Sequential(nn.Linear(2, 100), nn.ReLU(), nn.Linear(100, 3), nn.Dropout(0.3), nn.Linear(3, 5), nn.ReLU())
    module, _ = masked_copy(net, None, None)
    assert repeated_width(module, "3", randn(4, 2)) == 3 + 3 + 5 + 5  # into the mask, out of it, and two layers
    module, _ = masked_copy(net, "0", None)
    assert repeated_width(module, "0", randn(4, 2)) == 2 + 100 + 100 + 3 + 3 + 5 + 5


# -- draws of masks ----------------------------------------------------------------------------------------------------
def test_masks_come_from_the_seed_and_sites_are_independent():
    sites = (Site("a", 0.5, (), False), Site("b", 0.5, (), False))
    shapes = {"a": (1000,), "b": (1000,)}
    like = torch.zeros((), dtype=f64)
    one, same, other = (draw_masks(sites, shapes, 4, seed, like) for seed in (0, 0, 1))
    assert all(torch.equal(one[k], same[k]) for k in one)
    for a, b in (
        (one["a.mask"], one["b.mask"]),
        (one["a.mask"][0], one["a.mask"][1]),
        (one["a.mask"], other["a.mask"]),
    ):
        agree = (a == b).double()
        assert float(agree.mean()) == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / agree.numel()))
    rows = draw_masks(sites, shapes, 4, 0, like, ("row", 1, 2))["a.mask"]
    assert not torch.equal(rows, one["a.mask"])
    assert not torch.equal(rows, draw_masks(sites, shapes, 4, 0, like, ("row", 2, 1))["a.mask"])
