import math

import pytest
import torch
from torch import distributions as td

from credibly.errors import InputError
from credibly.metrics import information as info
from credibly.metrics.information import (
    Estimate,
    cross_entropy,
    entropy,
    kl_divergence,
    log_mean_exp,
    mutual_information,
    mutual_information_of_draws,
    self_information,
)

T = torch.tensor


def close(a, b, tol=1e-6):
    torch.testing.assert_close(torch.as_tensor(a).double(), torch.as_tensor(b).double(), rtol=tol, atol=tol)


def as_mixture(component):
    """The same distribution, as a mixture of one component: torch has no closed form for it."""
    return td.MixtureSameFamily(td.Categorical(torch.ones(1)), component.expand((1,)))


def mixture(weights=(0.3, 0.7), means=(-2.0, 1.0), scale=0.5):
    return td.MixtureSameFamily(td.Categorical(T(weights)), td.Normal(T(means), scale))


def tables(*shape, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=dtype).mul(2).softmax(-1)


# pairs over the same outcomes with a closed form for everything
PAIRS = {
    "normal": (td.Normal(0.3, 1.2), td.Normal(-0.5, 0.8)),
    "laplace-normal": (td.Laplace(0.2, 0.7), td.Normal(0.0, 1.5)),
    "gamma": (td.Gamma(2.0, 3.0), td.Gamma(3.0, 2.0)),
    "beta": (td.Beta(2.0, 3.0), td.Beta(3.0, 2.0)),
    "uniform": (td.Uniform(0.0, 1.0), td.Uniform(-1.0, 2.0)),
    "lognormal": (td.LogNormal(0.0, 0.5), td.LogNormal(0.2, 1.0)),
    "dirichlet": (td.Dirichlet(T([1.0, 2.0, 3.0])), td.Dirichlet(T([2.0, 2.0, 2.0]))),
    "multivariate": (
        td.MultivariateNormal(torch.zeros(2), T([[1.0, 0.3], [0.3, 2.0]])),
        td.MultivariateNormal(torch.ones(2), torch.eye(2)),
    ),
    "independent": (
        td.Independent(td.Normal(torch.zeros(3), T([0.5, 1.0, 2.0])), 1),
        td.Independent(td.Normal(torch.ones(3), T([1.0, 1.0, 1.0])), 1),
    ),
    "categorical": (td.Categorical(T([0.2, 0.3, 0.5])), td.Categorical(T([0.4, 0.5, 0.1]))),
    "bernoulli": (td.Bernoulli(0.3), td.Bernoulli(0.9)),
    "binomial": (td.Binomial(5, T(0.3)), td.Binomial(5, T(0.6))),
    "geometric": (td.Geometric(0.3), td.Geometric(0.6)),
}


# -- tables, by hand


def test_table_by_hand():
    p, q = T([0.5, 0.25, 0.25]), T([0.25, 0.25, 0.5])
    close(entropy(p).value, 1.5 * math.log(2))
    close(cross_entropy(p, q).value, 1.75 * math.log(2))
    close(kl_divergence(p, q).value, 0.25 * math.log(2))
    assert all(e.standard_error == 0 for e in (entropy(p), cross_entropy(p, q), kl_divergence(p, q)))
    assert isinstance(entropy(p), Estimate)


def test_self_information_of_a_table_and_of_distributions():
    close(self_information(T([0.25, 0.75, 0.0]), T([0, 1])).value, [math.log(4), math.log(4 / 3)])
    assert self_information(T([0.25, 0.75, 0.0]), 2).value == math.inf
    close(self_information(T([[0.25, 0.75], [0.5, 0.5]]), T([1, 0])).value, [math.log(4 / 3), math.log(2)])
    close(self_information(td.Categorical(T([0.25, 0.75])), 0).value, math.log(4))
    close(self_information(td.OneHotCategorical(T([0.25, 0.75])), T([1.0, 0.0])).value, math.log(4))
    close(self_information(td.Bernoulli(0.25), T([0.0, 1.0])).value, [-math.log(0.75), math.log(4)])
    close(self_information(td.Normal(1.0, 2.0), 3.0).value, 0.5 + math.log(2) + 0.5 * math.log(2 * math.pi))
    # outside the support: torch's own log_prob raises
    close(self_information(td.Uniform(0.0, 2.0), T([1.0, 3.0])).value, [math.log(2), math.inf])
    dirichlet = td.Dirichlet(T([1.0, 1.0]))
    close(self_information(dirichlet, T([[0.5, 0.5], [0.5, 0.6]])).value, [0.0, math.inf])


