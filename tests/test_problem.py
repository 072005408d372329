"""The density of a problem: value, gradient, plans, tempering, and every form of data."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson, StudentT
from credibly.priors.elementwise import Laplace, Normal, ScaleMixture
from credibly.priors.elementwise import StudentT as StudentTPrior

f64 = torch.float64


def small_problem(likelihood=None, prior=None, **kwargs):
    x = randn(12, 3, dtype=f64)
    return cr.Problem(
        mlp(3, 5, 1, dtype=f64),
        data=(x, x.sum(1)),
        likelihood=likelihood or Gaussian(0.3),
        prior=prior or Normal(),
        **kwargs,
    )


def test_density_by_hand():
    """log p_T by torch.distributions, including the constants of likelihood and prior."""
    problem = small_problem(temperature=cr.Tempering(0.5, 2.0))
    theta = randn(2, problem.dim, seed=1, dtype=f64)
    for c in range(2):
        net = problem.layout.write(theta[c])
        log_lik = torch.distributions.Normal(net(problem.x), 0.3).log_prob(problem.y).sum()
        log_prior = torch.distributions.Normal(0.0, 1.0).log_prob(theta[c]).sum()
        torch.testing.assert_close(problem.log_density(theta)[c], log_lik / 0.5 + log_prior / 2.0)
        torch.testing.assert_close(problem.log_density(theta[c]), log_lik / 0.5 + log_prior / 2.0)


@pytest.mark.parametrize(
    "likelihood, outputs, y",
    [
        (Gaussian(0.3), 2, randn(6, 2, dtype=f64)),
        (Gaussian(), 1, randn(6, dtype=f64)),
        (Gaussian(per_target=True), 2, randn(6, 2, dtype=f64)),
        (StudentT(df=3.0), 1, randn(6, dtype=f64)),
        (HeteroscedasticGaussian(), 4, randn(6, 2, dtype=f64)),
        (Bernoulli(), 1, torch.tensor([0, 1, 1, 0, 1, 0])),
        (Categorical(), 3, torch.tensor([0, 2, 1, 0, 1, 2])),
        (cr.likelihoods.HeteroscedasticCategorical(samples=5), 6, torch.tensor([0, 2, 1, 0, 1, 2])),
        (Poisson(), 1, torch.tensor([0, 3, 1, 7, 2, 0])),
    ],
    ids=lambda v: type(v).__name__ if hasattr(v, "support") else None,
)
@pytest.mark.parametrize(
    "prior",
    [Normal(0.7), Laplace(0.5, loc=0.1), StudentTPrior(3.0, 0.8), ScaleMixture(0.3, 1.0, 0.1)],
    ids=lambda p: type(p).__name__,
)
def test_gradcheck_of_every_likelihood_and_prior(likelihood, outputs, y, prior):
    problem = cr.Problem(
        mlp(2, 3, outputs, dtype=f64), data=(randn(6, 2, seed=4, dtype=f64), y), likelihood=likelihood, prior=prior
    )
    theta = (0.5 * randn(2, problem.dim, seed=2, dtype=f64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: problem.parts(t, problem.x, problem.y), theta, eps=1e-6, atol=1e-6)
    got = problem.log_density_and_grad(theta.detach())
    value = problem.parts(theta, problem.x, problem.y)
    (expected,) = torch.autograd.grad(value[0].sum() + value[1].sum(), theta)
    torch.testing.assert_close(got.gradient, expected)
    torch.testing.assert_close(got.log_density, (value[0] + value[1]).detach())


class Residual(nn.Module):
    """Not a plain stack, so it runs under vmap."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(x + torch.tanh(self.a(x)))


class TinyConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(24, 2))


