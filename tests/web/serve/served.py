"""A server on a real socket in a thread, and requests to it."""

from __future__ import annotations

import contextlib
import csv
import io
import socket
import threading
import time

import httpx
import uvicorn

from credibly.web import app

JSON = {"Content-Type": "application/json"}
CSV = {"Content-Type": "text/csv"}


@contextlib.contextmanager
def serving(*runs, **settings):
    """Serve runs on a free port of the loopback, and yield a client."""
    listening = socket.create_server(("127.0.0.1", 0))
    made = app(*runs, **({"watch": 0.05} | settings))
    server = uvicorn.Server(uvicorn.Config(made, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        wait(lambda: server.started)
        with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=60) as client:
            client.app = made
            yield client
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
    assert not thread.is_alive()


def wait(there, seconds=30):
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def records(path, count=5):
    """Return the first rows of a CSV file as JSON has them: numbers, text and null."""
    with open(path, newline="") as handle:
        return [{k: _cell(v) for k, v in row.items()} for row, _ in zip(csv.DictReader(handle), range(count))]


def _cell(text):
    if text == "":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def first_lines(path, count):
    """Return the header and the first rows of a file."""
    return b"".join(path.read_bytes().splitlines(keepends=True)[: count + 1])


def parsed(answer):
    """Return the rows of a CSV answer."""
    assert answer.status_code == 200, answer.text
    return list(csv.DictReader(io.StringIO(answer.text)))


def refused(answer, status, *words):
    """Assert that an answer is an error of one line with the given words, and return its message."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"type", "status", "argument", "message", "advice"}
    assert error["status"] == status
    text = f"{error['message']}. {error['advice']}"
    assert text.isprintable()
    assert "Traceback" not in text
    for word in words:
        assert word in text, text
    return error
