"""A playground server on a free port of this machine, and a browser, one of each per worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import playground_browser
import pytest


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    uvicorn = pytest.importorskip("uvicorn")
    from credibly.web.playground.server import CLOSING_BYTES, make_app

    config = uvicorn.Config(make_app(), port=0, log_level="warning", ws_max_size=CLOSING_BYTES)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[playground_browser.Browser]:
    if playground_browser.BROWSER is None:
        pytest.skip(f"no browser found: none of {', '.join(playground_browser.NAMES)} is installed")
    one = playground_browser.Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def page(browser, address):
    """Open a scene; whatever the page logs as an error fails the test."""
    browser.console.clear()

    def open_(fragment, width=1400, *, dark=False, wait=playground_browser.FINAL):
        browser.size(width, 900, dark=dark)
        browser.open(f"http://{address}/{fragment}")
        browser.wait(f"window.playground && {wait}")
        return browser

    yield open_
    assert browser.console == []
