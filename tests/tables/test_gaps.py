"""Rows with missing cells: donors by brute force, the mixture over completions, and widths in closed form."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv

import credibly as cr
from credibly.conformal.labels import uniforms
from credibly.likelihoods import Gaussian
from credibly.predictive.base import Predictive
from credibly.tables import Config, TableRun, fit_table, prepare
from credibly.tables.columns.encoders import fit_column
from credibly.tables.columns.gaps import mark_gaps
from credibly.tables.columns.scaling import InputScaling
from credibly.tables.missing.completed import LEAST_DRAWS, predict_gaps, segments
from credibly.tables.missing.imputation import COMPLETIONS, RIDGE, Donors, patterns, training_inputs
from credibly.tables.model import TableModel
from credibly.tables.preparation import Preparation

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(300, 4)) @ RNG.normal(size=(4, 4))
ROWS = (ROWS - ROWS.mean(0)) / ROWS.std(0)


class Linear:
    """Draws of linear functions: output s of a row is its product with weights[s]."""

    def __init__(self, draws, inputs=4):
        self.weights = torch.from_numpy(np.random.default_rng(1).normal(size=(draws, inputs)))
        self.likelihood, self.count, self.seen = Gaussian(0.5), draws, []

    def outputs(self, x, start, stop, first_row=0):
        self.seen.append((len(x), stop - start))
        return (self.weights[start:stop] @ x.T).unsqueeze(-1)

    def extra(self, start, stop):
        return {}

    def row_width(self):
        return 1

    def predict(self, x):
        return Predictive(self, torch.from_numpy(x))


def gappy(rows=40, seed=3):
    x = ROWS[:rows].copy()
    x[np.random.default_rng(seed).random(x.shape) < 0.3] = np.nan
    x[0], x[1] = ROWS[0], np.nan
    return x


# -- donors -----------------------------------------------------------------------------------------------------------
def test_donors_are_the_nearest_by_the_distance_of_the_module():
    donors = Donors(ROWS[40:])
    covariance = np.cov(donors.rows.T, bias=True) + RIDGE * np.eye(4)
    for row, found in zip(gappy(), donors.nearest(gappy())):
        m = np.isnan(row)
        if not m.any() or m.all():
            continue
        slope = np.linalg.solve(covariance[np.ix_(~m, ~m)], covariance[np.ix_(~m, m)])
        residual = covariance[np.ix_(m, m)] - covariance[np.ix_(m, ~m)] @ slope
        apart = donors.rows[:, ~m] - row[~m]
        predicted = apart @ slope
        distance = (apart**2).mean(1)
        distance += np.einsum("ni,ij,nj->n", predicted, np.linalg.inv(residual), predicted) / m.sum()
        assert set(found) == set(distance.argsort()[:COMPLETIONS])


def test_completions_keep_observed_values_and_copy_the_others_from_one_donor():
    donors, x = Donors(ROWS[40:]), gappy()
    completed, nearest = donors.complete(x), donors.nearest(x)
    observed = ~np.isnan(x)
    assert not np.isnan(completed).any()
    for i in range(len(x)):
        assert np.array_equal(completed[i][:, observed[i]], np.tile(x[i, observed[i]], (COMPLETIONS, 1)))
        assert np.array_equal(completed[i][:, ~observed[i]], donors.rows[nearest[i]][:, ~observed[i]])


def test_donors_of_a_row_do_not_depend_on_other_rows():
    donors, x = Donors(ROWS[40:]), gappy()
    together = donors.nearest(x)
    for i in range(len(x)):
        assert np.array_equal(donors.nearest(x[i : i + 1])[0], together[i] if np.isnan(x[i]).any() else 0 * together[i])


def test_donors_that_lack_the_value_themselves_are_used_last():
    rows = ROWS.copy()
    rows[50:, 2] = np.nan
    donors = Donors(rows)
    assert not np.isnan(donors.rows).any()
    x = ROWS[:5].copy()
    x[:, 2] = np.nan
    assert donors.observed[donors.nearest(x), 2].all()
    assert np.isin(donors.complete(x)[..., 2], ROWS[:50, 2]).all()


def test_few_donors_constant_inputs_and_absurd_values():
    few = Donors(ROWS[:3])
    assert few.complete(gappy()).shape == (40, 3, 4)
    constant = ROWS.copy()
    constant[:, 1] = 5.0
    x = ROWS[:4].copy()
    x[:, 0], x[0, 2] = np.nan, 1e30
    assert np.isfinite(Donors(constant).complete(x)).all()
    never = ROWS.copy()
    never[:, 3] = np.nan
    assert np.isfinite(Donors(never).complete(np.full((1, 4), np.nan))).all()


def test_training_rows_are_filled_without_the_target_and_only_where_something_is_missing():
    assert training_inputs(ROWS) is ROWS
    x = ROWS.copy()
    x[::3, 1] = np.nan
    filled = training_inputs(x)
    assert np.array_equal(filled[~np.isnan(x)], x[~np.isnan(x)])
    # Closer to the truth than the mean of the column, since the columns are correlated.
    error = filled[::3, 1] - ROWS[::3, 1]
    assert np.mean(error**2) < 0.7 * np.mean((ROWS[::3, 1] - np.nanmean(x[:, 1])) ** 2)


def test_patterns_group_rows_by_what_they_lack():
    gaps = np.array([[0, 0, 0], [1, 0, 1], [0, 1, 0], [1, 0, 1]], dtype=bool)
    found = {tuple(columns): tuple(rows) for rows, columns in patterns(gaps)}
    assert found == {(0, 2): (1, 3), (1,): (2,)}


# -- the mixture ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("draws", [1, 4, 25, 700])
def test_every_draw_predicts_from_a_completion(draws):
    source, x, donors = Linear(draws), gappy(), Donors(ROWS[40:])
    p = predict_gaps(source.predict, x, donors)
    assert p.draws == (draws if draws >= LEAST_DRAWS else draws * -(-LEAST_DRAWS // draws))
    completed = torch.from_numpy(donors.complete(x))
    run = max(1, p.draws // 240)
    expected = torch.stack([completed[:, s // run % COMPLETIONS] @ source.weights[s % draws] for s in range(p.draws)])
    assert torch.allclose(p.functions().squeeze(-1), expected, rtol=0, atol=1e-12)
    rows = torch.tensor([7, 0, 3])
    assert torch.allclose(p.subset(rows).mean, p.mean[rows], rtol=0, atol=1e-12)


def test_complete_rows_are_bit_for_bit_the_same_and_cost_nothing_more():
    source, x = Linear(50), gappy()
    donors = Donors(ROWS[40:])
    complete = np.flatnonzero(~np.isnan(x).any(1))
    before, after = source.predict(ROWS[:40]), predict_gaps(source.predict, x, donors)
    for name in ("mean", "variance", "aleatoric", "epistemic"):
        assert torch.equal(getattr(before, name)[complete], getattr(after, name)[complete])
    assert torch.equal(before.quantile(0.05)[complete], after.quantile(0.05)[complete])
    # A batch without gaps takes no detour, and rows with gaps cost one forward pass per draw more, not forty.
    assert type(predict_gaps(source.predict, ROWS, donors).source) is Linear
    source.seen.clear()
    predict_gaps(source.predict, x, donors).mean  # noqa: B018
    assert sum(rows * draws for rows, draws in source.seen) <= 2 * 40 * 50 + 2 * 40


@pytest.mark.parametrize("kind", ["quantile", "categories"])
def test_completions_are_encoded_as_complete_rows_are(kind):
    rows = ROWS.copy()
    rows[:, 1] = np.round(rows[:, 1])
    scaling = InputScaling.fit(kind, rows, (0, 1, 2, 3))
    x, donors = rows[:20].copy(), Donors(rows[40:])
    x[:, 1], x[5:, 0] = np.nan, np.nan
    source = Linear(25, scaling.outputs(4))
    p = predict_gaps(lambda given: source.predict(np.float64(scaling(given))), x, donors, scaling)
    completed = donors.complete(x)
    for s in range(25):
        encoded = torch.from_numpy(np.float64(scaling(completed[:, s])))
        assert torch.allclose(p.functions()[s].squeeze(-1), encoded @ source.weights[s], rtol=0, atol=1e-6)


def test_the_random_number_of_a_row_does_not_depend_on_gaps_in_other_rows():
    x, linear = gappy(), Linear(30)
    alone = uniforms(linear.predict(ROWS[:1]).x, 7)
    together = predict_gaps(linear.predict, x, Donors(ROWS[40:]))
    assert torch.equal(uniforms(together.x, 7)[:1], alone)
    some = torch.tensor([0, 5, 6])
    assert torch.equal(uniforms(together.subset(some).x, 7), uniforms(together.x, 7)[some])
    # Nor on the donors: the same row with a gap, among others.
    fewer = predict_gaps(linear.predict, x[5:7], Donors(ROWS[60:]))
    assert torch.equal(uniforms(fewer.x, 7), uniforms(together.x, 7)[5:7])
    assert len(uniforms(together.x, 7).unique()) == len(x)


def test_segments():
    assert list(segments(3, 11, 4)) == [(3, 4), (4, 8), (8, 11)]
    assert list(segments(4, 8, 4)) == [(4, 8)]


@pytest.mark.parametrize("method", ["map", "laplace"])
def test_width_of_a_row_with_a_gap_in_closed_form(method):
    # y = a + b + noise with correlated a and b: given a alone, y is Normal((1 + r) a, 1 - r^2 + noise^2).
    rng, r, noise = np.random.default_rng(5), 0.6, 0.3
    a = rng.normal(size=2000)
    b = r * a + np.sqrt(1 - r**2) * rng.normal(size=2000)
    y = a + b + noise * rng.normal(size=2000)
    model = cr.BayesianRegressor(method, hidden=()).fit(np.stack([a, b], 1)[:1000], y[:1000])
    x = np.stack([a, np.full(2000, np.nan)], 1)[1000:]
    mean, std = model.predict(x, return_std=True)
    assert np.sqrt(np.mean((mean - (1 + r) * a[1000:]) ** 2)) < 0.3
    assert np.mean(std**2) == pytest.approx(1 - r**2 + noise**2, rel=0.15)
    lower, upper = model.predict_interval(x)
    assert 0.85 < np.mean((lower <= y[1000:]) & (y[1000:] <= upper)) < 0.95
    p = model.predictive(x)
    assert float(p.epistemic.mean()) == pytest.approx(1 - r**2, rel=0.15)
    assert float(p.aleatoric.mean()) == pytest.approx(noise**2, rel=0.2)


# -- tables -----------------------------------------------------------------------------------------------------------
def mark(cells, new):
    column = fit_column("a", pa.array(cells))
    out = np.zeros((len(new), len(column.features)), dtype=np.float32)
    mark_gaps(column, out, column.encode(pa.array(new, pa.array(cells).type), out))
    return out


def test_gaps_of_a_number():
    # 3 is the median that missing cells are imputed by, and is not missing.
    found = mark([1.0, 2.0, 3.0, 4.0, 5.0], [3.0, None, float("inf"), 1e9])
    assert np.isnan(found[:, 0]).tolist() == [False, True, True, False]
    found = mark([1.0, 2.0, 3.0, 4.0, None], [3.0, None])
    assert np.isnan(found[:, 0]).tolist() == [False, True]
    assert found[:, 1].tolist() == [0, 1]


def test_gaps_of_a_category():
    found = mark(["x", "y", "x"], ["x", None, "unknown"])
    assert np.isnan(found).tolist() == [[False, False], [True, True], [True, True]]
    found = mark(["x", "y", None], ["x", None])
    assert np.isnan(found[:, :2]).tolist() == [[False, False], [True, True]]
    assert found[:, 2].tolist() == [0, 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gaps")
    rng = np.random.default_rng(7)
    a, b, c = rng.normal(size=(3, 200))
    group = np.where(a > 0, "high", "low")
    y = 3 * a + b + np.where(group == "high", 2, 0) + 0.2 * rng.normal(size=200)
    table = pa.table({"a": a, "b": b, "c": c, "group": group, "y": y})
    csv.write_csv(table, folder / "table.csv")
    settings = {"members": 12, "steps": 200, "lr": 0.05, "validation": 0.0, "noise_from": "training"}
    config = Config(table=str(folder / "table.csv"), target="y", method="ensemble", hidden=(8,), settings=settings)
    fit_table(prepare(config), folder / "run", progress=False)
    return TableRun.load(folder / "run"), table, folder


def blanked(table, names, rows):
    for name in names:
        cells = table[name].to_pylist()
        table = table.set_column(
            table.column_names.index(name), name, pa.array([None if i in rows else v for i, v in enumerate(cells)])
        )
    return table


def test_gaps_of_a_table_widen_intervals_and_raise_ood(run):
    fitted, table, _ = run
    y = table["y"].to_numpy()
    widths, scores, covered = [], [], []
    for names in ([], ["b"], ["a", "group"]):
        predictive = fitted.model.predict_table(blanked(table, names, set(range(200))))
        lower, upper = (bound.numpy() for bound in predictive.interval(0.9))
        widths.append(np.mean(upper - lower))
        covered.append(np.mean((lower <= y) & (y <= upper)))
        scores.append(fitted.model.ood(predictive).mean())
    assert 1.5 * widths[0] < widths[1]
    assert 1.5 * widths[1] < widths[2]
    assert scores[0] < 0.8
    assert min(scores[1:]) > 0.95
    assert min(covered[1:]) > 0.8


def test_an_absent_column_is_as_one_with_missing_cells(run):
    fitted, table, _ = run
    absent = fitted.model.predict_table(table.drop_columns(["a"]))
    blank = fitted.model.predict_table(blanked(table, ["a"], set(range(200))))
    assert torch.equal(absent.mean, blank.mean)
    assert torch.equal(absent.epistemic, blank.epistemic)


def test_files_with_gaps(run):
    fitted, table, folder = run
    some = blanked(table, ["a"], {3, 4, 100})
    before = fitted.model.predict_table(table)
    csv.write_csv(some, folder / "some.csv")
    outcome = fitted.model.predict_file(folder / "some.csv", folder / "out.csv")
    assert outcome.noted == 3
    found = csv.read_csv(folder / "out.csv")
    complete = np.setdiff1d(np.arange(200), [3, 4, 100])
    # Numbers of the CSV file are read back exactly.
    assert np.array_equal(found["mean"].to_numpy()[complete], before.mean.numpy()[complete])
    assert np.array_equal(found["upper_90"].to_numpy()[complete], before.interval(0.9)[1].numpy()[complete])
    width = found["upper_90"].to_numpy() - found["lower_90"].to_numpy()
    assert width[[3, 4, 100]].min() > 2 * np.median(width)


def test_a_model_without_training_rows_imputes(run):
    fitted, table, _ = run
    alone = TableModel(fitted.model.preparation, fitted.model.posterior)
    some = blanked(table, ["a"], {3})
    assert torch.isfinite(alone.predict_table(some).mean).all()
    with pytest.raises(cr.InputError, match="no training rows"):
        alone.predict(fitted.model.inputs(some)[0])


def test_training_uses_rows_with_gaps():
    table = pa.table({"a": [1.0, 2.0, None, 4.0, 5.0, 6.0] * 5, "y": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] * 5})
    known = Preparation.fit(table, "y")
    x = training_inputs(known.transform(table, gaps=True)[0])
    assert x.shape == (30, 2)
    assert np.isfinite(x).all()
    assert x[:, 1].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0] * 5