def test_entropy_is_the_mean_self_information():
    p = tables(4, 5)
    parts = torch.stack([self_information(p, k).value for k in range(5)], -1)
    close(entropy(p).value, (p * parts).sum(-1))


def test_entropy_is_largest_for_equal_probabilities():
    assert entropy(T([0.25] * 4)).value == pytest.approx(math.log(4))
    assert (entropy(tables(50, 4)).value < math.log(4)).all()


def test_zero_probabilities():
    p, q = T([0.5, 0.5, 0.0]), T([0.5, 0.25, 0.25])
    close(entropy(p).value, math.log(2))
    close(entropy(T([1.0, 0.0])).value, 0.0)
    close(kl_divergence(p, q).value, 0.5 * math.log(2))
    assert kl_divergence(q, p).value == math.inf
    assert cross_entropy(q, p).value == math.inf
    close(cross_entropy(p, p).value, math.log(2))
    close(kl_divergence(p, p).value, 0.0)


def test_small_probabilities_are_not_clamped():
    # torch.distributions clamps given probabilities to 1.2e-7 before it takes their logarithm
    tiny = T([1.0 - 1e-12, 1e-12])
    expected = 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-12)
    for q in (tiny, td.Categorical(tiny), td.Bernoulli(1e-12), td.Categorical(logits=tiny.log())):
        close(kl_divergence(T([0.5, 0.5]), q).value, expected, 1e-6)
    assert kl_divergence(td.Bernoulli(0.5), td.Bernoulli(1.0)).value == math.inf
    assert entropy(td.Bernoulli(1.0)).value == 0
    assert self_information(td.Categorical(T([0.0, 1.0])), 0).value == math.inf


@pytest.mark.parametrize("logit", [-300.0, -16.0, -15.0, 0.7, 15.0, 16.0, 300.0])
def test_logits_are_not_clamped(logit):
    # -300 underflows as a probability, and 1 - sigmoid(16) has no correct digit in single precision
    off, on = -math.log1p(math.exp(min(logit, 50))) - max(0, logit - 50), -math.log1p(math.exp(min(-logit, 50)))
    on -= max(0, -logit - 50)
    close(self_information(td.Bernoulli(logits=T(logit)), T([0, 1])).value, [-off, -on], 1e-5)
    close(self_information(td.Categorical(logits=T([0.0, logit])), T([0, 1])).value, [-off, -on], 1e-5)
    close(cross_entropy(td.Bernoulli(0.5), td.Bernoulli(logits=T(logit))).value, -0.5 * (off + on), 1e-5)


# -- closed forms of densities, by hand


def test_gaussian_formulas():
    m, s, n, t = 0.3, 1.2, -0.5, 0.8
    p, q = td.Normal(T(m).double(), T(s).double()), td.Normal(T(n).double(), T(t).double())
    close(entropy(p).value, 0.5 * math.log(2 * math.pi * math.e * p.scale.item() ** 2))
    expected = math.log(t / s) + (s**2 + (m - n) ** 2) / (2 * t**2) - 0.5
    close(kl_divergence(p, q).value, expected)
    close(cross_entropy(p, q).value, 0.5 * math.log(2 * math.pi * t**2) + (s**2 + (m - n) ** 2) / (2 * t**2))
    assert kl_divergence(p, q).standard_error == 0


def test_independent_sums_its_base():
    p, q = PAIRS["independent"]
    close(entropy(p).value, entropy(p.base_dist).value.sum())
    close(kl_divergence(p, q).value, kl_divergence(p.base_dist, q.base_dist).value.sum())
    hard = td.Independent(td.Bernoulli(T([0.0, 1.0])), 1)
    soft = td.Independent(td.Bernoulli(T([0.5, 0.5])), 1)
    assert entropy(hard).value == 0
    close(kl_divergence(hard, soft).value, 2 * math.log(2))
    assert kl_divergence(soft, hard).value == math.inf


def test_divergence_from_a_uniform_to_a_continuous_bernoulli_is_finite():
    # torch's closed form returns infinity; at probability 1/2 the two are the same distribution
    uniform, bernoulli = td.Uniform(T(0.0), T(1.0)), td.ContinuousBernoulli(T(0.5))
    assert kl_divergence(uniform, bernoulli).value.abs() < 1e-5
    assert kl_divergence(bernoulli, uniform).value.abs() < 1e-5


def test_broken_closed_form_falls_back():
    certain, fair = td.Binomial(5, T(1.0)), td.Binomial(5, T(0.5))  # torch's formula gives -inf
    close(kl_divergence(certain, fair).value, 5 * math.log(2), 1e-4)


