"""Where the noise of a draw enters: all estimators have the same expected gradient, or refuse the network."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import credibly as cr
from conftest import mlp, randn
from credibly.gaussians.families import MeanField, inverse_softplus
from credibly.inference.training.reparameterisation import choose_estimator
from credibly.likelihoods import Categorical, Gaussian
from credibly.methods.bbb import BayesByBackprop, FreeEnergy

f64 = torch.float64
ROWS, COUNT = 7, 20_000


class Sequences(nn.Module):
    """Linear layers over (B, T, F), with a nonlinear read-out that sees all positions of a row together."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(2, 3), nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x))).sum(1).tanh()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.shared(torch.tanh(self.shared(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class TimeFirst(nn.Module):
    """Works on (T, B, F) inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x):
        return torch.tanh(self.inner(x.transpose(0, 1))).sum(0)


class Folded(nn.Module):
    """Puts positions into the rows: (B T, F)."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x):
        return torch.tanh(self.inner(x.flatten(0, 1))).reshape(len(x), -1).sum(1)


def cnn(padding_mode="zeros", bias=True):
    return nn.Sequential(
        nn.Conv2d(1, 2, 2, padding=1, padding_mode=padding_mode, bias=bias),
        nn.Tanh(),
        nn.Conv2d(2, 2, 2, stride=2, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8, 1),
    )


def conv1d():
    return nn.Sequential(nn.Conv1d(2, 3, 2, dilation=2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 1))


NETS = {
    "mlp": (lambda: mlp(3, 4, 4, 1, activation=nn.Tanh), (3,)),
    "mlp without biases": (
        lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False)),
        (3,),
    ),
    "one linear layer": (lambda: nn.Linear(3, 1), (3,)),
    "cnn": (cnn, (1, 3, 3)),
    "cnn without a bias": (lambda: cnn(bias=False), (1, 3, 3)),
    "conv1d": (conv1d, (2, 4)),
    "sequences": (Sequences, (4, 2)),
    "recurrent": (Recurrent, (4, 2)),
    "twice": (Twice, (3,)),
    "tied": (Tied, (3,)),
    "circular": (lambda: cnn("circular"), (1, 3, 3)),
    "time first": (TimeFirst, (4, 2)),
    "time first, as long as the batch": (TimeFirst, (ROWS, 2)),
    "folded": (Folded, (4, 2)),
}


def problem(name, likelihood=None, prior=None, **kwargs):
    make, shape = NETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make().double()
    x, y = randn(ROWS, *shape, seed=1, dtype=f64), randn(ROWS, seed=2, dtype=f64)
    likelihood = likelihood or Gaussian(0.7)
    return cr.Problem(net, data=(x, y), likelihood=likelihood, prior=prior or cr.priors.Normal(), **kwargs)


def choose(asked, name, *, batch=ROWS, mean_field=True, **kwargs):
    return choose_estimator(asked, problem(name, **kwargs), batch, mean_field=mean_field)


@functools.cache
def setting(name, estimator, samples=1, learned=False, prior=None):
    """The free energy of a network, and a generic phi: no special means or standard deviations."""
    p = problem(name, Gaussian() if learned else None, prior)
    options = BayesByBackprop(estimator=estimator, samples=samples)
    layers = choose_estimator(estimator, p, ROWS, mean_field=True)
    objective = FreeEnergy(p, MeanField(), p.n, options, layers, seed=0, per_epoch=1)
    phi = MeanField().init(0.7 * randn(1, p.dim, seed=3, dtype=f64), 0.5)
    phi = phi + torch.cat([torch.zeros(1, p.dim, dtype=f64), 0.3 * randn(1, p.dim, seed=4, dtype=f64)], 1)
    return objective, phi


@functools.cache
def gradients(name, estimator, learned=False, count=COUNT):
    """Gradients (count, P) of the mean log likelihood, one per draw of the noise; and one without noise."""
    objective, phi = setting(name, estimator, count, learned)
    p = objective.problem

    def value(phi, *noise):
        return objective.log_likelihood(phi, p.x, p.y, tuple(n.unsqueeze(1) for n in noise)).sum() / p.n

    noise = objective.noise(0)
    assert all(n.shape[:2] == (1, count) for n in noise)
    batched = vmap(grad(value), in_dims=(None, *(1 for _ in noise)))
    parts = [batched(phi, *part)[:, 0] for part in zip(*(n.split(2_000, 1) for n in noise))]
    still = grad(value)(phi, *(torch.zeros_like(n[:, 0]) for n in noise))
    return torch.cat(parts), still


def z_scores(a, b):
    """Difference of two means in standard errors, per coordinate; zero where nothing varies."""
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    return (a.mean(0) - b.mean(0)) / error.clamp_min(1e-12)


