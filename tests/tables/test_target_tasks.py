"""Counts, ordered classes, proportions, censored times, transforms and several targets in a table, end to end."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from scipy import stats

import credibly as cr
from credibly.tables import Config, TableRun, fit_table, prepare
from credibly.tables.columns.screening import screen
from credibly.tables.files.reading import read_table
from credibly.tables.preparation import Preparation
from credibly.tables.summarise import baseline, summarise, summarise_targets
from credibly.tables.targets.checks import inspect_target, target_names
from credibly.tables.targets.metrics import target_metrics
from credibly.tables.targets.scale import TargetScale

ROWS = 120
RNG = np.random.default_rng(0)
X = RNG.normal(size=ROWS)
NOISE = RNG.normal(size=ROWS)
TABLE = pa.table(
    {
        "x": X,
        "visits": RNG.poisson(np.exp(1.5 + 0.8 * X)).astype(float),
        "level": np.array(["low", "mid", "high"])[np.digitize(X + 0.5 * NOISE, [-0.6, 0.6])],
        "share": 1 / (1 + np.exp(-X - 0.5 * NOISE)),
        "time": np.exp(2 + 0.5 * X + 0.4 * NOISE),
        "over": RNG.random(ROWS) < 0.6,
        "price": np.exp(8 + X + 0.3 * NOISE),
        "rent, cold": 5 * X + NOISE,
    }
)
SETTINGS = {"steps": 30, "noise_from": "training"}
TASKS = {
    "counts": {"target": "visits", "task": "counts"},
    "ordinal": {"target": "level", "order": ("low", "mid", "high")},
    "proportion": {"target": "share", "task": "proportion"},
    "survival": {"target": "time", "event": "over"},
    "log": {"target": "price", "transform": "log"},
    "several": {"target": "price,rent", "transform": "none"},
}


def table_file(tmp_path):
    path = tmp_path / "table.parquet"
    names = {"rent, cold": "rent"}
    pyarrow.parquet.write_table(TABLE.rename_columns([names.get(n, n) for n in TABLE.column_names]), path)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    path = table_file(folder)
    made = {}
    others = {"visits", "level", "share", "time", "over", "price", "rent"}
    for name, options in TASKS.items():
        used = {*options["target"].split(","), options.get("event")}
        drop = tuple(sorted(others - used))
        config = Config(str(path), drop=drop, method="map", hidden=(4,), settings=SETTINGS, **options)
        made[name] = fit_table(prepare(config), folder / name, progress=False)
    return made


@pytest.mark.parametrize("name", TASKS)
def test_fit_summary_and_predictions(name, runs, tmp_path):
    run = runs[name]
    loaded = TableRun.load(run.path)
    assert loaded.model.preparation == run.model.preparation
    assert all(math.isfinite(value) for value in run.figures.values())
    from credibly.cli.fit import write_results

    facts, page = write_results(run)
    assert page.read_text().count("<h2") >= 6
    results = json.loads((run.path / "results.json").read_text())
    assert results["task"] == {"log": "regression", "several": "regression"}.get(name, name)
    assert facts.kind == run.model.preparation.task
    assert facts.baseline["log_density"] < 5
    assert (run.path / "report_2.html").exists() == (name == "several")
    run.model.predict_file(run.config.table, tmp_path / "p.parquet")
    found = read_table(tmp_path / "p.parquet").to_pydict()
    expected = {
        "counts": ("mean", "std", "lower_90", "upper_90"),
        "ordinal": ("prediction", "p_low", "p_mid", "p_high", "entropy_total"),
        "proportion": ("mean", "lower_90", "upper_90"),
        "survival": ("median", "lower_90", "upper_90"),
        "log": ("mean", "std", "lower_90", "upper_90"),
        "several": ("mean_price", "std_price", "lower_90_price", "mean_rent", "upper_90_rent", "ood"),
    }
    assert set(expected[name]) <= set(found)
    if name in ("counts", "proportion", "survival", "log"):
        assert min(found["lower_90"]) >= 0
    if name == "proportion":
        assert max(found["upper_90"]) <= 1
    if name == "survival":
        ordered = zip(found["lower_90"], found["median"], found["upper_90"])
        assert all(low < middle < high for low, middle, high in ordered)


def test_log_densities_are_in_the_units_of_the_target(runs):
    """The log density of a fit to log(price) is that of a lognormal mixture."""
    model = runs["log"].model
    known = model.preparation
    inputs = known.transform(TABLE)[0]
    y = known.target_values(TABLE)
    predictive = model.predict(inputs)
    inner = model.posterior.predict(torch.from_numpy(inputs))
    z = torch.from_numpy(known.standardise(y)).float()
    expected = inner.log_prob(z).double().numpy() + known.scale.log_jacobian(y)
    assert predictive.log_prob(torch.from_numpy(y)).numpy() == pytest.approx(expected, abs=1e-4)
    assert known.scale.log_jacobian(y) == pytest.approx(-np.log(y) - math.log(known.y_std))
    assert known.standardise(y) == pytest.approx((np.log(y) - known.y_mean) / known.y_std)


def test_constant_predictions(runs):
    """Without inputs: a lognormal, a negative binomial and a Weibull distribution fitted to the training targets."""
    run = runs["log"]
    y = run.model.preparation.target_values(run.rows()[0])
    known = run.model.preparation
    lognormal = stats.lognorm(known.y_std, scale=math.exp(known.y_mean))
    found = baseline(run.model, y, run.sample())
    assert found["log_density"] == pytest.approx(lognormal.logpdf(y).mean())
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((y - lognormal.mean()) ** 2)))
    run = runs["survival"]
    known = run.model.preparation
    training = known.target_values(run.sample())
    y = known.target_values(run.rows()[0])
    found = baseline(run.model, y, run.sample())
    data = stats.CensoredData.right_censored(np.abs(training), training < 0)
    shape, _, scale = stats.weibull_min.fit(data, floc=0)
    d = stats.weibull_min(shape, scale=scale)
    expected = np.where(y > 0, d.logpdf(np.abs(y)), d.logsf(np.abs(y))).mean()
    assert found["log_density"] == pytest.approx(expected, abs=1e-3)
    assert found["concordance"] == 0.5


def test_several_targets_are_summarised_one_by_one(runs):
    run = runs["several"]
    rows = run.rows()[0]
    y = run.model.preparation.target_values(rows)
    assert y.shape == (len(rows), 2)
    predictive = run.predict_rows(run.model.inputs(rows)[0])
    parts = summarise_targets(run)
    assert [part.target for part in parts] == ["price", "rent"]
    for k, part in enumerate(parts):
        torch.testing.assert_close(part.predictive.mean, predictive.mean[:, k])
        torch.testing.assert_close(part.predictive.std, predictive.std[:, k])
        torch.testing.assert_close(part.predictive.quantile(0.9), predictive.quantile(0.9)[:, k])
        error = predictive.mean[:, k].numpy() - y[:, k]
        assert part.figures["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)))
    joint = sum(part.predictive.log_prob(torch.from_numpy(part.y)) for part in parts)
    # One draw: the targets are independent given the weights.
    assert run.figures["log_density"] == pytest.approx(float(joint.mean()))


def test_each_of_several_targets_is_screened():
    """A copy of the second target and an outlier in it are found, as they are for a single target."""
    rent = np.where(np.arange(ROWS) == 7, 1e6, TABLE["rent, cold"].to_numpy())
    table = pa.table({"x": X, "twice": 2 * rent, "price": TABLE["price"], "rent": rent})
    rows = np.arange(ROWS)
    found = screen(table, Preparation.fit(table, "price,rent"), [(rows[:100], rows[100:])])
    assert found[0].startswith("twice has a correlation of 1.000000 with the target rent; pass --drop twice")
    assert [line.split(",")[0] for line in found[1:]] == ["twice is 2e+06 in row 8", "rent is 1e+06 in row 8"]


def test_survival_targets_keep_their_sign(runs):
    known = runs["survival"].model.preparation
    y = known.target_values(TABLE)
    assert (y > 0).tolist() == TABLE["over"].to_pylist()
    assert np.abs(y) == pytest.approx(TABLE["time"].to_numpy())
    assert "over" not in known.names
    assert set(known.target_columns) == {"time", "over"}


def test_text_events_and_missing_events():
    table = pa.table({"x": X, "t": np.exp(X), "died": ["Yes", "no", None, "TRUE"] * 30})
    known = Preparation.fit(table, "t", event="died")
    assert known.task == "survival"
    assert len(known.usable_rows(table)) == 90
    assert (known.target_values(table.take(known.usable_rows(table))) > 0).tolist()[:3] == [True, False, True]


@pytest.mark.parametrize(
    "values, task, words",
    [
        (np.arange(100.0) % 3, "classification", "ordinal if they are ordered"),
        (np.floor(np.random.default_rng(0).exponential(6, 200)), "counts", "pass --task regression"),
        (np.arange(1950.0, 2050.0), "regression", "100 distinct"),
        (np.floor(np.random.default_rng(0).exponential(60_000, 200)), "regression", "numeric"),
        (np.linspace(0, 1, 50), "regression", "--task proportion"),
        (np.linspace(0, 2, 50), "regression", "50 distinct values"),
    ],
)
def test_the_task_is_inferred(values, task, words):
    found = inspect_target("y", pa.array(values))
    assert found.task == task
    assert words in found.reason


def test_columns_with_commas_are_single_targets():
    assert target_names("rent, cold", TABLE.column_names) == ("rent, cold",)
    assert target_names("price, time", TABLE.column_names) == ("price", "time")
    with pytest.raises(cr.InputError, match="no column 'prise'.*Did you mean 'price'"):
        target_names("prise,time", TABLE.column_names)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target": "time", "task": "survival"}, "--event: survival needs to know which events were observed"),
        ({"target": "time", "event": "x"}, "--event: 'x' must hold 1 for an event and 0 for none"),
        ({"target": "time", "event": "x"}, "Write 1 where the event of interest was observed, and 0 in all other rows"),
        ({"target": "time", "event": "level"}, "'level' must hold 1 or 0, true or false, yes or no"),
        ({"target": "time", "event": "time"}, "--event: 'time' is the target"),
        ({"target": "time", "event": "ever"}, "--event: no column 'ever'.*Did you mean 'over'"),
        ({"target": "time", "event": "over", "task": "counts"}, "--event: is for --task survival, got --task counts"),
        ({"target": "rent, cold", "event": "over"}, "times are positive, but 'rent, cold' holds"),
        ({"target": "time", "event": "over", "drop": "over"}, "--drop: 'over' is the event column"),
        ({"target": "level", "task": "ordinal"}, "--order: ordered classes of text need an order"),
        ({"target": "level", "order": ("low", "high")}, "--order: 'mid' of 'level' is not in it"),
        ({"target": "level", "order": ("low", "mid", "mid")}, "must name every level once"),
        ({"target": "level", "task": "counts"}, "counts needs numbers, but 'level' holds text"),
        ({"target": "price", "task": "counts"}, "counts are non-negative integers, but 'price' holds"),
        ({"target": "price", "task": "proportion"}, "proportions are between 0 and 1.*Divide percentages by 100"),
        ({"target": "rent, cold", "transform": "log"}, "--transform: \"log\" needs positive targets.*'rent, cold'"),
        ({"target": "visits", "task": "counts", "transform": "log"}, "is for --task regression, the task is counts"),
        ({"target": "price,level"}, "regression needs numbers, but 'level' holds text"),
        ({"target": "price,time", "task": "counts"}, "counts has one target, got 2"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(cr.InputError, match=message):
        Preparation.fit(TABLE, **options)


def test_events_coded_as_in_r():
    table = pa.table({"x": X, "t": np.exp(X), "e": 1 + np.arange(ROWS) % 2})
    with pytest.raises(cr.InputError, match="got 2. If 1 is censored and 2 an event, as in R, subtract 1"):
        Preparation.fit(table, "t", event="e")


def test_infinite_targets_are_counted():
    y = X.copy()
    y[[3, 9]] = np.inf, -np.inf
    with pytest.raises(cr.InputError, match="--target: 'y' is infinite in 2 of 120 rows"):
        Preparation.fit(pa.table({"x": X, "y": y}), "y")
    known = Preparation.fit(pa.table({"x": X, "y": X + 1}), "y")
    with pytest.raises(cr.InputError, match="'y' is infinite in 1 row. Remove those rows"):
        known.target_values(pa.table({"y": [1.0, np.inf]}))


def test_no_event_at_all():
    table = pa.table({"x": X, "t": np.exp(X), "e": np.zeros(ROWS)})
    with pytest.raises(cr.InputError, match="'e' marks no event in 120 rows"):
        Preparation.fit(table, "t", event="e")


def test_targets_outside_the_task_at_evaluation():
    known = Preparation.fit(TABLE, "visits", task="counts", drop=("level",))
    with pytest.raises(cr.InputError, match="counts are non-negative integers, but 'visits' holds -1"):
        known.target_values(pa.table({"visits": [1.0, -1.0]}))


@pytest.mark.parametrize("kind", ["none", "log", "power"])
def test_scales_of_several_targets(kind):
    y = np.stack([np.exp(X), np.exp(2 * X) + 1], 1)
    both = TargetScale.fit(y, kind, ("a", "b"))
    one, two = (TargetScale.fit(y[:, k], kind) for k in range(2))
    assert both.standardise(y) == pytest.approx(np.stack([one.standardise(y[:, 0]), two.standardise(y[:, 1])], 1))
    assert both.log_jacobian(y) == pytest.approx(one.log_jacobian(y[:, 0]) + two.log_jacobian(y[:, 1]))
    z = one.standardise(y[:, 0])
    assert (z.mean(), z.std()) == pytest.approx((0, 1), abs=1e-9)
    step = 1e-6 * y[:, 0]
    slope = (one.standardise(y[:, 0] + step) - one.standardise(y[:, 0] - step)) / (2 * step)
    assert one.log_jacobian(y[:, 0]) == pytest.approx(np.log(slope), abs=1e-5)


def test_metrics_of_the_joint_summary(runs):
    run = runs["several"]
    facts = summarise(run)
    assert facts.y.ndim == 2
    y = torch.from_numpy(facts.y)
    assert target_metrics(facts.predictive, y, ("price", "rent")) == pytest.approx(run.figures)
