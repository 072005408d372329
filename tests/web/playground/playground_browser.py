"""A real Chromium, driven over the DevTools protocol, and states of the page to open in it."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
# Seconds until something that was expected counts as missing; a loaded machine is slow.
PATIENCE = 60.0

# A small network: a fit takes a fraction of a second.
MODEL = {"width": 4, "depth": 1, "chains": 2}
POINTS = [[-1.5, -0.6], [-1.0, -0.9], [1.0, 0.8], [1.4, 0.3]]
FINAL = (
    "playground.scene.panels?.length > 0 && !playground.scene.drafting() && "
    "playground.scene.panels.every((p) => p.node.dataset.stage === 'final')"
)
INSIDE = "document.querySelector('.inside')?.dataset.stage === 'final'"


class Browser:
    """One headless browser with one tab."""

    def __init__(self, folder: Path) -> None:
        command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={folder}", "--remote-debugging-port=0", "--no-first-run", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file = folder / "DevToolsActivePort"
        until = time.monotonic() + PATIENCE
        while not (port_file.exists() and len(port_file.read_text().splitlines()) == 2):
            assert time.monotonic() < until, "the browser did not start"
            time.sleep(0.05)
        port, path = port_file.read_text().splitlines()
        address = f"ws://127.0.0.1:{port}{path}"
        self.open_things = ExitStack()
        self.socket = self.open_things.enter_context(connect(address, max_size=None, open_timeout=PATIENCE))
        self.ids = itertools.count(1)
        self.console: list[str] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv(timeout=PATIENCE))
            self.note(answer)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer.get("error"))
                return answer["result"]

    def note(self, event: dict[str, Any]) -> None:
        """Keep errors and warnings of the page."""
        kind, details = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.console.append(json.dumps(details["exceptionDetails"])[:800])
        elif kind == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
        elif kind == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.console.append(json.dumps(details["args"])[:800])

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Evaluate an expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until an expression is true and return its value."""
        until = time.monotonic() + PATIENCE
        while not (value := self.run(condition)):
            assert time.monotonic() < until, f"still not true: {condition}"
            time.sleep(0.02)
        return value

    def mouse(self, kind: str, x: float, y: float, button: str = "none") -> None:
        pressed = {"left": 1, "right": 2}.get(button, 0) if kind != "mouseReleased" else 0
        self.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button=button,
            buttons=pressed,
            clickCount=int(bool(pressed)),
        )

    def click(self, x: float, y: float, button: str = "left") -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button)
        self.mouse("mouseReleased", x, y, button)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, "left")
        for part in (0.5, 1.0):
            x, y = (a + part * (b - a) for a, b in zip(start, end))
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1)
        self.mouse("mouseReleased", *end, "left")

    def key(self, name: str, *, shift: bool = False) -> None:
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Delete": 46, "Tab": 9}
        for kind in ("rawKeyDown", "keyUp"):
            parameters = {"windowsVirtualKeyCode": codes[name], "modifiers": 8 * int(shift)}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, **parameters)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def close(self) -> None:
        self.session = None
        try:
            self.call("Browser.close")
        finally:
            self.open_things.close()
            self.process.wait(timeout=PATIENCE)


def link(scene, **state):
    """The fragment of an address that opens a scene in a state."""
    text = base64.urlsafe_b64encode(json.dumps({"model": MODEL, **state}).encode()).decode().rstrip("=")
    return f"#{scene}~{text}"


def regression(panels=("map",), points=POINTS, **more):
    return link("regression", regression={"points": points, "panels": list(panels), "preset": "", **more})


def points(browser):
    return browser.run("playground.scene.state.points")