# -- the identity, closed form and Monte Carlo


@pytest.mark.parametrize("name", PAIRS)
def test_identity_closed_form(name):
    p, q = PAIRS[name]
    h, ce, kl = entropy(p), cross_entropy(p, q), kl_divergence(p, q)
    close(kl.value, ce.value - h.value, 2e-6)
    assert h.standard_error == ce.standard_error == kl.standard_error == 0


@pytest.mark.parametrize("name", PAIRS)
def test_monte_carlo_agrees_with_closed_form(name):
    p, q = PAIRS[name]
    a, b = as_mixture(p), as_mixture(q)
    for closed, estimate in (
        (entropy(p), entropy(a)),
        (kl_divergence(p, q), kl_divergence(a, b)),
        (cross_entropy(p, q), cross_entropy(a, b)),
        (kl_divergence(p, q), kl_divergence(p, b)),
        (cross_entropy(p, q), cross_entropy(p, b)),
    ):
        assert 0 <= estimate.standard_error < 0.1
        assert (closed.value - estimate.value).abs() <= 4 * estimate.standard_error + 1e-5
    assert kl_divergence(a, b).standard_error > 0 or name == "uniform"  # log p - log q is constant there


@pytest.mark.parametrize(
    "p, q",
    [
        (mixture(), mixture((0.5, 0.5))),
        (td.Normal(0.0, 1.0), mixture()),  # the entropy has a closed form, the divergence does not
        (td.Poisson(T([2.0, 3.0])), td.Poisson(T([3.0, 3.0]))),  # the other way round
        (mixture(), td.Normal(T([[0.0], [1.0]]), 2.0)),
        (td.Normal(T([0.0, 1.0]), 1.0), td.Normal(T([[0.0], [1.0]]), 1.0)),
    ],
)
def test_identity_monte_carlo(p, q):
    for seed in (0, 7):
        h, kl = entropy(p, seed=seed), kl_divergence(p, q, seed=seed)
        ce = cross_entropy(p, q, seed=seed)
        assert ce.value.shape == ce.standard_error.shape == kl.value.shape
        close((ce.value - h.value).expand_as(kl.value), kl.value, 1e-5)


def test_standard_error_is_that_of_the_mean():
    p, q = mixture(), mixture((0.5, 0.5))
    runs = torch.stack([kl_divergence(p, q, samples=400, seed=s).value for s in range(300)])
    stated = torch.stack([kl_divergence(p, q, samples=400, seed=s).standard_error for s in range(300)])
    assert 0.85 < runs.std() / stated.mean() < 1.15
    assert (runs.mean() - kl_divergence(p, q, samples=100_000).value).abs() < 5 * runs.std() / math.sqrt(300)
    ratio = entropy(p, samples=2_000).standard_error / entropy(p, samples=200_000).standard_error
    assert 9 < ratio < 11


def test_chunks_give_the_same_moments(monkeypatch):
    p, q = mixture(), mixture((0.5, 0.5))
    whole = kl_divergence(p, q, samples=20_001)
    monkeypatch.setattr(info, "_CHUNK_VALUES", 1_000)
    chunked = kl_divergence(p, q, samples=20_001)  # different draws: the components are drawn chunk by chunk
    assert (whole.value - chunked.value).abs() < 4 * math.sqrt(2) * whole.standard_error
    close(chunked.standard_error, whole.standard_error, 0.05)
    draws = []
    exact = info._monte_carlo(p, lambda x: (draws.append(x), x)[1], 20_001, 3)
    everything = torch.cat(draws)
    assert len(draws) > 10
    close(exact.value, everything.mean(), 1e-5)
    close(exact.standard_error, everything.std() / math.sqrt(20_001), 1e-5)


def test_batches_line_up_when_q_has_more_axes():
    p = td.MixtureSameFamily(td.Categorical(torch.ones(3, 1)), td.Normal(T([[0.0], [1.0], [2.0]]), 1.0))
    q = td.Normal(T([[0.0], [5.0]]), 1.0)
    closed = kl_divergence(td.Normal(T([0.0, 1.0, 2.0]), 1.0), q).value
    estimate = kl_divergence(p, q)
    assert estimate.value.shape == closed.shape == (2, 3)
    assert ((estimate.value - closed).abs() <= 4 * estimate.standard_error + 1e-5).all()


# -- divergence


