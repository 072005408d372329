"""Curvature against brute force: full Jacobians, Fisher matrices by enumeration and quadrature, dense inverses."""

import itertools

import pytest
import torch
from curvature_cases import CASES, CLASSES, DOUBLE, REAL, X
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.core.inputs import blank_row, describe
from credibly.curvature import (
    DenseBlock,
    DiagonalBlock,
    KronBlock,
    choose_names,
    curvature_blocks,
    find_parts,
    fisher_root,
    prior_precision,
)
from credibly.inference.method import initial
from credibly.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticCategorical,
    HeteroscedasticGaussian,
    StudentT,
)
from credibly.likelihoods.continuous import LocationScale

LIKELIHOODS = {
    "gaussian": (Gaussian(0.3), 1, REAL),
    **CASES,
    "noisy logits": (HeteroscedasticCategorical(samples=8), 6, CLASSES),
}


def setup(problem, random=None):
    row = blank_row(describe(problem.x), problem.device)
    names = choose_names(problem.layout, random, row)
    return names, find_parts(problem.layout, names, row)


def expected_fisher(likelihood, f, extra):
    """E_y[s s'] for one output vector f (W,), by enumeration of labels or dense quadrature over y."""

    def score(y):
        return torch.func.grad(lambda out: likelihood.log_prob(out.reshape(1, 1, -1), y, extra).sum())(f)

    if likelihood.support == "class":
        log_p = likelihood.log_probabilities(f.reshape(1, 1, -1)).flatten()
        return sum(p * torch.outer(s, s) for p, s in ((q.exp(), score(torch.tensor([c]))) for c, q in enumerate(log_p)))
    total = torch.zeros(len(f), len(f), dtype=f.dtype)
    if likelihood.support == "binary":
        values = torch.tensor([[0.0], [1.0]], dtype=f.dtype)
        weights = torch.ones(2, dtype=f.dtype)
    elif likelihood.support == "count":
        values = torch.arange(0.0, 60.0, dtype=f.dtype).unsqueeze(1)
        weights = torch.ones(60, dtype=f.dtype)
    else:
        # y = sinh(t) on each axis. Targets are independent: one axis at a time, with the others at their location.
        t = torch.linspace(-40, 40, 4001, dtype=f.dtype)
        location, _ = likelihood.location_scale(f.reshape(1, 1, -1), extra)
        location = location.flatten()
        # Two independent targets: their scores have mean zero and are uncorrelated.
        if len(location) > 1:
            for k in range(len(location)):
                single = Gaussian(likelihood.scale[k])
                own = expected_fisher(single, f[k : k + 1], {})
                total[k, k] = own[0, 0]
            return total
        values = (location + torch.sinh(t)).unsqueeze(1)
        weights = torch.cosh(t) * (t[1] - t[0])
    log_p = likelihood.log_prob(f.reshape(1, 1, -1).expand(1, len(values), -1), values, extra).flatten()
    scores = torch.func.vmap(score)(values.unsqueeze(1))
    p = log_p.exp() * weights
    scores = torch.where((p > 0).unsqueeze(1), scores, 0)
    return torch.einsum("s,sa,sb->ab", p, scores, scores)


def brute(problem, theta):
    """sum_i J_i' F_i J_i over the network's coordinates, from full Jacobians."""
    jacobian = torch.func.jacrev(lambda t: problem.likelihood.arrange(problem.layout.call(t, problem.x)))(theta)
    output = problem.likelihood.arrange(problem.layout.call(theta, problem.x)).detach()
    extra = problem.extra(theta.unsqueeze(0))
    total = torch.zeros(problem.dim, problem.dim, dtype=theta.dtype)
    for f, j in zip(output.flatten(0, -2), jacobian.flatten(0, -3)):
        total += j.mT @ expected_fisher(problem.likelihood, f, extra) @ j
    return total