NETWORKS = {
    "stack": (lambda: mlp(4, 5, 2), (4,), False),
    "residual": (Residual, (4,), False),
    "conv": (TinyConv, (1, 5, 5), True),
    "lstm": (Recurrent, (3, 2), True),
    "transformer": (transformer, (3, 8), True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_batched_equals_looped_and_the_plan_is_shown(name):
    make, shape, looped = NETWORKS[name]
    torch.manual_seed(0)
    net = make().to(f64)
    x, y = randn(7, *shape, dtype=f64), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    auto = cr.Problem(net, data=(x, y), likelihood=Categorical(), prior=Normal())
    assert auto.forward.looped is looped
    assert auto.forward.reason
    assert auto.forward.reason in repr(auto)
    theta = 0.3 * randn(3, auto.dim, seed=1, dtype=f64)
    one_at_a_time = cr.Problem(net, data=(x, y), likelihood=Categorical(), prior=Normal(), plan="looped")
    results = [auto.log_density_and_grad(theta), one_at_a_time.log_density_and_grad(theta)]
    if name == "conv":
        results.append(
            cr.Problem(net, data=(x, y), likelihood=Categorical(), prior=Normal(), plan="batched").log_density_and_grad(
                theta
            )
        )
    for other in results[1:]:
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    for c in range(3):  # both equal the plain module with those weights
        log_lik = torch.log_softmax(auto.layout.write(theta[c])(x), -1)[torch.arange(7), y].sum()
        torch.testing.assert_close(results[0].log_likelihood[c], log_lik.detach())


def test_plan_batched_refuses_a_network_that_cannot_be_batched():
    x, y = randn(4, 3, 2), torch.tensor([0, 1, 1, 0])
    with pytest.raises(cr.InputError, match="plan: this network cannot be batched"):
        cr.Problem(Recurrent(), data=(x, y), likelihood=Categorical(), prior=Normal(), plan="batched")


@pytest.mark.parametrize("micro_batch", [1, 5, 11])
def test_micro_batched_equals_full(micro_batch):
    full, parts = small_problem(), small_problem(micro_batch=micro_batch)
    theta = randn(3, full.dim, seed=1, dtype=f64)
    for a, b in zip(full.log_density_and_grad(theta), parts.log_density_and_grad(theta)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(full.log_density(theta), parts.log_density(theta))


def test_minibatches_estimate_the_density_without_bias():
    """The mean of the rescaled minibatches over a partition of the rows is exactly the full density."""
    problem = small_problem(temperature=cr.Tempering(0.7, 1.3))
    theta = randn(2, problem.dim, seed=1, dtype=f64)
    full = problem.log_density_and_grad(theta)
    batches = [problem.minibatch(theta, rows) for rows in torch.arange(12).split(4)]
    torch.testing.assert_close(torch.stack([b.log_density for b in batches]).mean(0), full.log_density)
    torch.testing.assert_close(torch.stack([b.gradient for b in batches]).mean(0), full.gradient)


def test_each_chain_may_have_its_own_minibatch():
    problem = small_problem()
    theta, rows = randn(2, problem.dim, seed=1, dtype=f64), torch.tensor([[0, 3, 5], [7, 7, 1]])
    together = problem.minibatch(theta, rows)
    for c in range(2):
        alone = problem.minibatch(theta[c : c + 1], rows[c])
        torch.testing.assert_close(together.gradient[c], alone.gradient[0])
        torch.testing.assert_close(together.log_likelihood[c], alone.log_likelihood[0])


def test_tempering_identities():
    """T = 1 is the posterior; one T divides the log density; likelihood tempering divides only the log likelihood."""
    theta = randn(2, small_problem().dim, seed=1, dtype=f64)
    plain, cold, tempered = (small_problem(temperature=t) for t in (1.0, 0.25, cr.Tempering(likelihood=0.25)))
    base = plain.log_density_and_grad(theta)
    torch.testing.assert_close(base.log_density, base.log_likelihood + base.log_prior)
    torch.testing.assert_close(cold.log_density(theta), base.log_density / 0.25)
    torch.testing.assert_close(cold.log_density_and_grad(theta).gradient, base.gradient / 0.25)
    torch.testing.assert_close(tempered.log_density(theta), base.log_likelihood / 0.25 + base.log_prior)


class Items(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def test_every_form_of_data_is_the_same_problem():
    x, y = randn(10, 3), randn(10, seed=1)
    columns = {"a": x[:, 0].numpy(), "b": x[:, 1].numpy(), "c": x[:, 2].numpy()}
    forms = [
        (x, y),
        (x.numpy(), y.numpy()),
        (x.numpy().astype(np.float64), y.tolist()),
        (pd.DataFrame(columns), pd.Series(y.numpy())),
        TensorDataset(x, y),
        Items(x, y),
        DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, drop_last=True),
    ]
    problems = [cr.Problem(mlp(3, 4, 1), data=form, likelihood=Gaussian(0.5), prior=Normal()) for form in forms]
    assert {p.n for p in problems} == {10}
    assert len({p.fingerprint() for p in problems}) == 1
    other = cr.Problem(mlp(3, 4, 1), data=(x.flip(0), y), likelihood=Gaussian(0.5), prior=Normal())
    assert other.fingerprint() != problems[0].fingerprint()


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(5, 1)

    def forward(self, tokens, numbers):
        return self.head(torch.cat([self.embed(tokens).mean(1), numbers], -1))


def test_tuple_and_dict_inputs():
    tokens, numbers, y = torch.arange(8).reshape(4, 2) % 5, randn(4, 2), randn(4, seed=2)
    torch.manual_seed(0)
    net = TwoInputs()
    pair = cr.Problem(net, data=((tokens, numbers), y), likelihood=Gaussian(0.5), prior=Normal())
    named = cr.Problem(net, data=({"numbers": numbers, "tokens": tokens}, y), likelihood=Gaussian(0.5), prior=Normal())
    loader = cr.Problem(net, data=TensorDataset(tokens, numbers, y), likelihood=Gaussian(0.5), prior=Normal())
    theta = randn(3, pair.dim)
    torch.testing.assert_close(pair.log_density(theta), named.log_density(theta))
    torch.testing.assert_close(pair.log_density(theta), loader.log_density(theta))
    posterior = cr.MAP(steps=5).fit(named, seed=0)
    assert posterior.predict({"tokens": tokens, "numbers": numbers}).mean.shape == (4,)
    ensemble = cr.DeepEnsemble(members=2, steps=5, batch_size=2).fit(pair, seed=0)
    assert ensemble.predict((tokens, numbers)).epistemic.shape == (4,)


def test_the_callers_network_and_data_are_left_alone():
    net, x, y = mlp(3, 4, 1), randn(10, 3), randn(10, seed=1)
    net.train()
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    array = x.numpy().copy()
    problem = cr.Problem(net, data=(array, y), likelihood=Gaussian(), prior=Normal())
    cr.DeepEnsemble(members=2, steps=5).fit(problem, seed=0)
    array[:] = 0  # the problem keeps its own copy of a numpy array
    assert net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert float(problem.x.abs().sum()) > 0


@pytest.mark.slow
@pytest.mark.nightly  # compiled training and compiled samplers evaluate the same density
def test_compiled_equals_eager():
    problem = small_problem(likelihood=Gaussian())
    theta = randn(4, problem.dim, seed=1, dtype=f64)
    run = torch.compile(lambda t: problem.parts_and_grad(t, problem.x, problem.y, 0.5, 2.0))
    with torch.no_grad():
        got = run(theta)
    expected = problem.parts_and_grad(theta, problem.x, problem.y, 0.5, 2.0)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_targets_with_a_single_channel_have_a_fingerprint():
    """Moving the channel of (N, 1, H, W) to the end leaves an unusual stride there, which must not fail."""
    x = randn(5, 1, 4, 4)
    net = nn.Conv2d(1, 1, 3, padding=1)
    problem = cr.Problem(net, data=(x, 2 * x), likelihood=Gaussian(0.1, axis=1), prior=Normal())
    other = cr.Problem(net, data=(x, 3 * x), likelihood=Gaussian(0.1, axis=1), prior=Normal())
    assert problem.fingerprint() != other.fingerprint()
