"""MC-Dropout: the objective against brute force over masks, the passes, wrapping, fitting, grids and learned rates."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import credibly as cr
from conftest import mlp, randn
from credibly.core.compilation import compiler_missing
from credibly.core.rng import stream
from credibly.inference.training import loop
from credibly.inference.training.dropout_objective import DropoutObjective, Dropped
from credibly.likelihoods import Bernoulli, Categorical, Gaussian
from credibly.networks.dropout_masks import find_sites
from credibly.posterior.dropout import DropoutPosterior, draw_masks

f64 = torch.float64
X, Y = randn(40, 3, dtype=f64), randn(40, 3, dtype=f64).sum(1) + 0.1 * randn(40, seed=1, dtype=f64)
X32, Y32 = X.float(), Y.float()
LABELS = (Y > 0).long() + (Y > 1).long()
NOTHING = torch.tensor(())
NOISE, PRIOR = 0.4, 0.6


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return build()


def dropped_mlp(inputs=3, hidden=8, outputs=1, first=0.2, second=0.3, dtype=f64):
    """Dropout before both layers."""
    return seeded(
        lambda: nn.Sequential(
            nn.Dropout(first), nn.Linear(inputs, hidden), nn.Tanh(), nn.Dropout(second), nn.Linear(hidden, outputs)
        ).to(dtype)
    )


class Residual(nn.Module):
    """No plain stack, so it is batched by vmap or looped."""

    def __init__(self):
        super().__init__()
        self.drop, self.a, self.late, self.b, self.c = (
            nn.Dropout(0.2), nn.Linear(3, 6), nn.Dropout(0.3), nn.Linear(6, 1), nn.Linear(3, 1),
        )  # fmt: skip

    def forward(self, x):
        return self.b(self.late(torch.tanh(self.a(self.drop(x))))) + self.c(x)


def residual():
    return seeded(lambda: Residual().double())


class Reader(nn.Module):
    """An LSTM over (N, T, F), dropout on its last state, a Linear head."""

    def __init__(self, dropout=0.25):
        super().__init__()
        self.rnn, self.drop, self.head = nn.LSTM(2, 5, batch_first=True), nn.Dropout(dropout), nn.Linear(5, 1)

    def forward(self, x):
        out = self.rnn(x)[0]
        return self.head(self.drop(out[:, -1]))


def convolutional(outputs=3):
    return seeded(
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(4, 4, 3), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(16, outputs),
        )
    )  # fmt: skip


def build(net, data=(X, Y), likelihood=None, prior=None, **kwargs):
    return cr.Problem(net, data, likelihood or Gaussian(NOISE), prior or cr.priors.Normal(PRIOR), **kwargs)


def objective_of(problem, *, insert=None, rate=None, members=None, rates=None, n=None, batch=None, **kwargs):
    network = Dropped(problem, insert, rate)
    given = torch.tensor(rates or [network.rate_row(rate)], dtype=problem.layout.dtype)
    given = given if members is None else given.expand(members, -1)
    options = {"seed": 0, "concrete": False, "fixed_scale": False, **kwargs}
    return DropoutObjective(problem, network, n or problem.n, given, batch=batch or problem.n, **options)


def every_mask(network):
    """All masks: their probabilities (K,), and whether each value is kept, (K, 1, *shape) by the name of the mask."""
    sizes = [math.prod(network.shapes[s.name]) for s in network.sites]
    kept = torch.tensor(list(itertools.product((0.0, 1.0), repeat=sum(sizes))), dtype=f64)
    parts = kept.split(sizes, 1)
    chance = torch.ones(len(kept), dtype=f64)
    for site, part in zip(network.sites, parts):
        chance = chance * (part * (1 - site.rate) + (1 - part) * site.rate).prod(1)
    assert float(chance.sum()) == pytest.approx(1)
    shaped = {s.mask: p.reshape(-1, 1, *network.shapes[s.name]) for s, p in zip(network.sites, parts)}
    return chance, shaped


def scaled(network, kept):
    return {s.mask: kept[s.mask] * s.gain for s in network.sites}


def some_weights(problem, count=5):
    return 0.8 * randn(count, problem.dim, seed=7, dtype=f64)


# -- the objective is -ELBO ----------------------------------------------------------------------------------------------
ROWS = 4


def tiny(net=None, **kwargs):
    net = dropped_mlp(2, 3, first=0.25, second=0.4) if net is None else net
    return build(net, (randn(ROWS, 2, seed=4, dtype=f64), randn(ROWS, seed=5, dtype=f64)), **kwargs)


def expected(objective, theta):
    """E over masks of the sum of log likelihoods, by giving the objective every mask; and the complexity."""
    problem, network = objective.problem, objective.network
    chance, kept = every_mask(network)
    weights = theta.expand(len(chance), -1)
    rows = objective.log_likelihood(weights, scaled(network, kept), problem.x, problem.y)
    return chance @ rows.sum(1), objective.complexity(theta.unsqueeze(0), objective.own[0])[0]


@pytest.mark.parametrize("where", ["both layers", "second layer"])
def test_objective_is_minus_the_elbo_over_n_tau(where):
    """SPEC 4 in its own terms: variational parameters M = W/keep, (1/N) sum 1/2 ||y - f||^2 and the decays lambda."""
    first = 0.25 if where == "both layers" else 0.0
    net = dropped_mlp(2, 3, first=0.25, second=0.4)
    problem = tiny(net if first else net[1:])
    objective = objective_of(problem)
    keep = (1 - first, 0.6)
    tau, length = 1 / NOISE**2, 1 / PRIOR
    differences = []
    for theta in some_weights(problem):
        w1, b1, w2, b2 = problem.layout.split(theta)[0].values()
        m1, m2 = w1 / keep[0], w2 / keep[1]
        squares = torch.zeros((), dtype=f64)
        for z in itertools.product((0.0, 1.0), repeat=5):
            z1, z2 = torch.tensor(z[:2], dtype=f64), torch.tensor(z[2:], dtype=f64)
            odds = [(keep[0], z1), (keep[1], z2)]
            chance = math.prod(k if v else 1 - k for k, part in odds for v in part.tolist())
            hidden = torch.tanh(problem.x @ (m1 * z1).T + b1)
            f = hidden @ (m2 * z2).T + b2
            squares += chance * 0.5 * torch.square(problem.y - f).sum() / ROWS
        decay = [k * length**2 / (2 * ROWS * tau) for k in keep]
        decay_of_biases = length**2 / (2 * ROWS * tau)
        spec = squares + decay[0] * m1.square().sum() + decay[1] * m2.square().sum()
        spec += decay_of_biases * (b1.square().sum() + b2.square().sum())
        log_lik, complexity = expected(objective, theta)
        differences.append(float((-log_lik + complexity) / (ROWS * tau) - spec))
    # The constant is that of the Gaussian density, log sqrt(2 pi / tau) for a row, divided by tau.
    assert differences == pytest.approx([0.5 * math.log(2 * math.pi / tau) / tau] * 5, abs=1e-12)


def test_evaluate_is_that_objective_and_rows_may_have_masks_of_their_own():
    """Through the uniform numbers that a step gets; the expectation of the sum is the same with one mask for each row."""
    problem = tiny()
    chance, kept = every_mask(Dropped(problem, None, None))
    count = len(chance)
    objective = objective_of(problem, members=count)
    theta = some_weights(problem, 1)[0]
    log_lik, complexity = expected(objective_of(problem), theta)
    noise = tuple(torch.where(k > 0, 0.0, 0.999).double().expand(-1, ROWS, -1) for k in kept.values())
    parts, _ = objective.evaluate(theta.expand(count, -1), objective.own, problem.x, problem.y, None, noise, NOTHING)
    assert parts.shape == (count, 2)
    assert float(chance @ parts[:, 0]) == pytest.approx(float(-log_lik) / ROWS, rel=1e-12)
    assert parts[:, 1].tolist() == pytest.approx([float(complexity) / ROWS] * count, rel=1e-12)
    # Row i under mask k + i: every row still meets every mask with its probability.
    turned = (torch.arange(count).unsqueeze(1) + torch.arange(ROWS)) % count
    masks = {name: m[turned].squeeze(2) for name, m in scaled(objective.network, kept).items()}
    rows = objective.log_likelihood(theta.expand(count, -1), masks, problem.x, problem.y)
    assert float((chance[turned] * rows).sum()) == pytest.approx(float(log_lik), rel=1e-12)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.one, self.two = nn.Dropout(0.3), nn.Linear(2, 1), nn.Linear(2, 1, bias=False)

    def forward(self, x):
        x = self.drop(x)
        return self.one(x) + torch.tanh(self.two(x))


KL_CASES = {
    "own layers": (lambda: dropped_mlp(2, 3, first=0.25, second=0.4), None),
    "inserted": (lambda: mlp(2, 3, 1, dtype=f64), "*"),
    "inserted before the last": (lambda: mlp(2, 3, 1, dtype=f64), "2"),
    "two on one weight": (lambda: nn.Sequential(nn.Dropout(0.25), nn.Linear(2, 1)).double(), "*"),
    "two heads": (lambda: Heads().double(), None),
}


@pytest.mark.parametrize("case", KL_CASES)
def test_complexity_is_the_kl_divergence_up_to_a_constant(case):
    """E_q[-log p(w)] by brute force: the prior's own density at the weights under every mask. (E_q log q is constant.)"""
    net, insert = KL_CASES[case]
    problem = tiny(net(), prior={"*weight": cr.priors.Normal(PRIOR), "*": cr.priors.Normal(1.7)})
    objective = objective_of(problem, insert=insert)
    network = objective.network
    chance, kept = every_mask(network)
    masks = scaled(network, kept)
    entries = {e.name: e for e in problem.layout.entries}
    differences = []
    for theta in some_weights(problem):
        draws = theta.expand(len(chance), -1).clone()
        for site in network.sites:
            for entry in (entries[w] for w in site.weights):
                part = draws[:, entry.start : entry.stop].reshape(-1, *entry.shape)
                draws[:, entry.start : entry.stop] = (part * masks[site.mask]).flatten(1)
        # The folded weights are the masked pass: q is where it should be.
        folded = problem.forward(draws, problem.x)
        passes = network.forward.apply({**problem.layout.split(theta.expand(len(chance), -1))[0], **masks}, problem.x)
        torch.testing.assert_close(folded, passes)
        cross = -(chance @ problem.prior.log_prob(draws))
        differences.append(float(cross - objective.complexity(theta.unsqueeze(0), objective.own[0])[0]))
    assert differences == pytest.approx([differences[0]] * 5, abs=1e-11)


