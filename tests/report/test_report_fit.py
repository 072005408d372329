"""Reports of fits and comparisons: every sentence follows from the metrics and changes with them."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch

import credibly as cr
from conftest import undrawn
from credibly import report
from credibly.diagnostics.verdict import judge as judge_chains
from credibly.report import assessment, comparison, findings, row_statistics
from credibly.report.finding import FAIL, NOTE, PASS, WARN
from credibly.report.metric_columns import format_number
from credibly.report.sampling import sampling
from html_page import check_self_contained
from tabular import facts_of
from tests.conformal.simulated import predictive


@pytest.fixture(scope="module")
def diabetes():
    return facts_of("diabetes", "ensemble")


@pytest.fixture(scope="module")
def hmc():
    return facts_of("diabetes", "hmc")


@pytest.fixture(scope="module")
def wine():
    return facts_of("wine", "ensemble")


@pytest.fixture(scope="module")
def point():
    return facts_of("diabetes", "map")


@pytest.fixture(scope="module")
def fits(diabetes, hmc, point):
    return {"ensemble": diabetes, "hmc": hmc, "map": point}


def changed(facts, figures=None, **fields):
    return dataclasses.replace(facts, figures=facts.figures | (figures or {}), **fields)


def with_chains(facts, *, divergences=0, ess=1000.0, rhat=1.003, e_bfmi=0.9):
    """Return the same fit with the given diagnostics."""
    space = dataclasses.replace(facts.diagnostics.functions, rhat_most=rhat, rhat_worst=rhat, ess_most=ess)
    ok, verdict = judge_chains(4, space, space, (0.8,) * 4, divergences, (e_bfmi,) * 4)
    found = dataclasses.replace(
        facts.diagnostics,
        chains=4,
        functions=space,
        weights=space,
        divergences=divergences,
        e_bfmi=(e_bfmi,) * 4,
        still=(),
        ok=ok,
        verdict=verdict,
        quantities={},
    )
    return changed(facts, diagnostics=found)


class TestFindings:
    @pytest.mark.parametrize(
        "observed, severity, word",
        [
            (0.9, PASS, "cover 90.0%"),
            (0.84, PASS, "cover 84.0%"),
            (0.8, WARN, "Overconfident"),
            (0.6, FAIL, "Overconfident"),
            (1.0, NOTE, "Underconfident"),
        ],
    )
    def test_coverage_is_compared_with_its_binomial_error(self, diabetes, observed, severity, word):
        found = findings.coverage(changed(diabetes, {"coverage": observed}))
        assert found.severity == severity
        assert word in found.text
        assert "with 88 rows, 81.8% to 96.6% is within chance" in found.text

    def test_the_same_coverage_is_within_chance_with_few_rows(self, diabetes):
        few = changed(diabetes, {"coverage": 0.75}, y=diabetes.y[:20])
        assert findings.coverage(few).severity == PASS

    def test_a_negligible_gap_is_no_warning_however_many_rows_show_it(self, diabetes):
        many = _repeated(diabetes, 200)
        assert findings.coverage(changed(many, {"coverage": 0.885})).severity == NOTE
        assert findings.coverage(changed(many, {"coverage": 0.87})).severity == WARN

    def test_other_levels(self, hmc):
        p = hmc.predictive
        # All values just inside the 90% interval, none inside the 80% one.
        lower, upper = (edge.numpy() for edge in p.interval(0.85))
        outside = changed(hmc, y=np.where(np.arange(len(p)) % 2, lower, upper))
        found = findings.other_levels(outside)
        assert found.severity == WARN
        assert "the 50% intervals cover 0.0%" in found.text
        assert "the 80% intervals cover 0.0%" in found.text
        assert "--noise heteroscedastic" in found.recommendations[0].command
        # Every value at the median: far too wide.
        wide = findings.other_levels(changed(hmc, y=p.quantile(0.5).numpy()))
        assert (wide.severity, "the 50% intervals cover 100.0%" in wide.text) == (WARN, True)
        even = changed(hmc, y=_at_quantiles(p))
        assert findings.other_levels(even) is None

    def test_nothing_already_done_is_recommended(self, hmc, diabetes):
        done = facts_of("diabetes", "ensemble", noise="heteroscedastic")
        low = {"coverage": 0.5}
        assert ["--noise" in one.command for one in findings.coverage(changed(diabetes, low)).recommendations] == [
            True,
            False,
        ]
        (one,) = findings.coverage(changed(done, low)).recommendations  # HMC, with the noise as it was
        assert "--method hmc --noise heteroscedastic" in one.command
        assert findings.changing_noise(done) is None
        assert ["hmc" in one.command for one in findings.coverage(changed(hmc, low)).recommendations] == [
            True
        ]  # its noise alone

    def test_prediction_sets_that_cover_more_than_90_percent_pass(self, wine):
        assert findings.coverage(changed(wine, {"coverage": 1.0})).severity == PASS
        assert findings.coverage(changed(wine, {"coverage": 0.5})).severity == FAIL

    @pytest.mark.parametrize(
        "base, severity, word", [(-50.0, PASS, "Better than always"), (0.0, FAIL, "Worse than always")]
    )
    def test_baseline(self, diabetes, base, severity, word):
        found = findings.baseline(changed(diabetes, baseline={"log_density": base, "rmse": 77.0}))
        assert found.severity == severity
        assert word in found.text
        assert format_number(base) in found.text

    def test_a_larger_error_is_no_improvement(self, diabetes):
        found = findings.baseline(changed(diabetes, {"rmse": 80.0}, baseline={"log_density": -50.0, "rmse": 77.0}))
        assert found.text.endswith("; but the RMSE is larger, 80.00 vs 77.00: some means are far off.")

    def test_intervals_of_counts_cover_more_without_being_too_wide(self, diabetes):
        def finding(rate, y):
            p = predictive(torch.full((1, 400, 1), math.log(rate)), cr.likelihoods.Poisson(squeeze=True))
            return findings.coverage(changed(diabetes, {"coverage": 0.985}, predictive=p, y=np.asarray(y)))

        found = finding(0.5, torch.poisson(torch.full((400,), 0.5), generator=torch.Generator().manual_seed(0)))
        assert found.severity == PASS
        assert found.text.startswith("The 90% intervals cover 98.5% of the values, more than 90% because they end at")
        assert "Underconfident" in finding(30.0, np.full(400, 30.0)).text

    def test_a_gain_within_its_error_is_a_warning(self, diabetes):
        own = diabetes.figures["log_density"]
        error = row_statistics.standard_error(row_statistics.log_density_per_row(diabetes))
        near, far = (changed(diabetes, baseline={"log_density": own - times * error}) for times in (1.9, 2.1))
        assert (findings.baseline(near).severity, findings.baseline(far).severity) == (WARN, PASS)

    def test_the_gain_over_the_baseline_is_paired_by_row(self, diabetes):
        """Two densities that differ by the same amount in every row have no error at all."""
        own = row_statistics.log_density_per_row(diabetes).numpy()
        behind = {"log_density": diabetes.figures["log_density"] - 0.01}
        assert findings.baseline(changed(diabetes, baseline=behind)).severity == WARN
        paired = changed(diabetes, baseline=behind, baseline_density=own - 0.01)
        assert findings.baseline(paired).severity == PASS

    def test_zero_predicted_probability_fails(self, diabetes):
        assert findings.baseline(changed(diabetes, {"log_density": -math.inf})).severity == FAIL

    def test_missing_metrics_are_not_mentioned(self, diabetes):
        bare = dataclasses.replace(diabetes, figures={}, baseline={}, ood=None, ood_far=None)
        for check in (
            findings.coverage,
            findings.baseline,
            findings.confidence,
            findings.bias,
            findings.outliers,
            findings.unusual_inputs,
        ):
            assert check(bare) is None
        assert sampling(bare) is None
        words = " ".join(report.assess(bare).sentences)
        assert "coverage" not in words
        assert "AUROC" not in words
        assert "chains" not in words
        report.render(report.fit_page(bare))

    def test_confidence(self, wine):
        sure = row_statistics.confidence_gap(wine)[0]
        low = findings.confidence(changed(wine, {"accuracy": 0.2}))
        assert (low.severity, "Overconfident" in low.text) == (FAIL, True)
        assert findings.confidence(changed(wine, {"accuracy": sure})).severity == PASS
        # 12 of 36 rows are right where 35.3 are expected: found, but one row fewer than expected is chance.
        near = round(sure * len(wine.y)) - 1
        assert findings.confidence(changed(wine, {"accuracy": near / len(wine.y)})).severity == PASS

    @pytest.mark.parametrize(
        "chains, severity, word, option",
        [
            ({}, PASS, "chains agree (R-hat up to 1.003", ""),
            ({"rhat": 1.3}, WARN, "R-hat up to 1.30", "--set draws=120 --set warmup=120"),
            ({"rhat": 1.07}, WARN, "R-hat up to 1.07", "--set draws=60 --set warmup=60"),
            ({"ess": 230.0}, NOTE, "230 effective draws (400 recommended)", "--set draws=60"),
            ({"ess": 50.0}, WARN, "50 effective draws", "--set draws=240"),
            ({"divergences": 7}, WARN, "7 divergent trajectories", "--set target_accept=0.95"),
            ({"e_bfmi": 0.1}, NOTE, "E-BFMI 0.10", "--set warmup=60"),
        ],
    )
    def test_chains(self, hmc, chains, severity, word, option):
        _, found = sampling(with_chains(hmc, **chains))
        assert found.severity == severity
        assert word in found.text
        assert [option in one.command for one in found.recommendations] == [True] * bool(option)

    def test_a_point_estimate_has_no_epistemic_uncertainty(self, point, diabetes):
        found = findings.epistemic(point)
        assert found.severity == WARN
        assert "No epistemic uncertainty" in found.text
        assert "--method hmc" in found.recommendations[0].command
        assert findings.epistemic(diabetes) is None

    def test_held_out_rows(self, diabetes):
        assert findings.held_out_rows(diabetes).severity == NOTE
        assert findings.held_out_rows(changed(diabetes, y=diabetes.y[:10])).severity == WARN
        assert findings.held_out_rows(changed(diabetes, y=np.zeros(200))) is None
        trained = findings.held_out_rows(changed(diabetes, on="training"))
        assert (trained.severity, "--holdout 0.2" in trained.recommendations[0].command) == (WARN, True)

    def test_training_size(self, diabetes):
        assert findings.training_size(changed(diabetes, rows=20)).severity == WARN
        assert findings.training_size(changed(diabetes, rows=60)).severity == NOTE
        assert findings.training_size(changed(diabetes, rows=354, parameters=100)) is None
        assert "551 parameters for 354 rows" in findings.training_size(changed(diabetes, parameters=551)).text
        assert findings.training_size(changed(diabetes, parameters=551, method="mle")).severity == WARN
        ensemble = {"parameters": 551, "method": "ensemble"}
        assert "follow the prior" in findings.training_size(changed(diabetes, **ensemble)).text
        unregularised = changed(diabetes, **ensemble, settings={"prior": False, "anchored": False})
        assert "their random initialisation" in findings.training_size(unregularised).text

    def test_unusual_inputs(self, diabetes):
        rng = np.random.default_rng(0)
        inside = rng.uniform(size=100)
        apart = findings.unusual_inputs(changed(diabetes, ood=inside, ood_far=np.full(100, 2.0)))
        alike = findings.unusual_inputs(changed(diabetes, ood=inside, ood_far=rng.uniform(size=100)))
        assert (apart.severity, alike.severity) == (PASS, NOTE)
        assert "100 of 100 times" in apart.text
        assert "Do not rely on the ood column" in alike.text

    def test_standard_error_of_auroc_matches_simulations(self, diabetes):
        rng = np.random.default_rng(1)
        areas, errors = [], []
        for _ in range(200):
            shifted = changed(diabetes, ood=rng.exponential(size=40), ood_far=2 * rng.exponential(size=60))
            area, error = row_statistics.ood_auroc(shifted)
            areas.append(area)
            errors.append(error)
        assert np.mean(errors) == pytest.approx(np.std(areas), rel=0.15)

    def test_changing_noise(self):
        facts = facts_of("wave", settings={"members": 3, "steps": 200})
        mean = facts.predictive.mean.numpy()
        # The absolute error increases with the rank of the predicted mean.
        rank = np.argsort(np.argsort(mean))
        sign = np.where(np.arange(len(mean)) % 2, 1.0, -1.0)
        growing = changed(facts, y=mean + sign * (1.0 + rank))
        assert row_statistics.residual_rank_correlation(growing) > 0.9
        # 40 rows are too few.
        assert findings.changing_noise(growing) is None
        big = _repeated(growing, 2)
        found = findings.changing_noise(big)
        assert found.severity == WARN
        assert "grow with the predicted value" in found.text
        assert "--noise heteroscedastic" in found.recommendations[0].command

    def test_outliers(self, diabetes):
        y = _at_quantiles(diabetes.predictive)
        assert findings.outliers(changed(diabetes, y=y)) is None
        for far, severity in ((1, None), (2, NOTE), (4, WARN)):
            y[:far] = diabetes.predictive.mean.numpy()[:far] + 8 * diabetes.predictive.std.numpy()[:far]
            found = findings.outliers(changed(diabetes, y=y))
            if severity is None:
                assert found is None
                continue
            assert found.severity == severity
            assert f"{far} of 88 values" in found.text
            assert "--noise student" in found.recommendations[0].command

    @pytest.mark.parametrize("shift, word", [(1.0, "too low"), (-1.0, "too high")])
    def test_bias(self, diabetes, shift, word):
        p = diabetes.predictive
        y = _at_quantiles(p)
        assert findings.bias(changed(diabetes, y=y)) is None
        found = findings.bias(changed(diabetes, y=y + shift * p.std.numpy()))
        assert (found.severity, word in found.text) == (WARN, True)

    def test_confidence_and_error(self, diabetes):
        total = diabetes.predictive.total.numpy()
        uncertain = total > np.median(total)
        mean = diabetes.predictive.mean.numpy()
        sign = np.where(np.arange(len(mean)) % 2, 1.0, -1.0)
        noise = np.random.default_rng(0).uniform(0.9, 1.1, size=len(mean))
        right_way = findings.confidence_and_error(
            changed(diabetes, y=mean + sign * noise * np.where(uncertain, 100, 1))
        )
        wrong_way = findings.confidence_and_error(
            changed(diabetes, y=mean + sign * noise * np.where(uncertain, 1, 100))
        )
        assert (right_way.severity, wrong_way.severity) == (PASS, WARN)
        assert findings.confidence_and_error(changed(diabetes, y=mean)) is None

    def test_the_most_severe_finding_decides(self, diabetes):
        fine = changed(diabetes, {"coverage": 0.9}, baseline={"log_density": -50.0})
        worse = {observed: report.assess(changed(fine, {"coverage": observed})) for observed in (0.9, 0.8, 0.5)}
        assert worse[0.5].verdict == "do not trust"
        assert worse[0.8].verdict == "use with care"
        assert worse[0.5].findings[0].severity == FAIL
        rank = [assessment.VERDICTS.index(one.verdict) for one in worse.values()]
        assert rank == sorted(rank)
        for one in worse.values():
            assert one.headline.lower().startswith(one.verdict)
            severities = [f.severity for f in one.findings]
            assert severities == sorted(severities, key=assessment.ORDER.index)
            assert len(set(one.recommendations)) == len(one.recommendations)

    def test_a_good_fit(self, hmc):
        rng = np.random.default_rng(3)
        p = hmc.predictive
        y = p.mean.numpy() + p.std.numpy() * rng.normal(size=len(p))
        good = with_chains(changed(hmc, y=y, figures=cr.evaluate(p, y), ood=None, ood_far=None))
        found = report.assess(good)
        assert found.verdict == "good", found.reasons
        assert found.recommendations == ()

    def test_commands_survive_a_shell(self, diabetes):
        import shlex

        odd = changed(diabetes, table="my table's.csv", target="price in $", on="training")
        words = shlex.split(findings.held_out_rows(odd).recommendations[0].command)
        assert words[:5] == ["credibly", "fit", "my table's.csv", "--target", "price in $"]


def _at_quantiles(predictive):
    """Return a target per row at evenly spaced quantiles of the predictive, in a random order: perfectly calibrated."""
    n = len(predictive)
    order = np.random.default_rng(0).permutation(n)
    quantiles = predictive.quantile(tuple((np.arange(n) + 0.5) / n)).numpy()
    return quantiles[order, np.arange(n)]


def _repeated(facts, times):
    """Return the fit with its rows repeated."""
    from credibly.core.inputs import map_inputs

    p = facts.predictive
    longer = cr.Predictive(p.source, map_inputs(lambda t: torch.cat([t] * times), p.x))
    return changed(facts, predictive=longer, y=np.tile(facts.y, times))


def headings(page):
    return [section.heading for section in page.sections]


class TestFitPage:
    def test_regression_by_chains(self, hmc):
        page = report.fit_page(hmc)
        assert page.sections[0].heading.startswith("Verdict: ")
        assert "Did the chains mix?" in headings(page)
        assert "Did training converge?" not in headings(page)
        names = {p.name for s in page.sections for p in s.pictures}
        shown = {"observed", "errors", "coverage", "pit", "parts", "ood", "risk", "trace", "ranks", "rhat"}
        assert names == shown
        text = report.render(page)
        check_self_contained(text)
        for piece in ("diabetes.csv", "354 rows", "98 parameters", "draws=30", "1.2 seconds", "standardised"):
            assert piece in text
        assert f"{hmc.figures['rmse']:.2f}" in text
        assert f"{hmc.baseline['rmse']:.2f}" in text
        assert text == report.render(report.fit_page(hmc))

    def test_classification_by_training(self, wine):
        page = report.fit_page(wine)
        names = {p.name for s in page.sections for p in s.pictures}
        assert {"confusion", "reliability", "training", "ood"} <= names
        assert not names & {"trace", "coverage", "observed"}
        check_self_contained(report.render(page))

    @undrawn()
    def test_free_energy_of_bbb(self):
        facts = facts_of("diabetes", "bbb")
        section = next(s for s in report.fit_page(facts).sections if s.heading == "Did training converge?")
        assert section.pictures[0].title == "Free energy"
        elbo = facts.posterior.record.history["elbo"]
        assert f"Evidence lower bound: {format_number(elbo)}" in section.pictures[0].caption

    @pytest.mark.parametrize(
        "name, pictures",
        [("wave", {"fit"}), ("steps", {"fit"}), ("plane", {"fit", "fit-doubt"}), ("moons", {"fit", "fit-doubt"})],
    )
    def test_the_function_is_plotted_over_one_or_two_inputs(self, name, pictures):
        page = report.fit_page(facts_of(name))
        section = next(s for s in page.sections if s.heading == "The fit")
        assert {p.name for p in section.pictures} == pictures
        assert ("age" if name in ("wave", "steps") else "height") in section.pictures[0].svg
        check_self_contained(report.render(page))

    @undrawn()
    def test_a_point_estimate_has_no_uncertainty_pictures(self, point):
        page = report.fit_page(point)
        section = next(s for s in page.sections if s.heading == "What does it not know?")
        assert section.pictures == ()
        assert "No epistemic uncertainty" in section.findings[0]

    @undrawn()
    def test_coverage_by_level(self, diabetes):
        section = next(s for s in report.fit_page(diabetes).sections if s.heading == "Is it calibrated?")
        lower, upper = (edge.numpy() for edge in diabetes.predictive.interval(0.8))
        share = float(((lower <= diabetes.y) & (diabetes.y <= upper)).mean())
        assert section.table.rows[1][:2] == ("80%", f"{share:.1%}")

    def test_a_scatter_plot_of_many_rows_is_subsampled(self, diabetes):
        many = _repeated(diabetes, 6)
        shown, y = row_statistics.plotted_rows(many)
        assert len(shown) == len(y) == row_statistics.POINTS
        assert shown.mean.numpy() == pytest.approx(
            many.predictive.mean.numpy()[np.linspace(0, 527, 400).round().astype(int)]
        )

    def test_names_from_a_table_are_escaped(self, wine):
        evil = "<script>alert(1)</script>"
        odd = changed(wine, table=evil, target=evil, classes=(evil, "b", "c"), columns=((evil, evil, evil),))
        page = check_self_contained(report.render(report.fit_page(odd)))
        assert "script" not in page.tags

    @undrawn()
    def test_a_long_list_of_columns_is_truncated(self, diabetes):
        many = changed(diabetes, columns=tuple((f"c{i}", "numeric", "") for i in range(100)))
        section = next(s for s in report.fit_page(many).sections if s.heading == "The columns")
        assert len(section.table.rows) == 60
        assert "there are 40 more" in section.text[1]


class TestComparePage:
    def test_every_method_has_a_row_everywhere(self, fits):
        page = report.compare_page(fits)
        for section in page.sections:
            if section.table is not None:
                assert {row[0] for row in section.table.rows} == set(fits), section.heading
        check_self_contained(report.render(page))

    def test_the_ranking_is_paired(self, fits):
        order = comparison.ranking(fits)
        means = [mean for _, mean, _, _ in order]
        assert means == sorted(means, reverse=True)
        best, worst = order[0][0], order[-1][0]
        y = torch.as_tensor(fits[best].y)
        gap = (fits[best].predictive.log_prob(y) - fits[worst].predictive.log_prob(y)).double()
        assert order[-1][2] == pytest.approx(float(gap.mean()))
        assert order[-1][3] == pytest.approx(float(gap.std()) / len(y) ** 0.5)

    @undrawn()
    def test_a_method_is_indistinguishable_from_its_copy(self, hmc, point):
        said = " ".join(report.compare_page({"hmc": hmc, "copy": hmc, "map": point}).sections[0].findings)
        assert "hmc is statistically indistinguishable from copy" in said

    def test_classification(self, wine):
        page = report.compare_page({"ensemble": wine, "map": facts_of("wine", "map")})
        assert {p.name for s in page.sections for p in s.pictures} == {
            "compare-density",
            "compare-accuracy",
            "compare-held",
            "compare-reliability",
        }
        check_self_contained(report.render(page))

    @undrawn()
    def test_one_method_and_none(self, point):
        assert report.compare_page({"map": point}).sections[0].findings == ()
        with pytest.raises(cr.InputError, match="facts must contain at least one fit, got none"):
            report.compare_page({})

    def test_fits_on_different_rows_are_refused(self, point, wine, diabetes):
        with pytest.raises(
            cr.InputError, match="facts must all be evaluated on the same rows of one table, but wine has other rows"
        ):
            report.compare_page({"map": point, "wine": wine})
        with pytest.raises(cr.InputError, match="ensemble has other rows"):
            report.compare_page({"map": point, "ensemble": changed(diabetes, y=diabetes.y[::-1])})


@pytest.mark.parametrize(
    "value, shown",
    [
        (123456.7, "123,457"),
        (52.8163, "52.82"),
        (0.012344, "0.01234"),
        (0.0, "0.000"),
        (-5.39, "-5.390"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_about_four_significant_digits(value, shown):
    assert format_number(value) == shown


def test_every_finding_contains_a_number(hmc, wine, point):
    for facts in (hmc, wine, point):
        for finding in report.assess(facts).findings:
            assert re.search(r"\d", finding.text) or "one set of weights" in finding.text
