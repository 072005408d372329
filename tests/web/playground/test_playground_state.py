"""The state of the page in a real browser: what a link may hold, and controls that show it."""

from __future__ import annotations

import itertools
import json

import pytest
from playground_browser import BROWSER, FINAL, INSIDE, MODEL, POINTS, link, points, regression

from credibly.web.playground.protocol import FitRequest, read

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")


def test_a_broken_link_opens_the_page(page):
    browser = page("#regression~bm90IEpTT04", wait="playground.scene.panels?.length === 4")
    assert browser.run("playground.state.regression.preset") == "gap"
    browser.run("playground.send({ type: 'cancel' })")


@pytest.mark.parametrize("scene", ["regression", "hmc"])
@pytest.mark.parametrize("depth, allowed", [(1.5, 2), (-1, 1), (1e300, 3)])
def test_settings_of_a_link_are_within_the_ranges_of_their_controls(page, scene, depth, allowed):
    model = MODEL | {"depth": depth, "noise": -3, "rate": 0.123, "activation": "sine", "seed": 0.5}
    own = {"panels": ["map"], "points": [[1e9, -1e9], *POINTS], "probe": [1e300]}
    fragment = link(scene, model=model, regression=own, hmc={"chains": 99, "density": "toString"})
    browser = page(fragment, wait=FINAL if scene == "regression" else INSIDE)
    model = browser.run("playground.state.model")
    assert model["depth"] == allowed
    assert [model[key] for key in ("noise", "rate", "activation", "seed")] == [0.02, 0.12, "tanh", 1]
    assert points(browser) == [[1000, -1000], *POINTS] if scene == "regression" else True
    assert browser.run("playground.state.hmc.chains") == 4
    assert browser.run("playground.state.hmc.density") == "banana"


def test_every_number_of_the_state_has_limits(page):
    browser = page(regression())
    numbers = """import("./js/state.js").then(({ defaults }) => Object.entries(defaults()).flatMap(([group, own]) =>
        Object.keys(own).filter((key) => typeof own[key] === "number").map((key) => [group, key])))"""
    limits = browser.run('import("./js/limits.js").then(({ LIMITS }) => LIMITS)')
    found = browser.run(numbers)
    assert len(found) > 15
    assert [one for one in found if one[1] not in limits.get(one[0], {})] == []
    unchanged = """import("./js/state.js").then(({ defaults, decode }) =>
        JSON.stringify(decode("#vi~e30")) === JSON.stringify({ ...defaults(), scene: "vi" }))"""
    assert browser.run(unchanged)


@pytest.mark.parametrize("ends", [*itertools.product(("low", "high"), repeat=2)])
@pytest.mark.parametrize("scene", ["regression", "classification"])
def test_both_engines_accept_the_ends_of_all_sliders(page, scene, ends):
    """Also together: the likelihood's temperature in a request is the product of two sliders."""
    browser = page(link(scene, **{scene: {"panels": ["map"]}}))
    likelihood, others = ends
    request = browser.run(f"""import("./js/limits.js").then(({{ LIMITS }}) => {{
        const {{ model }} = playground.state;
        for (const [key, limits] of Object.entries(LIMITS.model)) model[key] = limits.{others} ?? model[key];
        model.likelihood = LIMITS.model.likelihood.{likelihood};
        return playground.scene.request();
    }})""")
    product = {("low", "low"): 1e-4, ("high", "high"): 1e4}.get(ends, 1)
    assert request["model"]["likelihood_temperature"] == product
    assert isinstance(read(json.dumps(request)), FitRequest)
    known = {"scenes": ["regression", "classification"], "methods": [p["method"] for p in request["panels"]]}
    known["points"] = 400
    accepted = f"m.read({json.dumps(request)}, {json.dumps(known)})"
    browser.run(f'import("./wasm/requests.js").then((m) => Object.keys({accepted}).length)')


def test_a_scene_that_fails_says_so(page):
    browser = page(regression())
    browser.run("playground.scenes.vi.enter = () => { throw new Error('no scene') }; playground.open('vi')")
    assert "no scene" in browser.run("document.getElementById('hint').textContent")
    assert browser.run("!document.getElementById('hint').hidden")
    assert len(browser.console) == 1
    browser.console.clear()
    # The other scenes still work, also in place of one that there is not.
    browser.run("playground.open('nothing')")
    browser.wait(FINAL)
    assert browser.run("playground.state.scene") == "regression"


def test_controls_show_the_state_of_their_scene(page):
    browser = page(link("classification", classification={"points": [[0, 0, 0]], "panels": ["map"]}))
    eraser = "[...document.querySelectorAll('#controls button')].find((one) => one.textContent === 'Erase')"
    browser.run(f"{eraser}.click()")
    browser.run(
        "const one = document.querySelector('[data-key=label]'); one.value = 1; one.dispatchEvent(new Event('change'))"
    )
    for scene, pressed, label in (("regression", "false", None), ("classification", "true", "1")):
        browser.run(f"playground.open('{scene}')")
        assert browser.run(f"{eraser}.ariaPressed") == pressed
        assert browser.run("playground.scene.eraser") == (pressed == "true")
        assert browser.run("document.querySelector('[data-key=label]')?.value ?? null") == label
    assert browser.run("playground.scene.label") == 1
    browser.wait(FINAL)


def test_a_link_that_cannot_be_copied_is_in_the_address(page):
    """Pages that are served without TLS have no clipboard; the code's dialog, closed, has nothing to select."""
    browser = page(regression())
    browser.run("navigator.clipboard.writeText = () => Promise.reject(new Error('denied')), 0")
    browser.run("document.getElementById('link').click()")
    browser.wait("document.getElementById('link').textContent.includes('address bar')")
    browser.run("playground.showCode('x = 1'), document.getElementById('copy').click()")
    browser.wait("document.getElementById('copy').textContent === 'Press Ctrl-C'")
    assert browser.run("String(getSelection())") == "x = 1"


def test_copying_twice_leaves_the_label(page):
    browser = page(regression())
    browser.run("document.getElementById('link').click(), document.getElementById('link').click()")
    browser.wait("document.getElementById('link').textContent !== 'Copy link'")
    browser.run("document.getElementById('link').click()")
    browser.wait("document.getElementById('link').textContent === 'Copy link'")
