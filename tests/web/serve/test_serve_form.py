"""The form and the description in a real browser, driven over its debugging protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess

import pytest
from served import records, serving
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser found: none of {', '.join(NAMES)} is installed")

TOKEN = "a-token-that-nobody-knows"


class Page:
    """A page of the browser: its addresses, scripts and console."""

    def __init__(self, socket):
        self.socket = socket
        self.numbers = itertools.count(1)
        self.console = []
        self.session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Page", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **values):
        number = next(self.numbers)
        whole = {"id": number, "method": method, "params": values}
        self.socket.send(json.dumps(whole | ({"sessionId": self.session} if self.session else {})))
        while True:
            found = json.loads(self.socket.recv(timeout=60))
            if found.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.console.append(found["params"])
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]

    def run(self, script):
        """Return the value of a script, once its promise is resolved."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition):
        """Wait until an expression is true."""
        script = (
            f"new Promise(done => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 20); look(); }})"
        )
        assert self.run(script)

    def open(self, address, width=1400, dark=False):
        self.console.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=str(address))
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    profile = tmp_path_factory.mktemp("profile")
    process = subprocess.Popen(
        [str(BROWSER), *words, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.PIPE, text=True
    )
    try:
        lines = iter(process.stderr.readline, "")
        address = next(line.split()[-1] for line in lines if line.startswith("DevTools listening on"))
        with connect(address, max_size=None) as socket:
            yield Page(socket)
    finally:
        process.kill()
        process.communicate()


READY = "document.getElementById('headline').textContent && !document.querySelector('.stale')"
SHOWN = "Object.fromEntries([...document.querySelectorAll('#numbers dd')].map(e => [e.dataset.name, e.dataset.value]))"
OVERFLOW = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg, pre')
    && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '.' + e.className)"""


def type_into(page, column, text):
    """Fill in a field as a person does, and wait for the prediction."""
    page.run(f"document.querySelector('[name={json.dumps(column)}]').focus()")
    page.run("document.activeElement.select()")
    if text:
        page.send("Input.insertText", text=text)
    else:
        press(page, "Backspace")
    press(page, "Enter")


def press(page, key):
    code = {"Enter": 13, "Backspace": 8, "Tab": 9}[key]
    text = {"text": "\r"} if key == "Enter" else {}
    page.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
    page.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)


def test_numbers_are_the_servers(page, client, numbers):
    page.open(client.base_url)
    page.wait(READY)
    row = records(numbers.with_suffix(".csv"), 1)[0]
    for column in ("age", "bmi", "bp", "s5", "clinic"):
        type_into(page, column, str(row[column]))
    expected = client.post("/predict", json=[row]).json()["predictions"][0]
    page.wait(f"{READY} && {SHOWN}.mean === '{expected['mean']!r}'")
    shown = page.run(SHOWN)
    assert {name: float(value) for name, value in shown.items()} == {
        name: value for name, value in expected.items() if name not in ("notes", "ood")
    }
    lower, upper = (f"{expected[name]:.4g}" for name in ("lower_90", "upper_90"))
    assert page.run("document.getElementById('headline').textContent").endswith(f"90 % between {lower} and {upper}")
    assert page.run("document.querySelectorAll('svg.distribution polyline').length") == 1
    points = page.run("document.querySelector('svg.distribution .curve').getAttribute('points').split(' ').length")
    assert points == len(client.post("/picture", json=[row]).json()["curves"][0]["x"])
    assert page.console == []


def test_unusual_missing_and_impossible_inputs(page, client):
    page.open(client.base_url)
    page.wait(READY)
    type_into(page, "age", "9")
    type_into(page, "bmi", "")
    page.wait(f"{READY} && document.getElementById('notes').children.length === 2")
    assert "age = 9 is far outside" in page.run("document.getElementById('notes').textContent")
    unusual = "[...document.querySelectorAll('[data-unusual=true]')].map(e => e.dataset.name)"
    assert page.run(unusual) == ["age", "bmi"]
    type_into(page, "age", "<b>old</b>")
    page.wait("!document.getElementById('problem').hidden")
    assert "age = '<b>old</b>' is not a number" in page.run("document.getElementById('problem').textContent")
    # A form has no rows, null or parameters.
    assert page.run("document.getElementById('problem').textContent") == (
        "age = '<b>old</b>' is not a number. Leave the field empty if the value is missing."
    )
    assert page.run("document.querySelector('.field.wrong input').name") == "age"
    assert page.run("document.getElementById('headline').textContent") == ""
    page.run("document.getElementById('typical').click()")
    page.wait(f"document.getElementById('problem').hidden && {READY}")
    assert page.run("document.querySelector('.field.wrong')") is None
    # The refused request alone is on the console, as a network error.
    assert [one["entry"]["source"] for one in page.console if "entry" in one] == ["network"]
    assert all("entry" in one for one in page.console)


def test_dots_of_extreme_values_are_not_cut_off(page, client):
    page.open(client.base_url)
    page.wait(READY)
    dots = "[...document.querySelectorAll('#inputs circle')].map(c => [+c.getAttribute('cx'), +c.getAttribute('r')])"
    for value in ("-1000", "1000"):
        type_into(page, "age", value)
        page.wait(f"{READY} && document.querySelector('[data-name=age] .unusual')")
        assert all(x - r >= 0 and x + r <= 300 for x, r in page.run(dots))
    page.run("document.getElementById('typical').click()")
    page.wait(READY)


def test_numbers_as_people_write_them(page, client):
    """Years have no separator, and no number has decimals where others of its size have none."""
    page.open(client.base_url)
    page.wait(READY)
    values = "[1987, 1289.23, 970.94, -0.5, 123456.7, 0.00001234]"
    shown = page.run(f"import('./pages/shared.js').then(m => {values}.map(v => m.short(v)))")
    assert shown == ["1987", "1289", "970.9", "−0.5", "123,457", "1.234e−5"]


def test_decimal_numbers_are_sent_as_numbers_and_the_rest_as_text(page, client):
    page.open(client.base_url)
    page.wait(READY)
    page.run("window.sent = []; window.plain = fetch; 0")
    record = "sent.push(JSON.parse(options.body)[0].age); return plain(path, options);"
    page.run(f"window.fetch = (path, options) => {{ {record} }}; 0")
    typed = {
        "1e1": 10,
        "+10.": 10,
        "010": 10,
        "-.5": -0.5,
        "0x10": "0x10",
        "0b1": "0b1",
        "1e999": "1e999",
        "1,5": "1,5",
    }
    for text, value in typed.items():
        type_into(page, "age", text)
        page.wait(f"sent.at(-1) === {json.dumps(value)} && !document.querySelector('.stale')")
    type_into(page, "age", "0x10")
    page.wait("document.getElementById('problem').textContent.includes(\"age = '0x10' is not a number\")")
    page.run("document.getElementById('typical').click()")
    page.wait(READY)


@pytest.mark.parametrize("width, dark", [(400, False), (1400, True)])
def test_every_run_fits_the_screen(page, all_runs, width, dark):
    page.open(f"{all_runs.base_url}/?run=kind", width, dark)
    page.wait(READY)
    assert page.run("document.getElementById('title').textContent") == "Predict kind"
    assert page.run("document.querySelectorAll('svg.distribution rect').length") == 3
    for name in ("progress", "visits", "kind"):
        page.run(f"document.getElementById('run').value = {name!r}")
        page.run("document.getElementById('run').dispatchEvent(new Event('change'))")
        page.wait(f"document.title === 'Predict {name}' && {READY}")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(OVERFLOW) == []
    paper, ink = (
        [int(v) for v in page.run(f"getComputedStyle(document.body).{name}")[4:-1].split(",")[:3]]
        for name in ("backgroundColor", "color")
    )
    assert (max(paper) < 50 and min(ink) > 200) if dark else (min(paper) > 230 and max(ink) < 60)
    assert page.console == []


def test_keyboard_alone(page, client):
    page.open(client.base_url)
    page.wait(READY)
    seen = []
    for _ in range(10):
        press(page, "Tab")
        seen.append(page.run("document.activeElement.name || document.activeElement.textContent"))
    assert seen[:7] == ["API", "age", "bmi", "bp", "s5", "clinic", "50 %80 %90 %95 %"]
    assert seen[7:9] == ["Predict", "Typical row"]


@pytest.mark.parametrize("width", [400, 1400])
def test_description(page, all_runs, width):
    page.open(f"{all_runs.base_url}/docs", width)
    page.wait("document.querySelectorAll('section').length >= 9")
    text = page.run("document.body.textContent")
    for word in ("POST /runs/progress/predict", "POST /runs/kind/predict", "Barbera d'Asti", "allow_empty", "curl"):
        assert word in text
    assert page.run(OVERFLOW) == []
    # Nothing has to be scrolled into view sideways.
    beyond = "[...document.querySelectorAll('td')].filter(td => td.getBoundingClientRect().right > innerWidth).length"
    assert page.run(beyond) == 0
    # Code is typeset, and a run is described with the parameters that it can use.
    assert "`" not in text
    own = "[...document.querySelectorAll('section')].find(s => s.textContent.includes('%s')).textContent"
    numbers, classes = page.run(own % "POST /runs/progress/predict"), page.run(own % "POST /runs/kind/predict")
    assert ("tolerance" in numbers, "allow_empty" in numbers) == (True, False)
    assert ("tolerance" in classes, "allow_empty" in classes) == (False, True)
    assert page.console == []


def test_token_is_asked_for(page, numbers):
    with serving(numbers, token=TOKEN) as client:
        page.open(client.base_url)
        page.wait("!document.getElementById('ask-token').hidden")
        assert "clinic" not in page.run("document.body.textContent")
        page.run("document.getElementById('token').focus()")
        page.send("Input.insertText", text=TOKEN)
        press(page, "Enter")
        page.wait(READY)
        assert "clinic" in page.run("document.body.textContent")
        assert TOKEN not in page.run("location.href")


def test_an_error_would_be_detected(page, client):
    page.open(client.base_url)
    page.wait(READY)
    with contextlib.suppress(AssertionError):
        page.run("setTimeout(() => { undefined.nothing; }, 0)")
    page.run("new Promise(done => setTimeout(done, 50))")
    assert any("exceptionDetails" in one for one in page.console)
    picture = page.send("Page.captureScreenshot", format="png")["data"]
    assert base64.b64decode(picture).startswith(b"\x89PNG")
