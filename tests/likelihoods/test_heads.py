"""Several heads with several likelihoods: against the heads one by one, and with every method."""

from collections import OrderedDict

import pandas as pd
import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.curvature.output_fisher import fisher_root
from credibly.likelihoods import Categorical, Gaussian, Heads, NegativeBinomial, Poisson, Survival, from_distribution

f64 = torch.float64
X = randn(30, 3, dtype=f64)
Z = X.sum(1) + 0.2 * randn(30, seed=1, dtype=f64)
TARGETS = {
    "price": Z,
    "kind": (Z > 0).long() + (Z > 1).long(),
    "pixels": (randn(30, 2, 2, seed=2) > 0).long(),
    "time": torch.stack([Z.exp(), (Z < 1).double()], 1),
}
METHODS = {
    "mle": {"steps": 20},
    "map": {"steps": 20},
    "ensemble": {"members": 3, "steps": 20},
    "dropout": {"steps": 20, "insert": "*"},
    "bbb": {"steps": 20},
    "laplace": {"steps": 20},
    "swag": {"steps": 20, "rank": 3, "iterates": 4, "every": 5},
    "hmc": {"chains": 2, "draws": 4, "warmup": 20, "init": "fresh", "compile": False, "trajectory_length": 0.2},
    "sghmc": {"chains": 2, "draws": 4, "warmup": 20, "init": "network", "compile": False, "step_size": 1e-3, "thin": 3},
}


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.body = mlp(3, 5, 4, seed=seed, dtype=f64)
        self.price, self.kind = mlp(4, 1, seed=seed, dtype=f64), mlp(4, 3, seed=seed, dtype=f64)
        self.pixels, self.time = mlp(4, 8, seed=seed, dtype=f64), mlp(4, 1, seed=seed, dtype=f64)

    def forward(self, x):
        h = self.body(x)
        # In another order than that of the likelihood.
        return {
            "pixels": self.pixels(h).reshape(-1, 2, 2, 2),
            "time": self.time(h),
            "price": self.price(h),
            "kind": self.kind(h),
        }


class Changed(Net):
    """The network with a change of its outputs."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


class Head(nn.Module):
    """One head of the network, with the same parameters."""

    def __init__(self, name):
        super().__init__()
        self.net, self.name = Net(), name

    def forward(self, x):
        return self.net(x)[self.name]


def heads(**kwargs):
    likelihoods = {"price": Gaussian(), "kind": Categorical(), "pixels": Categorical(axis=1), "time": Survival()}
    return Heads(likelihoods, **kwargs)


def problem(**kwargs):
    return cr.Problem(Net(), (X, TARGETS), heads(**kwargs), cr.priors.Normal())


def alone(name):
    return cr.Problem(Head(name), (X, TARGETS[name]), heads().heads[name], cr.priors.Normal())


def own_theta(p, one, theta, name):
    """The coordinates of one head's problem in the joint vector."""
    network, extra = p.layout.split(theta)
    single = {f"net.{k}": v for k, v in network.items()}
    mine = {k.replace(f"likelihood.{name}.", "likelihood."): v for k, v in extra.items() if f".{name}." in k}
    return one.layout.flatten(single, mine)


def test_the_density_is_the_weighted_sum_of_the_heads():
    weights = {"kind": 0.5, "time": 2.0}
    p, weighted = problem(), problem(weights=weights)
    theta = 0.3 * randn(2, p.dim, seed=5, dtype=f64)
    each = {}
    for name in TARGETS:
        one = alone(name)
        each[name] = one.log_density_and_grad(own_theta(p, one, theta, name)).log_likelihood
    torch.testing.assert_close(p.log_density_and_grad(theta).log_likelihood, sum(each.values()))
    expected = sum(weights.get(name, 1.0) * value for name, value in each.items())
    torch.testing.assert_close(weighted.log_density_and_grad(theta).log_likelihood, expected)
    assert set(p.layout.extra) == {"likelihood.price.log_scale", "likelihood.time.log_scale"}