def tiny(name, **kwargs):
    likelihood, width, y = LIKELIHOODS[name]
    net = mlp(3, 4, width, dtype=DOUBLE)
    return cr.Problem(net, data=(X, y), likelihood=likelihood, prior=cr.priors.Normal(0.8, fan_in=True), **kwargs)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_fisher_root_is_the_expected_product_of_scores(name):
    problem = tiny(name)
    theta = initial(problem, "network", 1, 0)[0]
    output = problem.likelihood.arrange(problem.layout.call(theta, X)).detach() * 3
    extra = problem.extra(theta.unsqueeze(0))
    root = fisher_root(problem.likelihood, output, problem.y, extra)
    for f, own in zip(output[:3], root):
        torch.testing.assert_close(own @ own.mT, expected_fisher(problem.likelihood, f, extra), rtol=1e-8, atol=1e-10)


def test_score_moments_match_the_closed_forms():
    from credibly.curvature.output_fisher import _score_moments

    for df in (0.5, 1.0, 4.0, 30.0):
        expected = torch.diag(torch.tensor([(df + 1) / (df + 3), 2 * df / (df + 3)], dtype=DOUBLE))
        torch.testing.assert_close(_score_moments(StudentT(1.0, df=df)), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        _score_moments(Gaussian(1.0)), torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=DOUBLE), rtol=1e-12, atol=1e-12
    )
    assert issubclass(HeteroscedasticGaussian, LocationScale)


def test_the_heteroscedastic_hessian_itself_would_be_indefinite():
    """The reason for the expectation: at a single y the Hessian has a negative eigenvalue."""
    y = torch.tensor([[2.0]], dtype=DOUBLE)

    def value(f):
        return HeteroscedasticGaussian().log_prob(f.reshape(1, 1, 2), y, {}).sum()

    hessian = -torch.func.hessian(value)(torch.zeros(2, dtype=DOUBLE))
    assert float(torch.linalg.eigvalsh(hessian)[0]) < -0.1


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_gauss_newton_matches_full_jacobians(name):
    problem = tiny(name)
    theta = initial(problem, "network", 1, 0)[0]
    _, parts = setup(problem)
    expected = brute(problem, theta)[: problem.layout.network_dim, : problem.layout.network_dim]
    indices = parts.indices
    full = curvature_blocks(problem, theta, "full", parts)[0]
    torch.testing.assert_close(full.likelihood_precision(), expected[indices][:, indices], rtol=1e-8, atol=1e-9)
    for layer, block in zip(parts.layers, curvature_blocks(problem, theta, "diag", parts)):
        own = expected.diagonal()[layer.indices.flatten()]
        torch.testing.assert_close(block.likelihood_precision(), own, rtol=1e-8, atol=1e-9)


def test_kronecker_factors_are_averages_of_inputs_and_sums_of_gradients():
    """For the hidden layer of an MLP, with gradients written out by hand."""
    problem = tiny("categorical")
    theta = initial(problem, "network", 1, 0)[0]
    _, parts = setup(problem)
    first, second = curvature_blocks(problem, theta, "kron", parts)
    net = problem.layout.write(theta)
    inputs = torch.cat([X, torch.ones(7, 1, dtype=DOUBLE)], 1)
    hidden = net[0](X).detach().requires_grad_()
    slope = torch.autograd.grad(nn.functional.silu(hidden).sum(), hidden)[0]
    p = net(X).softmax(-1).detach()
    fisher = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    back = slope.unsqueeze(2) * net[2].weight.detach().mT  # (N, hidden, classes)
    outer, inner = first.factors()
    torch.testing.assert_close(outer, (back @ fisher @ back.mT).sum(0))
    torch.testing.assert_close(inner, inputs.mT @ inputs / 7)
    torch.testing.assert_close(second.factors()[0], fisher.sum(0))
    exact = DenseBlock.of("all", torch.kron(outer, inner), first.prior)
    torch.testing.assert_close(first.covariance(), exact.covariance())


