"""The demo: its metrics, its comparison with HMC, and the sentences of its page."""

from __future__ import annotations

import dataclasses
import html
import json

import pytest
import torch

import credibly as cr
from conftest import undrawn
from credibly import report
from credibly.demo import fits as demo
from credibly.demo import page as demo_report
from credibly.demo import reference
from credibly.demo.fits import TASKS, demo_settings, run_demo
from credibly.demo.page import demo_page
from credibly.methods import METHODS
from credibly.metrics import evaluation
from credibly.report import pictures
from html_page import check_self_contained

# One set of weights, a linearised posterior and draws.
DRAWN = {"mle", "laplace", "hmc"}
SAMPLERS = {"hmc", "nuts", "chees", "mclmc", "mile", "tempering", "sgld", "sghmc"}


@pytest.fixture(scope="module")
def result(quick_demo):
    return quick_demo


@pytest.fixture(scope="module")
def page(result):
    """The page with its pictures. Those of most methods repeat those of DRAWN with other numbers: left empty."""
    draw = pictures._draw
    repeats = {f"{kind}-{name}" for kind in ("reliability", "gap", "star") for name in METHODS if name not in DRAWN}

    def some(name, paint, size):
        return "<svg></svg>" if name in repeats else draw(name, paint, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "_draw", some)
        return demo_page(result)


@pytest.fixture(scope="module")
def text(page):
    return report.render(page)


