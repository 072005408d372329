"""What a visitor reads on the page: axes, numbers, verdicts, advice, and plots that can be compared."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from playground_browser import BROWSER, FINAL, INSIDE, link, regression

from credibly.diagnostics import diagnose

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")

# Labels of the ticks of a plot, by axis: those of x share their height, those of y their right end.
TICKS = """(() => {
  const plots = [...document.querySelectorAll('.plot')];
  const texts = plots.map((plot) => [...plot.querySelectorAll('.axes text:not(.axis-label)')]);
  const of = (all, anchor) => all.filter((t) => t.getAttribute('text-anchor') === anchor).length;
  return texts.map((all) => [of(all, 'middle'), of(all, 'end')]);
})()"""


@pytest.mark.parametrize("width", [400, 1000, 1400])
def test_every_axis_has_two_ticks(page, width):
    """An axis with the label 0 alone has no scale."""
    browser = page(regression(panels=("map", "mle", "laplace")), width)
    ticks = browser.run(TICKS)
    assert len(ticks) == 3
    assert min(min(pair) for pair in ticks) >= 2
    browser = page(link("hmc", hmc={"speed": 1000}), width, wait=INSIDE)
    browser.wait("playground.scene.ended.length > 20")
    assert min(min(pair) for pair in browser.run(TICKS)) >= 2


@pytest.mark.parametrize("low, high", [(-0.17, 0.17), (-4.2, 4.2), (-57.5, 57.5), (0, 7), (-1e-3, 3e-3)])
def test_ticks_are_round_and_at_least_three(page, low, high):
    ticks = page(regression()).run(f"import('./js/plot.js').then((m) => m.ticks({low}, {high}, 4))")
    assert 3 <= len(ticks) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    steps = {round((b - a) / (high - low), 9) for a, b in itertools.pairwise(ticks)}
    assert len(steps) == 1


def test_numbers_have_one_minus_sign(page):
    """Signs and exponents alike; what is left of a sum that should vanish is 0."""
    browser = page(regression())
    values = "[-0.00069, 4.8e-10, -2.5, 0, 3.4e-318]"
    shown = browser.run(f"import('./js/plot.js').then((m) => {values}.map((v) => m.show(v)))")
    assert shown == ["−6.9e−4", "0", "−2.5", "0", "0"]


def test_chains_are_settled_only_if_the_verdict_is_good(page):
    """R-hat near 1 with too few effective draws is not convergence."""
    browser = page(regression(panels=("hmc",)))
    band = "playground.scene.panels[0].receive({...playground.scene.panels[0].band, rhat: 1.01, diagnosis: %s})"
    settled = "document.querySelector('.panel .status').classList.contains('settled')"
    browser.run(band % "'Not yet: ESS is only 169, 400 are needed.'")
    assert not browser.run(settled)
    assert browser.run("document.querySelector('.note summary').textContent") == "Convergence: not yet"
    browser.run(band % "'Good: the chains agree.'")
    assert browser.run(settled)
    browser.run(band % "'Broken: chains have infinite predictions.'")
    assert not browser.run(settled)
    # The verdict of the page without a server.
    browser.run(band % "'Chains agree: R-hat 1.01.'")
    assert browser.run(settled)


def test_a_verdict_of_a_finished_fit_names_what_is_wrong(page):
    """ "Not yet" alone reads as if the panel were still at work. The sentences are the library's."""
    draws = torch.randn(4, 1000, 3, generator=torch.Generator().manual_seed(0))
    # Averages of 20 draws in a row: few of them are independent, and the chains still agree.
    slow = draws.unfold(1, 20, 1).mean(-1)
    verdicts = {
        "more draws needed": diagnose(slow, slow).verdict,
        "chains agree, but 2 trajectories diverged": diagnose(draws, draws, divergences=2).verdict,
        # Of the page without a server.
        "chains agree, but 1 trajectory diverged": "Not yet: the functions agree, and 1 trajectory diverged.",
        "not yet": "Not yet: the functions nearly agree (R-hat 1.070), and 2 trajectories diverged.",
    }
    browser = page(regression(panels=("hmc",)))
    band = "playground.scene.panels[0].receive({...playground.scene.panels[0].band, diagnosis: %s})"
    for title, verdict in verdicts.items():
        assert verdict.startswith("Not yet")
        browser.run(band % json.dumps(verdict))
        assert browser.run("document.querySelector('.note summary').textContent") == f"Convergence: {title}"


