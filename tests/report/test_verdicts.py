"""Verdicts: calibrated predictions pass, others do not, and chains are judged apart from the predictions."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

import credibly as cr
from credibly import report
from credibly.core.inputs import map_inputs
from credibly.diagnostics.verdict import judge as judge_chains
from credibly.report import evaluated_rows, findings, row_statistics
from credibly.report.class_findings import class_frequencies, imbalance
from credibly.report.finding import NOTE, PASS, WARN
from tabular import facts_of

pytestmark = pytest.mark.usefixtures("no_drawing_in_module")

REPEATS = 60


def repeated(predictive, times):
    return cr.Predictive(predictive.source, map_inputs(lambda t: torch.cat([t] * times), predictive.x))


def simulated(name, method, times, *, scale=1.0, repeats=REPEATS):
    """Yield the summary of a fit with targets drawn from its own predictive, independently in every row.

    The residuals are multiplied by `scale`. The baseline is far behind, so only calibration is judged.
    """
    facts = facts_of(name, method)
    p = repeated(facts.predictive, times)
    n, rng = len(p), np.random.default_rng(0)
    drawn = p.sample(1000, seed=1).numpy()
    mean = p.mean.numpy()
    for _ in range(repeats):
        y = drawn[rng.integers(0, len(drawn), n), np.arange(n)]
        if facts.task == "regression":
            y = mean + scale * (y - mean)
            lower, upper = (edge.numpy() for edge in p.interval(0.9))
            figures = {"coverage": float(((lower <= y) & (y <= upper)).mean())}
        else:
            y = y.astype(int)
            figures = {k: v for k, v in cr.evaluate(p, y).items() if k in ("coverage", "accuracy")}
        yield dataclasses.replace(
            facts, predictive=p, y=y, figures=figures, baseline={}, ood=None, ood_far=None, diagnostics=None, rows=9999
        )


@pytest.mark.parametrize("name, method, times", [("diabetes", "hmc", 1), ("wine", "ensemble", 3)])
def test_calibrated_predictions_are_good(name, method, times):
    """Of 60 fits with a true rate of at most 5 %, 8 or more would not be good with a probability of 1 in 70."""
    verdicts = [report.assess(facts).verdict for facts in simulated(name, method, times)]
    assert verdicts.count("do not trust") == 0
    assert verdicts.count("use with care") <= 7


@pytest.mark.parametrize(
    "scale, verdicts", [(2.0, {"do not trust"}), (1.3, {"do not trust", "use with care"}), (0.4, {"use with care"})]
)
def test_intervals_of_the_wrong_width_are_found(scale, verdicts):
    found = {report.assess(facts).verdict for facts in simulated("diabetes", "hmc", 3, scale=scale, repeats=8)}
    assert found <= verdicts


def test_an_input_that_gives_the_target_away_is_a_finding():
    """However good the metrics are, they are not those of new rows."""
    facts = next(simulated("diabetes", "hmc", 2, repeats=1))
    copy = "cost is a copy of the target y; pass --drop cost unless it is known before y is"
    others = ("city has the same value in every training row and is left out",)
    assert report.assess(dataclasses.replace(facts, warnings=others)).predictions == "good"
    for leaks, more in ((1, ""), (2, " (and one more such column)"), (3, " (and 2 more such columns)")):
        found = report.assess(dataclasses.replace(facts, warnings=(*others, *[copy] * leaks)))
        assert found.predictions == "use with care"
        assert found.reasons[0] == (
            f"An input gives the target away: cost is a copy of the target y{more}. These metrics hold only if it is"
            " known before the target is."
        )


def test_the_range_of_chance_is_as_precise_as_the_coverage():
    """A coverage of 95.3 % beside "83% to 95% is within chance" reads as a contradiction."""
    reasons = report.assess(next(simulated("diabetes", "hmc", 2, repeats=1))).reasons
    assert any(re.search(r"cover \d+\.\d% .* rows, \d+\.\d% to \d+\.\d% is within chance", one) for one in reasons)


def test_a_coverage_of_088_on_154_rows_is_good():
    facts = next(simulated("diabetes", "hmc", 2, repeats=1))
    some = dataclasses.replace(facts, predictive=facts.predictive.subset(torch.arange(154)), y=facts.y[:154])
    found = report.assess(dataclasses.replace(some, figures={"coverage": 0.88}))
    assert found.verdict == "good", found.reasons


def with_chains(facts, **values):
    known = {"rhat": 1.003, "ess": 1000.0, "still": ()} | values
    space = dataclasses.replace(
        facts_of("diabetes", "hmc").diagnostics.functions,
        rhat_most=known["rhat"],
        rhat_worst=known["rhat"],
        ess_most=known["ess"],
    )
    ok, verdict = judge_chains(4, space, space, (0.8,) * 4, 0, (0.9,) * 4, known["still"])
    diagnostics = dataclasses.replace(
        facts_of("diabetes", "hmc").diagnostics,
        chains=4,
        functions=space,
        weights=space,
        divergences=0,
        e_bfmi=(0.9,) * 4,
        still=known["still"],
        ok=ok,
        verdict=verdict,
        quantities={},
    )
    return dataclasses.replace(facts, diagnostics=diagnostics)


@pytest.fixture(scope="module")
def good():
    return next(f for f in simulated("diabetes", "hmc", 2) if report.assess(f).verdict == "good")


class TestSampling:
    @pytest.mark.parametrize(
        "chains, sampling, verdict",
        [
            ({}, "good", "good"),
            ({"ess": 230.0}, "not enough draws", "good"),
            ({"ess": 40.0}, "not enough draws", "use with care"),
            ({"rhat": 1.07}, "not enough draws", "use with care"),
            ({"rhat": 1.4}, "not mixed", "use with care"),
            ({"still": (0, 1, 2, 3)}, "failed", "do not trust"),
        ],
    )
    def test_is_judged_apart_from_the_predictions(self, good, chains, sampling, verdict):
        found = report.assess(with_chains(good, **chains))
        assert (found.predictions, found.sampling, found.verdict) == ("good", sampling, verdict)
        assert [line.partition(".")[0] for line in found.lines] == ["Predictions: good", f"Sampling: {sampling}"]
        assert found.headline.lower().startswith(verdict)
        assert found.sentences[:2] == found.lines
        plain = found.to_dict()
        assert (plain["verdict"], plain["sampling"], len(plain["findings"])) == (verdict, sampling, len(found.findings))

    def test_without_rows_to_test_on_chains_that_disagree_decide(self, good):
        seen = dataclasses.replace(with_chains(good, rhat=1.4), on="training")
        assert report.assess(seen).verdict == "do not trust"

    def test_a_method_without_chains_has_no_such_line(self, good):
        found = report.assess(good)
        assert found.sampling is None
        assert len(found.lines) == 1

    def test_both_lines_are_on_the_page(self, good):
        text = report.render(report.fit_page(with_chains(good, ess=230.0)))
        assert "<h2>Verdict: good</h2>" in text
        assert "Sampling: not enough draws." in text
        assert "Predictions: good." in text


class TestOrderOfErrors:
    def test_one_outlier_does_not_hide_the_order(self):
        """Errors grow with the predicted standard deviation; the square of one outlier would drown them."""
        facts = facts_of("diabetes", "hmc")
        p = facts.predictive
        rng = np.random.default_rng(0)
        mean, std = p.mean.numpy(), p.std.numpy()
        size = 1 + np.argsort(np.argsort(std)) * rng.uniform(0.5, 1.5, size=len(std))
        y = mean + size * rng.choice([-1, 1], size=len(std))
        y[int(np.argmin(std))] += 5000.0
        found = findings.confidence_and_error(dataclasses.replace(facts, y=y))
        assert found.severity == PASS, found.text

    def test_the_statistics_are_those_of_scipy(self):
        from scipy.stats import spearmanr
        from sklearn.metrics import roc_auc_score

        facts = facts_of("diabetes", "hmc")
        found = row_statistics.error_order(facts)
        error = np.abs(facts.y - facts.predictive.mean.numpy())
        assert found.statistic == pytest.approx(spearmanr(facts.predictive.std.numpy(), error).statistic)
        assert found.larger + found.smaller == pytest.approx(1, abs=0.02)
        labels = facts_of("wine", "ensemble")
        y = labels.y.copy()
        y[:8] = (y[:8] + 1) % 3
        other = dataclasses.replace(labels, y=y)
        wrong = labels.predictive.probabilities.numpy().argmax(-1) != y
        area = roc_auc_score(wrong, labels.predictive.total.numpy())
        assert row_statistics.error_order(other).statistic == pytest.approx(2 * area - 1)


def two_classes(case, y):
    """Return a fit whose predictions are the given probabilities of the second class."""
    facts = facts_of("moons", "ensemble")
    case, y = np.asarray(case, dtype=float), np.asarray(y)
    p = torch.from_numpy(np.stack([1 - case, case], 1))

    class Fixed(cr.Predictive):
        def __init__(self):
            super().__init__(facts.predictive.source, facts.predictive.x)

        probabilities = p

    accuracy = float((p.argmax(-1).numpy() == y).mean())
    return dataclasses.replace(facts, predictive=Fixed(), y=y, figures={"accuracy": accuracy}, classes=("no", "fraud"))


class TestClasses:
    def test_a_rare_class_that_is_missed(self):
        """99:1, 5 of 16 cases above one half: not good, and a threshold is proposed."""
        rng = np.random.default_rng(0)
        y = np.zeros(1600, dtype=int)
        y[:16] = 1
        case = rng.uniform(0, 0.02, size=1600)
        case[:5], case[5:16] = 0.8, 0.15
        found = imbalance(two_classes(case, y))
        assert found.severity == WARN
        assert "5 of its 16 rows (recall 31%)" in found.text
        assert "average precision of 1.00" in found.text
        # 1 / (1 + 10) = 0.09 is the first of the thresholds that flags the other 11.
        assert "costs 10 false alarms" in found.recommendations[0].text
        assert "at least 0.09: recall 100%, precision 100%" in found.recommendations[0].text

    def test_an_accuracy_of_the_largest_class_says_nothing(self):
        y = np.array([0] * 95 + [1] * 5)
        found = imbalance(two_classes(np.full(100, 0.05), y))
        assert (found.severity, "No more accurate than always answering no" in found.text) == (WARN, True)
        assert "balanced accuracy 50.0%" in found.text
        even = np.array([0, 1] * 50)
        assert imbalance(two_classes(np.where(even == 1, 0.9, 0.2), even)) is None

    def test_predicted_frequencies(self):
        y = np.array([0] * 180 + [1] * 20)
        assert class_frequencies(two_classes(np.full(200, 0.1), y)) is None
        assert class_frequencies(two_classes(np.full(200, 0.13), y)) is None
        off = two_classes(np.full(200, 0.5), y)
        found = class_frequencies(off)
        assert (found.severity, "fraud 50.0% predicted, 10.0% observed" in found.text) == (WARN, True)
        weighted = class_frequencies(dataclasses.replace(off, class_weight="balanced"))
        assert (weighted.severity, "reweighted by --class-weight balanced" in weighted.text) == (NOTE, True)


@pytest.mark.parametrize(
    "on, kind, count",
    [
        ("held-out", "held-out rows", "88 held-out rows"),
        ("cross-validated", "cross-validated rows", "88 cross-validated rows"),
        ("training", "training rows", "88 of the training rows"),
        ("new", "rows of other.csv", "88 rows of other.csv"),
    ],
)
def test_pages_name_the_rows_behind_the_numbers(on, kind, count):
    facts = dataclasses.replace(facts_of("diabetes", "hmc"), on=on, evaluated="other.csv" if on == "new" else "")
    assert (evaluated_rows.kind_of_rows(facts), evaluated_rows.count_of_rows(facts)) == (kind, count)
    text = report.render(report.fit_page(facts))
    assert f"evaluated on {count}" in text
    assert evaluated_rows.origin(facts) in text
    # The traces of chains belong to the fit behind the predictions.
    assert ("Prediction for" in text) == (on != "cross-validated")