@pytest.mark.parametrize(
    "name, estimator",
    [
        ("mlp", "local"),
        ("mlp", "flipout"),
        ("mlp without biases", "local"),
        ("mlp without biases", "flipout"),
        ("one linear layer", "local"),
        ("one linear layer", "flipout"),
        ("cnn", "flipout"),
        pytest.param("cnn without a bias", "flipout", marks=pytest.mark.nightly),
        ("conv1d", "flipout"),
        ("sequences", "flipout"),
    ],
)
def test_estimators_have_the_same_expected_gradient(name, estimator):
    plain, _ = gradients(name, "weights")
    other, still = gradients(name, estimator)
    z = z_scores(plain, other)
    # 10 to 90 numbers, each N(0, 1): the largest exceeds 4.5 once in a thousand cases.
    assert float(z.abs().max()) < 4.5
    assert float(z.square().mean().sqrt()) < 1.6
    # The check has power: without the noise the gradient is far off.
    without = (still[0] - plain.mean(0)) / (plain.std(0) / math.sqrt(len(plain)))
    assert float(without.abs().max()) > 30


def test_a_learned_noise_scale_has_the_same_expected_gradient():
    """The likelihood's own parameter is drawn beside the layers."""
    plain, _ = gradients("mlp", "weights", True)
    for estimator in ("local", "flipout"):
        other, _ = gradients("mlp", estimator, True)
        assert float(z_scores(plain, other).abs().max()) < 4.5
    dim = setting("mlp", "weights", COUNT, True)[0].problem.dim
    assert float(plain[:, 2 * dim - 1].mean().abs()) > 0.01  # the rho of log_scale, which comes last


def test_local_is_biased_on_sequences():
    """Positions share a row's weights: local reparameterisation treats them as independent, as its docstring states."""
    plain, _ = gradients("sequences", "weights")
    assert float(z_scores(plain, gradients("sequences", "local")[0]).abs().max()) > 10


def test_weights_of_unsupported_layers_are_drawn():
    """An LSTM under a Linear head: noise on the head, drawn weights in the LSTM; the same expected gradient."""
    means = {}
    for estimator in ("weights", "local", "flipout"):
        objective, phi = setting("recurrent", estimator, 40)
        p, found = objective.problem, []
        for step in range(30):
            controls = torch.zeros(1, dtype=f64)
            _, gradient = objective.evaluate(phi, (), p.x, p.y, None, objective.noise(step), controls)
            found.append(gradient[0])
        means[estimator] = torch.stack(found)
    for estimator in ("local", "flipout"):
        z = z_scores(means["weights"], means[estimator])
        assert float(z.abs().max()) < 4.5
        inside = phi.shape[1] // 2 - 4  # the LSTM's weights come first
        assert float(means[estimator][:, :inside].var(0).min()) > 0


def test_priors_without_a_closed_form_have_the_same_complexity_under_every_estimator():
    """It is averaged over draws of the weights, even if the noise of the network is on its layers."""
    values = {}
    for estimator in ("weights", "local", "flipout"):
        objective, phi = setting("mlp", estimator, 50, prior=cr.priors.Laplace(0.4))
        found = torch.cat([objective.complexity(phi, objective.noise(step)[0]) for step in range(100)])
        values[estimator] = found.unsqueeze(1)
    assert abs(float(z_scores(values["weights"], values["local"]))) < 4
    assert abs(float(z_scores(values["weights"], values["flipout"]))) < 4
    still = objective.complexity(phi, torch.zeros(1, 1, objective.problem.dim, dtype=f64))
    assert abs(float(values["local"].mean() - still)) > 20 * float(values["local"].std()) / 10  # draws are needed


def test_gradient_variance_falls_from_weights_to_flipout_to_local():
    """Separate noise per row averages out over the batch; noise on the outputs even more."""
    total = {e: float(gradients("mlp", e)[0].var(0).sum()) for e in ("weights", "local", "flipout")}
    assert total["local"] < 0.8 * total["weights"]
    assert total["flipout"] < 0.95 * total["weights"]
    assert total["local"] < total["flipout"]


