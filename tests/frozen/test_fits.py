"""Every method on a network with a frozen body: the same results as on the whole network, and as by hand."""

import copy
import pickle

import pytest
import torch
from frozen_networks import NETWORKS, X, stack
from torch import nn

import credibly as cr
from conftest import randn
from credibly.inference.sampling import run as sampling_run
from methods.test_methods import QUICK

Y = X.sum(1) + 0.1 * randn(30, seed=1)
SHORT = {"steps": 30, "every": 3}


def network():
    torch.manual_seed(0)
    return stack()


def problem(net=None, x=X, **kwargs):
    kwargs = {"random": "4.*"} | kwargs
    return cr.Problem(net or network(), (x, Y), cr.likelihoods.Gaussian(), cr.priors.Normal(), **kwargs)


def method(name, **kwargs):
    settings = {key: SHORT.get(key, value) for key, value in QUICK[name].items()}
    if "chains" in settings:
        # In C++ the head alone would round differently, and chains amplify that.
        settings["compile"] = False
    return cr.METHODS[name](**settings | ({"insert": "4"} if name == "dropout" else {}) | kwargs)


@pytest.fixture(scope="module", params=cr.METHODS)
def fits(request):
    whole = problem()
    whole._tried = True  # as if the network could not be cut
    return request.param, method(request.param).fit(problem(), seed=0), method(request.param).fit(whole, seed=0)


def test_results_are_those_of_the_whole_network(fits):
    _, mine, whole = fits
    assert mine.model.frozen is not None
    assert whole.model.frozen is None
    a, b = mine.predict(X), whole.predict(X)
    # The head alone may run in C++, which rounds differently; training amplifies that over 30 steps.
    assert torch.allclose(a.mean, b.mean, atol=1e-4)
    assert torch.allclose(a.variance, b.variance, rtol=1e-3, atol=1e-4)
    assert mine.record.fingerprint == whole.record.fingerprint
    assert "boundary" in mine.record.history["frozen_body"]
    assert mine.layout.signature() == whole.layout.signature()


def test_stored_posteriors_predict_the_same(fits, tmp_path):
    _, mine, _ = fits
    mine.save(tmp_path / "run")
    for net in (None, network()):
        loaded = cr.load(tmp_path / "run", net)
        assert loaded.model.frozen is not None
        assert torch.equal(loaded.predict(X).mean, mine.predict(X).mean)


@pytest.mark.parametrize("name", ["hmc", "sghmc"])
def test_draws_are_bit_for_bit_those_by_hand(name):
    whole, net = problem(), network()
    with torch.no_grad():
        by_hand = problem(nn.Sequential(net[4]), net[:4](X), random="*")
    settings = {"init": "network"}
    mine, hand = (method(name, **settings).fit(p, seed=0) for p in (whole, by_hand))
    assert torch.equal(mine.draws, hand.draws)
    assert torch.equal(mine.predict(X).mean, hand.predict(by_hand.x).mean)


@pytest.mark.parametrize("name", ["residual", "functional", "tied", "keywords"])
@pytest.mark.parametrize("key", ["laplace", "bbb", "hmc"])
def test_heads_of_other_forms(name, key):
    build, x, random, _ = NETWORKS[name]
    torch.manual_seed(0)
    net = build()
    first, second = problem(net, x, random=random), problem(copy.deepcopy(net), x, random=random)
    second._tried = True
    # Without its body the network is a stack, whose output layer could be integrated out.
    plain = {"warmup": 20, "draws": 2, "chains": 1, "init": "network", "collapse": False}
    settings = {"hmc": plain}.get(key, {})
    a, b = (method(key, **settings).fit(p, seed=0) for p in (first, second))
    assert a.model.frozen is not None
    assert torch.allclose(a.predict(x).mean, b.predict(x).mean, atol=2e-3)


def test_dropout_in_the_body_keeps_the_whole_network():
    net = nn.Sequential(*network()[:1], nn.Dropout(0.2), *network()[1:])
    posterior = cr.MCDropout(steps=5).fit(problem(net, random="5.*"), seed=0)
    assert posterior.model.frozen is None
    passes = posterior.predict(X, passes=20).functions()
    assert float(passes.std(0).max()) > 0.01


