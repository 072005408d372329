"""Comparisons: gradient boosting beside the methods, and recommendations that never name an unreliable one."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

from credibly import report
from credibly.predictive.fixed import gaussian_predictive
from credibly.report import reliability
from credibly.report.comparison import BOOSTING_LABEL
from credibly.tables.boosting import BoostingFit
from html_page import check_self_contained
from tabular import facts_of


def normal(like, offset, std, **fields):
    """Return a fit that predicts N(y + offset, std^2) around the observed values."""
    offsets = torch.from_numpy(np.broadcast_to(np.asarray(offset, float), like.y.shape).copy())
    p = gaussian_predictive(torch.from_numpy(np.asarray(like.y, float)) + offsets, torch.full((len(like.y),), std))
    figures = like.figures | {"coverage": 0.9, "log_density": float(p.log_prob(like.y).mean())}
    return dataclasses.replace(like, predictive=p, figures=figures, diagnostics=None, **fields)


@pytest.fixture(scope="module")
def like():
    return facts_of("diabetes", "ensemble")


@pytest.fixture(scope="module")
def noise(like):
    """Return errors that make N(0, 50^2) calibrated at every level."""
    from scipy.stats import norm

    n = len(like.y)
    return np.random.default_rng(0).permutation(norm.ppf((np.arange(n) + 0.5) / n, scale=50.0))


def off(facts):
    """Return the same fit with intervals that cover half of the values."""
    return dataclasses.replace(facts, figures=facts.figures | {"coverage": 0.5})


@pytest.mark.usefixtures("no_drawing")
class TestRecommendation:
    def test_the_reliable_fit_with_the_highest_log_density(self, like, noise):
        good, worse = normal(like, noise, 50.0), normal(like, 1.5 * noise, 75.0)
        assert reliability.doubts(good) == reliability.doubts(worse) == ()
        assert reliability.recommended({"worse": worse, "good": good}) == "good"
        assert reliability.recommended({"worse": worse, "good": off(good)}) == "worse"
        assert reliability.recommended({"worse": off(worse), "good": off(good)}) is None
        said = reliability.recommendation_text({"worse": off(worse), "good": off(good)})
        assert said == ["No method is recommended: all are unreliable here (see the verdicts)."]

    def test_chains_that_have_not_mixed_are_not_recommended(self, noise):
        hmc = facts_of("diabetes", "hmc")
        unmixed = dataclasses.replace(normal(hmc, noise, 50.0), diagnostics=hmc.diagnostics)
        assert not hmc.diagnostics.ok
        (finding,) = reliability.doubts(unmixed)
        assert "not explored well enough" in finding.text
        assert reliability.recommended({"hmc": unmixed}) is None
        worse = normal(hmc, 1.2 * noise, 60.0)
        assert reliability.recommended({"hmc": unmixed, "map": worse}) == "map"
        section = report.compare_page({"hmc": unmixed, "map": worse}).sections[0]
        assert [(row[0], row[-1]) for row in section.table.rows] == [("hmc", "no"), ("map", "yes")]
        assert section.findings[0].startswith("Recommended: map,")
        assert "Highest log density: hmc. It is unreliable here (see its verdict below)." in section.findings

    @pytest.mark.parametrize(
        "offset, std, said",
        [
            (2.0, 100.0, r"better by 0\.\d+ ± 0\.\d+ nats per row"),
            (0.5, 25.0, r"worse by 0\.\d+ ± 0\.\d+ nats per row"),
            (-1.0, 50.0, r"(better|worse) by 0\.000 ± 0\.\d+ nats per row, which may be chance"),
        ],
    )
    def test_against_boosting(self, like, noise, offset, std, said):
        good, boosting = normal(like, noise, 50.0), normal(like, offset * noise, std, method="boosting")
        found = reliability.recommendation_text({"good": good}, boosting)
        assert re.fullmatch(f"Against gradient boosting, the model to beat, good is {said}.", found[1])

    def test_the_lead_is_paired_by_row(self, like, noise):
        one, two = normal(like, noise, 50.0), normal(like, 2 * noise, 100.0)
        gap = (one.predictive.log_prob(like.y) - two.predictive.log_prob(like.y)).numpy()
        lead = reliability.lead_over(one, two)
        assert lead.mean == pytest.approx(gap.mean())
        assert lead.error == pytest.approx(gap.std(ddof=1) / np.sqrt(len(gap)))


class TestBoosting:
    def test_it_has_a_row_everywhere(self, like, noise):
        p = normal(like, noise, 50.0).predictive
        fit = BoostingFit(p, like.y, like.figures, 1.5)
        summary = report.boosting_summary(like, fit)
        assert (summary.seconds, summary.diagnostics, summary.ood) == (1.5, None, None)
        page = report.compare_page({"ensemble": like}, boosting=summary)
        for section in page.sections:
            if section.table is not None:
                assert {row[0] for row in section.table.rows} == {"ensemble", BOOSTING_LABEL}, section.heading
        assert "which is not Bayesian" in page.lead
        check_self_contained(report.render(page))

    def test_classes(self):
        from credibly.predictive.fixed import categorical_predictive

        like = facts_of("wine", "ensemble")
        chance = torch.full((len(like.y), len(like.classes)), 1 / len(like.classes))
        fit = BoostingFit(categorical_predictive(chance), like.y, like.figures, 1.0)
        page = report.compare_page({"ensemble": like}, None, report.boosting_summary(like, fit))
        assert any(row[0] == BOOSTING_LABEL for row in page.sections[0].table.rows)
        check_self_contained(report.render(page))


def test_results_are_computed_once_per_fit(like, noise, monkeypatch):
    from credibly.predictive.base import Predictive

    calls = []
    plain = Predictive.log_prob
    monkeypatch.setattr(Predictive, "log_prob", lambda self, y: calls.append(self) or plain(self, y))
    fresh = normal(like, noise, 50.0)
    calls.clear()
    report.assess(fresh)
    report.assess(fresh)
    report.fit_page(fresh)
    assert len(calls) == 1