@pytest.mark.parametrize("name, layer", [("cnn", "0"), ("conv1d", "0"), ("sequences", "inner"), ("mlp", "0")])
def test_local_outputs_have_the_marginals_of_weight_draws(name, layer):
    """Mean and variance of every output of a layer, at each position, against 20,000 draws of its weights."""
    objective, phi = setting(name, "local")
    p = objective.problem
    mu, sigma = objective.family.loc(phi, p.dim)[0], objective.family.variance(phi, p.dim)[0].sqrt()
    noisy, plain = objective.layers.module.get_submodule(layer), p.layout.module.get_submodule(layer)
    means = {k: p.layout.split(mu)[0][f"{layer}.{k}"] for k in ("weight", "bias")}
    scales = {f"{k}_scale": p.layout.split(sigma)[0][f"{layer}.{k}"] for k in ("weight", "bias")}

    def output(noise):
        return functional_call(noisy, {**means, **scales, "noise": torch.full_like(noisy.noise, noise)}, (p.x,))

    mean, sd = output(0.0), output(1.0) - output(0.0)
    assert mean.shape == noisy.noise.shape  # one number per position
    drawn = {k: means[k] + scales[f"{k}_scale"] * randn(COUNT, *means[k].shape, seed=5, dtype=f64) for k in means}
    outputs = vmap(lambda w: functional_call(plain, w, (p.x,)))(drawn)
    assert float(((outputs.mean(0) - mean) / sd).abs().max()) < 4.5 / math.sqrt(COUNT)
    assert float((outputs.var(0) / sd.square() - 1).abs().max()) < 4.5 * math.sqrt(2 / COUNT)


def test_flipout_draws_separately_per_row():
    """One layer: every row has the marginals of a weight draw, and two rows with the same input differ."""
    p = problem("one linear layer")
    p.x = p.x[:1].expand(ROWS, -1).clone()
    layers = choose_estimator("flipout", p, ROWS, mean_field=True)
    mu, sigma = torch.zeros(4, dtype=f64), torch.tensor([0.5, 1.0, 0.2, 0.3], dtype=f64)
    noise = layers.draw(COUNT, torch.Generator().manual_seed(0))
    names = [buffer for buffer, _, _ in layers.shapes]
    given = {"weight": mu[:3].reshape(1, 3), "bias": mu[3:], "weight_scale": sigma[:3].reshape(1, 3)}
    given["bias_scale"] = sigma[3:]

    def run(*drawn):
        return functional_call(layers.module, {**given, **dict(zip(names, drawn))}, (p.x,))

    outputs = vmap(run)(*(n[0] for n in noise)).squeeze(-1)  # (draws, rows)
    exact = float((p.x[0].square() * sigma[:3].square()).sum() + sigma[3].square())
    assert float(outputs.mean(0).abs().max()) < 4.5 * math.sqrt(exact / COUNT)
    assert float((outputs.var(0) / exact - 1).abs().max()) < 4.5 * math.sqrt(2 / COUNT)
    assert float((outputs[:, 0].abs() - outputs[:, 1].abs()).abs().max()) > 0.1  # not just opposite signs
    correlation = torch.corrcoef(outputs.T) - torch.eye(ROWS, dtype=f64)  # random signs: uncorrelated rows
    assert float(correlation.abs().max()) < 4.5 * math.sqrt(2 / COUNT)


def test_signs_are_signs_and_normals_are_normal():
    objective, _ = setting("cnn", "flipout", 500)
    for (buffer, shape, signs), noise in zip(objective.layers.shapes, objective.noise(0)[1:]):
        assert noise.shape == (1, 500, *shape)
        if signs:
            assert "sign" in buffer
            assert set(noise.unique().tolist()) == {-1.0, 1.0}
            assert float(noise.mean().abs()) < 4.5 / math.sqrt(noise.numel())
        else:
            assert float(noise.var() - 1) == pytest.approx(0, abs=4.5 * math.sqrt(2 / noise.numel()))


@pytest.mark.parametrize("estimator", ["weights", "local", "flipout"])
def test_k_samples_are_the_average_of_k_single_passes(estimator):
    """With the same noise: misfit, complexity and gradient."""
    objective, phi = setting("mlp", estimator, 5)
    p, noise, controls = objective.problem, objective.noise(3), torch.ones(1, dtype=f64)
    parts, gradient = objective.evaluate(phi, (), p.x, p.y, None, noise, controls)
    singles = [
        objective.evaluate(phi, (), p.x, p.y, None, tuple(n[:, k : k + 1] for n in noise), controls) for k in range(5)
    ]
    torch.testing.assert_close(parts, torch.stack([s[0] for s in singles]).mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, torch.stack([s[1] for s in singles]).mean(0), rtol=1e-12, atol=1e-12)
    assert float((singles[0][0] - singles[1][0]).abs().max()) > 1e-3