def test_decay_of_each_coordinate():
    """l^2/keep on the weights that torch's inverted dropout trains, l^2 on biases and on layers without dropout."""
    net = seeded(
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Dropout(0.4), nn.Linear(3, 3), nn.Linear(3, 1)).double()
    )
    prior = {"*.bias": cr.priors.Normal(2.0), "*": cr.priors.Normal(PRIOR, fan_in=True)}
    problem = tiny(net, prior=prior, likelihood=Gaussian())
    objective = objective_of(problem)
    (theta,) = some_weights(problem, 1)
    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective.complexity(leaf.unsqueeze(0), objective.own[0]).sum(), leaf)
    # variance of the prior and keep; the noise scale keeps its own prior N(-1, 1)
    expected_by_name = {
        "0.weight": (PRIOR**2 / 2, 1.0), "0.bias": (4.0, 1.0), "3.weight": (PRIOR**2 / 3, 0.6), "3.bias": (4.0, 1.0),
        "4.weight": (PRIOR**2 / 3, 1.0), "4.bias": (4.0, 1.0),
    }  # fmt: skip
    found = problem.layout.split(gradient)[0]
    weights = problem.layout.split(theta)[0]
    assert set(found) == set(expected_by_name)
    for name, (variance, keep) in expected_by_name.items():
        torch.testing.assert_close(found[name], weights[name] / (variance * keep), rtol=1e-12, atol=1e-13)
    assert float(gradient[-1]) == pytest.approx(float(theta[-1]) + 1, rel=1e-12)


def test_tied_weights_are_decayed_by_their_keep():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(2, 2, bias=False), nn.Dropout(0.5), nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.drop(self.a(x))).sum(1, keepdim=True)

    problem = tiny(Tied().double())
    objective = objective_of(problem)
    theta = some_weights(problem, 1)
    square = float(theta.square().sum())
    assert float(objective.complexity(theta, objective.own[0])) == pytest.approx(square / (2 * PRIOR**2 * 0.5))


@pytest.mark.parametrize("bias", [True, False])
def test_alpha_dropout_has_the_decay_of_no_dropout(bias):
    """It replaces values, so a mask moves weights and bias: w = a W diag(z), b + W (a floor (1 - z) + shift). Their expected
    squares are ||W||^2 + ||b||^2 whatever the rate, by the very property that makes it keep the variance."""
    rate = 0.3
    floor = -1.7580993408473766
    a = ((1 - rate) * (1 + rate * floor**2)) ** -0.5
    shift = -a * rate * floor
    problem = tiny(nn.Sequential(nn.AlphaDropout(rate), nn.Linear(2, 1, bias=bias)).double())
    objective = objective_of(problem)
    chance, kept = every_mask(objective.network)
    (theta,) = some_weights(problem, 1)
    w, b = theta[:2], theta[2:].sum()
    square = torch.zeros((), dtype=f64)
    weights = {k: v.expand(len(chance), *v.shape) for k, v in problem.layout.split(theta)[0].items()}
    passes = objective.network.forward.apply({**weights, **kept}, problem.x).squeeze(-1)
    for p, z, f in zip(chance, kept["0.mask"][:, 0], passes):
        weight, constant = a * w * z, b + (w * (a * floor * (1 - z) + shift)).sum()
        torch.testing.assert_close(problem.x @ weight + constant, f)
        square += p * (weight.square().sum() + constant.square())
    complexity = objective.complexity(theta.unsqueeze(0), objective.own[0])
    assert float(complexity) == pytest.approx(float(square) / (2 * PRIOR**2), rel=1e-12)


def test_tempering_enters_as_in_the_problem():
    cold = objective_of(tiny(temperature=cr.Tempering(0.25, 2.0)))
    plain = objective_of(tiny())
    theta = some_weights(plain.problem, 1)
    noise = plain.noise(0)
    parts, gradient = plain.evaluate(theta, plain.own, plain.problem.x, plain.problem.y, None, noise, NOTHING)
    tempered, its_gradient = cold.evaluate(theta, cold.own, cold.problem.x, cold.problem.y, None, noise, NOTHING)
    torch.testing.assert_close(tempered, parts / torch.tensor([0.25, 2.0], dtype=f64))
    decay = theta / PRIOR**2 / ROWS
    for name, keep in (("1.weight", 0.75), ("4.weight", 0.6)):
        entry = next(e for e in plain.problem.layout.entries if e.name == name)
        decay[:, entry.start : entry.stop] /= keep
    torch.testing.assert_close(its_gradient, (gradient - decay) / 0.25 + decay / 2.0)


def test_n_is_the_number_of_training_rows():
    """The first step sees the network's own weights, so its decay is known: complexity / rows that train."""
    problem = build(dropped_mlp())
    whole = objective_of(problem)
    start = problem.layout.read(problem.layout.module).unsqueeze(0)
    complexity = float(whole.complexity(start, whole.own[0]))
    for validation, batch, rows in ((0.0, None, 40), (0.25, None, 30), (0.0, 8, 40), (0.25, 8, 30)):
        method = cr.MCDropout(steps=1, validation=validation, batch_size=batch)
        parts = method.fit(problem, seed=0).record.history["parts"]
        assert parts["decay"] == [[pytest.approx(complexity / rows, rel=1e-12)]]


def test_minibatches_estimate_the_same_objective():
    problem = build(dropped_mlp())
    objective = objective_of(problem, batch=10)
    theta = some_weights(problem, 1)
    noise = torch.rand(1, 40, 3, generator=stream(0, "a"), dtype=f64), torch.rand(1, 40, 8, generator=stream(0, "b"), dtype=f64)  # fmt: skip
    whole = objective.evaluate(theta, objective.own, problem.x, problem.y, None, noise, NOTHING)
    parts = []
    for rows in torch.arange(40).split(10):
        own = tuple(u[:, rows] for u in noise)
        parts.append(objective.evaluate(theta, objective.own, problem.x, problem.y, rows, own, NOTHING))
    torch.testing.assert_close(torch.stack([p for p, _ in parts]).mean(0), whole[0])
    torch.testing.assert_close(torch.stack([g for _, g in parts]).mean(0), whole[1])


# -- its gradient --------------------------------------------------------------------------------------------------------
RATES = [[0.2, 0.3], [0.5, 0.05], [0.9, 0.7]]


def by_hand(theta, uniforms, rates, x, y, count):
    """The loss of one member written out with F.linear, for `dropped_mlp`."""
    w1, b1, w2, b2 = (t.reshape(s) for t, s in zip(theta.split([24, 8, 8, 1]), [(8, 3), (8,), (1, 8), (1,)]))
    r1, r2 = rates
    h = torch.tanh(F.linear(x * (uniforms[0] < 1 - r1) / (1 - r1), w1, b1))
    f = F.linear(h * (uniforms[1] < 1 - r2) / (1 - r2), w2, b2).squeeze(1)
    misfit = -torch.distributions.Normal(f, NOISE).log_prob(y).mean()
    decay = w1.square().sum() / (1 - r1) + w2.square().sum() / (1 - r2) + b1.square().sum() + b2.square().sum()
    return misfit, decay / (2 * PRIOR**2 * count)