def test_hmc_settles_on_the_first_preset(page):
    """With a warm-up of 100 iterations, one of its four chains adapted badly and left 261 effective draws."""
    browser = page(link("regression", model={}, regression={"panels": ["hmc"]}))
    assert browser.run("document.querySelector('.panel .status').classList.contains('settled')")
    assert browser.run("document.querySelector('.note summary').textContent") == "Convergence: good"


def test_plots_of_a_row_are_level(page):
    """Bands of panels side by side can only be compared if their axes are at the same height."""
    browser = page(regression(panels=("map", "dropout", "ensemble", "hmc")))
    tops = browser.run("[...document.querySelectorAll('.panel .plot')].map((p) => p.getBoundingClientRect().top)")
    assert tops[0] == tops[1] < tops[2] == tops[3]


def test_a_preset_moves_the_pointer_to_what_it_is_about(page):
    browser = page(regression())
    browser.run("document.querySelector('[data-preset=far]').click()")
    assert browser.run("playground.scene.state.probe") == [3.5]
    assert max(x for x, _ in browser.run("playground.scene.state.points")) < 1
    # The next preset is about something else.
    browser.run("document.querySelector('[data-preset=noise]').click()")
    assert browser.run("playground.scene.state.probe") == [1.5]
    browser.wait(FINAL)


def test_every_preset_has_a_pointer_inside_its_plot(page):
    browser = page(regression())
    presets = browser.run("import('./js/presets.js').then((m) => m.PRESETS)")
    probes = [(scene, one["probe"]) for scene, own in presets.items() for one in own.values()]
    assert all(len(probe) == (1 if scene == "regression" else 2) for scene, probe in probes)
    # "Zoom out" of the star's preset shows three times as much.
    assert all(abs(v) <= (4 if scene == "regression" else 10) for scene, probe in probes for v in probe)


def test_a_density_starts_with_settings_that_suit_it(page):
    """With the banana's step size, every trajectory on the network's posterior diverges."""
    browser = page(link("hmc", hmc={"speed": 1000}), wait=INSIDE)
    browser.run(
        "(() => { const s = document.querySelector('[data-key=density]'); s.value = 'network'; "
        "s.dispatchEvent(new Event('change')); })()"
    )
    browser.wait(f"playground.scene.asked.density === 'network' && {INSIDE}")
    assert browser.run("playground.scene.finished.divergences") == 0
    assert browser.run("playground.scene.finished.acceptance") > 0.8
    # The sliders show it.
    shown = browser.run("document.querySelector('output[for=field-step]').textContent")
    assert float(shown) == browser.run("playground.state.hmc.step") < 0.25


def test_chains_that_never_moved_have_no_effective_draws(page):
    browser = page(link("hmc", hmc={"step": 2, "length": 5, "speed": 1000}), wait=INSIDE)
    for key in ("ess", "cost", "rhat"):
        assert browser.run(f"document.querySelector('[data-value={key}]').textContent") == "–"


def test_without_points_nothing_is_left(page):
    """Neither numbers of the last fit, nor code without data, nor a message of the protocol."""
    browser = page(regression(panels=("hmc",)))
    browser.run("[...document.querySelectorAll('#controls button')].find((b) => b.textContent === 'Clear').click()")
    text = "document.querySelector('.panel %s').textContent"
    assert [browser.run(text % part) for part in (".status", ".numbers", ".note")] == ["", "", ""]
    assert "no points" in browser.run("document.getElementById('hint').textContent")
    browser.run("playground.scene.showCode(0)")
    assert not browser.run("document.getElementById('code').open")
    browser.run("playground.open('hmc'), playground.scene.set('density', 'network')")
    browser.wait("document.getElementById('hint').textContent.includes('choose another density')")
    browser.run("playground.open('regression'), document.querySelector('[data-preset=gap]').click()")
    browser.wait("playground.scene.asked && playground.scene.panels[0].band")


def test_a_file_dropped_inside_hmc_gets_an_answer(page):
    browser = page(link("hmc"), wait=INSIDE)
    browser.run("playground.readFile(new File(['1,2'], 'a.csv'))")
    assert "Regression" in browser.run("document.getElementById('hint').textContent")


@pytest.mark.parametrize("touch", [False, True])
def test_the_advice_is_for_the_device(page, touch):
    browser = page(regression())
    browser.call("Emulation.setTouchEmulationEnabled", enabled=touch)
    try:
        advice = browser.run("document.querySelector('.legend.first').innerText")
        assert ("right-click" in advice, "Erase" in advice) == (not touch, touch)
    finally:
        browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
