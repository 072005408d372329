"""The study of marginal likelihood and leave-one-out: end to end at a tiny size, and conclusions from known numbers."""

import json

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from credibly.cli import app
from credibly.errors import InputError
from studies import evidence
from studies.study import Options


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "uci").mkdir()
    rng = np.random.default_rng(0)
    for name in evidence.NAMES:
        x = rng.standard_normal((50, 3))
        order = [rng.permutation(50) for _ in range(2)]
        np.savez(
            folder / "uci" / f"{name}.npz",
            X=x,
            y=10 + 2 * np.sin(x[:, 0]) + x[:, 1] + 0.3 * rng.standard_normal(50),
            train_idx=np.stack([o[:40] for o in order]),
            test_idx=np.stack([o[40:] for o in order]),
            n_hidden=np.int32(5),
        )
    return folder


@pytest.mark.nightly
def test_it_runs_from_the_command_line(root, tmp_path):
    out = tmp_path / "out"
    words = ["study", "evidence-picks-the-model", "--root", str(root), "--quick", "--out", str(out), "--quiet"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    stored = json.loads((out / "results.json").read_text())
    assert stored["held"] is None  # one split has no interval
    assert set(stored["numbers"]["groups"]) == set(evidence.NAMES)
    assert set(stored["numbers"]["groups"]["yacht"]) == {"2, 0.5", "2, 2", "4, 0.5", "4, 2"}
    assert all(v is not None for model in stored["numbers"]["groups"]["yacht"].values() for v in model["laplace"])
    text = (out / "README.md").read_text()
    assert [picture.name for picture in out.glob("*.svg")] == ["evidence.svg"]
    assert "(evidence.svg)" in text


def test_what_cannot_be_asked_for(root):
    for extra in ({"splits": "0"}, {"splits": "x"}, {"data": "protein"}):
        with pytest.raises(InputError, match="--set (splits|data) must be"):
            evidence.run(Options(root=root, quick=True, extra=extra))


def test_ranks_are_those_of_scipy():
    rng = np.random.default_rng(1)
    a = rng.normal(size=12).round(1)
    a[3] = a[7]  # a tie
    b = a + rng.normal(size=12)
    assert evidence.spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    assert np.isnan(evidence.spearman([1.0, 1.0], [1.0, 2.0]))


def made_up(relation, splits=6, noise=0.05, seed=0):
    """Return nine models whose criterion follows (1), ignores (0) or opposes (-1) the test log density."""
    rng = np.random.default_rng(seed)
    cells = {}
    for i in range(9):
        row = {"bad_k": [0.0] * splits, "rhat": [1.0] * splits}
        for c in evidence.CRITERIA:
            row[f"{c}_test"] = list(i + noise * rng.normal(size=splits))
            row[c] = list(relation * i + noise * rng.normal(size=splits))
        cells[f"{i}, 1"] = row
    return cells


def test_the_rule():
    good, bad = made_up(1.0), made_up(-1.0)
    assert evidence.correlation(good, "loo")[0] == pytest.approx(1.0)
    assert evidence.correlation(bad, "loo")[0] == pytest.approx(-1.0)
    passed = evidence.result_of({"a": good, "b": good}, ())
    assert passed.reproduced is True
    assert passed.sentences[0].startswith("Reproduced at this size: marginal likelihood")
    failed = evidence.result_of({"a": good, "b": bad}, ())
    assert failed.reproduced is False
    assert evidence.judge((0.9, -0.1, 1.0)) is None  # the lower end is below 0
    assert evidence.judge((0.4, 0.1, 0.6)) is None
    assert evidence.judge((0.9, np.nan, np.nan)) is None  # one split
    assert evidence.result_of({"a": made_up(1.0, splits=1)}, ()).reproduced is None


def test_what_a_pick_loses():
    """The loss of the picked model against the best of each split, and that of a random model."""
    cells = made_up(-1.0, noise=0.0)  # it picks the worst of 0 to 8
    assert evidence.loss(cells, "elbo") == pytest.approx(8.0)
    assert evidence.typical_loss(cells, "elbo") == pytest.approx(4.0)
    assert evidence.loss(made_up(1.0, noise=0.0), "elbo") == pytest.approx(0.0)
    assert evidence.top(cells, "elbo") == "0, 1"
    assert evidence.top(cells, "elbo_test") == "8, 1"


def test_the_interval_covers_splits(monkeypatch):
    """Splits that disagree widen the interval: for a criterion that is pure noise it contains 0."""
    monkeypatch.setattr(evidence, "SAMPLES", 400)
    value, low, high = evidence.correlation(made_up(0.0, noise=1.0, seed=3), "laplace")
    assert low < 0 < high
    assert low <= value <= high


def test_the_look_afterwards_leaves_out_a_prior():
    cells = {f"{width}, {scale:g}": {} for width in (5, 20) for scale in (0.3, 1.0, 3.0)}
    assert list(evidence.wider(cells)) == ["5, 1", "5, 3", "20, 1", "20, 3"]
    assert list(evidence.narrower(cells)) == ["5, 0.3", "5, 1", "20, 0.3", "20, 1"]
