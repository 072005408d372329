"""Censored times, several targets and Poisson counts of a table: promises, columns of predictions and importance."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import credibly as cr
from conftest import undrawn
from credibly.cli import app
from credibly.conformal.counts import covered, randomised_threshold, steps_of
from credibly.tables import Config, fit_table, prepare
from credibly.tables.choices.search import choose
from credibly.tables.files.reading import read_table
from credibly.tables.guarantee import guaranteed
from credibly.tables.importance import importance_by_target, permutation_importance
from credibly.tables.recipe import Recipe
from credibly.tables.summarise import summarise_targets

ROWS = 240
RNG = np.random.default_rng(1)
X, IDLE = RNG.normal(size=(2, ROWS))
TIME = np.exp(2 + 0.8 * X) * RNG.exponential(size=ROWS) ** 0.5
CENSORING = np.exp(2.5 + RNG.normal(size=ROWS))
RENT = 5 * X + RNG.normal(size=ROWS)
TABLE = pa.table(
    {
        "x": X,
        "idle": IDLE,
        "time": np.minimum(TIME, CENSORING),
        "over": TIME <= CENSORING,
        "rent": RENT,
        "size": 100 + 20 * IDLE + 5 * (RENT - 5 * X) + 8 * RNG.normal(size=ROWS),
        "visits": RNG.poisson(np.exp(1.5 + 0.5 * X)).astype(float),
    }
)
# Nearly always right: a set with a class covers more than 90 %.
KINDS = TABLE.select(["x", "idle"]).append_column("kind", pa.array(np.where(X + 0.1 * IDLE > 0, "high", "low")))
TASKS = {
    "survival": {"target": "time", "event": "over", "drop": ("rent", "size", "visits")},
    "several": {"target": "rent,size", "transform": "none", "drop": ("time", "over", "visits")},
    "poisson": {"target": "visits", "task": "counts", "noise": "poisson", "drop": ("time", "over", "rent", "size")},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    pyarrow.parquet.write_table(TABLE, folder / "table.parquet")
    settings = {"steps": 300, "noise_from": "training"}
    made = {}
    for name, options in TASKS.items():
        config = Config(str(folder / "table.parquet"), method="map", hidden=(8,), settings=settings, **options)
        made[name] = fit_table(prepare(config), folder / name, progress=False)
    return made


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def predicted(run, tmp_path, *options):
    out = tmp_path / "p.parquet"
    found = call("predict", run.path, run.config.table, "--out", out, *options)
    assert found.exit_code == 0, found.output
    return {name: np.asarray(column) for name, column in read_table(out).to_pydict().items()}


def test_survival_probabilities_at_given_times(runs, tmp_path):
    """One set of weights predicts a Weibull time: its survival function in closed form."""
    run = runs["survival"]
    found = predicted(run, tmp_path, "--at", "4, 12,0.5")
    one = run.model.predict_table(read_table(run.config.table))
    output, scale = one.source.outputs(one.x, 0, 1)[0, :, 0], one.source.extra(0, 1)["log_scale"].exp()
    unit = one.likelihood.unit * output.double().exp().numpy()
    for time, name in ((4, "survival_4"), (12, "survival_12"), (0.5, "survival_0.5")):
        expected = stats.weibull_min.sf(time, 1 / float(scale), scale=unit)
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-12)
    assert (found["survival_0.5"] > found["survival_12"]).all()


def test_lower_bounds_of_times(runs, tmp_path):
    run = runs["survival"]
    found = predicted(run, tmp_path, "--level", "0.8,0.95")
    facts = run.facts["guarantee"]
    assert facts["kind"] == "cross-conformal"
    assert abs(facts["measured"] - 0.9) < 4 * np.sqrt(0.09 / ROWS)
    # In sample, with a model of the right kind: the promise is for the time without censoring.
    for level in (80, 95):
        held = found[f"at_least_{level}"] <= TIME
        assert held.mean() > level / 100 - 4 * np.sqrt(level / 100 * (1 - level / 100) / ROWS)
    assert (found["at_least_95"] < found["at_least_80"]).all()
    assert (found["at_least_95"] >= 0).all()
    assert (found["lower_80"] < found["upper_80"]).all()


def test_counts_have_an_exact_and_a_given_coverage(runs):
    """By hand: randomised thresholds from the other folds."""
    run = runs["poisson"]
    rows, _ = run.rows()
    y = run.model.preparation.target_values(rows)
    predictive, fold = run.predict_rows(run.model.inputs(rows)[0]), np.asarray(run.facts["fold_of_row"])
    facts = run.facts["guarantee"]
    ends, inside = steps_of(predictive, y), torch.empty(len(y), dtype=torch.float64)
    for k in range(5):
        own, others = (torch.from_numpy(np.flatnonzero(part)) for part in (fold == k, fold != k))
        inside[own] = covered(ends[:, own], randomised_threshold(ends[:, others], 0.9)).reshape(-1)
    assert facts["measured"] == pytest.approx(float(inside.mean()), rel=1e-9)
    assert abs(facts["measured"] - 0.9) < 4 * np.sqrt(0.09 / ROWS)
    assert facts["measured_given"] >= 0.9 - 4 * np.sqrt(0.09 / ROWS)


def test_sets_of_classes_have_an_exact_and_a_given_coverage(tmp_path):
    pyarrow.parquet.write_table(KINDS, tmp_path / "kinds.parquet")
    config = Config(str(tmp_path / "kinds.parquet"), "kind", method="map", hidden=(), settings={"steps": 200})
    run = fit_table(prepare(config), tmp_path / "run", progress=False)
    rows, _ = run.rows()
    predictive = run.predict_rows(run.model.inputs(rows)[0])
    right = predictive.probabilities.argmax(-1).numpy() == run.model.preparation.target_values(rows)
    facts = run.facts["guarantee"]
    assert abs(facts["measured"] - 0.9) < 4 * np.sqrt(0.09 / ROWS)
    # Sets of one or two classes hold the most probable one.
    assert facts["measured_given"] >= right.mean() > 0.93


@pytest.mark.parametrize("labels", [False, True])
def test_a_group_with_nearly_all_rows_leaves_too_few_to_measure_coverage(labels, tmp_path):
    """Outside the fold of the 100 rows there are 8, and a coverage of 90 % needs 9; together they are enough."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=108)
    y = np.where(x + rng.normal(size=108) > 0, "high", "low") if labels else 2 * x + rng.normal(size=108)
    groups = np.repeat(list("abcde"), [100, 2, 2, 2, 2])
    pyarrow.parquet.write_table(pa.table({"x": x, "y": y, "g": groups}), tmp_path / "t.parquet")
    config = Config(
        str(tmp_path / "t.parquet"), "y", group="g", method="map", hidden=(4,), tune="none", settings={"steps": 20}
    )
    run = fit_table(prepare(config), tmp_path / "run", progress=False)
    assert run.facts["guarantee"] == {"level": 0.9, "measured": None, "rows": 108, "kind": "cross-conformal"}
    assert run.model.calibration is not None
    assert summarise_targets(run)[0].guarantee is None
    for verb in (
        ["report", tmp_path / "run"],
        ["card", tmp_path / "run", "--out", tmp_path / "card.md"],
        ["predict", tmp_path / "run", tmp_path / "t.parquet", "--out", tmp_path / "p.csv"],
    ):
        with undrawn():
            assert call(*verb).exit_code == 0
    assert "; not measured." in (tmp_path / "card.md").read_text()
    assert ("set_90" if labels else "lower_90") in (tmp_path / "p.csv").read_text().splitlines()[0]


