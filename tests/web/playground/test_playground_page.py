"""The page in a real browser: points, sliders, keyboard, links, files; its numbers against the library's."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from playground_browser import BROWSER, FINAL, INSIDE, POINTS, link, points, regression

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")

# Every panel shows the numbers of its own fit.
PROBED = "playground.scene.panels.every((p) => p.found?.id === p.band.id && p.found.stage === 'final')"


def pixel(browser, x, y, panel=0):
    place = "(() => { const p = playground.scene.panels[%d].plot, r = p.svg.getBoundingClientRect();"
    return browser.run(f"{place % panel} return [r.left + p.x({x}), r.top + p.y({y})]; }})()")


def number(browser, key, panel=0):
    text = browser.run(f"document.querySelectorAll('.panel')[{panel}].querySelector('[data-value={key}]').textContent")
    return float(text.replace("−", "-"))


def run_code(browser, panel):
    """Run the lines that the panel shows and return the names that they define."""
    browser.run(f"document.querySelectorAll('.panel')[{panel}].querySelector('footer button').click()")
    lines = browser.run("document.getElementById('lines').textContent")
    browser.run("document.getElementById('code').close()")
    assert len(lines.splitlines()) <= 10
    names: dict = {}
    with redirect_stdout(io.StringIO()):
        exec(compile(lines, "panel", "exec"), names)
    return names


def test_the_code_of_every_panel_gives_its_numbers(page):
    browser = page(regression(["hmc", "dropout", "laplace", "ensemble"], probe=[0.25]))
    browser.wait(PROBED)
    for panel in range(4):
        shown = browser.run(f"playground.scene.panels[{panel}].band")
        names = run_code(browser, panel)
        p = names["p"]
        for key in ("aleatoric", "epistemic"):
            assert number(browser, key, panel) == pytest.approx(float(getattr(p, key)) ** 0.5, rel=6e-3, abs=1e-6)
        assert number(browser, "mean", panel) == pytest.approx(float(p.mean), rel=6e-3, abs=1e-3)
        grid = names["posterior"].predict(torch.linspace(-4, 4, 161).unsqueeze(1))
        assert shown["mean"] == pytest.approx(grid.mean.tolist(), rel=1e-4, abs=1e-5)
        assert shown["epistemic"] == pytest.approx(grid.epistemic.tolist(), rel=1e-4, abs=1e-6)


def test_classification_and_its_code(page):
    data = [[-1.0, 0.0, 0], [-0.6, 0.5, 0], [1.0, 0.1, 1], [0.8, -0.4, 1]]
    fragment = link("classification", classification={"points": data, "panels": ["map", "hmc"], "probe": [2, 9]})
    browser = page(fragment)
    browser.wait(PROBED)
    for panel in range(2):
        p = run_code(browser, panel)["p"]
        assert number(browser, "mean", panel) == pytest.approx(float(p.mean), rel=6e-3)
        assert number(browser, "epistemic", panel) == pytest.approx(float(p.epistemic), rel=6e-3, abs=1e-6)
    # Far away the mode is more confident than the average over the posterior.
    sure = [abs(number(browser, "mean", panel) - 0.5) for panel in range(2)]
    assert sure[0] > sure[1]
    window = browser.run("playground.scene.panels[0].plot.window")
    slide(browser, "far", "ArrowRight", 1)
    browser.wait(FINAL)
    assert browser.run("playground.scene.panels[0].plot.window[1]") > window[1]
    # A click adds a point of the chosen class.
    before = len(points(browser))
    browser.click(*pixel(browser, -2.0, 2.0))
    assert points(browser)[before][2] == 0
    browser.wait(FINAL)


def slide(browser, key, name, times):
    browser.run(f"document.querySelector('#controls [data-key={key}]').focus()")
    for _ in range(times):
        browser.key(name)


def test_points_by_mouse(page):
    browser = page(regression())
    first = browser.run("playground.scene.asked.id")
    browser.click(*pixel(browser, 0.0, 1.0))
    assert points(browser)[-1] == pytest.approx([0.0, 1.0], abs=0.03)
    browser.wait(f"playground.scene.asked.id > {first} && {FINAL}")
    browser.drag(pixel(browser, *points(browser)[-1]), pixel(browser, 0.5, -1.0))
    assert points(browser)[-1] == pytest.approx([0.5, -1.0], abs=0.03)
    assert len(points(browser)) == 5
    browser.click(*pixel(browser, *points(browser)[-1]), "right")
    assert points(browser) == POINTS
    # The fit follows the last edit.
    browser.wait(f"playground.scene.asked.data.x.length === 4 && {FINAL}")


def test_points_by_keyboard(page):
    browser = page(regression())
    browser.run("playground.scene.panels[0].plot.svg.focus()")
    for _ in range(3):
        browser.key("ArrowRight")
    browser.key("ArrowUp")
    browser.key("Enter")
    step = 8 / 60
    assert points(browser)[-1] == pytest.approx([3 * step, 0.15], abs=1e-3)
    browser.key("ArrowUp", shift=True)
    assert points(browser)[-1][1] == pytest.approx(0.3, abs=1e-3)
    browser.key("Delete")
    assert points(browser) == POINTS
    browser.wait(FINAL)


def test_sliders_take_effect(page):
    """MAP's aleatoric standard deviation is the noise; a smaller prior scale flattens the function."""
    browser = page(regression())
    before = browser.run("playground.state.model.noise")
    slide(browser, "noise", "ArrowRight", 5)
    noise = browser.run("playground.state.model.noise")
    assert noise > before
    browser.wait(f"playground.scene.asked.model.noise === {noise} && {FINAL}")
    browser.wait(f"Math.abs(playground.scene.panels[0].found?.aleatoric - {noise**2}) < 1e-6")
    assert number(browser, "aleatoric") == pytest.approx(noise, rel=6e-3)
    slope = "Math.max(...playground.scene.panels[0].band.mean) - Math.min(...playground.scene.panels[0].band.mean)"
    steep = browser.run(slope)
    browser.run("document.querySelector('#controls [data-key=prior]').value = 0")
    browser.run("document.querySelector('#controls [data-key=prior]').dispatchEvent(new Event('input'))")
    browser.wait(f"playground.scene.asked.model.prior_scale === 0.3 && {FINAL}")
    assert browser.run(slope) < 0.95 * steep