def test_with_zero_variance_every_estimator_is_the_network():
    for name in ("mlp", "cnn", "sequences"):
        for estimator in ("weights", "local", "flipout"):
            objective, _ = setting(name, estimator)
            p = objective.problem
            mu = randn(1, p.dim, seed=3, dtype=f64)
            phi = torch.cat([mu, torch.full_like(mu, inverse_softplus(1e-12))], 1)
            value = objective.log_likelihood(phi, p.x, p.y, objective.noise(0))
            exact = p.log_likelihood_rows(mu, p.x, p.y).sum(1)
            torch.testing.assert_close(value, exact, rtol=1e-6, atol=1e-6)  # local has a std of at least 1e-8


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_inputs_that_are_all_zero_have_finite_gradients(estimator):
    objective, phi = setting("mlp without biases", estimator)
    p = objective.problem
    x = torch.zeros_like(p.x)
    _, gradient = objective.evaluate(phi, (), x, p.y, None, objective.noise(0), torch.ones(1, dtype=f64))
    assert bool(torch.isfinite(gradient).all())


def test_the_users_network_is_not_modified():
    p = problem("mlp")
    before = [type(m) for m in p.layout.module.modules()]
    layers = choose_estimator("local", p, ROWS, mean_field=True)
    assert [type(m) for m in p.layout.module.modules()] == before
    assert not list(p.layout.module.buffers())
    assert not any(m._forward_hooks for m in p.layout.module.modules())
    assert isinstance(layers.module[0], nn.Linear)
    assert type(layers.module[0]) is not nn.Linear


# -- which estimator ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, estimator, reason",
    [
        ("mlp", "local", "Linear on rows"),
        ("one linear layer", "local", "Linear on rows"),
        ("recurrent", "local", "Linear on rows"),
        ("cnn", "flipout", "positions share weights"),
        ("conv1d", "flipout", "positions share weights"),
        ("sequences", "flipout", "positions share weights"),
        ("twice", "weights", "layer 'shared' is called 2 times in one pass"),
        ("tied", "weights", "parameter 'b.weight' is tied to 'a.weight'"),
        ("circular", "weights", "layer '0' pads with 'circular'"),
        ("time first", "weights", "layer 'inner' does not keep the rows on its first axis"),
        ("time first, as long as the batch", "weights", "layer 'inner' does not keep the rows on its first axis"),
        ("folded", "weights", "layer 'inner' does not keep the rows on its first axis"),
    ],
)
def test_auto_picks_what_suits_and_records_why(name, estimator, reason):
    chosen = choose("auto", name)
    assert chosen.name == estimator
    assert reason in chosen.reason


@pytest.mark.parametrize("asked", ["local", "flipout"])
@pytest.mark.parametrize(
    "name, reason",
    [
        ("twice", "called 2 times"),
        ("tied", "is tied to"),
        ("circular", "pads with 'circular'"),
        ("time first, as long as the batch", "does not keep the rows"),
        ("folded", "does not keep the rows"),
    ],
)
def test_an_estimator_that_does_not_support_the_network_is_refused(asked, name, reason):
    with pytest.raises(
        cr.InputError,
        match=rf'estimator: "{asked}" does not support this network: .*{reason}.* Use estimator="weights"',
    ):
        choose(asked, name)


def test_networks_without_a_supported_layer():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, x):
            return self.table(x).sum(1)

    p = cr.Problem(
        Embedded(),
        data=(torch.arange(10).reshape(5, 2) % 5, torch.tensor([0, 1, 2, 0, 1])),
        likelihood=Categorical(),
        prior=cr.priors.Normal(),
    )
    chosen = choose_estimator("auto", p, 5, mean_field=True)
    assert (chosen.name, chosen.reason) == ("weights", "no Linear or convolution layer was found")
    with pytest.raises(cr.InputError, match="estimator: .*no Linear or convolution layer was found"):
        choose_estimator("flipout", p, 5, mean_field=True)


def test_layers_that_are_not_random_get_no_noise():
    p = problem("mlp", random="4.*")
    chosen = choose_estimator("auto", p, ROWS, mean_field=True)
    assert (chosen.name, chosen.layers) == ("local", ["4"])


def test_other_families_and_mixtures_draw_weights():
    chosen = choose("auto", "mlp", mean_field=False)
    assert chosen.name == "weights"
    assert "other families and from mixtures" in chosen.reason
    assert choose("weights", "mlp", mean_field=False).reason == "asked for"
    for options in ({"family": "low-rank"}, {"family": "full-rank"}, {"members": 2}):
        with pytest.raises(
            cr.InputError, match='estimator must be "weights" with another family or several members, got "local"'
        ):
            cr.BayesByBackprop(estimator="local", steps=3, **options).fit(problem("mlp"), seed=0)
        history = cr.BayesByBackprop(steps=3, **options).fit(problem("mlp"), seed=0).record.history
        assert history["estimator"] == "weights"


@pytest.mark.parametrize("batch", [1, 2, ROWS])
def test_any_batch_size_can_be_traced(batch):
    chosen = choose("auto", "cnn", batch=batch)
    assert chosen.name == "flipout"
    assert all(shape[0] == batch for buffer, shape, _ in chosen.shapes if "sign" in buffer)