class Irregular(nn.Module):
    """An embedding-like gain, a norm, a layer used twice, a tied weight and one that is never used."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.0, 0.5, 2.0]))
        self.norm = nn.LayerNorm(3)
        self.twice = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = nn.Parameter(self.head.weight[:, :2].detach().clone())
        self.again = nn.Linear(2, 2, bias=False)
        self.again.weight = self.tied.weight
        self.idle = nn.Linear(2, 2)

    def forward(self, x):
        h = self.twice(torch.tanh(self.twice(self.norm(x) * self.gain)))
        return self.again(torch.tanh(self.tied(self.head(h))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 3, batch_first=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.rnn(x.unsqueeze(-1))[0][:, -1])


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 2, 3, padding="same"),
        nn.Tanh(),
        nn.Conv2d(2, 3, (2, 1), stride=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 2),
    )


def tokens():
    return nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))


def pixels():
    """Outputs (N, 2, 2, classes): every pixel has its own Fisher matrix."""
    return nn.Sequential(nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 12), nn.Unflatten(1, (2, 2, 3)))


def network_problem(kind):
    make, width, likelihood = {
        "irregular": (Irregular, 3, Gaussian((0.5, 0.2))),
        "recurrent": (Recurrent, 4, Gaussian(0.5)),
        "convolution": (convolutional, 16, Categorical()),
        "tokens": (tokens, 16, Categorical()),
        "pixels": (pixels, 16, Categorical()),
    }[kind]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = make().double()
    x = randn(5, width, dtype=DOUBLE)
    y = {"irregular": randn(5, 2, dtype=DOUBLE), "recurrent": randn(5, dtype=DOUBLE)}.get(kind)
    if y is None:
        shape = (5, 2, 2) if kind == "pixels" else (5,)
        y = torch.arange(5 * (4 if kind == "pixels" else 1)).reshape(shape) % (3 if kind == "pixels" else 2)
    return cr.Problem(net, data=(x, y), likelihood=likelihood, prior=cr.priors.Normal(0.8))


@pytest.mark.parametrize(
    "kind, layers",
    [
        ("irregular", ["head"]),
        ("recurrent", ["head"]),
        ("convolution", ["1", "3", "6"]),
        ("tokens", ["1", "4"]),
        ("pixels", ["0", "2"]),
    ],
)
def test_networks_of_all_kinds(kind, layers):
    problem = network_problem(kind)
    theta = initial(problem, "network", 1, 0)[0]
    _, parts = setup(problem)
    assert [layer.name for layer in parts.layers] == layers
    assert sorted(parts.indices.tolist()) == list(range(problem.dim))  # every coordinate once
    expected = brute(problem, theta)
    full = curvature_blocks(problem, theta, "full", parts)[0]
    torch.testing.assert_close(
        full.likelihood_precision(), expected[parts.indices][:, parts.indices], rtol=1e-7, atol=1e-8
    )
    diagonal = curvature_blocks(problem, theta, "diag", parts)
    found = torch.cat([block.likelihood_precision() for block in diagonal])
    torch.testing.assert_close(found, expected.diagonal()[parts.indices], rtol=1e-7, atol=1e-8)
    for block in curvature_blocks(problem, theta, "kron", parts):
        if block.source == "rest":
            torch.testing.assert_close(
                block.likelihood_precision(), expected.diagonal()[parts.rest_indices], rtol=1e-7, atol=1e-8
            )
        else:
            assert isinstance(block, KronBlock)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_micro_batches_add_up(structure):
    whole, parts_of = tiny("learned noise"), [tiny("learned noise", micro_batch=m) for m in (1, 3)]
    theta = initial(whole, "network", 1, 0)[0]
    _, parts = setup(whole)
    expected = curvature_blocks(whole, theta, structure, parts)
    for problem in parts_of:
        for a, b in zip(curvature_blocks(problem, theta, structure, parts), expected, strict=True):
            torch.testing.assert_close(a.precision(), b.precision(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_both_parts_carry_their_temperature(structure):
    plain, cold = tiny("learned noise"), tiny("learned noise", temperature=cr.Tempering(0.2, 4.0))
    theta = initial(plain, "network", 1, 0)[0]
    _, parts = setup(plain)
    for a, b in zip(curvature_blocks(plain, theta, structure, parts), curvature_blocks(cold, theta, structure, parts)):
        torch.testing.assert_close(b.likelihood_precision(), a.likelihood_precision() / 0.2, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(b.prior, a.prior / 4)


def test_learned_noise_has_its_exact_second_derivative():
    problem = tiny("learned noise")
    theta = initial(problem, "network", 1, 0)[0]
    own = curvature_blocks(problem, theta, "kron", setup(problem)[1])[-1]

    def value(log_scale):
        return problem.parts(torch.cat([theta[:-1], log_scale]).unsqueeze(0), problem.x, problem.y)[0].sum()

    assert own.source == "likelihood"
    torch.testing.assert_close(own.likelihood_precision().reshape(1, 1), -torch.func.hessian(value)(theta[-1:]))


# -- blocks
def psd(size, seed, rank=None):
    half = randn(size, rank or size + 2, seed=seed, dtype=DOUBLE)
    return half @ half.mT


def some_blocks():
    d = randn(6, seed=4, dtype=DOUBLE).exp()
    return {
        "diagonal": DiagonalBlock.of("rest", psd(6, 1).diagonal(), d),
        "dense": DenseBlock.of("all", psd(6, 1, rank=3), d),
        "kron": KronBlock.of("layer", psd(2, 1), psd(3, 2, rank=2), d[:3]),
    }


@pytest.mark.parametrize("kind", ["diagonal", "dense", "kron"])
def test_blocks_are_their_dense_matrices(kind):
    block = some_blocks()[kind]
    d = randn(6, seed=4, dtype=DOUBLE).exp()
    curvature = {
        "diagonal": torch.diag(psd(6, 1).diagonal()),
        "dense": psd(6, 1, rank=3),
        "kron": torch.kron(psd(2, 1), psd(3, 2, rank=2)),
    }[kind]
    prior = d[:3].repeat(2) if kind == "kron" else d
    precision = curvature + torch.diag(prior)
    torch.testing.assert_close(block.precision(), precision)
    torch.testing.assert_close(block.covariance(), torch.linalg.inv(precision))
    torch.testing.assert_close(block.variance(), torch.linalg.inv(precision).diagonal())
    assert block.log_det() == pytest.approx(float(torch.logdet(precision)), rel=1e-12)
    other = 3.0 * torch.diag(prior) + 0.2 * curvature
    assert block.log_det(3.0, 0.2) == pytest.approx(float(torch.logdet(other)), rel=1e-12)
    torch.testing.assert_close(block.scaled(3.0, 0.2).precision(), other)


def test_roots_do_not_depend_on_the_basis_of_degenerate_eigenspaces():
    """A rank-deficient curvature has degenerate eigenspaces: a draw must not depend on the basis chosen in them."""
    d = torch.ones(6, dtype=DOUBLE)
    noise = randn(4, 6, dtype=DOUBLE)
    a = DenseBlock.of("all", psd(6, 1, rank=2), d).root(noise)
    b = DenseBlock.of("all", psd(6, 1, rank=2) * (1 + 1e-13), d).root(noise)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


# -- the prior
def test_prior_precision():
    net = mlp(3, 4, 1, dtype=DOUBLE)
    priors = {
        "0.weight": cr.priors.Normal(0.5, fan_in=True),
        "0.bias": cr.priors.StudentT(df=4.0, scale=0.3),
        "2.weight": cr.priors.Laplace(0.2),
        "*": cr.priors.ScaleMixture(0.5, 1.0, 0.1),
    }
    problem = cr.Problem(net, data=(X, REAL), likelihood=Gaussian(0.3), prior=priors)
    theta = randn(problem.dim, seed=6, dtype=DOUBLE) * 0.1
    theta[20] = 0.01  # where the mixture's spike curves downwards
    theta[12] = 5.0  # in the tail of the Student-t, where it curves upwards
    found = prior_precision(problem.prior, theta)
    hessian = -torch.func.hessian(lambda t: problem.prior.log_prob(t.unsqueeze(0)).sum())(theta).diagonal()
    torch.testing.assert_close(found[:12], torch.full((12,), 3 / 0.25, dtype=DOUBLE))
    torch.testing.assert_close(found[13:16], hessian[13:16])
    variance = 0.3**2 * 2
    assert float(found[12]) == pytest.approx(1 / (100 * variance))
    assert float(hessian[12]) < 0
    torch.testing.assert_close(found[16:20], torch.full((4,), 1 / (100 * 2 * 0.04), dtype=DOUBLE))
    torch.testing.assert_close(found[20:], hessian[20:])


class Flat(cr.priors.Prior):
    """An improper flat prior."""

    fan_in = False
    std = float("inf")

    def log_prob(self, w, shrink=1.0):
        return w * 0

    def sample(self, shape, generator, *, dtype=torch.float32, shrink=1.0):
        return torch.randn(shape, generator=generator, dtype=dtype)


def test_a_flat_prior_is_rejected_before_work():
    problem = cr.Problem(mlp(3, 4, 1, dtype=DOUBLE), data=(X, REAL), likelihood=Gaussian(0.3), prior=Flat())
    with pytest.raises(cr.InputError, match="prior: is flat somewhere"):
        cr.Laplace(steps=10**9).fit(problem)


# -- which parameters
def test_names_by_layer_and_pattern():
    problem = network_problem("irregular")
    row = blank_row(describe(problem.x), problem.device)

    def names(random):
        return choose_names(problem.layout, random, row)

    assert names(None) == tuple(e.name for e in problem.layout.entries)
    assert names("last layer") == ("tied.weight",)  # `again` comes last, and shares this weight
    assert names("norm.*") == ("norm.weight", "norm.bias")
    assert names(("head.bias", "gai?")) == ("gain", "head.bias")
    assert choose_names(tiny("gaussian").layout, "last layer", X[:1]) == ("2.weight", "2.bias")
    with pytest.raises(cr.InputError, match=r"random: pattern 'body.\*' matches no random parameter"):
        names("body.*")


def test_memory_is_checked_before_it_is_allocated():
    x = torch.zeros(4, 3)
    wide = cr.Problem(
        nn.Sequential(nn.Linear(3, 120_000), nn.Linear(120_000, 1)),
        data=(x, torch.zeros(4)),
        likelihood=Gaussian(1.0),
        prior=cr.priors.Normal(),
    )
    with pytest.raises(
        cr.InputError, match=r"structure: 'full' of 600,001 parameters needs 8,04\d\.\d GiB \(8,640,028,800,024 bytes\)"
    ) as full:
        cr.Laplace(structure="full", steps=10**9).fit(wide)
    assert 'structure="kron"' in str(full.value)
    with pytest.raises(cr.InputError, match=r"structure: 'kron' of 600,001 parameters needs .*structure=\"diag\""):
        cr.Laplace(structure="kron", steps=10**9).fit(wide)


def test_all_pairs_of_structures_agree_on_sizes():
    problem = network_problem("irregular")
    theta = initial(problem, "network", 1, 0)[0]
    _, parts = setup(problem)
    sizes = [sum(b.size for b in curvature_blocks(problem, theta, s, parts)) for s in ("kron", "diag", "full")]
    assert all(a == b == problem.dim for a, b in itertools.pairwise(sizes))
