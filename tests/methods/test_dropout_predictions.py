"""Predictions of MC-Dropout: passes and masks, tiles, the layers before the first dropout, draws of the weights."""

import copy
import math

import pytest
import torch
from dropout_networks import (
    LABELS,
    NOISE,
    Y32,
    Heads,
    Reader,
    X,
    Y,
    build,
    close_in_distribution,
    convolutional,
    dropped_mlp,
    f64,
    masks_of,
    one_by_one,
    residual,
    seeded,
    wrap,
)
from torch import nn
from torch.nn import functional as F

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Categorical, Gaussian


def test_passes_are_those_of_a_network_written_by_hand():
    net = dropped_mlp()
    p = wrap(net).predict(X, passes=6, seed=3)
    masks = masks_of(wrap(net), X, 6, 3)
    for s in range(6):
        h = torch.tanh(F.linear(X * masks["0.mask"][s], net[1].weight, net[1].bias))
        f = F.linear(h * masks["3.mask"][s], net[4].weight, net[4].bias).squeeze(1)
        torch.testing.assert_close(p.functions()[s], f.detach(), rtol=1e-12, atol=1e-12)
    assert sorted(masks["0.mask"].unique().tolist()) == [0.0, 1 / 0.8]
    assert sorted(masks["3.mask"].unique().tolist()) == [0.0, 1 / 0.7]


def test_variance_is_one_over_tau_plus_the_variance_of_passes():
    p = wrap(dropped_mlp()).predict(X, passes=50)
    f = p.functions()
    assert f.shape == (50, 40)
    torch.testing.assert_close(p.mean, f.mean(0))
    torch.testing.assert_close(p.aleatoric, torch.full((40,), NOISE**2, dtype=f64))  # 1/tau
    torch.testing.assert_close(p.epistemic, f.var(0, correction=0))
    torch.testing.assert_close(p.variance, NOISE**2 + f.var(0, correction=0))
    assert float(p.epistemic.min()) > 1e-3


def test_log_density_is_the_log_of_the_mean_over_passes():
    p = wrap(dropped_mlp()).predict(X, passes=50)
    each = torch.distributions.Normal(p.functions(), NOISE).log_prob(Y)
    torch.testing.assert_close(p.log_prob(Y), torch.logsumexp(each, 0) - math.log(50))
    assert float((p.log_prob(Y) - each.mean(0)).min()) > 1e-3  # the average of logs would be lower


def test_classes_are_the_mean_of_softmaxes():
    posterior = wrap(dropped_mlp(outputs=3), Categorical(), (X, LABELS))
    p = posterior.predict(X, passes=20, seed=1)
    probabilities = torch.softmax(one_by_one(posterior, X, 20, 1), -1)
    torch.testing.assert_close(p.mean, probabilities.mean(0))
    torch.testing.assert_close(
        p.log_prob(LABELS), probabilities.mean(0).gather(1, LABELS.unsqueeze(1)).squeeze(1).log()
    )
    total = -(p.mean * p.mean.log()).sum(1)
    aleatoric = -(probabilities * probabilities.log()).sum(-1).mean(0)
    torch.testing.assert_close(p.aleatoric, aleatoric)
    torch.testing.assert_close(p.epistemic, total - aleatoric)