def test_the_address_keeps_the_state(page):
    browser = page(regression(["map", "laplace"], probe=[0.5]))
    browser.click(*pixel(browser, 0.0, 1.0))
    slide(browser, "noise", "ArrowLeft", 3)
    browser.wait(f"playground.scene.asked.data.x.length === 5 && {FINAL}")
    read = "[playground.state, playground.scene.panels.map((p) => p.band.mean)]"
    before = browser.run(read)
    browser.wait("location.hash.length > 10 && new Promise((done) => setTimeout(() => done(true), 300))")
    page(browser.run("location.hash"))
    assert browser.run(read) == before


def drop(browser, name, text):
    browser.run(
        f"""(() => {{ const files = new DataTransfer();
        files.items.add(new File([{json.dumps(text)}], {json.dumps(name)}));
        const event = {{ dataTransfer: files, bubbles: true, cancelable: true }};
        document.body.dispatchEvent(new DragEvent("drop", event)); }})()"""
    )


def test_a_csv_file(page):
    browser = page(regression())
    drop(browser, "dose.csv", "dose,effect\n1,10\n2,20\n3,60\n")
    browser.wait(f"playground.scene.asked.data.x.length === 3 && {FINAL}")
    data = torch.tensor(points(browser), dtype=torch.float64)
    torch.testing.assert_close(data.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-3, rtol=0)
    torch.testing.assert_close(data.std(0, correction=0), torch.ones(2, dtype=torch.float64), atol=1e-3, rtol=0)
    assert "dose" in browser.run("document.getElementById('controls').textContent")
    drop(browser, "bad.csv", "a,b\nx,1\n")
    browser.wait("!document.getElementById('hint').hidden")
    assert "not a number" in browser.run("document.getElementById('hint').textContent")