@pytest.mark.parametrize("name", PAIRS)
def test_divergence_is_zero_only_for_equals(name):
    p, q = PAIRS[name]
    assert 0 <= kl_divergence(p, p).value < 1e-6
    assert kl_divergence(as_mixture(p), as_mixture(p)).value == 0
    assert kl_divergence(p, q).value > 1e-3
    assert kl_divergence(q, p).value > 1e-3


def test_divergence_of_random_tables():
    p, q = tables(200, 6), tables(200, 6, seed=1)
    assert (kl_divergence(p, q).value > 0).all()
    close(kl_divergence(p, p).value, torch.zeros(200), 1e-12)
    assert not torch.allclose(kl_divergence(p, q).value, kl_divergence(q, p).value)
    order = torch.randperm(6)
    close(kl_divergence(p[:, order], q[:, order]).value, kl_divergence(p, q).value, 1e-12)
    assert kl_divergence(p, q[0]).value.shape == (200,)


def test_infinite_divergence():
    wide, narrow = td.Uniform(-1.0, 2.0), td.Uniform(0.0, 1.0)
    assert kl_divergence(wide, narrow).value == math.inf  # closed form
    by_draws = kl_divergence(as_mixture(wide), as_mixture(narrow))
    assert by_draws.value == math.inf
    assert by_draws.standard_error == 0
    assert cross_entropy(as_mixture(wide), narrow).value == math.inf
    # one row infinite, the other not
    p = td.MixtureSameFamily(td.Categorical(torch.ones(2, 1)), td.Uniform(T([[0.0], [0.0]]), T([[1.0], [2.0]])))
    rows = kl_divergence(p, td.Uniform(T([0.0, 0.0]), T([1.0, 1.0])))
    assert rows.value.tolist() == [0.0, math.inf]


# -- mutual information


def test_mutual_information_of_a_joint_table():
    joint = tables(7, 12).reshape(7, 3, 4)
    a, b = joint.sum(-1), joint.sum(-2)
    product = a[..., None] * b[..., None, :]
    mi = mutual_information(joint).value
    close(mi, kl_divergence(joint.flatten(-2), product.flatten(-2)).value, 1e-12)
    conditional = (b * entropy((joint / b[..., None, :]).transpose(-1, -2)).value).sum(-1)
    close(mi, entropy(a).value - conditional, 1e-12)
    close(mi, mutual_information(joint.transpose(-1, -2)).value, 1e-12)
    assert (mi > 0.01).all()
    close(mutual_information(product).value, torch.zeros(7), 1e-12)


def test_mutual_information_of_a_copy_is_the_entropy():
    p = T([0.5, 0.25, 0.25, 0.0])
    close(mutual_information(torch.diag(p)).value, 1.5 * math.log(2))


def test_mutual_information_of_draws():
    p = tables(20, 6, 3)
    mi = mutual_information_of_draws(p).value
    close(mi, entropy(p.mean(0)).value - entropy(p).value.mean(0), 1e-12)
    # equals the mutual information of the draw's index and the label
    joint = p.permute(1, 0, 2) / 20
    close(mi, mutual_information(joint).value, 1e-12)
    hard = torch.eye(4)[[0, 1, 2, 3]]
    close(mutual_information_of_draws(hard).value, math.log(4))
    same = tables(1, 1000, 10, dtype=torch.float32).expand(30, 1000, 10)
    assert (mutual_information_of_draws(same).value >= 0).all()
    assert mutual_information_of_draws(same).value.max() < 1e-6


def test_error_of_the_mutual_information_of_draws():
    g = torch.Generator().manual_seed(0)
    p = torch.randn(200, 400, 3, generator=g).softmax(-1)  # 400 repetitions with 200 draws each
    value, error = mutual_information_of_draws(p)
    assert 0.85 < value.std() / error.mean() < 1.15
    assert mutual_information_of_draws(p[:1]).standard_error.isinf().all()
    assert (mutual_information_of_draws(p[:1]).value == 0).all()


def test_tiny_probabilities_stay_finite():
    p = T([[1.0, 1e-45], [1.0, 0.0], [1.0, 0.0]])
    assert mutual_information_of_draws(p).value == 0
    joint = torch.full((2, 2), 0.0)
    joint[0, 0], joint[1, 1] = 1.0, 1e-30
    assert mutual_information(joint).value.isfinite()


# -- the rest


def test_log_mean_exp():
    x = T([[0.0, 1000.0], [math.log(3.0), 1000.0]])
    close(log_mean_exp(x, 0), [math.log(2.0), 1000.0])
    close(log_mean_exp(x[:, :1], (0, 1)), math.log(2.0))
    close(log_mean_exp(x[:, 0] - 5000, 0), math.log(2.0) - 5000)
    assert log_mean_exp(T([-math.inf, -math.inf]), 0) == -math.inf


