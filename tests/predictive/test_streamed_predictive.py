"""predict(loader): the same numbers as predict(x), in the order of the data set, without the rows in memory."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import credibly as cr
from conftest import mlp, randn

X, Y = randn(30, 3), randn(30, 1, seed=1)
METHODS = {
    "map": cr.MAP(steps=5),
    "ensemble": cr.DeepEnsemble(members=3, steps=5),
    "bbb": cr.BayesByBackprop(steps=5),
    "dropout": cr.MCDropout(steps=5, insert="*", rate=0.1),
    "laplace": cr.Laplace(steps=5),
}


def problem():
    return cr.Problem(mlp(3, 4, 1), (X, Y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))


@pytest.fixture(scope="module", params=METHODS)
def posterior(request):
    return METHODS[request.param].fit(problem())


LOADER = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, drop_last=True)


def test_every_number_equals_that_of_rows_in_memory(posterior):
    read, held = posterior.predict(LOADER), posterior.predict(X)
    assert len(read) == 30
    close = {"rtol": 1e-5, "atol": 1e-6}
    for name in ("mean", "variance", "epistemic", "aleatoric"):
        torch.testing.assert_close(getattr(read, name), getattr(held, name), **close)
    torch.testing.assert_close(read.log_prob(Y), held.log_prob(Y), **close)
    for a, b in zip(read.interval(0.9), held.interval(0.9), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert torch.equal(read.targets, Y)
    assert cr.evaluate(read, read.targets)["rmse"] == pytest.approx(cr.evaluate(held, Y)["rmse"], rel=1e-5)
    assert read.sample(3).shape == held.sample(3).shape


def test_one_batch_is_in_memory_at_a_time():
    posterior = cr.MAP(steps=5).fit(problem())
    sizes = []
    outputs = type(posterior.predict(X).source).outputs

    def watched(self, x, *rest):
        sizes.append(len(x))
        return outputs(self, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(posterior.predict(X).source), "outputs", watched)
        assert posterior.predict(LOADER).mean.shape == (30, 1)
    assert max(sizes) == 8


def test_data_sets_streams_and_batches_without_targets_are_read():
    posterior = cr.MAP(steps=5).fit(problem())
    want = posterior.predict(X).mean

    class Flow(IterableDataset):
        def __iter__(self):
            return iter(X)

    for data in (TensorDataset(X), TensorDataset(X, Y), cr.data.Stream(LOADER), DataLoader(Flow(), batch_size=7)):
        torch.testing.assert_close(posterior.predict(data).mean, want)
    named = DataLoader([{"a": x, "label": y} for x, y in zip(X, Y, strict=True)], batch_size=9)
    torch.testing.assert_close(posterior.predict(named).mean, want)


def test_chosen_rows_are_read_into_memory():
    posterior = cr.MAP(steps=5).fit(problem())
    rows = torch.tensor([29, 3, 3, 17])
    part = posterior.predict(LOADER).subset(rows)
    assert torch.equal(part.x, X[rows])
    torch.testing.assert_close(part.mean, posterior.predict(X).mean[rows])


def test_targets_of_another_length_are_refused():
    read = cr.MAP(steps=5).fit(problem()).predict(LOADER)
    assert len(read.x) == 0
    with pytest.raises(cr.InputError, match=r"y must have shape \(30,"):
        read.log_prob(Y[:3])


def test_calibrated_posteriors_take_loaders():
    posterior = cr.DeepEnsemble(members=3, steps=5).fit(problem()).calibrate(randn(40, 3, seed=5), randn(40, 1, seed=6))
    for a, b in zip(posterior.predict(LOADER).interval(0.8), posterior.predict(X).interval(0.8), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_guaranteed_prediction_sets_need_rows_in_memory():
    made = cr.Problem(mlp(3, 4, 2), (X, (Y[:, 0] > 0).long()), cr.likelihoods.Categorical(), cr.priors.Normal(1.0))
    posterior = cr.MAP(steps=5).fit(made).calibrate(X, (Y[:, 0] > 0).long())
    with pytest.raises(cr.InputError, match="x must be in memory for prediction sets that carry a guarantee"):
        posterior.predict(LOADER)


def test_networks_with_a_frozen_body_read_loaders_and_streams():
    """Fitted on stored activations, and on a stream, which has none."""
    net = mlp(3, 16, 16, 1)
    made = cr.Problem(net, (X, Y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0), random="4.*")
    posterior = cr.MAP(steps=5).fit(made)
    torch.testing.assert_close(posterior.predict(LOADER).mean, posterior.predict(X).mean)
    assert torch.equal(posterior.predict(LOADER).targets, Y)
    likelihood, prior = cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0)
    streamed = cr.MAP(steps=5).fit(cr.Problem(net, cr.data.Stream(LOADER), likelihood, prior, random="4.*"))
    torch.testing.assert_close(streamed.predict(LOADER).mean, streamed.predict(X).mean)