def test_gradient_is_that_of_a_network_written_by_hand():
    problem = build(dropped_mlp())
    objective = objective_of(problem, rates=RATES)
    theta = some_weights(problem, 3)
    noise = objective.noise(3)
    parts, gradient = objective.evaluate(theta, objective.own, problem.x, problem.y, None, noise, NOTHING)
    for m in range(3):
        leaf = theta[m].clone().requires_grad_()
        pieces = by_hand(leaf, [u[m] for u in noise], RATES[m], X, Y, 40)
        (exact,) = torch.autograd.grad(sum(pieces), leaf)
        torch.testing.assert_close(parts[m], torch.stack(pieces).detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient[m], exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("net", [dropped_mlp, residual], ids=["stack", "vmap"])
def test_members_with_rates_of_their_own_are_as_if_alone(net):
    problem = build(net())
    together = objective_of(problem, rates=RATES)
    theta = some_weights(problem, 3)
    noise = together.noise(0)
    parts, gradient = together.evaluate(theta, together.own, problem.x, problem.y, None, noise, NOTHING)
    assert float((gradient[0] - gradient[1]).abs().max()) > 1e-3
    for m in range(3):
        alone = objective_of(problem, rates=RATES[m : m + 1])
        mine = tuple(u[m : m + 1] for u in noise)
        one = alone.evaluate(theta[m : m + 1], alone.own, problem.x, problem.y, None, mine, NOTHING)
        torch.testing.assert_close(one[0][0], parts[m], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(one[1][0], gradient[m], rtol=1e-10, atol=1e-12)


def test_members_share_their_uniform_numbers_and_steps_do_not():
    objective = objective_of(build(dropped_mlp()), rates=RATES, batch=8)
    u, later = objective.noise(0), objective.noise(1)
    assert [tuple(t.shape) for t in u] == [(3, 8, 3), (3, 8, 8)]
    assert torch.equal(u[0][0], u[0][2])
    assert not torch.equal(u[0], later[0])
    assert all(torch.equal(a, b) for a, b in zip(u, objective.noise(0)))


def test_training_is_gradient_descent_on_it():
    """Five steps of SGD by hand with the masks of each step."""
    problem = build(dropped_mlp())
    method = cr.MCDropout(steps=5, batch_size=40, optimiser="sgd", momentum=0.0, lr=0.05, schedule="constant")
    theta = problem.layout.read(problem.layout.module)
    objective = objective_of(problem, seed=9)
    for t in range(5):
        leaf = theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            sum(by_hand(leaf, [u[0] for u in objective.noise(t)], (0.2, 0.3), X, Y, 40)), leaf
        )
        theta = theta - 0.05 * gradient
    torch.testing.assert_close(method.fit(problem, seed=9).theta, theta, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{"rate": (0.1, 0.4)}, {"concrete": True}], ids=["grid", "concrete"])
def test_looped_equals_batched(options):
    fits = [
        cr.MCDropout(steps=25, batch_size=16, **options).fit(build(residual(), plan=plan), seed=0)
        for plan in ("batched", "looped")
    ]
    assert [f.model.forward.looped for f in fits] == [False, True]
    torch.testing.assert_close(fits[0].theta, fits[1].theta, rtol=1e-9, atol=1e-10)
    assert fits[0].rates == pytest.approx(fits[1].rates, rel=1e-9)
    if "rate" in options:
        tables = [[row["held_out_log_density"] for row in f.record.history["grid"]] for f in fits]
        assert tables[0] == pytest.approx(tables[1], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"concrete": True}, {"rate": (0.1, 0.3), "tau": (4.0, 9.0)}], ids=["concrete", "grid"]
)
def test_compiled_equals_eager(options, caplog):
    problem = build(dropped_mlp(), likelihood=Gaussian())
    with caplog.at_level("INFO", logger="credibly"):
        fits = [cr.MCDropout(steps=25, batch_size=16, compile=c, **options).fit(problem, seed=0) for c in (True, False)]
    if compiler_missing(torch.device("cpu")) is None:
        assert caplog.messages == []  # it did compile, and did not fall back
    torch.testing.assert_close(fits[0].theta, fits[1].theta, rtol=1e-9, atol=1e-10)
    assert fits[0].rates == pytest.approx(fits[1].rates, rel=1e-9)


# -- the passes ----------------------------------------------------------------------------------------------------------
def wrap(net, likelihood=None, data=(X, Y), **kwargs):
    """A posterior without training: what is tested below holds for any weights."""
    return cr.MCDropout.from_trained(net, data, likelihood or Gaussian(NOISE), **kwargs)


def masks_of(posterior, x, passes, seed):
    sites, shapes = find_sites(posterior.masked, posterior.rates, x[:1])
    return draw_masks(sites, shapes, passes, seed, posterior.theta)


