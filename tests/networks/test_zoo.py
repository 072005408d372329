"""The networks of the papers: their sizes, layer by layer, what they compute, and that all plans agree."""

import numpy as np
import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.likelihoods import Categorical
from credibly.networks import zoo
from credibly.networks.layout import Layout
from credibly.networks.normalisation import FilterResponseNorm, find_running_statistics

f64 = torch.float64


def size(module):
    return sum(p.numel() for p in module.parameters())


def scrambled(net, seed=0, scale=0.5):
    """Return the network in float64 with every parameter resampled, so that no bias is zero and no gain one."""
    net = net.double()
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(scale * randn(*parameter.shape, seed=1000 * seed + i, dtype=f64))
    return net


def tokens(rows, length, vocabulary, seed=0):
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


# Numbers of parameters


def test_resnet20_frn_has_the_published_size_layer_by_layer():
    net = zoo.resnet20_frn()
    # A unit is a k x k convolution of a to b channels with biases, a*b*k*k + b, and a normalisation with gamma, beta
    # and tau, 3b.
    assert size(net.stem) == 3 * 16 * 9 + 16 + 48 == 496
    # Two units of 16 to 16, 2 * (2304 + 16 + 48), three times.
    assert [size(b) for b in net.blocks[:3]] == [4736] * 3
    # 16 to 32 (4608 + 32 + 96), 32 to 32 (9216 + 32 + 96), shortcut 1 x 1 (512 + 32 + 96); then two of 32 to 32 twice.
    assert [size(b) for b in net.blocks[3:6]] == [4736 + 9344 + 640, 2 * 9344, 2 * 9344]
    # 32 to 64 (18432 + 64 + 192), 64 to 64 (36864 + 64 + 192), shortcut (2048 + 64 + 192); then two of 64 to 64 twice.
    assert [size(b) for b in net.blocks[6:]] == [18688 + 37120 + 2304, 2 * 37120, 2 * 37120]
    assert size(net.head) == 64 * 10 + 10
    assert size(net) == 496 + 14_208 + 52_096 + 206_592 + 650 == 274_042
    # Without tau: one value fewer for each of 16 + 6*16 + 7*32 + 7*64 channels.
    assert size(zoo.resnet20_frn(threshold=False)) == 274_042 - 784
    assert size(zoo.resnet20_frn(classes=100)) == 274_042 + 90 * 65


def test_cnn_lstm_has_the_published_size_layer_by_layer():
    net = zoo.cnn_lstm()
    assert size(net.embed) == 20_000 * 128
    assert size(net.conv) == 5 * 128 * 64 + 64 == 41_024
    # One matrix from 64 inputs and 128 states to 4 * 128 gates, and one bias.
    assert size(net.lstm) == (64 + 128) * 512 + 512 == 98_816
    assert size(net.head) == 128 * 2 + 2
    assert size(net) == 2_560_000 + 41_024 + 98_816 + 258 == 2_700_098


def test_lenet_has_the_published_size_layer_by_layer():
    net = zoo.lenet(classes=7, channels=3)
    sizes = [size(m) for m in net if size(m)]
    # 5 x 5 convolutions to 6, 16 and 120 filters; 28 -> 13 -> 6 -> 2 pixels per side, so 480 values reach the 84 units.
    assert sizes == [75 * 6 + 6, 150 * 16 + 16, 400 * 120 + 120, 480 * 84 + 84, 84 * 7 + 7]
    assert size(net) == 91_991
    assert net(randn(2, 3, 28, 28)).shape == (2, 7)