def test_the_fisher_information_is_made_of_blocks():
    p = problem(weights={"kind": 0.5})
    theta = 0.3 * randn(1, p.dim, seed=5, dtype=f64)
    output, extra = p.forward(theta, X)[0], p.extra(theta)
    matrix = fisher_root(p.likelihood, output, p.y, extra)
    matrix = matrix @ matrix.mT
    first = 0
    for name in ("pixels", "time", "price", "kind"):
        one = alone(name)
        own = own_theta(p, one, theta, name)
        raw = one.likelihood.arrange(one.forward(own, X), 1)[0]
        root = fisher_root(one.likelihood, raw, one.y, one.extra(own))
        block = root @ root.mT
        size = raw[0].numel()
        here = matrix[:, first : first + size, first : first + size]
        if name == "pixels":
            # Outputs have channels first, Fisher blocks one pixel each.
            here = here.reshape(30, 2, 4, 2, 4)
            for pixel in range(4):
                torch.testing.assert_close(here[:, :, pixel, :, pixel], block.flatten(1, 2)[:, pixel])
            assert not here[:, :, 0, :, 1].any()
        else:
            torch.testing.assert_close(here, block * (0.5 if name == "kind" else 1.0))
        assert not matrix[:, first : first + size, first + size :].any()
        first += size


@pytest.mark.parametrize("name", METHODS)
def test_every_method_predicts_and_is_stored(name, tmp_path):
    posterior = cr.METHODS[name](**METHODS[name]).fit(problem(), seed=0, out=tmp_path / "run")
    p = posterior.predict(X)
    assert {head: tuple(one.mean.shape) for head, one in p.heads.items()} == {
        "pixels": (30, 2, 2, 2), "time": (30,), "price": (30,), "kind": (30, 3),
    }  # fmt: skip
    assert p["kind"].probabilities.shape == (30, 3)
    assert p["pixels"].sample(2).shape == (2, 30, 2, 2)
    torch.testing.assert_close(p["price"].total, p["price"].aleatoric + p["price"].epistemic)
    assert {head: tuple(y.shape) for head, y in p.sample(5).items()}["pixels"] == (5, 30, 2, 2)
    metrics = cr.evaluate(p, TARGETS)
    assert {"log_density", "price.rmse", "kind.accuracy", "time.concordance", "pixels.brier"} <= set(metrics)
    if p.draws == 1:
        each = [metrics[f"{h}.log_density"] * (4 if h == "pixels" else 1) for h in TARGETS]
        assert metrics["log_density"] == pytest.approx(sum(each))
    loaded = cr.load(tmp_path / "run", Net(seed=4)).predict(X)
    assert torch.equal(loaded["price"].interval(0.8)[0], p["price"].interval(0.8)[0])
    assert torch.equal(loaded.log_prob(TARGETS), p.log_prob(TARGETS))


def test_the_joint_density_averages_over_draws_once():
    posterior = cr.DeepEnsemble(members=3, steps=10).fit(problem(), seed=0)
    p = posterior.predict(X)
    each = torch.stack([torch.cat(list(p[h].log_likelihoods(TARGETS[h])), 1) for h in TARGETS]).sum(0)
    torch.testing.assert_close(p.log_prob(TARGETS), torch.logsumexp(each, 0) - torch.tensor(3.0, dtype=f64).log())
    assert all(f"<p>{name}</p>" in p._repr_html_() for name in TARGETS)
    some = p.subset(torch.tensor([3, 1]))
    torch.testing.assert_close(some["price"].mean, p["price"].mean[[3, 1]])
    assert posterior.predict(X[:2].clone().requires_grad_(), grad=True)["price"].mean.requires_grad
    assert "log densities" in str(cr.HMC(**METHODS["hmc"]).fit(problem(), seed=0).diagnostics(X, TARGETS))


def test_a_frozen_body_under_the_heads():
    p = cr.Problem(Net(), (X, TARGETS), heads(), cr.priors.Normal(), random=["price.*", "kind.*"])
    posterior = cr.DeepEnsemble(members=2, steps=10).fit(p, seed=0)
    with torch.no_grad():
        expected = torch.stack([posterior.module(m)(X)["price"].squeeze(-1) for m in range(2)]).mean(0)
    torch.testing.assert_close(posterior.predict(X)["price"].mean, expected)