def one_by_one(posterior, x, passes, seed):
    """Outputs (passes, N) from the masked network called once a pass."""
    masks = masks_of(posterior, x, passes, seed)
    with torch.no_grad():
        rows = [functional_call(posterior.masked, {k: m[s] for k, m in masks.items()}, x) for s in range(passes)]
    return torch.stack(rows)


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
def test_the_seed_decides(per_row):
    posterior = wrap(dropped_mlp())
    before = torch.get_rng_state()
    one, same, other = (posterior.predict(X, passes=5, seed=s, per_row=per_row).functions() for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("net", [dropped_mlp, residual], ids=["stack", "vmap"])
def test_a_pass_is_a_function(net):
    """One mask for all rows: the value at a row does not depend on which other rows are asked for, nor on their order."""
    posterior = wrap(net())
    f = posterior.predict(X, passes=7).functions()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(posterior.predict(X[order], passes=7).functions(), f[:, order], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(posterior.predict(X[5:9], passes=7).functions(), f[:, 5:9], rtol=1e-13, atol=1e-13)
    equal = posterior.predict(X[:1].expand(6, 3), passes=7).functions()
    torch.testing.assert_close(equal, equal[:, :1].expand(7, 6), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("net", [dropped_mlp, residual], ids=["stack", "vmap"])
def test_rows_may_have_masks_of_their_own(net):
    posterior = wrap(net())
    f = posterior.predict(X[:1].expand(200, 3), passes=3, per_row=True).functions()
    assert all(len(row.unique()) > 100 for row in f)
    # A row's masks go with its place: asking for fewer rows changes nothing.
    torch.testing.assert_close(posterior.predict(X[:1].expand(70, 3), passes=3, per_row=True).functions(), f[:, :70])


def close_in_distribution(a, b):
    """Means and variances of two samples (S, ...) within 4.5 standard errors."""
    error = ((a.var(0) / len(a)) + b.var(0) / len(b)).sqrt()
    assert float(((a.mean(0) - b.mean(0)) / error).abs().max()) < 4.5
    squares = [torch.square(s - s.mean(0)) for s in (a, b)]
    error = (squares[0].var(0) / len(a) + squares[1].var(0) / len(b)).sqrt()
    assert float(((squares[0].mean(0) - squares[1].mean(0)) / error).abs().max()) < 4.5


@pytest.mark.parametrize("net", [dropped_mlp, lambda: convolutional(1).double()], ids=["mlp", "cnn"])
def test_shared_masks_own_masks_and_torchs_dropout_have_one_distribution(net):
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
    monkeypatch.setattr("credibly.predictive.base.BLOCK_VALUES", values)
    monkeypatch.setattr("credibly.predictive.base.CACHE_VALUES", values)
    monkeypatch.setattr("credibly.posterior.dropout.BLOCK_VALUES", values)
    p = posterior.predict(X, passes=11, per_row=per_row)
    for a, b in zip((p.functions(), p.mean, p.variance, p.log_prob(Y)), whole):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Counting(nn.Module):
    """Notes the rows of every call."""

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
def test_what_lies_before_the_first_dropout_is_computed_once(kind, per_row):
    net, shape, name = PREFIXES[kind]
    x = randn(30, *shape, dtype=f64)
    posterior = wrap(seeded(net).double(), data=(x, Y[:30]))
    counter = posterior.masked.get_submodule(name)
    p = posterior.predict(x, passes=25, seed=4, per_row=per_row)
    counter.calls.clear()
    f = p.functions()
    p.mean, p.log_prob(Y[:30])
    assert [c for c in counter.calls if c > 1] == [30]  # one row at a time is the search for shapes
    if not per_row:
        torch.testing.assert_close(f, one_by_one(posterior, x, 25, 4).squeeze(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", PREFIXES)
def test_the_prefix_is_computed_once_for_each_row_however_wide_it_is(monkeypatch, kind):
    """A prefix so wide that it takes several blocks of rows: every row still goes through it once, not once a pass."""
    net, shape, name = PREFIXES[kind]
    x = randn(30, *shape, dtype=f64)
    posterior = wrap(seeded(net).double(), data=(x, Y[:30]))
    counter = posterior.masked.get_submodule(name)
    plain = posterior.predict(x, passes=25).functions()
    monkeypatch.setattr("credibly.predictive.base.BLOCK_VALUES", 3000)
    monkeypatch.setattr("credibly.posterior.dropout.BLOCK_VALUES", 3000)
    p = posterior.predict(x, passes=25)
    counter.calls.clear()
    torch.testing.assert_close(p.functions(), plain, rtol=1e-12, atol=1e-12)
    blocks = [c for c in counter.calls if c > 1]
    assert len(blocks) > 1
    assert sum(blocks) == 30


def test_dropout_before_an_lstm_takes_the_loop():
    class Front(Reader):
        def forward(self, x):
            return self.head(self.rnn(self.drop(x))[0][:, -1])

    x = randn(12, 4, 2, dtype=f64)
    posterior = wrap(seeded(lambda: Front().double()), data=(x, Y[:12]))
    p = posterior.predict(x, passes=6, seed=2)
    torch.testing.assert_close(p.functions(), one_by_one(posterior, x, 6, 2).squeeze(-1), rtol=1e-12, atol=1e-12)
    assert float(p.epistemic.min()) > 0


def test_other_lengths_than_those_it_was_trained_on():
    net = seeded(lambda: nn.Sequential(nn.Dropout(0.3), nn.Conv1d(2, 3, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()))
    posterior = wrap(nn.Sequential(net, nn.Linear(3, 1)), data=(randn(8, 2, 9), Y32[:8]))
    assert posterior.predict(randn(5, 2, 20)).mean.shape == (5,)


# -- draws of the weights ------------------------------------------------------------------------------------------------
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
    """Its weight is used once with dropout and once without."""

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
    "convolution": (lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Dropout(0.3), nn.Conv1d(1, 1, 3), nn.Flatten()), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFOLDABLE)
def test_masks_that_are_no_masks_of_weights_have_no_draws(case):
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


# -- wrapping a trained network ------------------------------------------------------------------------------------------
def normalised(dtype=torch.float32):
    """A network with BatchNorm whose running statistics have seen data."""
    net = seeded(
        lambda: nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )
    ).to(dtype)  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for _ in range(5):
            net(2 * randn(64, 3, dtype=dtype) + 1)
    return net


def test_from_trained_leaves_the_network_as_it_was():
    net = normalised()
    net.train()
    net[2].eval()
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    posterior = cr.MCDropout.from_trained(net, (X32, Y32), Gaussian())
    posterior.predict(X32).mean, posterior.predict(X32, per_row=True).mean
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(net.state_dict()[k], v) for k, v in before.items())
    assert [type(m) for m in net][3] is nn.Dropout


def test_batchnorm_is_in_evaluation_mode_while_dropout_samples():
    net = normalised(f64)
    p = cr.MCDropout.from_trained(net, (X, Y), Gaussian(NOISE), rate=1e-7).predict(X)
    torch.testing.assert_close(p.mean, copy.deepcopy(net).eval()(X).squeeze(1).detach(), rtol=1e-5, atol=1e-5)
    assert (
        float((copy.deepcopy(net).train()(X).detach().squeeze(1) - p.mean).abs().max()) > 0.1
    )  # its batch statistics differ
    # A row's prediction does not depend on the other rows.
    posterior = cr.MCDropout.from_trained(net, (X, Y), Gaussian(NOISE))
    torch.testing.assert_close(posterior.predict(X[:1]).mean, posterior.predict(X).mean[:1])
    # The passes are those of the frozen network, by hand.
    frozen = copy.deepcopy(net).eval()
    mask = masks_of(posterior, X, 100, 0)["3.mask"][7]
    by_hand = frozen[4](frozen[2](frozen[1](frozen[0](X))) * mask).squeeze(1)
    torch.testing.assert_close(posterior.predict(X).functions()[7], by_hand.detach())


def test_from_trained_finds_the_noise_scale():
    """The scale of the highest log density under dropout: its neighbours are lower, and so is the network's start."""
    posterior = cr.MCDropout.from_trained(normalised(f64), (X, Y), Gaussian())

    def score(log_scale):
        theta = posterior.theta.clone()
        theta[-1] = log_scale
        other = DropoutPosterior(posterior.model, theta, posterior.rates, posterior.inserted, posterior.record)
        return float(other.predict(X, passes=50).log_prob(Y).mean())

    best = float(posterior.theta[-1])
    assert all(score(best) > score(best + step) for step in (-1.0, -0.1, 0.1, 1.0))
    assert score(best) > score(-1.0) + 0.1
    assert posterior.predict(X).aleatoric.tolist() == pytest.approx([math.exp(2 * best)] * 40)


def test_from_trained_with_rates_and_places_of_its_own():
    net = mlp(3, 6, 1, dtype=f64)
    posterior = wrap(net, insert="2", rate=0.4)
    assert (posterior.rates, posterior.inserted) == ({"2": 0.4}, ("2",))
    assert repr(posterior) == "DropoutPosterior(31 parameters, dropout 2 0.4)"
    assert wrap(dropped_mlp()).rates == {"0": 0.2, "3": 0.3}
    assert wrap(dropped_mlp(), rate=0.1).rates == {"0": 0.1, "3": 0.1}
    assert posterior.record.history == {"from_trained": True}


def test_from_trained_saved_and_loaded(tmp_path):
    net = normalised()
    posterior = cr.MCDropout.from_trained(net, (X32, Y32), Gaussian(), insert="0", rate=0.15)
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", cr.replace_batchnorm(normalised().train(), "frozen"))
    assert isinstance(loaded, DropoutPosterior)
    assert (loaded.rates, loaded.inserted) == (posterior.rates, ("0",))
    for per_row in (False, True):
        a, b = (q.predict(X32, seed=3, per_row=per_row) for q in (posterior, loaded))
        assert torch.equal(a.functions(), b.functions())
        assert torch.equal(a.log_prob(Y32), b.log_prob(Y32))


# -- fitting -------------------------------------------------------------------------------------------------------------
def test_rates_of_the_networks_own_layers_are_kept():
    posterior = cr.MCDropout(steps=3).fit(build(dropped_mlp()), seed=0)
    assert posterior.rates == {"0": 0.2, "3": 0.3}
    assert posterior.inserted == ()
    assert posterior.record.history["rates"] == posterior.rates


def test_inserted_dropout_has_a_small_rate_unless_told():
    posterior = cr.MCDropout(steps=3, insert="*").fit(build(mlp(3, 6, 1, dtype=f64)), seed=0)
    assert (posterior.rates, posterior.inserted) == ({"0": 0.05, "2": 0.05}, ("0", "2"))
    posterior = cr.MCDropout(steps=3, insert=["2"], rate=0.3).fit(build(mlp(3, 6, 1, dtype=f64)), seed=0)
    assert (posterior.rates, posterior.inserted) == ({"2": 0.3}, ("2",))


@pytest.mark.parametrize("own", [0.0, 0.9])
def test_a_rate_overrides_those_of_the_layers(own):
    """Also where theirs is zero: a layer that was switched off."""
    posterior = cr.MCDropout(steps=3, rate=0.25).fit(build(dropped_mlp(first=own, second=own)), seed=0)
    assert posterior.rates == {"0": 0.25, "3": 0.25}
    masks = masks_of(posterior, X, 50, 0)["0.mask"]
    assert sorted(masks.unique().tolist()) == [0.0, 1 / 0.75]
    assert float(posterior.predict(X).epistemic.min()) > 0


def test_fitting_a_regression():
    problem = build(dropped_mlp(hidden=30, first=0.02, second=0.05), likelihood=Gaussian())
    posterior = cr.MCDropout(steps=600, lr=0.02).fit(problem, seed=0)
    p = posterior.predict(X)
    assert float((p.mean - Y).square().mean()) < 0.1 * float(Y.var())
    history = posterior.record.history
    assert set(history["parts"]) == {"misfit", "decay"}
    assert history["loss"][-1][0] == pytest.approx(history["parts"]["misfit"][-1][0] + history["parts"]["decay"][-1][0])
    assert history["loss"][-1][0] < history["loss"][0][0]
    scale = float(posterior.theta[-1].exp())
    assert p.aleatoric.tolist() == pytest.approx([scale**2] * 40)


@pytest.mark.parametrize("insert", [None, "*"])
def test_fitting_images_with_channels_dropped(insert):
    y = torch.arange(60) % 2
    x = randn(60, 36) + torch.cat([torch.ones(18), -torch.ones(18)]) * (2 * y.unsqueeze(1) - 1)  # bright above or below
    problem = cr.Problem(convolutional(2), (x, y), Categorical(), cr.priors.Normal())
    posterior = cr.MCDropout(steps=150, insert=insert, batch_size=30).fit(problem, seed=0)
    p = posterior.predict(x)
    assert p.mean.shape == (60, 2)
    torch.testing.assert_close(p.mean.sum(1), torch.ones(60))
    assert float((p.mean.argmax(1) == y).float().mean()) > 0.9
    assert float(p.epistemic.max()) > 1e-3
    assert set(posterior.rates) == ({"3", "7"} if insert is None else {"1", "3", "4", "7", "8"})


def test_fitting_sequences():
    x = randn(30, 7, 2)
    y = x[:, -1].sum(1)
    problem = cr.Problem(seeded(Reader), (x, y), Gaussian(0.2), cr.priors.Normal())
    assert problem.forward.looped
    posterior = cr.MCDropout(steps=120, lr=0.03).fit(problem, seed=0)
    p = posterior.predict(x)
    assert float((p.mean - y).square().mean()) < 0.3 * float(y.var())
    assert float(p.epistemic.min()) > 0


def test_fitting_binary_labels_and_dict_inputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop, self.head = nn.Linear(2, 4), nn.Linear(1, 4), nn.Dropout(0.1), nn.Linear(4, 1)

        def forward(self, left, right):
            return self.head(self.drop(torch.relu(self.a(left) + self.b(right))))

    x = {"left": X32[:, :2], "right": X32[:, 2:]}
    problem = cr.Problem(seeded(Pair), (x, (Y > 0).long()), Bernoulli(), cr.priors.Normal())
    posterior = cr.MCDropout(steps=100).fit(problem, seed=0)
    p = posterior.predict(x)
    assert float(((p.mean > 0.5) == (Y > 0)).double().mean()) > 0.9
    torch.testing.assert_close(posterior.predict({k: v[:3] for k, v in x.items()}).mean, p.mean[:3])


def test_a_grid_is_chosen_by_held_out_density_and_fitted_again_on_all_rows():
    problem = build(dropped_mlp(), likelihood=Gaussian())
    options = {"steps": 60, "batch_size": 16, "lr": 0.02}
    posterior = cr.MCDropout(rate=(0.02, 0.2, 0.6), tau=[0.5, 30.0], **options).fit(problem, seed=3)
    history = posterior.record.history
    table = history["grid"]
    assert [(row["rate"], row["tau"]) for row in table] == list(itertools.product((0.02, 0.2, 0.6), (0.5, 30.0)))
    best = max(table, key=lambda row: row["held_out_log_density"])
    assert len({row["held_out_log_density"] for row in table}) == 6
    assert history["tau"] == best["tau"]
    assert posterior.rates == {"0": best["rate"], "3": best["rate"]}
    alone = cr.MCDropout(rate=best["rate"], tau=best["tau"], **options).fit(problem, seed=3)
    assert torch.equal(posterior.theta, alone.theta)
    assert float(posterior.theta[-1]) == -0.5 * math.log(best["tau"])
    torch.testing.assert_close(posterior.predict(X).aleatoric, torch.full((40,), 1 / best["tau"], dtype=f64))


def test_the_scores_of_a_grid_are_the_predictive_densities_of_the_held_out_rows():
    """Each pair trained alone on the rows that were not held out has the score in the table, up to other masks."""
    problem = build(dropped_mlp(), likelihood=Gaussian())
    options = {"steps": 60, "batch_size": 16, "lr": 0.02}
    table = cr.MCDropout(rate=(0.02, 0.5), tau=(0.5, 4.0), validation=0.25, **options).fit(problem, seed=3)
    held = torch.randperm(40, generator=stream(3, "validation split"))[:10].sort().values
    rest = problem.subset(torch.tensor([i for i in range(40) if i not in set(held.tolist())]))
    for row in table.record.history["grid"]:
        alone = cr.MCDropout(rate=row["rate"], tau=row["tau"], **options).fit(rest, seed=3)
        scores = [float(alone.predict(X[held], passes=200, seed=s).log_prob(Y[held]).mean()) for s in range(30)]
        scores = torch.tensor(scores)
        assert row["held_out_log_density"] == pytest.approx(float(scores.mean()), abs=4.5 * float(scores.std()))


def test_rates_by_place():
    problem = build(dropped_mlp())
    posterior = cr.MCDropout(rate={"0": 0.0, "*": 0.25}, steps=30).fit(problem, seed=0)
    assert posterior.rates == {"0": 0.0, "3": 0.25}
    alone = build(dropped_mlp(first=0.2, second=0.25))
    objective = objective_of(alone, rates=[[0.0, 0.25]])
    masks = objective.masks(objective.own[0], objective.uniforms(1, 500, stream(0, "m")))
    assert masks["0.mask"].unique().tolist() == [1.0]  # nothing is dropped there
    assert masks["3.mask"].unique().tolist() == [0.0, 1 / 0.75]
    one_place = nn.Sequential(*list(dropped_mlp())[1:])
    spared = build(one_place)
    twin = cr.MCDropout(rate=0.25, steps=30).fit(spared, seed=0)
    assert float(posterior.theta.sub(twin.theta).abs().max()) < 0.1  # the same problem, other uniform numbers


def test_rates_by_place_in_a_list_saved_and_loaded(tmp_path):
    problem = build(dropped_mlp())
    choices = [0.1, {"0": 0.0, "3": 0.4}]
    posterior = cr.MCDropout(rate=choices, steps=30).fit(problem, seed=0, out=tmp_path / "run")
    assert [row["rate"] for row in posterior.record.history["grid"]] == choices
    loaded = cr.load(tmp_path / "run", dropped_mlp())
    assert loaded.rates == posterior.rates
    assert torch.equal(loaded.predict(X).mean, posterior.predict(X).mean)


def test_folds_score_every_row_by_a_fit_that_has_not_seen_it():
    """The score of a fold is that of a fit to the rows of the others alone; the table has their mean."""
    problem = build(dropped_mlp(), likelihood=Gaussian())
    options = {"steps": 60, "batch_size": 16, "lr": 0.02}
    table = cr.MCDropout(rate=(0.02, 0.5), tau=4.0, folds=4, **options).fit(problem, seed=3).record.history["grid"]
    order = torch.randperm(40, generator=stream(3, "validation split"))
    for row in table:
        found, spread = [], []
        for fold in range(4):
            held = order[10 * fold : 10 * fold + 10].sort().values
            rest = problem.subset(torch.tensor([i for i in range(40) if i not in set(held.tolist())]))
            alone = cr.MCDropout(rate=row["rate"], tau=4.0, **options).fit(rest, seed=3)
            scores = [float(alone.predict(X[held], passes=200, seed=s).log_prob(Y[held]).mean()) for s in range(20)]
            found.append(sum(scores) / 20)
            spread.append(float(torch.tensor(scores).std()))
        error = math.hypot(*spread) / 4
        assert row["held_out_log_density"] == pytest.approx(sum(found) / 4, abs=4.5 * error)


@pytest.mark.parametrize("folds", [1, 5])
def test_the_precision_of_held_out_rows(folds):
    """A line with noise of a known size under so little dropout that the rest of the error is small: the precision is that of the noise."""
    x = randn(400, 1, dtype=f64)
    y = x[:, 0] + 0.5 * randn(400, seed=5, dtype=f64)
    net = seeded(lambda: nn.Sequential(nn.Dropout(0.01), nn.Linear(1, 1)).double())
    problem = build(net, (x, y), Gaussian(), cr.priors.Normal(10.0))
    posterior = cr.MCDropout(tau="held-out", folds=folds, steps=1500).fit(problem, seed=0)
    tau = posterior.record.history["tau"]
    held = 400 if folds == 5 else 80
    sampling = 4 / (2 * held) ** 0.5  # four standard errors of a log deviation, beside half a step of the scales
    assert abs(math.log(tau**-0.5 / 0.5)) < sampling + 0.08
    assert float(posterior.theta[-1]) == pytest.approx(-0.5 * math.log(tau))


def test_the_precision_of_held_out_rows_is_lower_where_the_network_learns_the_noise():
    noise = randn(40, seed=3, dtype=f64)
    problem = build(dropped_mlp(hidden=60, first=0.01, second=0.01), (X, noise), Gaussian(), cr.priors.Normal(10.0))
    options = {"steps": 2000, "lr": 0.02}
    learned = cr.MCDropout(**options).fit(problem, seed=0)
    chosen = cr.MCDropout(tau="held-out", folds=4, **options).fit(problem, seed=0)
    assert float(learned.theta[-1]) < -0.7  # half of it or less is left to the noise
    assert float(chosen.theta[-1]) > -0.3


def test_tau_fixes_the_noise_scale():
    problem = build(dropped_mlp(outputs=2), (X, torch.stack([Y, -Y], 1)), Gaussian(per_target=True))
    posterior = cr.MCDropout(tau=7.0, steps=20).fit(problem, seed=0)
    assert posterior.theta[-2:].tolist() == [-0.5 * math.log(7.0)] * 2
    start = problem.layout.read(problem.layout.module)
    assert float((posterior.theta[:-2] - start).abs().max()) > 1e-2
    free = cr.MCDropout(steps=20).fit(problem, seed=0)
    assert free.theta[-2] != free.theta[-1]


def test_early_stopping_keeps_the_best_on_held_out_rows():
    """Pure noise with a network that can learn it: what is kept is the best by held-out density, not the last."""
    noise = randn(40, seed=3, dtype=f64)
    problem = build(dropped_mlp(hidden=60, first=0.01, second=0.01), (X, noise), Gaussian(0.3), cr.priors.Normal(10.0))
    method = cr.MCDropout(steps=2000, lr=0.02, validation=0.25, patience=5, batch_size=10)
    posterior = method.fit(problem, seed=0)
    history = posterior.record.history
    scores = [row[0] for row in history["validation"]]
    assert history["steps"] < 2000
    assert max(scores) > scores[-1]
    held = problem.subset(torch.randperm(40, generator=stream(0, "validation split"))[:10].sort().values)
    objective = objective_of(problem)
    assert float(objective.score(posterior.theta.unsqueeze(0), held)) == pytest.approx(max(scores), rel=1e-9)


def test_the_score_is_a_log_of_means_over_passes():
    problem = build(dropped_mlp(), likelihood=Gaussian())
    objective = objective_of(problem)
    theta = torch.cat([problem.layout.read(problem.layout.module), torch.tensor([-0.4], dtype=f64)]).unsqueeze(0)
    generator = stream(0, "dropout scoring")
    each = []
    for _ in range(20):
        masks = objective.masks(objective.own[0], objective.uniforms(1, 1, generator))
        each.append(objective.log_likelihood(theta, masks, X, problem.y)[0])
    exact = (torch.logsumexp(torch.stack(each), 0) - math.log(20)).mean()
    assert float(objective.score(theta, problem)) == pytest.approx(float(exact), rel=1e-12)


def test_seeds_decide_the_fit():
    problem = build(dropped_mlp())
    a, b, c = (cr.MCDropout(steps=10, batch_size=8).fit(problem, seed=s) for s in (1, 1, 2))
    assert torch.equal(a.theta, b.theta)
    assert not torch.equal(a.theta, c.theta)
    full = [cr.MCDropout(steps=10, batch_size=40).fit(problem, seed=s).theta for s in (1, 2)]
    assert not torch.equal(*full)  # the masks differ even where the rows do not


def poison(monkeypatch, after, member=0):
    """The log likelihood of one member is NaN after so many calls."""
    calls = []
    plain = DropoutObjective.log_likelihood

    def poisoned(self, *args):
        calls.append(1)
        value = plain(self, *args)
        hurt = torch.arange(len(value)) == member
        return torch.where(hurt.unsqueeze(1), math.nan, value) if len(calls) > after else value

    monkeypatch.setattr(DropoutObjective, "log_likelihood", poisoned)
    monkeypatch.setattr(loop, "cpp_step", lambda *rest: None)


@pytest.mark.parametrize("concrete", [False, True])
def test_what_was_reached_before_a_blow_up_is_kept(monkeypatch, tmp_path, concrete):
    poison(monkeypatch, 60)
    problem = build(dropped_mlp())
    with pytest.raises(cr.TrainingError, match="MC-Dropout: the loss of member 0 was not finite at step 61") as caught:
        cr.MCDropout(steps=100, concrete=concrete).fit(problem, seed=0, out=tmp_path / "run")
    kept = caught.value.posterior
    assert isinstance(kept, DropoutPosterior)
    assert kept.record.status == "partial"
    assert bool(torch.isfinite(kept.theta).all())
    assert float((kept.theta - problem.layout.read(problem.layout.module)).abs().max()) > 1e-2
    assert (kept.rates == {"0": 0.2, "3": 0.3}) == (not concrete)  # learned rates are those reached so far
    loaded = cr.load(tmp_path / "run", dropped_mlp())
    assert torch.equal(loaded.predict(X).mean, kept.predict(X).mean)
    assert loaded.record.status == "partial"


def test_a_blow_up_in_a_grid_names_its_member_and_keeps_it(monkeypatch, tmp_path):
    poison(monkeypatch, 60, member=1)
    with pytest.raises(cr.TrainingError, match="grid of 3: the loss of member 1 was not finite") as caught:
        cr.MCDropout(steps=100, rate=(0.1, 0.4, 0.5)).fit(build(dropped_mlp()), seed=0, out=tmp_path / "run")
    kept = caught.value.posterior
    assert isinstance(kept, DropoutPosterior)
    assert kept.rates == {"0": 0.4, "3": 0.4}
    assert torch.equal(cr.load(tmp_path / "run", dropped_mlp()).theta, kept.theta)


def test_nothing_is_kept_of_a_blow_up_at_the_start(monkeypatch, tmp_path):
    poison(monkeypatch, 0)
    with pytest.raises(cr.TrainingError) as caught:
        cr.MCDropout(steps=100).fit(build(dropped_mlp()), seed=0, out=tmp_path / "run")
    assert caught.value.posterior is None
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{}, {"insert": "1"}, {"insert": "1", "concrete": True}], ids=str)
def test_saved_and_loaded(tmp_path, options):
    """Places, learned rates and all, bit for bit, on a network whose own weights and rates are others."""
    problem = build(dropped_mlp(first=0.2, second=0.3)[1:], likelihood=Gaussian())
    posterior = cr.MCDropout(steps=20, **options).fit(problem, seed=0)
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", dropped_mlp(second=0.6)[1:])
    assert loaded.rates == posterior.rates
    assert loaded.inserted == posterior.inserted == (("1",) if "insert" in options else ())
    assert (set(loaded.rates.values()) <= {0.05, 0.3}) == ("concrete" not in options)
    assert torch.equal(loaded.predict(X, seed=1).functions(), posterior.predict(X, seed=1).functions())
    assert torch.equal(loaded.sample(4), posterior.sample(4))
    assert loaded.record == posterior.record


def test_alpha_dropout_saved_and_loaded_with_another_rate(tmp_path):
    def net(rate):
        return seeded(
            lambda: nn.Sequential(nn.Linear(3, 6), nn.SELU(), nn.AlphaDropout(rate), nn.Linear(6, 1)).double()
        )

    posterior = cr.MCDropout(steps=5, rate=0.35).fit(build(net(0.1)), seed=0)
    assert posterior.masked[2].keep == 0.65
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", net(0.1))
    assert torch.equal(loaded.predict(X).functions(), posterior.predict(X).functions())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        module = posterior.module().train()
        module[2].p = 0.35
        torchs = module(X[:4].repeat(3000, 1)).reshape(3000, 4)
    close_in_distribution(posterior.predict(X[:4], passes=3000).functions(), torchs)


# -- learned rates -------------------------------------------------------------------------------------------------------
def test_relaxed_masks_are_nearly_binary_and_cut_where_the_hard_ones_do():
    objective = objective_of(build(dropped_mlp()), concrete=True)
    u = tuple(torch.rand(1, 5000, n, generator=stream(0, "u", n), dtype=f64) for n in (3, 8))
    soft, hard = objective.masks(objective.own[0], u), objective.masks(objective.own[0], u, hard=True)
    for (name, mask), rate in zip(soft.items(), (0.2, 0.3)):
        kept = mask * (1 - rate)
        assert 0 <= float(kept.min()) <= float(kept.max()) <= 1
        assert torch.equal(kept > 0.5, hard[name] > 0)
        assert sorted(hard[name].unique().tolist()) == [0.0, 1 / (1 - rate)]
        # In between only where the uniform number is near the cut: |logit u - logit keep| < 0.1 logit 0.95.
        reach, centre = 0.1 * math.log(0.95 / 0.05), math.log((1 - rate) / rate)
        share = 1 / (1 + math.exp(-centre - reach)) - 1 / (1 + math.exp(-centre + reach))
        between = ((kept > 0.05) & (kept < 0.95)).double().mean()
        assert float(between) == pytest.approx(share, abs=4 * math.sqrt(share / kept.numel()))
        assert share < 0.13


@pytest.mark.parametrize("net", [dropped_mlp, residual], ids=["stack", "vmap"])
def test_the_gradient_reaches_the_rates(net):
    """By central differences in float64, at fixed uniform numbers, for weights and rates alike."""
    problem = build(net(), likelihood=Gaussian(), temperature=cr.Tempering(0.7, 2.0))
    objective = objective_of(problem, members=2, concrete=True)
    logits = torch.tensor([[-1.0, 0.3], [0.5, -2.0]], dtype=f64)
    theta = torch.cat([0.5 * randn(2, problem.dim, seed=7, dtype=f64), logits], -1)
    noise = objective.noise(0)

    def value(point):
        return objective.evaluate(point, objective.own, problem.x, problem.y, None, noise, NOTHING)[0].sum(-1)

    gradient = objective.evaluate(theta, objective.own, problem.x, problem.y, None, noise, NOTHING)[1]
    assert gradient.shape == theta.shape
    step = 1e-6
    for j in range(theta.shape[1]):
        away = torch.zeros_like(theta)
        away[:, j] = step
        numeric = (value(theta + away) - value(theta - away)) / (2 * step)
        torch.testing.assert_close(gradient[:, j], numeric, rtol=1e-6, atol=1e-8)
    assert float(gradient[:, -2:].abs().min()) > 1e-4


def test_entropy_of_the_masks_is_in_the_objective_and_not_tempered():
    """E_q[log q - (1/T) log p]: K log-probabilities a site, for each of its K masked inputs, at any temperature."""
    for t in (1.0, 0.25):
        problem = build(dropped_mlp(), temperature=t)
        theta = some_weights(problem, 1)
        learned, fixed = objective_of(problem, concrete=True), objective_of(problem)
        rates = learned.own[0]
        entropy = sum(k * float(torch.distributions.Bernoulli(r).entropy()) for k, r in zip((3, 8), rates[0]))
        difference = fixed.complexity(theta, rates) - learned.complexity(theta, rates)
        assert float(difference) == pytest.approx(entropy, rel=1e-12)
    image = cr.Problem(convolutional(), (randn(5, 36), LABELS[:5]), Categorical(), cr.priors.Normal())
    assert objective_of(image, concrete=True).inputs.tolist() == [4, 16]  # whole channels, then values


WEIGHTS = torch.tensor([1.0, -0.5, 0.25], dtype=f64)


def linear_data(n, noise):
    x = randn(n, 3, dtype=f64)
    return x, x @ WEIGHTS + 0.2 + noise * randn(n, seed=1, dtype=f64)


def concrete_objective(v, x, y, noise, tempering):
    """-ELBO of linear regression with relaxed masks on its inputs, in closed form but for two moments of a mask.

    v holds three weights, the bias and the logit of the rate. E (y - sum_j x_j z_j W_j / keep - b)^2 needs the mean and the
    variance of z / keep, which are integrals over one uniform number.
    """
    u = (torch.arange(20_000, dtype=f64) + 0.5) / 20_000
    w, b, rate = v[:3], v[3], torch.sigmoid(v[4])
    z = (1 - torch.sigmoid((v[4] + torch.log(u) - torch.log1p(-u)) / 0.1)) / (1 - rate)
    mean, variance = z.mean(), z.var(correction=0)
    squares = torch.square(y - x @ (w * mean) - b).sum() + variance * (x.square() * w.square()).sum()
    entropy = torch.special.entr(rate) + torch.special.entr(1 - rate)
    decay = (w.square().sum() / (1 - rate) + b.square()) / 2  # the prior is N(0, 1)
    return squares / (2 * noise**2 * tempering.likelihood) + decay / tempering.prior - 3 * entropy


def concrete_optimum(*args):
    v = torch.tensor([*WEIGHTS.tolist(), 0.2, -2.0], dtype=f64, requires_grad=True)
    rule = torch.optim.LBFGS(
        [v], max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure():
        rule.zero_grad()
        loss = concrete_objective(v, *args)
        loss.backward()
        return loss

    rule.step(closure)
    hessian = torch.autograd.functional.hessian(lambda p: concrete_objective(p, *args), v.detach())
    return v.detach(), hessian


def gradients_at(objective, point, count, seed=0):
    """Gradients (count, P) of N times the objective, each at uniform numbers of its own."""
    problem, shapes = objective.problem, objective.network.shapes
    noise = tuple(
        torch.rand(count, problem.n, *shapes[s.name], generator=stream(seed, "test noise", place), dtype=f64)
        for place, s in enumerate(objective.network.sites)
    )
    theta = point.expand(count, -1).clone()
    return problem.n * objective.evaluate(theta, objective.own, problem.x, problem.y, None, noise, NOTHING)[1]


CONCRETE_CASES = [
    (20, cr.Tempering()),
    (60, cr.Tempering()),
    (20, cr.Tempering(1.0, 0.25)),
    (60, cr.Tempering(2.0, 0.5)),
]


@pytest.mark.parametrize("n, tempering", CONCRETE_CASES, ids=str)
def test_learned_rates_have_their_optimum_where_the_closed_form_has_it(n, tempering):
    """At the optimum of the linear model's own -ELBO the mean gradient over masks is zero, in the rate as in the weights."""
    noise, count = 3.0, 20_000
    x, y = linear_data(n, noise)
    best, _ = concrete_optimum(x, y, noise, tempering)
    assert 0.1 < float(torch.sigmoid(best[4])) < 0.6
    problem = build(nn.Linear(3, 1).double(), (x, y), Gaussian(noise), cr.priors.Normal(1.0), temperature=tempering)
    objective = objective_of(problem, insert="*", members=count, concrete=True)

    def distance(point):
        gradients = gradients_at(objective, point, count)
        return float((gradients.mean(0) / (gradients.std(0) / math.sqrt(count))).abs().max())

    assert distance(best) < 4.5
    for j in range(5):  # and it is not zero elsewhere
        away = best.clone()
        away[j] += 0.2
        assert distance(away) > 9


@pytest.mark.slow
@pytest.mark.parametrize("n, tempering", CONCRETE_CASES[1:3], ids=str)
def test_concrete_dropout_lands_on_it(n, tempering):
    """Within the error of averaging the gradients of a fifth of the steps, those that the falling learning rate weighs most."""
    noise, steps = 3.0, 1500
    x, y = linear_data(n, noise)
    best, hessian = concrete_optimum(x, y, noise, tempering)
    problem = build(nn.Linear(3, 1).double(), (x, y), Gaussian(noise), cr.priors.Normal(1.0), temperature=tempering)
    gradients = gradients_at(objective_of(problem, insert="*", members=2000, concrete=True), best, 2000)
    inverse = torch.linalg.inv(hessian)
    error = (inverse @ torch.cov(gradients.T) @ inverse).diagonal().div(steps / 5).sqrt()
    method = cr.MCDropout(insert="*", rate=0.05, concrete=True, steps=steps, batch_size=n, lr=0.02)
    posterior = method.fit(problem, seed=0)
    reached = torch.cat([posterior.theta, torch.logit(torch.tensor([posterior.rates[""]], dtype=f64))])
    assert float(((reached - best) / error).abs().max()) < 4
    assert float(((math.log(0.05 / 0.95) - best[4]) / error[4]).abs()) > 8  # it did not start there


def test_rates_go_to_one_half_without_data_and_down_with_plenty():
    """Without a say of the data the entropy of the masks is all that is left; with plenty of it masks are in the way."""
    x, y = linear_data(400, 0.1)
    options = {"insert": "*", "rate": 0.2, "concrete": True, "steps": 250, "lr": 0.05}
    found = {}
    for name, tempering in (("no data", cr.Tempering(1e9, 1.0)), ("plenty", cr.Tempering())):
        problem = build(nn.Linear(3, 1).double(), (x, y), Gaussian(0.1), cr.priors.Normal(1.0), temperature=tempering)
        posterior = cr.MCDropout(**options).fit(problem, seed=0)
        assert posterior.record.history["rates"] == posterior.rates
        (found[name],) = posterior.rates.values()
    assert found["no data"] == pytest.approx(0.5, abs=0.02)
    assert 0 < found["plenty"] < 0.05


def test_each_place_learns_a_rate_of_its_own_and_predicts_with_it():
    posterior = cr.MCDropout(steps=100, lr=0.03, concrete=True).fit(build(dropped_mlp()), seed=0)
    assert set(posterior.rates) == {"0", "3"}
    assert all(0 < r < 1 for r in posterior.rates.values())
    assert abs(posterior.rates["0"] - 0.2) > 0.02
    assert abs(posterior.rates["3"] - 0.3) > 0.02
    assert posterior.theta.shape == (41,)
    masks = masks_of(posterior, X, 4000, 0)["0.mask"]
    rate = posterior.rates["0"]
    assert float((masks == 0).double().mean()) == pytest.approx(rate, abs=4 * math.sqrt(0.25 / masks.numel()))
    assert float(masks.max()) == 1 / (1 - rate)


def test_concrete_with_early_stopping_keeps_the_rates_of_the_best():
    method = cr.MCDropout(steps=60, concrete=True, validation=0.25, batch_size=10)
    problem = build(dropped_mlp())
    posterior = method.fit(problem, seed=0)
    scores = [row[0] for row in posterior.record.history["validation"]]
    held = problem.subset(torch.randperm(40, generator=stream(0, "validation split"))[:10].sort().values)
    kept = torch.cat([posterior.theta, torch.logit(torch.tensor(list(posterior.rates.values()), dtype=f64))])
    objective = objective_of(problem, concrete=True)
    assert float(objective.score(kept.unsqueeze(0), held)) == pytest.approx(max(scores), rel=1e-9)


# -- linear regression: the optimum in closed form -----------------------------------------------------------------------
RATE, TIGHT = 0.5, 0.1  # a rate and a prior at which every part of the decay matters


def exact_optimum(conjugate, tempering, *, weight_keep=1 - RATE, bias_keep=1.0):
    """Ridge regression: E_z sum (y - (x z / keep) W - b)^2 = sum (y - x W - b)^2 + rate/keep sum_j W_j^2 sum_i x_ij^2."""
    design, keep = conjugate.design, 1 - RATE
    data = conjugate.noise**2 * tempering.likelihood
    prior = TIGHT**2 * tempering.prior
    masked = (1 - keep) / keep * conjugate.x.square().sum(0) / data + 1 / (prior * weight_keep)
    penalty = torch.cat([masked, torch.tensor([1 / (prior * bias_keep)], dtype=f64)])
    hessian = design.T @ design / data + penalty.diag()
    return torch.linalg.solve(hessian, design.T @ conjugate.y / data), hessian


def linear_problem(conjugate, tempering):
    return build(
        conjugate.net, (conjugate.x, conjugate.y), Gaussian(conjugate.noise), cr.priors.Normal(TIGHT), temperature=tempering
    )  # fmt: skip


TEMPERINGS = [cr.Tempering(), cr.Tempering(0.5, 2.0)]


@pytest.mark.parametrize("tempering", TEMPERINGS, ids=str)
def test_expected_gradient_vanishes_at_the_ridge_solution(conjugate, tempering):
    """Over all 8 masks, with their probabilities: exactly."""
    best, hessian = exact_optimum(conjugate, tempering)
    problem = linear_problem(conjugate, tempering)
    network = Dropped(problem, "*", RATE)
    chance, kept = every_mask(network)
    objective = objective_of(problem, insert="*", rate=RATE, members=len(chance))
    noise = (torch.where(kept["mask"] > 0, 0.0, 0.999).double().expand(-1, problem.n, -1),)
    theta = best.expand(len(chance), -1)
    _, gradient = objective.evaluate(theta, objective.own, problem.x, problem.y, None, noise, NOTHING)
    assert float((chance @ gradient).abs().max()) < 1e-12
    away = best + 0.01
    _, gradient = objective.evaluate(away.expand(8, -1), objective.own, problem.x, problem.y, None, noise, NOTHING)
    torch.testing.assert_close(chance @ gradient * problem.n, hessian @ (away - best), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tempering", TEMPERINGS, ids=str)
def test_training_lands_on_the_ridge_solution(conjugate, tempering):
    """Within the error of averaging the gradients of a fifth of the steps, those that the falling learning rate weighs most;
    a decay that is wrong in the weights or in the bias lies well outside of it."""
    steps = 2000
    best, hessian = exact_optimum(conjugate, tempering)
    problem = linear_problem(conjugate, tempering)
    gradients = gradients_at(objective_of(problem, insert="*", rate=RATE, members=2000), best, 2000)
    inverse = torch.linalg.inv(hessian)
    error = (inverse @ torch.cov(gradients.T) @ inverse).diagonal().div(steps / 5).sqrt()
    posterior = cr.MCDropout(insert="*", rate=RATE, steps=steps, batch_size=30, lr=0.01).fit(problem, seed=0)
    assert float(((posterior.theta - best) / error).abs().max()) < 4
    for keeps in ({"weight_keep": 2.0}, {"weight_keep": 1.0}, {"bias_keep": 0.5}, {"weight_keep": 1e9}):
        wrong, _ = exact_optimum(conjugate, tempering, **keeps)
        assert float(((wrong - best) / error).abs().max()) > 10


# -- bad input -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rate", [0, 1, 0.0, 1.0, -0.1, 1.5, True, math.nan, "half", (0.1, 0.0), [], (0.1, None)])
def test_bad_rates(rate):
    with pytest.raises(cr.InputError, match="rate: found"):
        cr.MCDropout(rate=rate)


@pytest.mark.parametrize("tau", [0, -1, True, math.inf, math.nan, (1.0, 0.0), []])
def test_bad_precisions(tau):
    with pytest.raises(cr.InputError, match="tau: found"):
        cr.MCDropout(tau=tau)


@pytest.mark.parametrize("passes", [0, -1, 2.5, True, None])
def test_bad_numbers_of_passes(passes):
    with pytest.raises(cr.InputError, match="passes must be a positive integer, got "):
        wrap(dropped_mlp()).predict(X, passes=passes)


@pytest.mark.parametrize("rate", [{"*": 0.0}, {"*": 1.0}, {"*": "a"}, {}, [0.1, {"*": -0.1}]], ids=str)
def test_bad_rates_by_place(rate):
    with pytest.raises(cr.InputError, match="rate: found"):
        cr.MCDropout(rate=rate)


def test_rates_of_places_that_are_not_there():
    with pytest.raises(cr.InputError, match=r"rate: pattern '7' matches no place of dropout. They are 0, 3"):
        cr.MCDropout(rate={"7": 0.1}).fit(build(dropped_mlp()))
    with pytest.raises(cr.InputError, match=r"rate: found 0\.0"):
        cr.MCDropout(rate={"0": 0.0, "*": 0.1}, concrete=True)


@pytest.mark.parametrize("folds", [0, 2.0, True])
def test_bad_folds(folds):
    with pytest.raises(cr.InputError, match="folds: found"):
        cr.MCDropout(folds=folds)


def test_more_folds_than_rows():
    with pytest.raises(cr.InputError, match="folds: found 41 for 40 rows"):
        cr.MCDropout(folds=41, rate=(0.1, 0.2)).fit(build(dropped_mlp()))


def test_concrete_takes_one_rate():
    with pytest.raises(cr.InputError, match="rate: .* with concrete=True.* pass one to start from"):
        cr.MCDropout(rate=(0.1, 0.2), concrete=True)


def test_no_dropout_layer_is_an_error():
    message = 'net: has no dropout layer. Add nn.Dropout layers, or pass insert="\\*"'
    with pytest.raises(cr.InputError, match=message):
        cr.MCDropout(steps=3).fit(build(mlp(3, 4, 1, dtype=f64)), seed=0)
    with pytest.raises(cr.InputError, match=message):
        wrap(mlp(3, 4, 1, dtype=f64))


def test_dropout_inside_a_recurrent_or_attention_layer_is_mentioned():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(2, 4, num_layers=2, dropout=0.2, batch_first=True)
            self.mix = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            h = self.rnn(x)[0]
            return self.head(self.mix(h, h, h)[0][:, -1])

    problem = cr.Problem(Deep(), (randn(8, 3, 2), Y32[:8]), Gaussian(0.3), cr.priors.Normal())
    with pytest.raises(
        cr.InputError, match=r"no dropout layer \(rnn, mix drop inside, where it cannot be controlled\)"
    ):
        cr.MCDropout(steps=3).fit(problem, seed=0)


def test_bad_places():
    with pytest.raises(cr.InputError, match="insert: pattern 'head' matches no Linear .* These layers are 0, 2"):
        cr.MCDropout(insert="head", steps=3).fit(build(mlp(3, 4, 1, dtype=f64)), seed=0)
    with pytest.raises(cr.InputError, match=r"rate: layer '0' drops with probability 0\.0"):
        cr.MCDropout(steps=3).fit(build(dropped_mlp(first=0.0)), seed=0)


def test_precision_of_a_likelihood_that_has_none_to_set():
    with pytest.raises(cr.InputError, match=r"tau: found 2\.0 with Gaussian.* likelihoods with a learned scale"):
        cr.MCDropout(tau=2.0, steps=3).fit(build(dropped_mlp()), seed=0)
    labels = build(dropped_mlp(outputs=3), (X, LABELS), Categorical())
    with pytest.raises(cr.InputError, match=r"tau: found \(1\.0, 2\.0\) with Categorical"):
        cr.MCDropout(tau=(1.0, 2.0), steps=3).fit(labels, seed=0)


@pytest.mark.parametrize(
    "prior",
    [
        cr.priors.Laplace(),
        cr.priors.StudentT(),
        cr.priors.ScaleMixture(),
        cr.priors.Normal(1.0, loc=0.5),
        {"0*": cr.priors.Normal(), "1.*": cr.priors.Normal(), "4.weight": cr.priors.Laplace(), "*": cr.priors.Normal()},
    ],
    ids=["Laplace", "StudentT", "ScaleMixture", "off centre", "one of several"],
)  # fmt: skip
def test_priors_without_the_derived_decay(prior):
    prior = {k: v for k, v in prior.items() if k != "0*"} if isinstance(prior, dict) else prior
    problem = build(dropped_mlp(), likelihood=Gaussian(), prior=prior)
    with pytest.raises(cr.InputError, match=r"prior: .* Normal priors centred at zero.* Use priors\.Normal"):
        cr.MCDropout(steps=3).fit(problem, seed=0)


@pytest.mark.parametrize("options", [{"rate": (0.1, 0.2)}, {"concrete": True}], ids=str)
def test_alpha_dropout_has_one_rate_in_a_fit(options):
    """Its rescaling depends on the rate and is part of the network, which a grid and learned rates share."""
    net = nn.Sequential(nn.Linear(3, 6), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(6, 1)).double()
    with pytest.raises(cr.InputError, match="rate: '2' is alpha dropout.* Pass one rate"):
        cr.MCDropout(steps=3, **options).fit(build(net), seed=0)


def test_a_second_prediction_finds_the_network_known(monkeypatch):
    posterior = cr.MCDropout.from_trained(dropped_mlp(), (X, Y), Gaussian(0.1))
    first = posterior.predict(X, passes=7, seed=3)
    mean = first.mean

    def refuse(*_args):
        raise AssertionError("looked at the network again")

    monkeypatch.setattr("credibly.posterior.dropout.find_sites", refuse)
    assert torch.equal(posterior.predict(X, passes=7, seed=3).mean, mean)
    torch.testing.assert_close(posterior.predict(X[:5], passes=7, seed=3).mean, mean[:5])
    with pytest.raises(cr.InputError, match="the network cannot take rows"):
        posterior.predict(X[:, :2])
    with pytest.raises(cr.InputError, match="NaN or infinite"):
        posterior.predict(X * torch.inf)
    with pytest.raises(AssertionError, match="again"):  # rows of another kind are looked at
        posterior.predict(X.unsqueeze(1))