def test_mlp():
    assert size(zoo.mlp(13)) == 13 * 50 + 50 + 50 + 1
    assert [str(m) for m in zoo.mlp(3, (4, 5), 2, "tanh")] == [
        str(m) for m in (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    ]
    assert [type(m) for m in zoo.mlp(3, (), 2)] == [nn.Linear]
    assert [type(m) for m in zoo.mlp(3, 4)] == [nn.Linear, nn.SiLU, nn.Linear]


# What they compute: the published networks written out in numpy, channels last as in their code


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def same_conv(x, conv):
    """Convolve (N, H, W, A) with "same" padding as in JAX: ceil(n / s) outputs, the odd zero at the end."""
    w, b = conv.weight.detach().numpy(), conv.bias.detach().numpy()
    k, s = w.shape[-1], conv.stride[0]
    pads = []
    for n in x.shape[1:3]:
        total = max((-(-n // s) - 1) * s + k - n, 0)
        pads.append((total // 2, total - total // 2))
    x = np.pad(x, ((0, 0), *pads, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), (1, 2))[:, ::s, ::s]
    return np.einsum("nhwaij,baij->nhwb", windows, w) + b


def unit(x, part):
    x = same_conv(x, part.conv)
    norm = {k: v.detach().numpy() for k, v in part.norm.named_parameters()}
    x = x / np.sqrt((x**2).mean((1, 2), keepdims=True) + 1e-6)
    x = x * norm["weight"] + norm["bias"]
    return np.maximum(x, norm["tau"]) if "tau" in norm else x


@pytest.mark.parametrize("threshold", [True, False])
@pytest.mark.parametrize("side", [8, 9])
def test_resnet20_frn_is_the_published_network(side, threshold):
    net = scrambled(zoo.resnet20_frn(classes=3, channels=2, width=2, threshold=threshold))
    images = randn(3, 2, side, side, dtype=f64)
    x = silu(unit(images.permute(0, 2, 3, 1).numpy(), net.stem))
    for number, block in enumerate(net.blocks):
        y = unit(silu(unit(x, block.first)), block.second)
        x = silu((unit(x, block.shortcut) if number in (3, 6) else x) + y)
    assert x.shape[1:] == (-(-side // 4), -(-side // 4), 8)
    expected = x.mean((1, 2)) @ net.head.weight.detach().numpy().T + net.head.bias.detach().numpy()
    np.testing.assert_allclose(net(images).detach().numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("activation, pool", [("silu", 1), ("relu", 4)])
def test_cnn_lstm_is_the_published_network(activation, pool):
    net = scrambled(zoo.cnn_lstm(11, 3, 4, 5, pool, 6, 2, activation))
    x = tokens(5, 26, 11)
    values = {k: v.detach().numpy() for k, v in net.named_parameters()}
    h = values["embed.weight"][x.numpy()]
    windows = np.lib.stride_tricks.sliding_window_view(h, 5, 1)
    h = np.einsum("ntak,bak->ntb", windows, values["conv.weight"]) + values["conv.bias"]
    h = silu(h) if activation == "silu" else np.maximum(h, 0)
    steps = h.shape[1] // pool
    h = h[:, : steps * pool].reshape(5, steps, pool, 4).max(2)
    weight = np.concatenate([values["lstm.weight_ih"], values["lstm.weight_hh"]], 1)
    state = cell = np.zeros((5, 6))
    for t in range(steps):
        gates = np.concatenate([h[:, t], state], 1) @ weight.T + values["lstm.bias"]
        i, f, g, o = np.split(gates, 4, 1)
        cell = sigmoid(f + 1) * cell + sigmoid(i) * np.tanh(g)  # Haiku adds one to the forget gate
        state = sigmoid(o) * np.tanh(cell)
    expected = state @ values["head.weight"].T + values["head.bias"]
    np.testing.assert_allclose(net(x).detach().numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("forget_bias", [0.0, 1.0])
def test_unrolled_lstm_equals_torch(forget_bias):
    ours, theirs = zoo.UnrolledLSTM(3, 5, forget_bias=forget_bias), nn.LSTM(3, 5, batch_first=True)
    scrambled(theirs)
    ours.double()
    with torch.no_grad():
        ours.weight_ih.copy_(theirs.weight_ih_l0)
        ours.weight_hh.copy_(theirs.weight_hh_l0)
        ours.bias.copy_(theirs.bias_ih_l0 + theirs.bias_hh_l0)
        ours.bias[5:10] -= forget_bias
    x = randn(4, 7, 3, dtype=f64)
    torch.testing.assert_close(ours(x), theirs(x)[0], rtol=1e-12, atol=1e-12)
    last = zoo.UnrolledLSTM(3, 5, forget_bias=forget_bias, sequence=False).double()
    last.load_state_dict(ours.state_dict())
    assert torch.equal(last(x), ours(x)[:, -1])
    (mine,) = torch.autograd.grad(last(x).square().sum(), last.weight_hh)
    (other,) = torch.autograd.grad(theirs(x)[0][:, -1].square().sum(), theirs.weight_hh_l0)
    torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_unrolled_lstm_of_one_step():
    ours, theirs = zoo.UnrolledLSTM(2, 3), nn.LSTM(2, 3, batch_first=True)
    ours.load_state_dict(
        {
            "weight_ih": theirs.weight_ih_l0,
            "weight_hh": theirs.weight_hh_l0,
            "bias": theirs.bias_ih_l0 + theirs.bias_hh_l0,
        }
    )
    torch.testing.assert_close(ours(randn(4, 1, 2)), theirs(randn(4, 1, 2))[0])


# Through a Problem


def small(name):
    make, x = {
        "mlp": (lambda: zoo.mlp(4, (5,), 3), randn(6, 4, dtype=f64)),
        "lenet": (lambda: zoo.lenet(3, 1), randn(3, 1, 28, 28, dtype=f64)),
        "resnet20_frn": (lambda: zoo.resnet20_frn(3, 1, width=2), randn(4, 1, 8, 8, dtype=f64)),
        "cnn_lstm": (lambda: zoo.cnn_lstm(9, 3, 4, 3, 2, 5, 3), tokens(6, 8, 9)),
        "block": (
            lambda: nn.Sequential(zoo.ResNet20FRN(3, 1, width=2).blocks[3], nn.Flatten()),
            randn(3, 2, 4, 4, dtype=f64),
        ),
    }[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double(), x


def problem(name, plan):
    net, x = small(name)
    return cr.Problem(
        net, data=(x, torch.arange(len(x)) % 3), likelihood=Categorical(), prior=cr.priors.Normal(0.5), plan=plan
    )


NAMES = ["mlp", "lenet", "resnet20_frn", "cnn_lstm"]


@pytest.mark.parametrize("name", NAMES)
def test_batched_equals_looped_and_the_rows_are_independent(name):
    batched, looped = problem(name, "batched"), problem(name, "looped")
    assert (batched.forward.looped, looped.forward.looped) == (False, True)
    theta = batched.layout.reinitialised(0, 3) + 0.1 * randn(3, batched.dim, dtype=f64)
    a, b = batched.log_density_and_grad(theta), looped.log_density_and_grad(theta)
    torch.testing.assert_close(a.log_density, b.log_density, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(a.gradient, b.gradient, rtol=1e-8, atol=1e-10)
    assert float(a.gradient.std(0).norm()) > 0.1
    alone = batched.forward(theta, batched.x[1:2])
    torch.testing.assert_close(batched.forward(theta, batched.x)[:, 1:2], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("plan", ["batched", "looped"])
@pytest.mark.parametrize("name", ["block", "cnn_lstm"])
def test_one_graph_for_the_compiler(name, plan):
    """The compiler's front end traces it without a graph break. Its back end is not tested here."""
    it = problem(name, plan)
    theta = it.layout.reinitialised(0, 2)
    traced = torch.compile(lambda t: it.forward(t, it.x), backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(traced(theta), it.forward(theta, it.x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["resnet20_frn", "cnn_lstm"])
def test_fits_predicts_and_survives_the_disk(name, tmp_path):
    it = problem(name, "auto")
    posterior = cr.DeepEnsemble(members=2, steps=3).fit(it, seed=0)
    posterior.save(tmp_path / "run")
    again = cr.load(tmp_path / "run", small(name)[0])
    assert torch.equal(again.predict(it.x).mean, posterior.predict(it.x).mean)


@pytest.mark.parametrize("name", NAMES)
def test_initial_values_differ_between_members_and_depend_on_the_seed_only(name):
    fresh = Layout(small(name)[0])
    trained = Layout(scrambled(small(name)[0], seed=5))
    first = fresh.reinitialised(0, 2)
    assert torch.equal(first, trained.reinitialised(0, 2))  # the old values have no influence
    assert not torch.equal(first[0], first[1])
    assert float(first.abs().max()) < 5


def test_resnet_starts_with_plain_normalisations():
    net = scrambled(zoo.resnet20_frn(2, 1, width=2))
    net.reset_parameters()
    norms = [m for m in net.modules() if isinstance(m, FilterResponseNorm)]
    assert len(norms) == 1 + 2 * 9 + 2
    for norm in norms:
        assert [set(p.tolist()) for p in norm.parameters()] == [{1.0}, {0.0}, {0.0}]


@pytest.mark.parametrize("name", NAMES)
def test_no_batch_statistics_and_nothing_random(name):
    net, x = small(name)
    assert find_running_statistics(net) == []
    assert torch.equal(net.train()(x), net.eval()(x))
    assert list(net.buffers()) == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32])
def test_tokens_of_any_integer_dtype(dtype):
    net, x = small("cnn_lstm")
    assert torch.equal(net(x.to(dtype)), net(x))


def test_real_reviews_in_their_own_dtype(shared_data):
    data = np.load(shared_data / "imdb_100.npz", allow_pickle=False)
    x, y = data["x_train"][:4], data["y_train"][:4]
    net = zoo.cnn_lstm(embedding=4, filters=3, hidden=5)
    it = cr.Problem(net, data=(x, y), likelihood=Categorical(), prior=cr.priors.Normal())
    assert it.forward(it.layout.reinitialised(0, 1), it.x).shape == (1, 4, 2)


# What is refused


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: zoo.mlp(0), "inputs must be a positive integer, got 0"),
        (lambda: zoo.mlp(3, (5, -1)), "hidden must be a positive integer, got -1"),
        (lambda: zoo.mlp(3, "50"), "hidden must be a width or a list of widths, .*got '50'"),
        (lambda: zoo.mlp(3, outputs=True), "outputs must be a positive integer, got True"),
        (lambda: zoo.mlp(3, activation="swoosh"), "activation must be one of 'silu', 'gelu', .*got 'swoosh'"),
        (lambda: zoo.mlp(3, activation=nn.SiLU), "activation must be one of .*got <class"),
        (lambda: zoo.lenet(channels=1.0), "channels must be a positive integer, got 1.0"),
        (lambda: zoo.resnet20_frn(width=0), "width must be a positive integer, got 0"),
        (lambda: zoo.resnet20_frn(activation="Relu"), "activation must be one of .*got 'Relu'"),
        (lambda: zoo.cnn_lstm(pool=0), "pool must be a positive integer, got 0"),
        (lambda: zoo.cnn_lstm(9, 2, forget_bias=float("nan")), "forget_bias must be a finite number, got nan"),
        (
            lambda: zoo.cnn_lstm(9, 2)(torch.zeros(2, 9)),
            "x must hold integer tokens of shape .N, T., got torch.float32 of shape .2, 9.. Tokens are 0 to 8",
        ),
        (lambda: zoo.cnn_lstm(9, 2)(tokens(2, 7, 9)), "x must have at least 8 tokens per row, got 7. Pad the rows"),
        (
            lambda: zoo.UnrolledLSTM(2, 3)(torch.zeros(4, 5, 3)),
            r"x must have shape \(N, T, 2\) with T >= 1, got \(4, 5, 3\)",
        ),
        (lambda: zoo.UnrolledLSTM(2, 3)(torch.zeros(4, 0, 2)), r"x must have shape .* got \(4, 0, 2\)"),
    ],
)
def test_bad_arguments(call, text):
    with pytest.raises(cr.InputError, match=text):
        call()


def test_shortest_review_is_taken():
    assert zoo.cnn_lstm(9, 2)(tokens(2, 8, 9)).shape == (2, 2)