def test_an_own_distribution_as_a_head(tmp_path):
    likelihood = Heads({**heads().heads, "price": from_distribution(lambda out: torch.distributions.Normal(out, 0.3))})
    p = cr.Problem(Net(), (X, TARGETS), likelihood, cr.priors.Normal())
    posterior = cr.MAP(steps=5).fit(p, seed=0, out=tmp_path / "run")
    with pytest.raises(cr.StoreError, match="Pass likelihood="):
        cr.load(tmp_path / "run", Net())
    loaded = cr.load(tmp_path / "run", Net(), likelihood=likelihood)
    assert torch.equal(loaded.predict(X)["price"].mean, posterior.predict(X)["price"].mean)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, i):
        return X[i], {name: y[i] for name, y in TARGETS.items()}


def test_data_sets_of_dicts():
    assert torch.equal(cr.Problem(Net(), Rows(), heads(), cr.priors.Normal()).y, problem().y)


@pytest.mark.parametrize("name", ["map", "laplace", "sghmc", "ensemble"])
def test_streams_of_dicts_of_targets(name):
    loader = torch.utils.data.DataLoader(Rows(), batch_size=7, shuffle=True)
    p = cr.Problem(Net(), cr.data.Stream(loader), heads(), cr.priors.Normal())
    assert (p.n, p.stream.batches) == (30, 5)
    theta = 0.3 * randn(2, p.dim, seed=5, dtype=f64)
    torch.testing.assert_close(p.log_density(theta), problem().log_density(theta))
    posterior = cr.METHODS[name](**METHODS[name]).fit(p, seed=0)
    assert torch.isfinite(posterior.predict(X)["price"].mean).all()


@pytest.mark.parametrize("name", ["map", "ensemble", "bbb", "dropout", "laplace"])
def test_predictions_at_a_loader_are_split_by_head(name):
    posterior = cr.METHODS[name](**METHODS[name]).fit(problem(), seed=0)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=7, shuffle=True)
    read, held = posterior.predict(loader), posterior.predict(X)
    assert list(read) == list(held)
    assert (len(read), len(read["price"])) == (30, 30)
    for head in TARGETS:
        torch.testing.assert_close(read[head].mean, held[head].mean)
        torch.testing.assert_close(read[head].variance, held[head].variance)
        assert torch.equal(read[head].targets, TARGETS[head])
        assert torch.equal(read.targets[head], TARGETS[head])
    torch.testing.assert_close(read["price"].interval(0.8)[0], held["price"].interval(0.8)[0])
    torch.testing.assert_close(read.log_prob(read.targets), held.log_prob(TARGETS))
    found, expected = cr.evaluate(read, read.targets), cr.evaluate(held, TARGETS)
    assert found["price.rmse"] == pytest.approx(expected["price.rmse"])
    assert found.keys() == expected.keys()
    assert {head: y.shape for head, y in read.sample(3).items()} == {h: y.shape for h, y in held.sample(3).items()}
    rows = torch.tensor([29, 3])
    torch.testing.assert_close(read.subset(rows)["kind"].mean, held["kind"].mean[rows])
    torch.testing.assert_close(read["kind"].subset(rows).mean, held["kind"].mean[rows])
    assert "StreamedHeadsPredictive(30 rows" in repr(read)
    assert "<p>price</p>" in read._repr_html_()
    with pytest.raises(cr.InputError, match="Ask one of them"):
        _ = read.mean


def test_targets_of_text_are_refused_by_head():
    text = {**TARGETS, "kind": pd.Series(["a", "b", "c"] * 10)}
    with pytest.raises(cr.InputError, match="y of head 'kind': holds values of dtype .*Encode text"):
        cr.Problem(Net(), (X, text), heads(), cr.priors.Normal())
    p = cr.MAP(steps=2).fit(problem(), seed=0).predict(X)
    with pytest.raises(cr.InputError, match="y of head 'kind': holds values of dtype .*Encode text"):
        p.log_prob(text)
    columns = {name: pd.Series(y.numpy()) if y.ndim == 1 else y.numpy() for name, y in TARGETS.items()}
    assert torch.equal(p.log_prob(columns), p.log_prob(TARGETS))


