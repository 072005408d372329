"""The playground without a server: the WebAssembly engine in node, and the static page in a real browser."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from credibly.web.playground.engine import Engine
from wasm_module import MODULE, NODE, needs_node, scripts_in

ROOT = Path(__file__).resolve().parents[3]
ENGINE = Path(__file__).with_name("wasm_engine.mjs")
POINTS = {"x": [[-1.5], [-1.0], [-0.6], [0.7], [1.1], [1.6]], "y": [-0.4, -0.9, -1.0, 1.1, 1.2, 0.4]}
PLANE = {"x": [[-1.5, 0.2], [-1.0, -0.3], [0.9, 0.1], [1.4, -0.2]], "y": [0, 0, 1, 1]}
MODEL = {"hidden": [6], "activation": "tanh", "prior_scale": 2.0, "noise": 0.1}
PANELS = [
    {"method": "hmc", "options": {"chains": 2, "draws": 20, "warmup": 20}},
    {"method": "ensemble", "options": {"steps": 20, "members": 3}},
    {"method": "dropout", "options": {"steps": 20, "rate": 0.2}},
]
REGRESSION = {"type": "fit", "id": 1, "scene": "regression", "data": POINTS, "model": MODEL, "panels": PANELS}
REGRESSION |= {"seed": 0, "grid": {"x": [-3, 3, 21]}}
CLASSES = REGRESSION | {"id": 3, "scene": "classification", "data": PLANE, "grid": {"x": [-3, 3, 9], "y": [-3, 3, 7]}}
ORBIT = {"type": "hmc", "id": 4, "density": "banana", "step_size": 0.2, "trajectory_length": 1.0, "chains": 2}
ORBIT |= {"trajectories": 5, "seed": 0}
NETWORK = ORBIT | {"id": 5, "density": "network", "data": POINTS, "model": MODEL, "step_size": 0.01}
STUCK = ORBIT | {"id": 6, "step_size": 2.0, "trajectory_length": 20.0}
PROBES = [{"type": "probe", "id": 1, "x": [0.1]}, {"type": "probe", "id": 3, "x": [0.1, 2.0]}]
REQUESTS = [REGRESSION, PROBES[0], CLASSES, PROBES[1], ORBIT, NETWORK, STUCK]


def answer(requests, folder) -> list[dict]:
    """Return the messages of the WebAssembly engine."""
    command = [str(NODE), str(ENGINE), str(scripts_in(folder)), str(MODULE)]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    return answer([[request, True] for request in REQUESTS], tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def of_the_server():
    """The messages of the Python engine to the same requests."""
    found: list[dict] = []
    engine = Engine(found.append)
    for request in REQUESTS:
        engine.handle(json.dumps(request))
        engine.join()
    return found


def shapes(messages: list[dict], types: tuple[str, ...]) -> set[tuple]:
    """Return type, id and fields of every message; lists with their length."""
    lengths = ("mean", "aleatoric", "epistemic", "lower", "upper", "log_density", "density", "y", "x")
    found = set()
    for message in messages:
        if message["type"] in types and message.get("stage", "final") == "final":
            sizes = tuple(sorted((k, len(v)) for k, v in message.items() if k in lengths and isinstance(v, list)))
            found.add((message["type"], message["id"], message.get("panel"), tuple(sorted(message)), sizes))
    return found


@needs_node
@pytest.mark.parametrize("kind", ["band", "probe", "surface", "trajectory", "finished"])
def test_messages_have_the_fields_of_the_server(kind, messages, of_the_server):
    expected = shapes(of_the_server, (kind,))
    assert expected
    assert shapes(messages, (kind,)) == expected


@needs_node
def test_chains_that_never_moved_have_no_effective_draws(messages, of_the_server):
    for found in (messages, of_the_server):
        moving, stuck = (next(m for m in found if m["type"] == "finished" and m["id"] == i) for i in (4, 6))
        assert moving["ess"] > 1
        assert stuck["divergences"] == 10
        assert (stuck["rhat"], stuck["ess"]) == (None, None)


@needs_node
def test_drafts_come_first_and_final_bands_last(messages):
    bands = [m for m in messages if m["type"] == "band" and m["id"] == 1]
    assert [m["stage"] for m in bands[:3]] == ["draft"] * 3
    finals = [m for m in bands if m["stage"] == "final"]
    assert {m["panel"] for m in finals} == {0, 1, 2}
    hmc = next(m for m in finals if m["panel"] == 0)
    assert (hmc["draws"], hmc["done"], hmc["total"], len(hmc["functions"])) == (40, 40, 40, 12)
    assert 1 <= hmc["rhat"] < 5
    assert 0.2 < hmc["acceptance"] <= 1
    # A verdict and its reason, as the library's.
    verdict, reason = hmc["diagnosis"].split(": ", 1)
    good = hmc["rhat"] <= 1.05 and not hmc["divergences"]
    assert verdict == ("Chains agree" if good else "Not yet" if hmc["rhat"] <= 1.1 else "Not mixed")
    assert f"{hmc['rhat']:.3f}" in reason
    assert not [m for m in messages if m["type"] in ("error", "failed")]


@needs_node
def test_probe_is_the_band_at_one_input(messages):
    probe = next(m for m in messages if m["type"] == "probe" and m["panel"] == 0)
    assert probe["total"] == pytest.approx(probe["aleatoric"] + probe["epistemic"])
    step = probe["y"][1] - probe["y"][0]
    mass = step * sum(probe["density"])
    mean = step * sum(y * p for y, p in zip(probe["y"], probe["density"])) / mass
    assert mass == pytest.approx(1, abs=0.01)
    assert mean == pytest.approx(probe["mean"], abs=0.02 * math.sqrt(probe["total"]))
    inside = step * sum(p for y, p in zip(probe["y"], probe["density"]) if probe["lower"] < y < probe["upper"])
    assert inside == pytest.approx(0.9, abs=step * max(probe["density"]) * 2)


@needs_node
def test_a_newer_request_cancels_the_running_one(tmp_path):
    long = REGRESSION | {"id": 7, "panels": [{"method": "hmc", "options": {"chains": 4, "draws": 500, "warmup": 500}}]}
    short = REGRESSION | {"id": 8, "panels": PANELS[1:]}
    found = answer([[long, False], [short, True], [{"type": "cancel"}, True]], tmp_path)
    ids = [m["id"] for m in found if m["type"] == "band"]
    assert 7 not in ids[ids.index(8) :]
    assert [m["stage"] for m in found if m.get("id") == 8][-1] == "final"


@needs_node
def test_bad_requests_are_answered_in_words(tmp_path):
    cases = [
        ({"type": "vi", "id": 1}, "needs the local server"),
        (REGRESSION | {"panels": [{"method": "laplace", "options": {}}]}, "needs the local server"),
        (
            REGRESSION | {"panels": [{"method": "map", "options": {"epochs": 3}}]},
            "epochs is not an option in this page",
        ),
        (REGRESSION | {"data": {"x": [], "y": []}}, "data.x must be a list of 1 to 400 entries"),
        (REGRESSION | {"model": MODEL | {"noise": -1}}, "noise must be a number from 0.01 to 10, got -1"),
        (REGRESSION | {"seed": 0.5}, "seed must be an integer"),
        (ORBIT | {"step_size": None}, "step_size must be a number"),
        ("nonsense", "type must be one of"),
    ]
    hello, *found = answer([[request, True] for request, _ in cases], tmp_path)
    assert hello["type"] == "hello"
    for (_, words), message in zip(cases, found, strict=True):
        assert message["type"] == "error"
        assert words in message["message"]


# -- the page ----------------------------------------------------------------------------------------------------------
@functools.cache
def hooks():
    pytest.importorskip("mkdocs", reason="the static page is made by the hooks of mkdocs, which is not installed")
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def site(tmp_path):
    """The address of the static page, served as plain files."""
    for name, content in hooks().playground_files().items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    handler = functools.partial(Quiet, directory=str(tmp_path / "site"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
    server.shutdown()
    thread.join()
    server.server_close()


def test_static_page_fits_a_preset_by_hmc(site, browser):
    browser.console.clear()
    browser.size(1400, 900)
    browser.open(site)
    browser.wait("document.getElementById('engine')?.textContent.includes('WebAssembly')")
    scenes = "[...document.querySelectorAll('button[data-scene]:not([hidden])')].map((b) => b.dataset.scene)"
    assert browser.run(scenes) == ["regression", "classification", "hmc"]
    # A small network, so that the test is short.
    browser.run("void Object.assign(playground.state.model, {width: 4, depth: 1, chains: 2})")
    browser.run("document.querySelector('[data-preset=n10]').click()")
    browser.wait("!!document.querySelector('.panel[data-method=hmc][data-stage=final]')")
    panel = "document.querySelector('.panel[data-method=hmc]')"
    assert "R-hat 1." in browser.run(f"{panel}.querySelector('.note').textContent")
    # Epistemic uncertainty far from the data is a number, and larger than the noise.
    browser.wait(f"!!{panel}.querySelector('dd[data-value=epistemic]')")
    epistemic = browser.run(f"{panel}.querySelector('dd[data-value=epistemic]').textContent")
    assert 0 < float(epistemic.replace("±", "").strip()) < 10
    assert "runs in your browser" in browser.run("document.querySelector('body > footer').textContent")
    assert browser.console == []