def test_joint_intervals_of_several_targets(runs, tmp_path):
    run = runs["several"]
    found = predicted(run, tmp_path)
    facts = run.facts["guarantee"]
    error = 4 * np.sqrt(0.09 / ROWS)
    assert abs(facts["measured"] - 0.9) < error
    assert abs(facts["measured_jointly"] - 0.9) < error
    for target in ("rent", "size"):
        assert (found[f"joint_lower_90_{target}"] < found[f"lower_90_{target}"]).all()
        assert (found[f"joint_upper_90_{target}"] > found[f"upper_90_{target}"]).all()
        assert f"bayes_lower_90_{target}" in found
    inputs = run.model.inputs(read_table(run.config.table))[0]
    promised = guaranteed(run.model, inputs, run.model.predict(inputs))
    lower, upper = promised.interval(0.9)
    np.testing.assert_array_equal(found["lower_90_size"], lower[:, 1].double().numpy())
    np.testing.assert_array_equal(found["upper_90_rent"], upper[:, 0].double().numpy())


def test_the_poisson_likelihood_of_counts(runs, tmp_path):
    run = runs["poisson"]
    one = run.model.predict_table(TABLE)
    assert isinstance(one.likelihood, cr.likelihoods.Poisson)
    assert one.likelihood.unit == pytest.approx(TABLE["visits"].to_numpy().mean())
    rate = one.likelihood.unit * one.source.outputs(one.x, 0, 1)[0, :, 0].double().exp().numpy()
    y = TABLE["visits"].to_numpy().copy()
    np.testing.assert_allclose(one.log_prob(torch.from_numpy(y)).numpy(), stats.poisson.logpmf(y, rate), rtol=1e-4)
    np.testing.assert_allclose(one.cdf(torch.from_numpy(y)).numpy(), stats.poisson.cdf(y, rate), rtol=1e-4)
    found = predicted(run, tmp_path)
    np.testing.assert_allclose(found["std_aleatoric"] ** 2, found["mean"], rtol=1e-4)


