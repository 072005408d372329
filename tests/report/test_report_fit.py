"""Pages of fits: every sentence follows from the numbers, and changes with them."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch

import credibly as cr
from credibly import report
from credibly.diagnostics.verdict import judge as judge_chains
from credibly.report import assessment as judgement
from credibly.report import comparison
from credibly.report import metric_columns as figures
from credibly.report import row_statistics as evidence
from credibly.report.assessment import CARE, FOR, NOTE, STOP
from html_page import check_self_contained
from tabular import facts_of


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
    """The same fit with chains that have these figures."""
    space = dataclasses.replace(facts.diagnostics.functions, rhat_most=rhat, rhat_worst=rhat, ess_most=ess)
    ok, verdict = judge_chains(4, space, space, (0.8,) * 4, divergences, (e_bfmi,) * 4)
    found = dataclasses.replace(
        facts.diagnostics, chains=4, functions=space, weights=space, divergences=divergences, e_bfmi=(e_bfmi,) * 4, still=(), ok=ok,
        verdict=verdict,
    )  # fmt: skip
    return changed(facts, diagnostics=found)


class TestJudgement:
    @pytest.mark.parametrize(
        "held, weight, word",
        [
            (0.9, FOR, "hold 90.0%"),
            (0.83, CARE, "Overconfident"),
            (0.6, STOP, "Overconfident"),
            (1.0, NOTE, "Cautious"),
        ],
    )
    def test_coverage_is_held_against_its_binomial_error(self, diabetes, held, weight, word):
        found = judgement._coverage(changed(diabetes, {"coverage": held}))
        assert found.weight == weight
        assert word in found.words
        assert "with 88 rows, 84% to 96% is within chance" in found.words

    def test_the_same_coverage_is_chance_with_few_rows(self, diabetes):
        few = changed(diabetes, {"coverage": 0.83}, y=diabetes.y[:20])
        assert judgement._coverage(few).weight == FOR

    def test_lower_levels_count_too(self, hmc):
        p = hmc.predictive
        lower, upper = (edge.numpy() for edge in p.interval(0.85))  # all just inside 90%, none inside 80%
        outside = changed(hmc, y=np.where(np.arange(len(p)) % 2, lower, upper))
        found = judgement._other_levels(outside)
        assert found.weight == CARE
        assert "the 50% intervals hold 0.0%" in found.words
        assert "the 80% intervals hold 0.0%" in found.words
        assert "--noise heteroscedastic" in found.steps[0].command
        assert judgement._other_levels(changed(hmc, y=p.mean.numpy())) is None

    def test_what_was_done_is_not_advised(self, hmc, diabetes):
        done = facts_of("diabetes", "ensemble", noise="heteroscedastic")
        low = {"coverage": 0.5}
        assert ["--noise" in step.command for step in judgement._coverage(changed(diabetes, low)).steps] == [
            True,
            False,
        ]
        (step,) = judgement._coverage(changed(done, low)).steps  # HMC, with the noise as it was
        assert "--method hmc --noise heteroscedastic" in step.command
        assert judgement._changing_noise(done) is None
        assert ["hmc" in step.command for step in judgement._coverage(changed(hmc, low)).steps] == [
            True
        ]  # its noise alone

    def test_more_classes_in_a_set_than_promised_is_no_fault(self, wine):
        assert judgement._coverage(changed(wine, {"coverage": 1.0})).weight == FOR
        assert judgement._coverage(changed(wine, {"coverage": 0.5})).weight == STOP

    @pytest.mark.parametrize(
        "base, weight, word", [(-50.0, FOR, "Better than always"), (0.0, STOP, "No better than always")]
    )
    def test_the_baseline(self, diabetes, base, weight, word):
        found = judgement._baseline(changed(diabetes, baseline={"log_density": base, "rmse": 77.0}))
        assert found.weight == weight
        assert word in found.words
        assert figures.number(base) in found.words

    def test_a_lead_within_its_error_is_none(self, diabetes):
        own = diabetes.figures["log_density"]
        error = evidence.standard_error(evidence.density_of_rows(diabetes))
        near, far = (changed(diabetes, baseline={"log_density": own - times * error}) for times in (1.9, 2.1))
        assert (judgement._baseline(near).weight, judgement._baseline(far).weight) == (CARE, FOR)

    def test_a_value_that_was_held_impossible(self, diabetes):
        assert judgement._baseline(changed(diabetes, {"log_density": -math.inf})).weight == STOP

    def test_what_is_missing_is_not_spoken_of(self, diabetes):
        bare = dataclasses.replace(diabetes, figures={}, baseline={}, ood=None, ood_far=None)
        for check in (
            judgement._coverage,
            judgement._baseline,
            judgement._confidence,
            judgement._chains,
            judgement._strange_rows,
        ):
            assert check(bare) is None
        words = " ".join(report.judge(bare))
        assert "coverage" not in words.replace("a coverage of 90% can only be known", "")
        assert "AUROC" not in words
        assert "chains" not in words
        report.render(report.fit_page(bare))

    @pytest.mark.parametrize("right, weight, word", [(0.2, STOP, "Too sure"), (1.0, None, "")])
    def test_confidence(self, wine, right, weight, word):
        sure, _, error = evidence.confidence_gap(wine)
        found = judgement._confidence(changed(wine, {"accuracy": right}))
        expected = weight if weight is not None else CARE if right - sure > max(4 * error, 0.1) else NOTE
        assert found.weight == expected
        assert word in found.words
        assert judgement._confidence(changed(wine, {"accuracy": sure})).weight == FOR

    @pytest.mark.parametrize(
        "chains, weight, word, option",
        [
            ({}, FOR, "chains agree (R-hat up to 1.003", ""),
            ({"rhat": 1.3}, STOP, "R-hat up to 1.30", "--set draws=120 --set warmup=120"),
            ({"rhat": 1.07}, CARE, "R-hat up to 1.07", "--set draws=60 --set warmup=60"),
            ({"ess": 130.0}, CARE, "worth only 130 independent", "--set draws=120"),
            ({"divergences": 7}, CARE, "7 of its trajectories diverged", "--set target_accept=0.95"),
            ({"e_bfmi": 0.1}, CARE, "E-BFMI 0.10", "--set warmup=60"),
        ],
    )
    def test_chains(self, hmc, chains, weight, word, option):
        found = judgement._chains(with_chains(hmc, **chains))
        assert found.weight == weight
        assert word in found.words
        assert [option in step.command for step in found.steps] == [True] * bool(option)

    def test_a_point_estimate_is_told_to_have_no_doubt(self, point, diabetes):
        found = judgement._doubt(point)
        assert found.weight == CARE
        assert "no epistemic uncertainty" in found.words
        assert "--method hmc" in found.steps[0].command
        assert judgement._doubt(diabetes) is None

    def test_rows(self, diabetes):
        assert judgement._rows_judged_on(diabetes).weight == NOTE
        assert judgement._rows_judged_on(changed(diabetes, y=diabetes.y[:10])).weight == CARE
        assert judgement._rows_judged_on(changed(diabetes, y=np.zeros(200))) is None
        trained = judgement._rows_judged_on(changed(diabetes, on="training"))
        assert (trained.weight, "--holdout 0.2" in trained.steps[0].command) == (CARE, True)

    def test_size(self, diabetes):
        assert judgement._size(changed(diabetes, rows=20)).weight == CARE
        assert judgement._size(changed(diabetes, rows=60)).weight == NOTE
        assert judgement._size(changed(diabetes, rows=354, parameters=100)) is None
        assert "551 parameters for 354 rows" in judgement._size(changed(diabetes, parameters=551)).words
        assert judgement._size(changed(diabetes, parameters=551, method="mle")).weight == CARE

    def test_strange_rows(self, diabetes):
        rng = np.random.default_rng(0)
        inside = rng.uniform(size=100)
        apart = judgement._strange_rows(changed(diabetes, ood=inside, ood_far=np.full(100, 2.0)))
        alike = judgement._strange_rows(changed(diabetes, ood=inside, ood_far=rng.uniform(size=100)))
        assert (apart.weight, alike.weight) == (FOR, NOTE)
        assert "100 of 100 times" in apart.words
        assert "Do not rely on the ood column" in alike.words

    def test_error_of_the_area_is_that_of_simulations(self, diabetes):
        rng = np.random.default_rng(1)
        areas, errors = [], []
        for _ in range(200):
            shifted = changed(diabetes, ood=rng.exponential(size=40), ood_far=2 * rng.exponential(size=60))
            area, error = evidence.told_apart(shifted)
            areas.append(area)
            errors.append(error)
        assert np.mean(errors) == pytest.approx(np.std(areas), rel=0.15)

    def test_noise_that_changes(self):
        facts = facts_of("wave", settings={"members": 3, "steps": 200})
        mean = facts.predictive.mean.numpy()
        # the size of the error follows the prediction, in the order of the rows' means
        rank = np.argsort(np.argsort(mean))
        sign = np.where(np.arange(len(mean)) % 2, 1.0, -1.0)
        growing = changed(facts, y=mean + sign * (1.0 + rank))
        assert evidence.error_with_size(growing) > 0.9
        assert judgement._changing_noise(growing) is None  # 40 rows are too few to say
        big = _repeated(growing, 2)
        found = judgement._changing_noise(big)
        assert found.weight == CARE
        assert "grow with the predicted value" in found.words
        assert "--noise heteroscedastic" in found.steps[0].command

    def test_heavy_tails(self, diabetes):
        y = diabetes.predictive.mean.numpy().copy()
        y[:3] += 6 * diabetes.predictive.std.numpy()[:3]
        found = judgement._tails(changed(diabetes, y=y))
        assert "3 of 88 values" in found.words
        assert "--noise student" in found.steps[0].command
        assert judgement._tails(changed(diabetes, y=diabetes.predictive.mean.numpy())) is None

    def test_unsure_is_wrong(self, diabetes):
        spread = diabetes.predictive.total.numpy()
        unsure = spread > np.median(spread)
        mean = diabetes.predictive.mean.numpy()
        sign = np.where(np.arange(len(mean)) % 2, 1.0, -1.0)
        noise = np.random.default_rng(0).uniform(0.9, 1.1, size=len(mean))
        right_way = judgement._unsure_is_wrong(changed(diabetes, y=mean + sign * noise * np.where(unsure, 100, 1)))
        wrong_way = judgement._unsure_is_wrong(changed(diabetes, y=mean + sign * noise * np.where(unsure, 1, 100)))
        assert (right_way.weight, wrong_way.weight) == (FOR, CARE)
        assert judgement._unsure_is_wrong(changed(diabetes, y=mean)) is None

    def test_the_heaviest_finding_decides(self, diabetes):
        fine = changed(diabetes, {"coverage": 0.9}, baseline={"log_density": -50.0})
        worse = {held: report.assess(changed(fine, {"coverage": held})) for held in (0.9, 0.83, 0.5)}
        assert worse[0.5].verdict == "do not trust"
        assert worse[0.83].verdict == "use with care"
        assert worse[0.5].findings[0].weight == STOP
        rank = [judgement.VERDICTS.index(one.verdict) for one in worse.values()]
        assert rank == sorted(rank)
        for one in worse.values():
            assert one.headline.lower().startswith(one.verdict)
            weights = [f.weight for f in one.findings]
            assert weights == sorted(weights, key=judgement.ORDER.index)
            assert len(set(one.steps)) == len(one.steps)

    def test_a_good_fit_is_called_good(self, hmc):
        rng = np.random.default_rng(3)
        p = hmc.predictive
        y = p.mean.numpy() + p.std.numpy() * rng.normal(size=len(p))
        good = with_chains(changed(hmc, y=y, figures=cr.evaluate(p, y), ood=None, ood_far=None))
        found = report.assess(good)
        assert found.verdict == "good", found.reasons
        assert found.steps == ()

    def test_commands_survive_a_shell(self, diabetes):
        import shlex

        odd = changed(diabetes, table="my table's.csv", target="price in $", on="training")
        words = shlex.split(judgement._rows_judged_on(odd).steps[0].command)
        assert words[:5] == ["credibly", "fit", "my table's.csv", "--target", "price in $"]


def _repeated(facts, times):
    """The same rows several times over."""
    from credibly.core.inputs import map_inputs

    p = facts.predictive
    longer = cr.Predictive(p._source, map_inputs(lambda t: torch.cat([t] * times), p._x))
    return changed(facts, predictive=longer, y=np.tile(facts.y, times))


def headings(page):
    return [section.heading for section in page.sections]


class TestFitPage:
    def test_regression_by_chains(self, hmc):
        page = report.fit_page(hmc)
        assert page.sections[0].heading.startswith("Verdict: ")
        assert "Did the chains mix?" in headings(page)
        assert "Did the training settle?" not in headings(page)
        names = {p.name for s in page.sections for p in s.pictures}
        assert names == {"observed", "coverage", "parts", "ood", "risk", "trace", "ranks", "rhat"}
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

    def test_free_energy_of_bbb(self):
        facts = facts_of("diabetes", "bbb")
        section = next(s for s in report.fit_page(facts).sections if s.heading == "Did the training settle?")
        assert section.pictures[0].title == "Free energy"
        elbo = facts.posterior.record.history["elbo"]
        assert f"Evidence lower bound: {figures.number(elbo)}" in section.pictures[0].caption

    @pytest.mark.parametrize(
        "name, pictures",
        [("wave", {"fit"}), ("steps", {"fit"}), ("plane", {"fit", "fit-doubt"}), ("moons", {"fit", "fit-doubt"})],
    )
    def test_the_fit_is_drawn_where_it_can_be(self, name, pictures):
        page = report.fit_page(facts_of(name))
        section = next(s for s in page.sections if s.heading == "The fit")
        assert {p.name for p in section.pictures} == pictures
        assert ("age" if name in ("wave", "steps") else "height") in section.pictures[0].svg
        check_self_contained(report.render(page))

    def test_a_point_estimate_has_no_doubt_to_draw(self, point):
        page = report.fit_page(point)
        section = next(s for s in page.sections if s.heading == "What does it not know?")
        assert section.pictures == ()
        assert "no epistemic part" in section.findings[0]

    def test_levels_of_coverage_are_counted(self, diabetes):
        section = next(s for s in report.fit_page(diabetes).sections if s.heading == "Is it calibrated?")
        lower, upper = (edge.numpy() for edge in diabetes.predictive.interval(0.8))
        share = float(((lower <= diabetes.y) & (diabetes.y <= upper)).mean())
        assert section.table.rows[1][:2] == ("80%", f"{share:.1%}")

    def test_a_picture_of_many_rows_shows_some(self, diabetes):
        many = _repeated(diabetes, 6)
        shown, y = evidence.some_rows(many)
        assert len(shown) == len(y) == evidence.POINTS
        assert shown.mean.numpy() == pytest.approx(
            many.predictive.mean.numpy()[np.linspace(0, 527, 400).round().astype(int)]
        )

    def test_names_from_a_table_cannot_break_out(self, wine):
        evil = "<script>alert(1)</script>"
        odd = changed(wine, table=evil, target=evil, classes=(evil, "b", "c"), columns=((evil, evil, evil),))
        page = check_self_contained(report.render(report.fit_page(odd)))
        assert "script" not in page.tags

    def test_many_columns_are_cut_short(self, diabetes):
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

    def test_a_method_is_level_with_its_twin(self, hmc, point):
        said = " ".join(report.compare_page({"hmc": hmc, "twin": hmc, "map": point}).sections[0].findings)
        assert "hmc cannot be told from twin" in said

    def test_classification(self, wine):
        page = report.compare_page({"ensemble": wine, "map": facts_of("wine", "map")})
        assert {p.name for s in page.sections for p in s.pictures} == {
            "compare-density", "compare-accuracy", "compare-held", "compare-reliability"
        }  # fmt: skip
        check_self_contained(report.render(page))

    def test_one_method_alone_and_none(self, point):
        assert report.compare_page({"map": point}).sections[0].findings == ()
        with pytest.raises(cr.InputError, match="at least one fit"):
            report.compare_page({})

    def test_other_rows_cannot_be_compared(self, point, wine, diabetes):
        with pytest.raises(cr.InputError, match="wine is of other rows"):
            report.compare_page({"map": point, "wine": wine})
        with pytest.raises(cr.InputError, match="other rows"):
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
def test_numbers_have_about_four_digits(value, shown):
    assert figures.number(value) == shown


def test_every_finding_of_real_fits_has_its_number(hmc, wine, point):
    """Nothing is said without one."""
    for facts in (hmc, wine, point):
        for finding in report.assess(facts).findings:
            assert re.search(r"\d", finding.words) or "one set of weights" in finding.words