def test_a_csv_file_with_decimal_commas_gaps_and_more_columns(page):
    browser = page(regression())
    drop(browser, "t.csv", "x;y;note\n1,5;2;a\n2,5;;b\n3,5;4,0;\n5,5;6;c\n")
    browser.wait(f"playground.scene.asked.data.x.length === 3 && {FINAL}")
    x = [row[0] for row in points(browser)]
    assert (x[2] - x[1]) / (x[1] - x[0]) == pytest.approx(1, abs=2e-3)
    say = browser.run("document.querySelector('#controls .say').textContent")
    assert "1 row with an empty cell left out" in say
    assert "Only the first 2 columns are used" in say
    # Nothing is left of the file.
    browser.run("[...document.querySelectorAll('#controls button')].find((b) => b.textContent === 'Clear').click()")
    assert browser.run("document.querySelector('#controls .say').textContent") == ""


def test_pictures_are_saved(page, tmp_path):
    browser = page(regression())
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for button in (1, 2):
        browser.run(f"document.querySelectorAll('.panel footer button')[{button}].click()")
    browser.wait("new Promise((done) => setTimeout(() => done(true), 100))")
    for name in ("credibly-regression-map.svg", "credibly-regression-map.png"):
        for _ in range(200):
            if (tmp_path / name).exists():
                break
            browser.wait("new Promise((done) => setTimeout(() => done(true), 50))")
    picture = ET.fromstring((tmp_path / "credibly-regression-map.svg").read_text())
    circles = [node for node in picture.iter() if node.tag.endswith("circle")]
    assert len(circles) == len(POINTS)
    # Style travels with the picture: no rule of the page's style sheet is needed.
    assert all("fill" in node.get("style", "") for node in circles)
    assert (tmp_path / "credibly-regression-map.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def value(browser, key):
    return float(browser.run(f"document.querySelector('[data-value={key}]').textContent").replace("−", "-"))


def test_inside_hmc(page):
    browser = page(link("hmc", hmc={"density": "banana", "step": 0.1, "length": 1.0, "speed": 1000}), wait=INSIDE)
    careful = value(browser, "all-acceptance")
    browser.wait("playground.scene.ended.length > 5")
    assert browser.run("document.querySelectorAll('.draw').length") > 3
    browser.run("playground.scene.set('step', 1.2)")
    browser.wait(f"playground.scene.asked.step_size === 1.2 && {INSIDE}")
    assert careful > 0.95
    assert value(browser, "all-acceptance") < 0.9 * careful


def test_inside_hmc_shows_the_steps_that_the_engine_runs(page):
    browser = page(link("hmc", hmc={"step": 0.01, "length": 10, "speed": 1000}), wait=INSIDE)
    assert browser.run("playground.scene.finished.gradients") == 60 * 400
    shown = "document.querySelector('[data-value=steps]').textContent"
    assert browser.run(shown) == "400 (cut from 1000)"
    browser.run("playground.scene.showCode()")
    assert "step_size=0.01, trajectory_length=4," in browser.run("document.getElementById('lines').textContent")
    browser.run("document.getElementById('code').close()")
    browser.run("playground.scene.set('step', 0.1), playground.scene.set('length', 1.1)")
    browser.wait(f"playground.scene.asked.step_size === 0.1 && {INSIDE}")
    assert browser.run("playground.scene.finished.gradients") == 60 * 11
    assert browser.run(shown) == "11"
    browser.run("playground.scene.showCode()")
    assert "step_size=0.1, trajectory_length=1.1," in browser.run("document.getElementById('lines').textContent")
    browser.run("document.getElementById('code').close()")


def test_inside_variational_inference(page):
    browser = page(link("vi", vi={"points": 6, "start": [2, 2]}), wait=INSIDE)
    gap = value(browser, "free-energy") - value(browser, "floor")
    assert gap == pytest.approx(value(browser, "kl-to"), abs=0.2)
    assert value(browser, "moments-from") < value(browser, "kl-from")
    browser.run("document.querySelectorAll('.panel footer button')[0].click()")
    lines = browser.run("document.getElementById('lines').textContent")
    browser.run("document.getElementById('code').close()")
    names: dict = {}
    with redirect_stdout(io.StringIO()):
        exec(compile(lines, "panel", "exec"), names)
    q = browser.run("playground.scene.trail.at(-1)")
    assert q["mean"] == pytest.approx(names["posterior"].loc[0].tolist(), rel=1e-9)


@pytest.mark.parametrize("width, dark", [(400, True), (1400, False)])
def test_every_scene_fits_the_screen(page, width, dark):
    for scene in ("regression", "classification", "hmc", "vi"):
        fits = scene in ("regression", "classification")
        state = {scene: {"panels": ["map", "laplace"]}} if fits else {}
        shown = FINAL if fits else "(playground.scene.ended ?? playground.scene.trail)?.length > 0"
        browser = page(link(scene, **state), width, dark=dark, wait=shown)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), scene
        over = "[...document.querySelectorAll('main *')].filter((e) => !e.closest('svg, dialog') && "
        over += "e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + e.className)"
        assert browser.run(over) == [], scene
        sizes = browser.run("[...document.querySelectorAll('svg.plot')].map((e) => e.getBoundingClientRect().width)")
        assert len(sizes) == 2
        assert min(sizes) > 240, scene
        paper, ink = (
            sum(int(part) for part in re.findall(r"\d+", browser.run(f"getComputedStyle(document.body).{name}"))[:3])
            / 3
            for name in ("backgroundColor", "color")
        )
        assert (paper < 40 and ink > 200) if dark else (paper > 230 and ink < 60)
        # Everything that can be pressed has a name and is large enough for a finger.
        small = "[...document.querySelectorAll('button, select')].filter((e) => e.offsetParent && (!(e.textContent || "
        small += "e.ariaLabel).trim() || e.getBoundingClientRect().height < 28)).map((e) => e.outerHTML)"
        assert browser.run(small) == [], scene