class TestDemo:
    def test_every_method_has_a_row_and_its_pictures(self, page, text):
        first, *tasks, close, chains = page.sections
        assert [len(s.pictures) for s in tasks] == [1, len(METHODS), len(METHODS), len(METHODS)]
        for section in (first, *tasks):
            assert [row[0] for row in section.table.rows] == list(METHODS)
        assert (len(close.pictures), len(chains.pictures)) == (1, len(TASKS))
        assert {row[0] for row in close.table.rows} == {*METHODS, "hmc, half against half"} - {"hmc"}
        assert {row[0].split(",")[0] for row in chains.table.rows} == SAMPLERS
        check_self_contained(text)

    def test_metrics_match_the_posteriors(self, result, text):
        known = result.data["diabetes"]
        for name, posterior in result.posteriors["diabetes"].items():
            p = posterior.predict(known.x_test)
            found = result.figures["diabetes"][name]
            y = known.y_test * known.y_std + known.y_mean
            error = (p.mean * known.y_std + known.y_mean - y).double().square().mean().sqrt()
            assert found["rmse"] == pytest.approx(float(error), rel=1e-4)
            density = p.log_prob(known.y_test).double().mean() - torch.tensor(known.y_std).double().log()
            assert found["log_density"] == pytest.approx(float(density), rel=1e-6)
        star = result.data["star_classification"].star
        for name, posterior in result.posteriors["star_classification"].items():
            p = float(posterior.predict(star).mean)
            assert result.figures["star_classification"][name]["probability_at_star"] == pytest.approx(p)
            assert f"probability {p:.3f}" in text

    def test_gradients_are_counted_in_gradients_of_all_rows(self, result, text):
        """150 steps of 128 of 354 rows, of one member or of ten; of SWAG and samplers as their records have it."""
        spent = result.gradients["diabetes"]
        assert spent["mle"] == spent["map"] == spent["bbb"] == round(150 * 128 / 354)
        assert spent["ensemble"] == round(10 * 150 * 128 / 354)
        assert spent["swag"] > spent["map"]
        records = {name: p.record.history for name, p in result.posteriors["diabetes"].items()}
        assert spent["hmc"] == records["hmc"]["gradients"]
        # 4 chains of 200 steps on all rows, one gradient at the start, and four estimates of the curvature.
        assert spent["sghmc"] == 4 * (200 + 1) + 4 * 4 * 12
        assert f">{spent['hmc']}<" in text
        assert result.as_dict()["gradients"]["diabetes"] == spent

    def test_epistemic_uncertainty_in_the_gap(self, result):
        figures = result.figures["gap_regression"]
        assert figures["mle"]["epistemic_in_gap"] == figures["map"]["epistemic_in_gap"] == 0
        assert figures["ensemble"]["epistemic_in_gap"] > figures["ensemble"]["epistemic_on_data"] > 0

    def test_hmc_is_the_reference(self, result):
        """Compare with distances computed here: classes from probabilities, the gap from densities on a fine grid."""
        known = result.data["breast_cancer"]
        p = {name: q.predict(known.x_test).mean for name, q in result.posteriors["breast_cancer"].items()}
        gap = demo.held_out(result.data["gap_regression"])
        y = torch.linspace(-40, 40, 4001)
        few = {name: result.posteriors["gap_regression"][name].predict(gap[:40]) for name in ("map", "hmc")}
        density = {name: torch.stack([p.log_prob(v.expand(40, 1)) for v in y]) for name, p in few.items()}
        far = (density["map"].exp() - density["hmc"].exp()).abs().sum(0) * 0.01
        assert evaluation.compare(few["map"], few["hmc"])["total_variation"] == pytest.approx(
            float(far.mean()), abs=0.01
        )
        for name in METHODS:
            if name != "hmc":
                found = result.against["breast_cancer"][name]
                assert found["total_variation"] == pytest.approx(float((p[name] - p["hmc"]).abs().mean()), abs=1e-6)
                assert found["agreement"] == float(((p[name] > 0.5) == (p["hmc"] > 0.5)).float().mean())
        assert set(result.against["diabetes"]["mle"]) == set(result.against["gap_regression"]["mle"])
        assert set(result.against["diabetes"]["mle"]) == {"total_variation", "mean_shift"}

    def test_the_row_of_hmc_compares_the_halves_of_its_chains(self, result):
        x = result.data["breast_cancer"].x_test
        posterior = result.posteriors["breast_cancer"]["hmc"]
        chains, draws, _ = posterior.draws.shape
        by_chain = posterior.predict(x).functions().reshape(chains, draws, -1).double().mean(1)
        halves = by_chain[: chains // 2].mean(0), by_chain[chains // 2 :].mean(0)
        found = result.against["breast_cancer"]["hmc"]["total_variation"]
        assert found == pytest.approx(float((halves[0] - halves[1]).abs().mean()), abs=1e-6)

    def test_diagnostics_use_held_out_predictions(self, result, text):
        for task in TASKS:
            assert set(result.diagnostics[task]) == SAMPLERS
            x = demo.held_out(result.data[task])
            assert len(x) <= 300
            assert result.diagnostics[task]["hmc"].functions.total == len(x)
            assert result.diagnostics[task]["sgld"].divergences is None
        for task in TASKS:
            assert html.escape(result.diagnostics[task]["hmc"].verdict, quote=False).replace("'", "&#39;") in text
        stored = json.loads(json.dumps(result.as_dict()))
        assert stored["diagnostics"]["diabetes"]["hmc"]["chains"] == result.diagnostics["diabetes"]["hmc"].chains
        assert stored["against_hmc"] == result.against

    def test_without_hmc_there_is_no_reference_and_without_samplers_no_chains(self):
        found = run_demo(["map", "sgld"], quick=True)
        assert not any(found.against.values())
        with undrawn():
            page = demo_page(found)
        sections = page.sections
        assert [s.heading for s in sections[5:]] == ["Did the chains mix?"]
        assert "From HMC" not in report.render(page)
        assert {p.name for p in sections[-1].pictures} == {
            f"rhat-sgld-{t}" for t in ("diabetes", "breast-cancer", "gap", "star")
        }

    def test_a_quick_run_does_not_wait_for_a_compiler(self, result):
        for task, posteriors in result.posteriors.items():
            for name, posterior in posteriors.items():
                # The C++ backend is compiled already.
                history = posterior.record.history
                assert not history.get("compiled") or history["native"], (task, name)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "task", ["diabetes", pytest.param("breast_cancer", marks=pytest.mark.nightly), "star_classification"]
    )
    def test_the_reference_has_mixed(self, task):
        """Check the settings of a full run; the wave takes too long for a test."""
        known = demo._load(task, 0)
        posterior = cr.HMC(**demo_settings("hmc")).fit(demo._problem(task, known, 0), seed=0)
        found = posterior.diagnostics(demo.held_out(known))
        assert found.ok, found.verdict
        assert found.functions.rhat_worst < 1.05
        assert found.divergences == 0
        assert 0.6 < min(found.acceptance) < 0.95

    def test_is_deterministic_and_leaves_global_state_alone(self, result):
        before, threads = torch.get_rng_state(), torch.get_num_threads()
        again = run_demo(["map"], quick=True)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.get_num_threads() == threads
        assert again.as_dict()["figures"] == {t: {"map": result.figures[t]["map"]} for t in TASKS}
        pages = [dataclasses.replace(r, seconds=again.seconds) for r in (again, run_demo(["map"], quick=True))]
        assert report.render(demo_page(pages[0])) == report.render(demo_page(pages[1]))
        assert run_demo(["map"], quick=True, seed=1).figures != again.figures

    def test_a_new_method_runs_with_its_defaults(self, monkeypatch):
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Later(cr.MAP):
            """A method of tomorrow, with a name to <escape>."""

            steps: int | None = 5
            compile: bool = False

            @classmethod
            def demo_settings(cls, quick):
                return {}

        monkeypatch.setitem(METHODS, "later", Later)
        seen = []
        found = run_demo(["later", "map"], quick=True, progress=lambda *step: seen.append(step))
        assert found.methods == ("later", "map")
        assert demo_settings("later") == {}
        assert found.posteriors["diabetes"]["later"].record.history["steps"] == 5
        with undrawn():
            page = demo_page(found)
        text = report.render(page)
        assert "A method of tomorrow, with a name to &lt;escape&gt;" in text
        assert {"reliability-later", "gap-later", "star-later"} <= {p.name for s in page.sections for p in s.pictures}
        assert seen[0] == ("diabetes: later", 0, 8)
        assert seen[-1] == ("done", 8, 8)

    def test_bad_arguments_are_refused_before_any_work(self):
        with pytest.raises(cr.InputError, match="methods must be one of 'mle', 'map', 'ensemble', .*, got 'gibbs'"):
            run_demo(["mle", "gibbs"])
        with pytest.raises(cr.InputError, match="methods must name at least one of mle, map, ensemble, .*, got none"):
            run_demo([])
        with pytest.raises(cr.InputError, match="seed"):
            run_demo(seed=-1)


