"""The server over real sockets: who may connect, what is refused, and the command that starts it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
from unittest import mock

import pytest
from typer.testing import CliRunner

from credibly.cli import app, playground
from warm_python import warm_python

websockets = pytest.importorskip("websockets.sync.client")


FIT_4 = '{"type": "fit", "id": 4}'


def open_socket(address, origin=None, **options):
    return websockets.connect(f"ws://{address}/socket", origin=origin or f"http://{address}", **options)


def get(address, path, **headers):
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_the_page_and_its_files(address):
    status, headers, text = get(address, "/")
    assert status == 200
    assert "default-src 'self'" in headers["content-security-policy"]
    for name in re.findall(r'(?:href|src)="((?!data:)[^"]+)"', text):
        assert get(address, f"/{name}")[0] == 200, name
    modules, seen = ["js/main.js"], set()
    while modules:
        name = modules.pop()
        seen.add(name)
        status, headers, text = get(address, f"/{name}")
        assert (status, "javascript" in headers["content-type"]) == (200, True), name
        modules += [f"js/{other}" for other in re.findall(r'from "\./([^"]+)"', text) if f"js/{other}" not in seen]
    assert len(seen) > 10


@pytest.mark.parametrize(
    "path", ["/../protocol.py", "/%2e%2e/protocol.py", "/js/../../server.py", "/nothing.js", "//etc/passwd"]
)
def test_nothing_else_is_served(address, path):
    assert get(address, path)[0] == 404


def test_a_browser_that_asks_for_an_icon_finds_no_error(address):
    assert get(address, "/favicon.ico")[0] == 204


def test_other_hosts_are_refused(address):
    assert get(address, "/", Host="evil.example")[0] == 421
    assert get(address, "/", Host="LOCALHOST:9")[0] == 200
    assert get(address, "/", Host="[::1]:9")[0] == 200


@pytest.mark.parametrize("host", ["[", "[::1", "", ":80"])
def test_malformed_hosts_are_refused(address, host):
    assert get(address, "/", Host=host)[0] == 400


@pytest.mark.parametrize(
    "listening, named, status",
    [
        ("0.0.0.0", "192.168.0.5:8617", 200),
        ("MyHost", "MyHost:8617", 200),
        ("::", "[fe80::2]:8617", 200),
        ("0.0.0.0", "[", 400),
        ("127.0.0.1", "192.168.0.5:8617", 421),
        ("::1", "[::1]:8617", 200),
        ("LocalHost", "localhost:8617", 200),
        ("LocalHost", "evil.example", 421),
    ],
)
def test_hosts_depend_on_the_address_that_is_listened_on(listening, named, status, monkeypatch):
    """The page is open to any name that reaches it unless only this machine can."""
    import uvicorn
    from starlette.testclient import TestClient

    from credibly.web.playground import server

    ran = []
    monkeypatch.setattr(server, "WarmUp", mock.Mock())
    monkeypatch.setattr(uvicorn.Server, "run", lambda self: ran.append(self.config.app))
    monkeypatch.setattr(server.torch, "set_num_threads", lambda count: None)
    server.run_server(listening, 0, print)
    client = TestClient(ran[0])
    assert client.get("/", headers={"Host": named}).status_code == status
    if status == 200:
        own = {"Host": named, "Origin": f"http://{named.lower()}"}
        with client.websocket_connect("/socket", headers=own) as page:
            assert page.receive_json()["type"] == "hello"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://["])
def test_other_origins_are_refused(address, origin):
    from websockets.exceptions import InvalidStatus

    with pytest.raises(InvalidStatus, match="403"), open_socket(address, origin):
        pass
    with pytest.raises(InvalidStatus, match="403"), websockets.connect(f"ws://{address}/socket"):
        pass


def test_bad_messages_get_words_and_the_socket_stays(address):
    with open_socket(address) as page:
        hello = json.loads(page.recv(timeout=30))
        assert hello["type"] == "hello"
        assert set(hello["scenes"]) == {"regression", "classification", "hmc", "vi"}
        for bad in ("{", b"\x00\xff", "x" * 300_000, '{"type": "probe", "id": 3, "x": [1%s]}' % ("0" * 400), FIT_4):
            page.send(bad)
            answer = json.loads(page.recv(timeout=30))
            assert answer["type"] == "error"
            assert "Traceback" not in answer["message"]
        assert answer["id"] == 4
        request = {
            "type": "hmc",
            "id": 5,
            "density": "banana",
            "step_size": 0.5,
            "trajectory_length": 1,
            "trajectories": 4,
        }
        page.send(json.dumps(request))
        kinds = [json.loads(page.recv(timeout=30))["type"] for _ in range(6)]
        assert kinds == ["surface", *["trajectory"] * 4, "finished"]


def test_huge_messages_close_the_socket(address):
    from websockets.exceptions import ConnectionClosed

    with open_socket(address) as page:
        page.recv(timeout=30)
        page.send("x" * 2_000_000)
        with pytest.raises(ConnectionClosed):
            page.recv(timeout=30)


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(playground, "NEEDED", ("starlette", "no_such_server"))
    answer = CliRunner().invoke(app, ["playground", "--no-open"])
    assert answer.exit_code == 2
    assert "pip install 'credibly[web]'" in answer.output


def test_a_port_in_use(address):
    answer = CliRunner().invoke(app, ["playground", "--no-open", "--port", address.split(":")[1]])
    assert answer.exit_code == 2
    assert "Choose another port" in answer.output
    assert CliRunner().invoke(app, ["playground", "--port", "70000"]).exit_code == 2


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is a signal of its own there")
def test_the_command_serves_until_it_is_stopped():
    command = [warm_python(), "-m", "credibly", "playground", "--no-open", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        found = re.search(r"http://(127\.0\.0\.1:\d+)/", line)
        assert found, (line, process.poll())
        assert get(found.group(1), "/")[0] == 200
        with open_socket(found.group(1)) as page:
            assert json.loads(page.recv(timeout=60))["type"] == "hello"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors
        assert process.returncode in (0, 130)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(tuple(found.group(1).split(":")), timeout=5)
    finally:
        if process.poll() is None:
            process.kill()
