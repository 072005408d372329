"""Permutation importance and effect curves, against brute force and closed forms of a linear model."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

import credibly as cr
from credibly.tables.effects import effect_curve, effect_curves
from credibly.tables.importance import permutation_importance

NOISE = 0.5


class Linear:
    """Predictions of y ~ N(slopes @ x, NOISE^2) for numeric columns, with several draws of the slopes."""

    def __init__(self, *slopes):
        self.slopes = np.array(slopes, dtype=float)  # (draws, columns)
        self.calls = 0

    def __call__(self, table):
        self.calls += 1
        x = np.stack([column.to_numpy().astype(float) for column in table.columns], 1)
        curves = torch.from_numpy(x @ self.slopes.T)  # (rows, draws)
        mean = curves.mean(1)
        density = torch.distributions.Normal(mean, NOISE)
        return SimpleNamespace(
            mean=mean,
            log_prob=density.log_prob,
            likelihood=SimpleNamespace(support="real"),
            functions=lambda count: curves.T[:count],
        )


def linear_data(rows, slopes, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, len(slopes)))
    y = x @ np.array(slopes) + NOISE * rng.normal(size=rows)
    return pa.table({f"c{i}": x[:, i] for i in range(len(slopes))}), y


def test_the_mean_over_permutations_is_that_over_all_pairs_of_rows():
    table, y = linear_data(7, (2.0, -1.0))
    model = Linear((2.0, -1.0))
    repeats = 4000
    found = permutation_importance(model, table, y, ["c0", "c1"], repeats=repeats)
    x = np.stack([c.to_numpy() for c in table.columns], 1)
    base = (y - x @ [2.0, -1.0]) ** 2
    for one in found.columns:
        j, slope = int(one.name[1]), (2.0, -1.0)[int(one.name[1])]
        # Row i with the cell of row k, for all i and k.
        squares = (y[:, None] - (x @ [2.0, -1.0])[:, None] + slope * (x[:, None, j] - x[None, :, j])) ** 2
        exact = (squares.mean() - base.mean()) / (2 * NOISE**2)
        spread = squares.mean(0).std() / (2 * NOISE**2)
        assert one.loss == pytest.approx(exact, abs=5 * spread / np.sqrt(repeats) * np.sqrt(len(y)))
        rmse = np.sqrt(squares.mean()) - np.sqrt(base.mean())
        assert one.score == pytest.approx(rmse, rel=0.05)


def test_the_standard_error_matches_the_spread_over_tables():
    values, errors = [], []
    for seed in range(200):
        table, y = linear_data(60, (1.0, 0.0), seed)
        one = permutation_importance(Linear((1.0, 0.0)), table, y, ["c0"], repeats=10, seed=seed).columns[0]
        values.append((one.loss, one.score))
        errors.append((one.loss_error, one.score_error))
    # slope^2 var(x) / noise^2 = 4 nats
    assert np.mean(values, 0)[0] == pytest.approx(1 / NOISE**2, rel=0.06)
    # The standard deviation of 200 values is known to 5 %, the errors contain 2 % of permutation noise too much.
    assert np.mean(errors, 0) == pytest.approx(np.std(values, 0), rel=0.17)


def test_columns_are_sorted_and_an_unused_one_has_no_importance():
    table, y = linear_data(100, (0.5, 0.0, 2.0))
    found = permutation_importance(Linear((0.5, 0.0, 2.0)), table, y, table.column_names)
    assert [one.name for one in found.columns] == ["c2", "c0", "c1"]
    unused = found.columns[-1]
    assert (unused.loss, unused.loss_error, unused.score) == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)
    assert found.to_dict()["columns"]["c2"]["loss"] == found.columns[0].loss


def test_cells_are_permuted_before_encoding_and_the_other_columns_stay():
    table = pa.table({"kind": ["a", "b", None, "c"] * 5, "size": np.arange(20.0)})
    seen = []

    def predict(given):
        seen.append(given)
        mean = torch.zeros(len(given), dtype=torch.float64)
        return SimpleNamespace(mean=mean, log_prob=lambda y: -(y**2), likelihood=SimpleNamespace(support="real"))

    permutation_importance(predict, table, np.ones(20), ["kind"], repeats=2)
    base, shuffled = seen
    assert base.equals(table)
    for part in (shuffled.slice(0, 20), shuffled.slice(20)):
        assert part["size"].to_pylist() == table["size"].to_pylist()
        assert part["kind"].to_pylist() != table["kind"].to_pylist()
        assert sorted(part["kind"].to_pylist(), key=str) == sorted(table["kind"].to_pylist(), key=str)


def test_many_columns_are_screened_and_rows_are_bounded():
    slopes = (3.0, *np.zeros(50), 2.0)
    table, y = linear_data(500, slopes)
    model = Linear(slopes)
    found = permutation_importance(model, table, y, table.column_names, most=5, rows=200)
    assert {one.name for one in found.columns[:2]} == {"c0", "c51"}
    assert (len(found.columns), len(found.skipped), found.rows) == (5, 47, 200)
    # Two predictions of the rows as they are, and the permutations in blocks.
    assert model.calls == 4


def test_labels():
    rng = np.random.default_rng(0)
    x = rng.normal(size=100)
    y = (x > 0).astype(np.int64)

    def predict(table):
        p = torch.sigmoid(torch.from_numpy(8 * table["x"].to_numpy()))
        p = torch.stack([1 - p, p], 1)
        return SimpleNamespace(
            probabilities=p, log_prob=lambda t: p.gather(1, t[:, None])[:, 0].log(), mean=p[:, 1], likelihood=None
        )

    (one,) = permutation_importance(predict, pa.table({"x": x}), y, ["x"], repeats=20).columns
    # Without errors at first, a permuted row is wrong where the other row is of the other class.
    share = y.mean()
    assert one.score == pytest.approx(2 * share * (1 - share), abs=0.05)


class TestEffects:
    def test_the_curve_of_a_linear_model(self):
        table, _ = linear_data(150, (1.0, 2.0))
        slopes = [(1.0 + 0.1 * s, 2.0) for s in range(21)]
        found = effect_curve(Linear(*slopes), table, "c0", points=9)
        rest = 2.0 * table["c1"].to_numpy().mean()
        assert found.numeric
        assert len(found.at) == 9
        assert found.mean[:, 0] == pytest.approx(found.at * 2.0 + rest)
        # The 5 % and 95 % quantiles of 21 evenly spaced draws are the second and the last but one.
        low, high = np.sort([found.at * 1.1, found.at * 2.9], axis=0) + rest
        assert found.low[:, 0] == pytest.approx(low)
        assert found.high[:, 0] == pytest.approx(high)
        inner = np.quantile(table["c0"].to_numpy(), (0.02, 0.98))
        assert (found.at[0], found.at[-1]) == pytest.approx(tuple(inner), abs=0.1)

    def test_categories_the_most_frequent_first(self):
        table = pa.table({"kind": ["a"] * 5 + ["b"] * 9 + [None] * 3, "x": np.arange(17.0)})

        def predict(given):
            known = {"a": 1.0, "b": 2.0}
            value = torch.tensor([known[cell] for cell in given["kind"].to_pylist()])
            return SimpleNamespace(functions=lambda n: value[None], likelihood=SimpleNamespace(support="real"))

        found = effect_curve(predict, table, "kind")
        assert (found.at, found.mean[:, 0].tolist()) == (("b", "a"), [2.0, 1.0])
        assert found.to_dict()["at"] == ["b", "a"]

    def test_two_classes_have_a_curve_each(self):
        def predict(given):
            p = torch.sigmoid(torch.from_numpy(given["x"].to_numpy()))
            return SimpleNamespace(functions=lambda n: p[None], likelihood=SimpleNamespace(support="binary"))

        found = effect_curve(predict, pa.table({"x": np.linspace(-1, 1, 30)}), "x", points=3)
        assert found.mean.sum(1) == pytest.approx([1, 1, 1])
        assert found.mean[:, 1] == pytest.approx(1 / (1 + np.exp(-found.at)))

    def test_columns_without_a_curve(self):
        model = Linear((1.0, 1.0))
        constant = pa.table({"c0": np.ones(10), "text": [f"id {i % 3}" for i in range(10)]})
        assert effect_curve(model, constant, "c0") is None
        many = pa.table({"text": [f"id {i}" for i in range(300)]})
        assert effect_curves(model, many, ["text"]) == ()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"columns": ["c9"]}, "columns must be columns of the table, got 'c9'"),
        ({"repeats": 0}, "repeats must be a positive integer"),
        ({"rows": 1}, "rows must be an integer"),
        ({"y": np.ones(3)}, "y must have one value for each"),
    ],
)
def test_bad_input(change, message):
    table, y = linear_data(10, (1.0,))
    options = {"y": y, "columns": ["c0"], "repeats": 1} | change
    with pytest.raises(cr.InputError, match=message):
        permutation_importance(Linear((1.0,)), table, **options)