@pytest.mark.parametrize("per_row", [False, True])
def test_predictions_depend_on_the_seed_alone(per_row):
    posterior = wrap(dropped_mlp())
    before = torch.get_rng_state()
    one, same, other = (posterior.predict(X, passes=5, seed=s, per_row=per_row).functions() for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("net", [dropped_mlp, residual], ids=["stack", "vmap"])
def test_a_pass_is_a_function(net):
    """One mask for all rows: the output for a row does not depend on the other rows or their order."""
    posterior = wrap(net())
    f = posterior.predict(X, passes=7).functions()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(posterior.predict(X[order], passes=7).functions(), f[:, order], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(posterior.predict(X[5:9], passes=7).functions(), f[:, 5:9], rtol=1e-13, atol=1e-13)
    equal = posterior.predict(X[:1].expand(6, 3), passes=7).functions()
    torch.testing.assert_close(equal, equal[:, :1].expand(7, 6), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("net", [dropped_mlp, residual], ids=["stack", "vmap"])
def test_masks_per_row(net):
    posterior = wrap(net())
    f = posterior.predict(X[:1].expand(200, 3), passes=3, per_row=True).functions()
    assert all(len(row.unique()) > 100 for row in f)
    # A row's masks depend on its index alone: fewer rows change nothing.
    torch.testing.assert_close(posterior.predict(X[:1].expand(70, 3), passes=3, per_row=True).functions(), f[:, :70])


@pytest.mark.parametrize("net", [dropped_mlp, lambda: convolutional(1).double()], ids=["mlp", "cnn"])
def test_shared_masks_masks_per_row_and_torch_dropout_have_one_distribution(net):
    net, passes = net(), 3000
    x = X[:4] if isinstance(net[0], nn.Dropout) else randn(4, 36, dtype=f64)
    posterior = wrap(net, data=(x, Y[:4]))
    shared = posterior.predict(x, passes=passes, seed=1).functions()
    own = posterior.predict(x, passes=passes, seed=1, per_row=True).functions()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        torchs = copy.deepcopy(net).train()(x.repeat(passes, *(1,) * (x.ndim - 1))).reshape(passes, 4)
    close_in_distribution(shared, torchs)
    close_in_distribution(own, torchs)
    assert float(shared.var(0).min()) > 1e-4


@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("values", [1, 60, 700])
@pytest.mark.parametrize("net", [dropped_mlp, residual], ids=["stack", "vmap"])
def test_tiles_change_nothing(monkeypatch, net, values, per_row):
    posterior = wrap(net())
    whole = posterior.predict(X, passes=11, per_row=per_row)
    whole = whole.functions(), whole.mean, whole.variance, whole.log_prob(Y)
    monkeypatch.setattr("credibly.predictive.blocks.BLOCK_VALUES", values)
    monkeypatch.setattr("credibly.predictive.blocks.CACHE_VALUES", values)
    monkeypatch.setattr("credibly.posterior.dropout.BLOCK_VALUES", values)
    p = posterior.predict(X, passes=11, per_row=per_row)
    for a, b in zip((p.functions(), p.mean, p.variance, p.log_prob(Y)), whole):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Counting(nn.Module):
    """Records the number of rows of every call."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, []

    def forward(self, x):
        self.calls.append(len(x))
        return self.inner(x)


def counted_mlp():
    return nn.Sequential(
        Counting(nn.Sequential(nn.Linear(3, 400), nn.ReLU(), nn.Linear(400, 4))), nn.Dropout(0.3), nn.Linear(4, 1)
    )


def counted_cnn():
    front = nn.Sequential(nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4))
    return nn.Sequential(Counting(front), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 1))


class CountedReader(Reader):
    def __init__(self):
        super().__init__()
        self.rnn = Counting(self.rnn)


PREFIXES = {
    "mlp": (counted_mlp, (3,), "0"),
    "cnn": (counted_cnn, (36,), "0"),
    "lstm": (CountedReader, (7, 2), "rnn"),
}


@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("kind", PREFIXES)
def test_layers_before_the_first_dropout_are_computed_once(kind, per_row):
    net, shape, name = PREFIXES[kind]
    x = randn(30, *shape, dtype=f64)
    posterior = wrap(seeded(net).double(), data=(x, Y[:30]))
    counter = posterior.masked.get_submodule(name)
    p = posterior.predict(x, passes=25, seed=4, per_row=per_row)
    counter.calls.clear()
    f = p.functions()
    p.mean, p.log_prob(Y[:30])
    assert [c for c in counter.calls if c > 1] == [30]  # calls with one row are the search for shapes
    if not per_row:
        torch.testing.assert_close(f, one_by_one(posterior, x, 25, 4).squeeze(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", PREFIXES)
def test_a_wide_prefix_is_computed_once_per_row(monkeypatch, kind):
    """The prefix needs several blocks of rows, and still computes every row once, not once per pass."""
    net, shape, name = PREFIXES[kind]
    x = randn(30, *shape, dtype=f64)
    posterior = wrap(seeded(net).double(), data=(x, Y[:30]))
    counter = posterior.masked.get_submodule(name)
    plain = posterior.predict(x, passes=25).functions()
    monkeypatch.setattr("credibly.predictive.blocks.BLOCK_VALUES", 3000)
    monkeypatch.setattr("credibly.posterior.dropout.BLOCK_VALUES", 3000)
    p = posterior.predict(x, passes=25)
    counter.calls.clear()
    torch.testing.assert_close(p.functions(), plain, rtol=1e-12, atol=1e-12)
    blocks = [c for c in counter.calls if c > 1]
    assert len(blocks) > 1
    assert sum(blocks) == 30


def test_dropout_before_an_lstm_is_looped():
    class Front(Reader):
        def forward(self, x):
            return self.head(self.rnn(self.drop(x))[0][:, -1])

    x = randn(12, 4, 2, dtype=f64)
    posterior = wrap(seeded(lambda: Front().double()), data=(x, Y[:12]))
    p = posterior.predict(x, passes=6, seed=2)
    torch.testing.assert_close(p.functions(), one_by_one(posterior, x, 6, 2).squeeze(-1), rtol=1e-12, atol=1e-12)
    assert float(p.epistemic.min()) > 0


def test_inputs_of_other_lengths_than_in_training():
    net = seeded(lambda: nn.Sequential(nn.Dropout(0.3), nn.Conv1d(2, 3, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()))
    posterior = wrap(nn.Sequential(net, nn.Linear(3, 1)), data=(randn(8, 2, 9), Y32[:8]))
    assert posterior.predict(randn(5, 2, 20)).mean.shape == (5,)


# -- draws of the weights ----------------------------------------------------------------------------------------------
SAMPLED = {
    "own layers": (lambda: dropped_mlp(), None),
    "inserted": (lambda: mlp(3, 6, 5, 1, dtype=f64), "*"),
    "vmap": (residual, None),
    "both": (lambda: dropped_mlp(), "4"),
}


@pytest.mark.parametrize("case", SAMPLED)
def test_draws_of_the_weights_are_the_masked_passes(case):
    net, insert = SAMPLED[case]
    posterior = wrap(net(), insert=insert, rate=0.3)
    draws = posterior.sample(9, seed=5)
    assert draws.shape == (9, posterior.layout.dim)
    outputs = posterior.model.forward(draws, X).squeeze(-1)
    torch.testing.assert_close(posterior.predict(X, passes=9, seed=5).functions(), outputs, rtol=1e-12, atol=1e-12)
    assert float(outputs.var(0).max()) > 1e-2
    assert torch.equal(posterior.draws[0], posterior.sample(100))


def test_draws_of_two_heads_behind_one_dropout():
    posterior = wrap(seeded(lambda: Heads().double()), data=(X[:, :2], Y))
    outputs = posterior.model.forward(posterior.sample(9, seed=5), X[:, :2]).squeeze(-1)
    torch.testing.assert_close(posterior.predict(X[:, :2], passes=9, seed=5).functions(), outputs)


class SkipOver(nn.Module):
    """A weight that is used once with dropout and once without."""

    def __init__(self):
        super().__init__()
        self.drop, self.fc, self.head = nn.Dropout(0.3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.fc(self.fc(self.drop(x))))


UNFOLDABLE = {
    "activation between": (lambda: nn.Sequential(nn.Dropout(0.3), nn.Tanh(), nn.Linear(3, 1)), {}),
    "two with one between": (
        lambda: nn.Sequential(nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 1)),
        {},
    ),
    "alpha": (lambda: nn.Sequential(nn.AlphaDropout(0.3), nn.Linear(3, 1)), {}),
    "at the end": (lambda: nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.3)), {}),
    "used again": (SkipOver, {}),
    "convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Dropout(0.3), nn.Conv1d(1, 1, 3), nn.Flatten()),
        {},
    ),
}


@pytest.mark.parametrize("case", UNFOLDABLE)
def test_masks_that_cannot_be_folded_into_weights_have_no_draws(case):
    net, options = UNFOLDABLE[case]
    posterior = wrap(seeded(net).double(), **options)
    assert float(posterior.predict(X).epistemic.max()) > 0
    with pytest.raises(
        cr.InputError, match=r"sample: dropout '.*' does not act on the inputs of a Linear.*Use predict"
    ):
        posterior.sample(3)


def test_draws_need_the_dropped_weights_to_be_random():
    problem = build(dropped_mlp(), random="4.*")
    posterior = cr.MCDropout(steps=2).fit(problem, seed=0)
    with pytest.raises(cr.InputError, match="sample: dropout '0' does not act on .* its own random weights"):
        posterior.sample(3)


def test_the_module_is_the_network_with_dropout_off():
    net = dropped_mlp()
    module = wrap(net).module()
    assert not module.training
    assert torch.equal(module(X), net.eval()(X))
    assert isinstance(module[0], nn.Dropout)


def test_a_second_prediction_does_not_trace_the_network_again(monkeypatch):
    posterior = cr.MCDropout.from_trained(dropped_mlp(), (X, Y), Gaussian(0.1))
    first = posterior.predict(X, passes=7, seed=3)
    mean = first.mean

    def refuse(*_args):
        raise AssertionError("traced the network again")

    monkeypatch.setattr("credibly.posterior.dropout.find_sites", refuse)
    assert torch.equal(posterior.predict(X, passes=7, seed=3).mean, mean)
    torch.testing.assert_close(posterior.predict(X[:5], passes=7, seed=3).mean, mean[:5])
    with pytest.raises(cr.InputError, match="the network cannot take rows"):
        posterior.predict(X[:, :2])
    with pytest.raises(cr.InputError, match="NaN or infinite"):
        posterior.predict(X * torch.inf)
    with pytest.raises(AssertionError, match="again"):  # inputs of another shape are traced
        posterior.predict(X.unsqueeze(1))