def test_runs_resume(tmp_path, monkeypatch):
    sampler = method("sghmc", draws=6)
    whole = sampler.fit(problem(), seed=0)

    def stopped(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sampling_run, "starts", stopped)
        with pytest.raises(cr.Interrupted):
            sampler.fit(problem(), seed=0, out=tmp_path / "run")
    # From the folder alone: network, data and random parameters are stored there.
    again = cr.resume(tmp_path / "run")
    assert again.model.frozen is not None
    assert torch.equal(again.draws, whole.draws)
    assert torch.equal(cr.resume(tmp_path / "run", problem()).draws, whole.draws)


def test_active_learning_keeps_its_rows():
    start = cr.Problem(network(), (X[:6], Y[:6]), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(), random="4.*")
    learner = cr.active.ActiveLearner(start, X[6:], "variance", method=cr.Laplace(steps=20), batch=2, initial=0, seed=0)
    rows = learner.ask()
    learner.tell(rows, Y[6:][rows])
    assert learner.problem.x.shape == (8, 4)
    assert learner.posterior.model.frozen is not None


@pytest.mark.parametrize("name", ["ensemble", "laplace", "dropout"])
def test_predictions_are_differentiable_through_the_body(name):
    first, second = problem(), problem()
    second._tried = True
    gradients = []
    for given in (first, second):
        x = X[:3].clone().requires_grad_()
        method(name).fit(given, seed=0).predict(x, grad=True).mean.sum().backward()
        gradients.append(x.grad)
    assert float(gradients[0].abs().max()) > 0.01
    assert torch.allclose(*gradients, atol=1e-4)


@pytest.mark.parametrize("name", ["last layer", "residual"])
def test_posteriors_can_be_pickled(name):
    build, x, random, _ = NETWORKS[name]
    posterior = cr.MAP(steps=3).fit(problem(build(), x, random=random), seed=0)
    again = pickle.loads(pickle.dumps(posterior))
    assert again.model.frozen is not None
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


class Scaled(nn.Module):
    """Two inputs of one shape: the frozen body takes one, the head the other."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, a, scale):
        return self.head(self.body(a)) * scale[:, :1]


@pytest.fixture
def scaled():
    torch.manual_seed(0)
    x = {"a": X, "scale": torch.rand(30, 4)}
    return problem(Scaled(), x, random="head.*"), x


@pytest.mark.parametrize("name", ["map", "laplace", "dropout"])
def test_inputs_by_name_may_come_in_any_order(name, scaled):
    given, x = scaled
    settings = {"insert": "head"} if name == "dropout" else {}
    posterior = cr.METHODS[name](steps=20, compile=False, **settings).fit(given, seed=0)
    assert posterior.model.frozen is not None
    turned = {"scale": x["scale"], "a": x["a"]}
    expected = posterior.predict(x).mean
    assert torch.equal(posterior.predict(turned).mean, expected)
    rows = [{"scale": x["scale"][i], "a": x["a"][i]} for i in range(30)]
    loader = torch.utils.data.DataLoader(rows, batch_size=30)
    assert torch.allclose(posterior.predict(loader).mean, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["map", "dropout"])
def test_inputs_with_other_names_or_without_names_are_refused(name, scaled):
    given, x = scaled
    settings = {"insert": "head"} if name == "dropout" else {}
    posterior = cr.METHODS[name](steps=2, compile=False, **settings).fit(given, seed=0)
    with pytest.raises(cr.InputError, match="x: has no 'scale'. Pass 'a', 'scale', as in the problem"):
        posterior.predict({"a": x["a"]})
    with pytest.raises(cr.InputError, match="x: has 'mask', which the problem does not have"):
        posterior.predict({**x, "mask": x["a"]})
    with pytest.raises(cr.InputError, match="x must be a dict of 2 tensors, as in the fit, got a tuple of 2"):
        posterior.predict((x["scale"], x["a"]))


def test_further_rows_are_joined_by_name(scaled):
    given, x = scaled
    given.reduced()
    joined = given.with_rows(({"scale": x["scale"], "a": x["a"]}, given.y))
    assert torch.equal(joined.x["a"], torch.cat([x["a"], x["a"]]))
    assert torch.equal(joined.x["scale"], torch.cat([x["scale"], x["scale"]]))
    for old, new in zip(given.features.values(), joined.features.values(), strict=True):
        assert torch.allclose(new[30:], old, atol=1e-6)