def test_folds_choose_between_poisson_and_negative_binomial(tmp_path):
    """Counts with a gamma-distributed rate have far more variance than Poisson counts."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=200)
    rate = np.exp(2 + 0.5 * x)
    counts = {"poisson": rng.poisson(rate), "learned": rng.poisson(rate * rng.gamma(0.7, 1 / 0.7, size=200))}
    for expected, y in counts.items():
        pyarrow.parquet.write_table(pa.table({"x": x, "y": y.astype(float)}), tmp_path / "t.parquet")
        prepared = prepare(Config(str(tmp_path / "t.parquet"), "y", task="counts", method="ensemble", hidden=(8,)))
        recipe = Recipe(
            "counts", (8,), method="ensemble", settings={"steps": 200, "lr": 0.02, "compile": False, "batch_size": 100}
        )
        fixed = ("hidden", "embedding", "inputs", "prior_scale", "transform")
        best, tried = choose(recipe, prepared.data, fixed=fixed)
        assert len(tried) == 2
        assert best.noise == expected


@pytest.mark.parametrize("name", TASKS)
def test_importance_and_effects(name, runs):
    run = runs[name]
    every = summarise_targets(run)
    assert len(every) == (2 if name == "several" else 1)
    for facts in every:
        assert facts.importance is not None
        relevant = "idle" if facts.target == "size" else "x"
        best, other = facts.importance.columns
        assert best.name == relevant
        assert best.loss > 4 * best.loss_error
        assert other.loss < best.loss / 4
        assert (best.score is None) == (name == "survival")
        effect = next(one for one in facts.effects if one.name == relevant)
        assert effect.mean.shape[1] == 1
        # All of these relations increase.
        assert effect.mean[-1, 0] > effect.mean[0, 0]


def test_importance_of_each_target_is_that_of_the_target_alone():
    table = pa.table({"a": np.arange(40.0), "b": np.arange(40.0)[::-1] ** 2})
    y = np.stack([table["a"].to_numpy() / 10, table["b"].to_numpy() / 500], 1)

    class Constant:
        count, likelihood = 1, cr.likelihoods.Gaussian(0.5)

        def __init__(self, targets):
            self.targets = targets
            if len(targets) == 1:
                self.likelihood = cr.likelihoods.Gaussian(0.5, squeeze=True)

        def outputs(self, x, start, stop, first_row=0):
            return torch.stack([x[:, 0] / 10, x[:, 1] / 500], 1)[None, :, self.targets]

        def extra(self, start, stop):
            return {}

        def row_width(self):
            return 2

    def predict(targets):
        def inner(rows):
            return cr.Predictive(Constant(targets), torch.from_numpy(np.stack([rows["a"], rows["b"]], 1)))

        return inner

    both = importance_by_target(predict([0, 1]), table, y, ["a", "b"])
    for k in (0, 1):
        alone = permutation_importance(predict([k]), table, y[:, k], ["a", "b"])
        assert both[k] == alone
    with pytest.raises(cr.InputError, match="one target per row"):
        permutation_importance(predict([0, 1]), table, y, ["a", "b"])


@pytest.mark.parametrize(
    "run, options, message",
    [
        ("survival", ("--at", "12,x"), "--at must be positive times such as 12,24, got 'x'"),
        ("survival", ("--at", "0"), "got '0'"),
        ("survival", ("--at", "-3"), "got '-3'"),
        ("survival", ("--at", "inf"), "got 'inf'"),
        ("survival", ("--at", "12,12.0"), "got 12 twice"),
        ("survival", ("--at", ","), "must be positive times"),
        ("survival", ("--level", "0.999"), "a guarantee of 0.999 needs 999 calibration rows"),
        ("survival", ("--allow-empty",), "has no prediction sets"),
        ("several", ("--at", "12"), "--at: is for censored times, this is regression"),
    ],
)
def test_refusals(run, options, message, runs, tmp_path):
    found = call("predict", runs[run].path, runs[run].config.table, "--out", tmp_path / "p.csv", *options)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())
    assert list(tmp_path.iterdir()) == []


def test_poisson_noise_is_for_counts():
    with pytest.raises(cr.InputError, match="'poisson' is for counts, got the task 'regression'"):
        Recipe("regression", noise="poisson")
    assert Config("t.csv", "y", noise="poisson").recipe("counts").noise == "poisson"