def test_a_console_error_would_be_noticed(browser, address):
    browser.open(f"http://{address}/nothing.html")
    browser.wait("document.readyState === 'complete'")
    browser.run("console.error('seen')")
    browser.run("1")
    assert any("seen" in line for line in browser.console)


def test_the_modules_have_no_build_step():
    folder = Path(__import__("credibly.web.playground", fromlist=["x"]).__file__).parent / "static"
    scripts = list(folder.glob("js/*.js"))
    assert len(scripts) > 10
    for script in scripts:
        assert len(script.read_text().splitlines()) <= 350, script.name
        assert not re.search(r'from "(?!\./)', script.read_text()), script.name


def touch(browser, *places):
    for kind, place in zip(("touchStart", *("touchMove",) * (len(places) - 1)), places):
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": place[0], "y": place[1]}])
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])


def test_points_by_finger(page):
    """A tap adds a point, a finger on a point drags it, and a swipe elsewhere scrolls without adding one."""
    browser = page(regression(["map", "mle", "laplace"]), 400)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    start, end = pixel(browser, 0.0, 2.0), pixel(browser, 0.5, -2.0)
    touch(browser, start)
    browser.wait("playground.scene.state.points.length === 5")
    touch(browser, start, *[[a + (b - a) * part / 4 for a, b in zip(start, end)] for part in range(1, 5)])
    browser.wait("playground.scene.state.points[4][1] < -1.9")
    x, y = pixel(browser, -3.0, -2.0)
    touch(browser, *[(x, y - 25 * step) for step in range(8)])
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
    browser.wait("scrollY > 0")
    assert len(points(browser)) == 5
    browser.wait(FINAL)