class TestSentences:
    """Every sentence follows from its numbers, whichever way they fall."""

    def test_coverage(self):
        groups = [demo_report._coverage_group(observed, 0.03) for observed in (0.7, 0.88, 0.99)]
        assert [g.split(" (")[0] for g in groups] == ["Overconfident", "Calibrated", "Underconfident"]

    def test_confidence(self):
        assert [demo_report._confidence_group(confidence, 0.9, 100) for confidence in (0.99, 0.92, 0.7)] == [
            "Overconfident on average",
            "Calibrated on average, within chance",
            "Underconfident on average",
        ]

    def test_methods_of_a_group_share_a_sentence(self):
        groups = {"a": "Low", "b": "High", "c": "Low"}
        assert demo_report._grouped(("a", "b", "c"), groups.__getitem__, str.upper) == ("Low: A, C.", "High: B.")

    def test_closeness(self):
        def rows(**distance):
            return {task: {name: {"total_variation": v} for name, v in distance.items()} for task in TASKS}

        sentences = reference.closeness_sentences(rows(a=0.3, b=0.004, c=0.1, hmc=0.005))
        assert sentences[0] == (
            "Over the 4 tasks, b is closest to HMC (mean total variation 0.004); a is farthest (0.300)."
        )
        assert sentences[1] == (
            "Diabetes: b is closest (0.004), a farthest (0.300). HMC's Monte Carlo error is 0.005, so b is "
            "indistinguishable from HMC here."
        )
        assert reference.closeness_sentences(rows(a=0.3, hmc=0.1)) == tuple(
            f"{name}: a is at 0.300. HMC's Monte Carlo error is 0.100."
            for name in ("Diabetes", "Breast cancer", "Gap", "Star")
        )
        assert reference.closeness_sentences(rows(hmc=0.1)) == ()

    def test_an_unconverged_reference_is_reported(self):
        assert reference._caution([]) == ()
        (two,) = reference._caution(["gap_regression", "star_classification"])
        assert "fail the diagnostics on gap and star" in two
        (three,) = reference._caution(["diabetes", "gap_regression", "star_classification"])
        assert "fail the diagnostics on diabetes, gap and star" in three

    def test_gap(self):
        def say(on, gap):
            return demo_report._gap_sentence({"epistemic_on_data": on, "epistemic_in_gap": gap, "error_in_gap": 0.25})

        assert say(0.0, 0.0) == "No epistemic uncertainty (std 0), while its mean is off by 0.25 in the gap."
        assert "0.300, 3.0 times the 0.100 on the data" in say(0.1, 0.3)
        assert "no wider than" in say(0.3, 0.1)

    def test_star(self):
        def say(p, epistemic):
            return demo_report._star_sentence(
                {"probability_at_star": p, "total_at_star": 0.5, "epistemic_at_star": epistemic}
            )

        assert "0.010 at the star: almost certain; none of its uncertainty" in say(0.01, 0.0)
        assert "leaning" in say(0.8, 0.0)
        assert "undecided; 80% of its uncertainty is epistemic" in say(0.6, 0.4)

    def test_ranking_reports_whether_a_lead_is_chance(self):
        class Fixed:
            def __init__(self, rows):
                self.rows = torch.tensor(rows)

            def log_prob(self, y):
                return self.rows

        class Known:
            y_test = None

        noisy = demo_report._ranking({"a": Fixed([1.0, -1.0, 0.1]), "b": Fixed([-1.0, 1.0, 0.0])}, Known())
        assert noisy[0].startswith("Highest log density: a, ahead of b by 0.033")
        assert noisy[0].endswith("within chance on 3 rows.")
        clear = demo_report._ranking({"c": Fixed([0.0] * 3), "b": Fixed([1.0] * 3), "a": Fixed([2.0] * 3)}, Known())
        assert "more than chance explains; c is last, 2.000 behind" in clear[0]
        assert demo_report._ranking({"a": Fixed([1.0])}, Known()) == ()
