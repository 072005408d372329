"""Weights of rows: an integer weight equals repeated rows, zero a row left out, in every method and criterion."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import credibly as cr
from credibly.backends.cpp.library import library
from credibly.core.rows import sum_rows
from credibly.diagnostics import pareto
from credibly.inference.sampling import run
from credibly.inference.target import ProblemTarget
from credibly.inference.training.dropout_objective import DropoutObjective, Dropped
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.reparameterisation import choose_estimator
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from credibly.networks.zoo import mlp
from credibly.posterior.laplace import LaplacePosterior
from credibly.problem import Problem

DOUBLE = torch.float64
COUNTS = torch.tensor([3, 0, 1, 2, 1, 4, 0, 1])
REPEATED = torch.arange(8).repeat_interleave(COUNTS)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


X, Y = noise(8, 2), noise(8, 1, seed=1)
LABELS = torch.tensor([0, 1, 2, 1, 0, 2, 2, 1])
TASKS = {
    "gaussian": (Gaussian(), Y, 1),
    "fixed": (Gaussian(0.5), Y, 1),
    "classes": (Categorical(), LABELS, 3),
    "binary": (Bernoulli(), (LABELS > 0).to(DOUBLE), 1),
}


def pair(task="gaussian", net=None, rows=X, **options):
    """Return the problem of weighted rows and that of repeated ones."""
    likelihood, y, width = TASKS[task]
    torch.manual_seed(0)
    net = (mlp(2, 4, width) if net is None else net).to(DOUBLE)
    options = {"likelihood": likelihood, "prior": cr.priors.Normal(0.8), **options}
    weighted = Problem(net, (rows, y), sample_weight=COUNTS, **options)
    return weighted, Problem(net, (rows[REPEATED], y[REPEATED]), **options)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=tolerance)


# -- the density ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("task", TASKS)
def test_integer_weights_equal_repeated_rows_in_density_and_gradient(task, micro_batch):
    weighted, repeated = pair(task, temperature=cr.Tempering(0.5, 2.0), micro_batch=micro_batch)
    assert (weighted.n, weighted.total_weight, repeated.total_weight) == (6, 12.0, 12.0)
    theta = noise(3, weighted.dim, seed=2)
    close(weighted.log_density(theta), repeated.log_density(theta))
    for mine, theirs in zip(weighted.log_density_and_grad(theta), repeated.log_density_and_grad(theta)):
        close(mine, theirs)
    for mine, theirs in zip(*(ProblemTarget(p).likelihood_and_grad(theta) for p in (weighted, repeated))):
        close(mine, theirs)


@pytest.mark.parametrize("own", [False, True])
def test_minibatch_gradients_are_unbiased(own):
    weighted, _ = pair()
    theta = noise(2, weighted.dim, seed=2)
    batches = [torch.tensor(rows) for rows in itertools.combinations(range(weighted.n), 2)]
    if own:
        batches = [torch.stack([rows, rows.flip(0)]) for rows in batches]
    found = [weighted.minibatch(theta, rows) for rows in batches]
    whole = weighted.log_density_and_grad(theta)
    close(torch.stack([e.gradient for e in found]).mean(0), whole.gradient)
    close(torch.stack([e.log_likelihood for e in found]).mean(0), whole.log_likelihood)
    target = ProblemTarget(weighted)
    by_target = [target.minibatch_and_grad(theta, rows, weighted.n / 2) for rows in batches]
    close(torch.stack([g for _, g in by_target]).mean(0), whole.gradient)


def test_zero_weights_leave_rows_out_and_ones_are_no_weights():
    options = {"likelihood": Gaussian(), "prior": cr.priors.Normal()}
    net = mlp(2, 4, 1).to(DOUBLE)
    kept = torch.tensor([0, 2, 3, 7])
    mask = torch.zeros(8).index_fill_(0, kept, 1.0)
    left = Problem(net, (X, Y), sample_weight=mask, **options)
    assert left.sample_weight is None
    assert left.fingerprint() == Problem(net, (X[kept], Y[kept]), **options).fingerprint()
    ones, none = (Problem(net, (X, Y), sample_weight=w, **options) for w in ([1] * 8, None))
    assert ones.fingerprint() == none.fingerprint()
    twos = Problem(net, (X, Y), sample_weight=[2] * 8, **options)
    assert twos.fingerprint() != none.fingerprint()
    assert "8 rows of total weight 16" in repr(twos)


def test_rows_keep_their_weights_in_parts_and_sums_of_problems():
    weighted, _ = pair()
    theta = noise(1, weighted.dim, seed=2)
    first, second = weighted.subset(torch.arange(2)), weighted.subset(torch.arange(2, 6))
    assert first.total_weight == 4.0
    close(first.with_rows(second.rows).log_density(theta), weighted.log_density(theta))
    plain = first.with_rows((second.x, second.y))
    assert plain.sample_weight.tolist() == [3.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "weights, message",
    [
        ([1.0] * 7, r"sample_weight must have shape \(8,\), one weight per row, got \(7,\)"),
        (torch.ones(8, 1), r"sample_weight must have shape"),
        ([1.0] * 7 + [math.nan], "sample_weight: has 1 values that are NaN or infinite"),
        ([1.0] * 7 + [-1.0], "sample_weight must be non-negative, got -1"),
        ([0.0] * 8, "sample_weight must be positive for at least one row"),
        (["a"] * 8, "sample_weight: holds values of dtype"),
    ],
)
def test_weights_are_checked(weights, message):
    with pytest.raises(cr.InputError, match=message):
        Problem(mlp(2, 4, 1).to(DOUBLE), (X, Y), Gaussian(), cr.priors.Normal(), sample_weight=weights)


def test_the_rows_of_a_pixel_task_are_weighted_as_a_whole():
    values, weight = noise(3, 4, 2, 5), torch.tensor([1.0, 2.0, 0.5, 0.0], dtype=DOUBLE)
    close(sum_rows(values, weight), torch.einsum("cnij,n->c", values, weight))
    close(sum_rows(values), values.sum((1, 2, 3)))


# -- the methods ------------------------------------------------------------------------------------------------------
FULL = {"steps": 60, "lr": 0.05, "batch_size": None, "compile": False}
SHORT = {"chains": 2, "warmup": 20, "draws": 10, "thin": 20, "batch_size": None, "init": "network", "compile": False}
METHODS = {
    "mle": cr.MLE(**FULL),
    "map": cr.MAP(**FULL),
    "ensemble": cr.DeepEnsemble(members=2, **FULL),
    "bbb": cr.BayesByBackprop(estimator="weights", **FULL),
    "low-rank": cr.BayesByBackprop(family="low-rank", rank=2, estimator="weights", **FULL),
    "ivon": cr.IVON(hess_init=1.0, samples=2, members=2, **FULL),
    "laplace kron": cr.Laplace(structure="kron", **FULL),
    "laplace diag": cr.Laplace(structure="diag", **FULL),
    "laplace full": cr.Laplace(structure="full", **FULL),
    "laplace network": cr.Laplace(structure="full", start="network"),
    "hmc": cr.HMC(chains=2, warmup=5, draws=10, step_size=0.05, max_steps=8, init="network", compile=False),
    "sgld": cr.SGLD(step_size=1e-4, **SHORT),
    "sghmc": cr.SGHMC(step_size=1e-4, **SHORT),
}


@pytest.mark.parametrize("name", METHODS)
def test_integer_weights_equal_repeated_rows_in_every_method(name):
    weighted, repeated = pair("fixed" if name == "laplace network" else "gaussian")
    mine, theirs = (METHODS[name].fit(p, seed=0, progress=False) for p in (weighted, repeated))
    if isinstance(mine, LaplacePosterior):
        # Draws use eigenvectors, whose signs are arbitrary.
        close(mine.covariance(), theirs.covariance(), 1e-7)
        close(mine.loc, theirs.loc, 1e-7)
    else:
        for key, tensor in mine.tensors().items():
            close(tensor, theirs.tensors()[key], 1e-7)
        close(mine.predict(X).mean, theirs.predict(X).mean, 1e-7)
    for key in ("log_evidence", "elbo"):
        if key in mine.record.history:
            close(mine.record.history[key], theirs.record.history[key], 1e-7)


def test_tuning_by_evidence_counts_rows_by_their_weights():
    method = cr.Laplace(structure="full", tune="evidence", tune_noise=True, **FULL)
    mine, theirs = (method.fit(p, seed=0, progress=False).record.history["tuned"][0] for p in pair("fixed"))
    assert mine == pytest.approx(theirs, rel=1e-6)


def test_kronecker_factors_of_a_convolution_are_weighted():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1))
    mine, theirs = (
        cr.Laplace(structure="kron", start="network").fit(p, progress=False)
        for p in pair("fixed", net=net, rows=noise(8, 1, 3, 3))
    )
    close(mine.covariance(), theirs.covariance(), 1e-8)
    close(mine.log_evidence, theirs.log_evidence, 1e-8)


def test_the_linear_model_has_the_closed_form_of_weighted_least_squares():
    weight = torch.tensor([0.3, 2.0, 0.7, 1.5, 1.0, 4.2, 0.1, 2.2], dtype=DOUBLE)
    problem = Problem(
        nn.Linear(2, 1, bias=False).to(DOUBLE), (X, Y), Gaussian(0.5), cr.priors.Normal(2.0), sample_weight=weight
    )
    precision = X.T @ (weight.unsqueeze(1) * X) / 0.25 + torch.eye(2, dtype=DOUBLE) / 4
    mean = torch.linalg.solve(precision, X.T @ (weight.unsqueeze(1) * Y) / 0.25).squeeze(1)
    laplace = cr.Laplace(structure="full", steps=800, lr=0.05, compile=False).fit(problem, progress=False)
    close(laplace.loc, mean, 1e-4)
    close(laplace.covariance(), torch.linalg.inv(precision), 1e-8)
    # Anchored members are draws from the posterior: their targets are perturbed by sigma / sqrt(v).
    ensemble = cr.DeepEnsemble(members=400, anchored=True, steps=400, lr=0.05, compile=False).fit(
        problem, progress=False
    )
    members = ensemble.draws[:, 0]
    variance = torch.linalg.inv(precision).diagonal()
    assert ((members.mean(0) - mean).abs() < 4 * (variance / 400).sqrt()).all()
    assert ((members.var(0) / variance - 1).abs() < 4 * math.sqrt(2 / 400)).all()


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_noise_on_layers_is_weighted_like_noise_on_weights(estimator):
    weighted, _ = pair("fixed")
    layers = choose_estimator(estimator, weighted, weighted.n, mean_field=True)
    mu, sigma = noise(weighted.dim, seed=3), torch.zeros(weighted.dim, dtype=DOUBLE)
    drawn = layers.draw(1, torch.Generator().manual_seed(0))
    layer_noise = tuple(torch.zeros(1, 1, *shape, dtype=DOUBLE) for _, shape, _ in layers.shapes)
    assert len(drawn) == len(layer_noise)
    value = layers.log_likelihood(
        weighted, mu, sigma, (torch.zeros(1, 1, weighted.dim, dtype=DOUBLE), *layer_noise), *weighted.rows
    )
    if estimator == "flipout":
        close(value, weighted.parts(mu.unsqueeze(0), *weighted.rows[:2], weight=weighted.sample_weight)[0][0])
    unweighted = weighted.parts(mu.unsqueeze(0), *weighted.rows[:2])[0][0]
    assert abs(float(value - unweighted)) > 0.1


def test_objectives_of_minibatches_average_to_that_of_all_rows():
    weighted, repeated = pair()
    theta = noise(1, weighted.dim, seed=2)
    batches = [torch.tensor(rows) for rows in itertools.combinations(range(weighted.n), 2)]
    objective, exact = (NegativeLogDensity(p, p.n) for p in (weighted, repeated))

    def evaluate(own, problem, rows):
        return own.evaluate(theta, (), problem.x, problem.y, rows, (), torch.zeros(0))

    found = [evaluate(objective, weighted, rows) for rows in batches]
    for column, whole in zip(zip(*found), evaluate(exact, repeated, None)):
        close(torch.stack(column).mean(0), whole)


def test_dropout_decays_by_the_sum_of_the_weights():
    weighted, repeated = pair("fixed", net=nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1)))
    theta, controls = noise(1, weighted.dim, seed=2), torch.zeros(0)
    values = []
    for problem in (weighted, repeated):
        network = Dropped(problem, None, None)
        rates = torch.tensor([network.rate_row(None)], dtype=DOUBLE)
        objective = DropoutObjective(
            problem, network, problem.n, rates, batch=problem.n, seed=0, concrete=False, fixed_scale=False
        )
        shared = tuple(torch.full((1, problem.n, *u.shape[2:]), 0.5, dtype=DOUBLE) for u in objective.noise(0))
        values.append(objective.evaluate(theta, (rates,), problem.x, problem.y, None, shared, controls))
        score = objective.score(theta, problem)
        values[-1] += (score,)
    for mine, theirs in zip(*values):
        close(mine, theirs)


@pytest.mark.parametrize(
    "method",
    [
        cr.MCDropout(insert="*", rate=[0.1, 0.2], **FULL | {"batch_size": 2}),
        cr.SWAG(iterates=4, rank=2, every=2, **FULL | {"batch_size": 2}),
        cr.DeepEnsemble(members=2, bootstrap=True, **FULL),
        cr.DeepEnsemble(members=3, validation=0.3, **FULL | {"batch_size": 2}),
        cr.BayesByBackprop(validation=0.3, **FULL | {"batch_size": 2}),
        cr.SGHMC(chains=2, warmup=10, draws=5, batch_size=2, init="network"),
    ],
    ids=["dropout", "swag", "bootstrap", "rotated", "bbb", "sghmc"],
)
def test_methods_with_minibatches_and_held_out_rows_take_weights(method):
    weighted, _ = pair()
    assert bool(torch.isfinite(method.fit(weighted, seed=0, progress=False).predict(X).mean).all())


# -- storage and criteria ---------------------------------------------------------------------------------------------
def test_weights_are_stored_with_a_run_and_part_of_its_identity(tmp_path, monkeypatch):
    weighted, repeated = pair()
    method = cr.HMC(chains=2, warmup=2, draws=4, step_size=0.05, max_steps=4, init="network", compile=False)
    whole = method.fit(weighted, seed=0, progress=False)
    assert whole.record.fingerprint == weighted.fingerprint() != repeated.fingerprint()

    def stop(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "starts", stop)
        with pytest.raises(KeyboardInterrupt):
            method.fit(weighted, seed=0, out=tmp_path / "run", progress=False)
    other = Problem(weighted.layout.module, (X, Y), Gaussian(), cr.priors.Normal(0.8), sample_weight=COUNTS * 2)
    with pytest.raises(cr.StoreError, match="another problem: the data differ"):
        cr.resume(tmp_path / "run", other, progress=False)
    assert torch.equal(cr.resume(tmp_path / "run", progress=False).draws, whole.draws)


def test_loo_and_waic_weigh_rows():
    """A row of weight v is p^v: its leave-one-out density is exact for the conjugate model without that row."""
    n, weight = 8, torch.tensor([0.5, 2.0, 1.0, 1.5, 1.0, 3.0, 0.2, 1.0], dtype=DOUBLE)
    y = noise(n, seed=5)
    draws = 200_000

    def moments(v):
        precision = v.sum() + 1
        return (v * y).sum() / precision, 1 / precision

    mean, variance = moments(weight)
    w = mean + variance.sqrt() * noise(draws, 1, seed=6)
    rows = -0.5 * (y - w) ** 2 - 0.5 * math.log(2 * math.pi)
    exact = []
    for i in range(n):
        m, s = moments(weight * (torch.arange(n) != i))
        exact.append(weight[i] * (-0.5 * (y[i] - m) ** 2 / (1 + s) - 0.5 * torch.log(2 * math.pi * (1 + s))))
    close(pareto.loo(rows, weight=weight).elpd, torch.stack(exact), 0.03)
    # Equal to integers of the same rows, each left out as a whole, in first order.
    found, plain = pareto.waic(rows, weight=weight), pareto.waic(rows)
    close(found.variance, weight**2 * plain.variance)
    close(found.elpd, weight * (plain.elpd + plain.variance) - weight**2 * plain.variance)


def test_comparisons_take_the_weights_of_the_problem():
    weighted, _ = pair("fixed")
    method = cr.HMC(chains=2, warmup=5, draws=50, step_size=0.1, max_steps=8, init="network", compile=False)
    posterior = method.fit(weighted, seed=0, progress=False)
    found = cr.compare_models({"a": (posterior, weighted)}, by="loo")
    rows = torch.cat(list(posterior.predict(weighted.x).log_likelihoods(weighted.y)), 1)
    exact = pareto.waic(rows, weight=weighted.sample_weight)
    close(found["a"].figures["waic"].pointwise, exact.elpd)
    assert found["a"].figures["loo"].parameters > 0
    by_data = cr.compare_models({"a": posterior}, data=weighted, by="loo")
    close(by_data["a"].figures["waic"].value, found["a"].figures["waic"].value)
    other = Problem(mlp(2, 4, 1).to(DOUBLE), weighted.rows[:2], Gaussian(0.5), cr.priors.Normal())
    with pytest.raises(cr.InputError, match="fitted with different sample_weight"):
        cr.compare_models({"a": (posterior, weighted), "b": (method.fit(other, progress=False), other)})
    with pytest.raises(cr.InputError, match="If they had weights"):
        cr.compare_models({"a": posterior}, data=weighted.rows[:2])


# -- the C++ backend --------------------------------------------------------------------------------------------------
@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("task", [*TASKS, "heteroscedastic", "two targets"])
def test_the_cpp_backend_weighs_rows_as_torch_does(task):
    extra = {
        "heteroscedastic": (HeteroscedasticGaussian(), Y, 2),
        "two targets": (Gaussian(per_target=True), noise(8, 2, seed=4), 2),
    }
    likelihood, y, width = {**TASKS, **extra}[task]
    weights = torch.tensor([0.3, 2.0, 0.7, 0.0, 1.0, 4.2, 0.1, 2.2], dtype=DOUBLE)
    torch.manual_seed(0)
    problem = Problem(
        mlp(2, 4, width).to(DOUBLE), (X, y), likelihood, cr.priors.Normal(0.8), sample_weight=weights, temperature=0.7
    )
    theta = noise(3, problem.dim, seed=2)
    fused, plain = ProblemTarget(problem), ProblemTarget(problem)
    assert fused.select_backend("auto").name == "cpp"
    for mine, theirs in zip(fused.likelihood_and_grad(theta), plain.likelihood_and_grad(theta)):
        close(mine, theirs, 1e-9)
    settings = {"steps": 20, "lr": 0.05, "batch_size": 3}
    for method in (cr.MAP(**settings), cr.MCDropout(insert="2", rate=0.2, **settings)):
        fits = (replace(method, compile=c).fit(problem, seed=0, progress=False) for c in ("auto", False))
        for mine, theirs in zip(*(fit.tensors().values() for fit in fits)):
            close(mine, theirs, 1e-8)
    sampler = cr.SGLD(chains=2, warmup=5, draws=5, batch_size=3, step_size=1e-4, init="network")
    mine, theirs = (replace(sampler, compile=c).fit(problem, seed=0, progress=False) for c in ("auto", False))
    close(mine.draws, theirs.draws, 1e-9)
