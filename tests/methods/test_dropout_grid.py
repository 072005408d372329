"""What MC-Dropout chooses by held-out rows: rates and precisions of a grid, with folds, and when to stop."""

import itertools
import math

import pytest
import torch
from dropout_networks import X, Y, build, dropped_mlp, f64, objective_of, seeded
from torch import nn

import credibly as cr
from conftest import randn
from credibly.core.rng import stream
from credibly.likelihoods import Gaussian


def test_the_best_of_a_grid_by_held_out_density_is_refitted_on_all_rows():
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
    """Each pair, trained separately on the other rows, has the score in the table up to the masks."""
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


def test_rates_by_layer():
    problem = build(dropped_mlp())
    posterior = cr.MCDropout(rate={"0": 0.0, "*": 0.25}, steps=30).fit(problem, seed=0)
    assert posterior.rates == {"0": 0.0, "3": 0.25}
    alone = build(dropped_mlp(first=0.2, second=0.25))
    objective = objective_of(alone, rates=[[0.0, 0.25]])
    masks = objective.masks(objective.own[0], objective.uniforms(1, 500, stream(0, "m")))
    assert masks["0.mask"].unique().tolist() == [1.0]  # nothing is dropped there
    assert masks["3.mask"].unique().tolist() == [0.0, 1 / 0.75]
    one_site = nn.Sequential(*list(dropped_mlp())[1:])
    twin = cr.MCDropout(rate=0.25, steps=30).fit(build(one_site), seed=0)
    assert float(posterior.theta.sub(twin.theta).abs().max()) < 0.1  # the same problem with other uniform numbers


def test_rates_by_layer_in_a_list_saved_and_loaded(tmp_path):
    problem = build(dropped_mlp())
    choices = [0.1, {"0": 0.0, "3": 0.4}]
    posterior = cr.MCDropout(rate=choices, steps=30).fit(problem, seed=0, out=tmp_path / "run")
    assert [row["rate"] for row in posterior.record.history["grid"]] == choices
    loaded = cr.load(tmp_path / "run", dropped_mlp())
    assert loaded.rates == posterior.rates
    assert torch.equal(loaded.predict(X).mean, posterior.predict(X).mean)


def test_folds_score_every_row_by_a_fit_without_it():
    """The score of a fold is that of a fit to the rows of the other folds; the table has the mean."""
    problem = build(dropped_mlp(), likelihood=Gaussian())
    options = {"steps": 60, "batch_size": 16, "lr": 0.02}
    table = cr.MCDropout(rate=(0.02, 0.5), tau=4.0, folds=4, **options).fit(problem, seed=3).record.history["grid"]
    order = torch.randperm(40, generator=stream(3, "validation split"))
    for row in table:
        means, stds = [], []
        for fold in range(4):
            held = order[10 * fold : 10 * fold + 10].sort().values
            rest = problem.subset(torch.tensor([i for i in range(40) if i not in set(held.tolist())]))
            alone = cr.MCDropout(rate=row["rate"], tau=4.0, **options).fit(rest, seed=3)
            scores = [float(alone.predict(X[held], passes=200, seed=s).log_prob(Y[held]).mean()) for s in range(20)]
            means.append(sum(scores) / 20)
            stds.append(float(torch.tensor(scores).std()))
        error = math.hypot(*stds) / 4
        assert row["held_out_log_density"] == pytest.approx(sum(means) / 4, abs=4.5 * error)


@pytest.mark.parametrize("folds", [1, 5])
def test_tau_by_held_out_rows(folds):
    """Linear data with known noise, and hardly any dropout: tau is the precision of the noise."""
    x = randn(400, 1, dtype=f64)
    y = x[:, 0] + 0.5 * randn(400, seed=5, dtype=f64)
    net = seeded(lambda: nn.Sequential(nn.Dropout(0.01), nn.Linear(1, 1)).double())
    problem = build(net, (x, y), Gaussian(), cr.priors.Normal(10.0))
    posterior = cr.MCDropout(tau="held-out", folds=folds, steps=500, lr=0.03).fit(problem, seed=0)
    tau = posterior.record.history["tau"]
    held = 400 if folds == 5 else 80
    # Four standard errors of the log of a standard deviation; the rest allows for half a step of the scales tried.
    sampling = 4 / (2 * held) ** 0.5
    assert abs(math.log(tau**-0.5 / 0.5)) < sampling + 0.08
    assert float(posterior.theta[-1]) == pytest.approx(-0.5 * math.log(tau))


def test_tau_by_held_out_rows_has_one_value_per_target():
    x = randn(400, 1, dtype=f64)
    y = torch.stack([x[:, 0] + 0.1 * randn(400, seed=5, dtype=f64), 30 * randn(400, seed=6, dtype=f64)], 1)
    net = seeded(lambda: nn.Sequential(nn.Dropout(0.01), nn.Linear(1, 2)).double())
    problem = build(net, (x, y), Gaussian(per_target=True), cr.priors.Normal(10.0))
    posterior = cr.MCDropout(tau="held-out", steps=500, lr=0.03).fit(problem, seed=0)
    tau = posterior.record.history["tau"]
    scales = posterior.theta[-2:].exp().tolist()
    assert scales == pytest.approx([t**-0.5 for t in tau])
    # Four standard errors of the log of a standard deviation from 80 rows, and what the weights miss.
    assert scales == pytest.approx([0.1, 30.0], rel=0.4)


def test_tau_by_held_out_rows_is_lower_where_the_network_overfits():
    noise = randn(40, seed=3, dtype=f64)
    problem = build(dropped_mlp(hidden=60, first=0.01, second=0.01), (X, noise), Gaussian(), cr.priors.Normal(10.0))
    options = {"steps": 1200, "lr": 0.02}
    learned = cr.MCDropout(**options).fit(problem, seed=0)
    chosen = cr.MCDropout(tau="held-out", folds=2, **options).fit(problem, seed=0)
    assert float(learned.theta[-1]) < -0.7  # half of the noise or less is left
    assert float(chosen.theta[-1]) > -0.3


def test_early_stopping_keeps_the_best_on_held_out_rows():
    """Pure noise and a network that can overfit it: the best parameters by held-out density are kept."""
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


def test_the_score_is_the_log_of_a_mean_over_passes():
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