def test_global_random_state_is_untouched_and_seeds_repeat():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    p, q = mixture(), td.Uniform(-1.0, 1.0)
    entropy(p), kl_divergence(p, q), cross_entropy(p, p), self_information(q, 3.0)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(entropy(p, seed=3).value, entropy(p, seed=3).value)
    assert not torch.equal(entropy(p, seed=3).value, entropy(p, seed=4).value)
    first = entropy(p, seed=3).value
    torch.manual_seed(6)
    assert torch.equal(first, entropy(p, seed=3).value)


def test_closed_forms_can_be_differentiated():
    logits = T([0.3, -1.0, 2.0], requires_grad=True)
    (a,) = torch.autograd.grad(entropy(logits.softmax(-1)).value, logits)
    p = logits.softmax(-1).detach()
    close(a, -p * (p.log() + entropy(p).value))  # dH/dlogit_k = -p_k (log p_k + H)
    loc = T(0.5, requires_grad=True)
    (b,) = torch.autograd.grad(kl_divergence(td.Normal(loc, 1.0), td.Normal(0.0, 2.0)).value, loc)
    close(b, 0.5 / 4)
    assert not entropy(logits.softmax(-1)).standard_error.requires_grad


def test_half_precision_tables():
    p = tables(8, 10, dtype=torch.float32).bfloat16()
    assert entropy(p).value.dtype == torch.float32


GOOD = T([0.5, 0.5])
BAD_TABLES = {
    "nan": T([math.nan, 1.0]),
    "negative": T([-0.5, 1.5]),
    "sum": T([0.5, 0.6]),
    "infinite": T([math.inf, 0.0]),
    "empty": torch.zeros(0, 3),
    "integers": T([1, 0]),
    "scalar": T(1.0),
    "a list": [0.5, 0.5],
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_bad_tables(name):
    bad = BAD_TABLES[name]
    for call in (
        lambda: entropy(bad),
        lambda: kl_divergence(bad, GOOD),
        lambda: kl_divergence(GOOD, bad),
        lambda: cross_entropy(GOOD, bad),
        lambda: self_information(bad, 0),
        lambda: mutual_information(bad),
        lambda: mutual_information_of_draws(bad),
    ):
        with pytest.raises(InputError):
            call()


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: kl_divergence(GOOD, T([0.2, 0.3, 0.5])), "q"),
        (lambda: kl_divergence(tables(3, 2), tables(4, 2)), "q"),
        (lambda: kl_divergence(GOOD, td.Normal(0.0, 1.0)), "q"),
        (lambda: kl_divergence(td.Normal(0.0, 1.0), td.MultivariateNormal(torch.zeros(2), torch.eye(2))), "q"),
        (lambda: kl_divergence(td.Normal(torch.zeros(2), 1.0), td.Normal(torch.zeros(3), 1.0)), "q"),
        (lambda: kl_divergence(td.Bernoulli(0.5), td.Normal(0.0, 1.0)), "q"),  # a density against a probability
        (lambda: cross_entropy(as_mixture(td.Poisson(2.0)), td.Normal(0.0, 1.0)), "q"),
        (lambda: self_information(GOOD, 2), "outcome"),
        (lambda: self_information(GOOD, -1), "outcome"),
        (lambda: self_information(GOOD, 0.5), "outcome"),
        (lambda: self_information(tables(3, 2), T([0, 1])), "outcome"),
        (lambda: self_information(GOOD, torch.zeros(0, dtype=torch.long)), "outcome"),
        (lambda: self_information(td.Normal(0.0, 1.0), math.nan), "outcome"),
        (lambda: self_information(td.Dirichlet(torch.ones(3)), T([0.5, 0.5])), "outcome"),
        (lambda: self_information(td.OneHotCategorical(GOOD), T([1.0, 1.0])), "outcome"),
        (lambda: entropy(mixture(), samples=1), "samples"),
        (lambda: entropy("normal"), "p"),
        (lambda: mutual_information(GOOD), "joint"),
        (lambda: mutual_information(tables(2, 2)), "joint"),  # a joint table sums to 1 as a whole
        (lambda: mutual_information_of_draws(GOOD), "probabilities"),
        (lambda: log_mean_exp(torch.zeros(0), 0), "x"),
    ],
)
def test_bad_arguments(call, argument):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.argument == argument