def test_an_ordered_dict_of_outputs_is_one_too():
    ordered = cr.Problem(Changed(OrderedDict), (X, TARGETS), heads(), cr.priors.Normal())
    theta = randn(2, ordered.dim, dtype=f64)
    torch.testing.assert_close(ordered.log_density(theta), problem().log_density(theta))


def test_errors():
    def build(net=None, y=TARGETS, likelihood=None):
        return cr.Problem(net or Net(), (X, y), likelihood or heads(), cr.priors.Normal())

    for arguments, message in [
        ({"y": Z}, "y must be a dict of targets for price, kind"),
        ({"y": {"price": Z}}, "y: has the heads price, the likelihood price, kind, pixels, time"),
        ({"net": mlp(3, 1, dtype=f64)}, "net must return a dict of outputs for Heads, got Tensor"),
        ({"net": Changed(lambda out: {"all": out})}, "returned dict, in which 'all' is a dict.*one tensor per name"),
        ({"likelihood": Gaussian()}, r"y: is a dict of targets, and Gaussian has one.*Heads\("),
        ({"likelihood": Gaussian(), "y": Z}, "net: its forward returned dict.*use Heads"),
        ({"y": {**TARGETS, "kind": Z}}, "y of head 'kind': has values that are not integers"),
        ({"y": {**TARGETS, "price": Z[:5]}}, "rows. All heads need the same number"),
    ]:
        with pytest.raises(cr.InputError, match=message):
            build(**arguments)
    with pytest.raises(cr.InputError, match="weights: has 'odd'"):
        heads(weights={"odd": 1.0})
    with pytest.raises(cr.InputError, match="must be a dict of names and likelihoods"):
        Heads({})
    p = cr.MAP(steps=2).fit(problem(), seed=0).predict(X)
    for ask in (lambda: p.mean, lambda: p.std, lambda: p.interval(0.9), lambda: p.probabilities):
        with pytest.raises(cr.InputError, match=r"Ask one of them, as in predictive\['pixels'\]"):
            ask()
    with pytest.raises(cr.InputError, match="head must be one of pixels, time, price, kind, got 'odd'"):
        p["odd"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_labels_and_counts_exact(dtype):
    """bfloat16 has 8 significant bits: it would round 259 to 260, and 1001 to 1000."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.kind, self.count = nn.Linear(3, 300), nn.Linear(3, 1)

        def forward(self, x):
            return {"kind": self.kind(x), "count": self.count(x)}

    x, labels, counts = randn(8, 3).to(dtype), torch.arange(258, 266), torch.arange(1000, 1008)
    heads = Heads({"kind": Categorical(), "count": Poisson()})
    problem = cr.Problem(Half().to(dtype), (x, {"kind": labels, "count": counts}), heads, cr.priors.Normal())
    assert problem.y.tolist() == [[float(a), float(b)] for a, b in zip(labels, counts)]
    y = problem.likelihood.prepared({"kind": labels, "count": counts}, dtype, problem.device)
    assert torch.equal(y, problem.y)
    for likelihood in (Poisson(), NegativeBinomial()):
        for given in (counts, counts.numpy().astype(float)):
            alone = cr.Problem(nn.Linear(3, 1).to(dtype), (x, given), likelihood, cr.priors.Normal())
            assert alone.y[:, 0].tolist() == counts.tolist()
    classes = cr.Problem(
        nn.Linear(3, 300).to(dtype), (x, labels.numpy().astype(float)), Categorical(), cr.priors.Normal()
    )
    assert classes.y.tolist() == labels.tolist()
    real = cr.Problem(nn.Linear(3, 1).to(dtype), (x, counts.numpy() / 7), cr.likelihoods.Gaussian(), cr.priors.Normal())
    assert real.y.dtype == dtype


def test_a_fit_in_half_precision_with_exact_counts():
    x, counts = randn(40, 3).bfloat16(), torch.arange(40) % 4 + 300
    likelihood = Poisson(unit=None)
    problem = cr.Problem(nn.Linear(3, 1).bfloat16(), (x, counts), likelihood, cr.priors.Normal())
    predictive = cr.MAP(steps=50).fit(problem, seed=0).predict(x)
    assert bool(torch.isfinite(predictive.log_prob(counts)).all())
