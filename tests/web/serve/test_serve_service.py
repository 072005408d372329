"""The server as a service: token, hosts, metrics, logs, replaced folders, signals, the command."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import re
import shutil
import signal
import socket
import subprocess
import threading

import httpx
import jsonschema
import pytest
from served import records, refused, serving, wait

from credibly.errors import InputError
from credibly.storage.replacing import replace_folder as swap
from credibly.web import app
from credibly.web.serve.guard import route_path
from credibly.web.serve.logs import JsonLines
from credibly.web.serve.metrics import Histogram
from credibly.web.serve.runs import ServedRun
from credibly.web.serve.server import is_loopback, listen, loopback_hosts
from own_tables import call, diabetes, start, wait_for
from own_tables import refused as command_refused
from warm_python import warm_python

TOKEN = "a-token-that-nobody-knows"


@pytest.fixture(scope="module")
def row(numbers):
    return records(numbers.with_suffix(".csv"), 1)[0]


@pytest.fixture(scope="module")
def guarded(numbers):
    with serving(numbers, token=TOKEN) as client:
        yield client


class TestToken:
    @pytest.mark.parametrize("path", ["/runs", "/openapi.json", "/metrics", "/columns", "/nothing"])
    @pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}])
    def test_needed(self, guarded, path, header):
        answer = guarded.get(path, headers=header)
        refused(answer, 401, "token", "Authorization")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in answer.text

    def test_given(self, guarded, row):
        own = {"Authorization": f"Bearer {TOKEN}"}
        assert guarded.get("/runs", headers=own).json()["runs"][0]["name"] == "progress"
        assert guarded.post("/predict", json=[row], headers=own).status_code == 200
        refused(guarded.post("/predict", json=[row]), 401)
        assert guarded.get("/openapi.json", headers=own).json()["security"] == [{"token": []}]

    @pytest.mark.parametrize("path", ["/", "/docs", "/health", "/ready", "/pages/form.js", "/pages/style.css"])
    def test_pages_without_data_are_open(self, guarded, path):
        answer = guarded.get(path)
        assert answer.status_code == 200
        assert "clinic" not in answer.text
        assert "progress" not in answer.text

    def test_weak_ones_are_refused_without_being_shown(self, numbers):
        with pytest.raises(InputError, match="at least 16") as found:
            app(numbers, token="short-secret")
        assert "short-secret" not in str(found.value)


@pytest.fixture(scope="module")
def mounted(numbers):
    """A client of an application that has the server below a prefix."""
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.testclient import TestClient

    outer = Starlette(routes=[Mount("/model", app(numbers, token=TOKEN, watch=0))])
    return TestClient(outer)


class TestMounted:
    """The server below a prefix of another application."""

    @pytest.mark.parametrize("path", ["/", "/docs", "/health", "/ready", "/pages/form.js"])
    def test_pages_without_data_are_open(self, mounted, path):
        assert mounted.get(f"/model{path}").status_code == 200

    @pytest.mark.parametrize("path", ["/runs", "/columns", "/metrics", "/model/", "/pages", "/nothing"])
    def test_everything_else_needs_the_token(self, mounted, path):
        refused(mounted.get(f"/model{path}"), 401, "token")

    def test_labels_are_those_of_the_routes(self, mounted):
        mounted.get("/model/pages/style.css")
        own = {"Authorization": f"Bearer {TOKEN}"}
        assert mounted.get("/model/columns", headers=own).status_code == 200
        text = mounted.get("/model/metrics", headers=own).text
        assert 'path="/pages/style.css"' in text
        assert "/model" not in text


@pytest.mark.parametrize(
    "path, root, expected",
    [
        ("/ready", "", "/ready"),
        ("/model/ready", "/model", "/ready"),
        ("/model/", "/model", "/"),
        ("/modelling/ready", "/model", "/modelling/ready"),
        ("/model", "/model", "/model"),
    ],
)
def test_paths_within_the_application(path, root, expected):
    assert route_path({"path": path, "root_path": root}) == expected


def test_hosts(numbers):
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")
    assert loopback_hosts("0.0.0.0") == ()
    with serving(numbers, hosts=loopback_hosts("127.0.0.1")) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/health", headers={"Host": "LOCALHOST:9"}).status_code == 200
        assert client.get("/health", headers={"Host": "[::1]"}).status_code == 200
        refused(client.get("/health", headers={"Host": "evil.example"}), 421, "evil.example", "127.0.0.1")


def test_responses_are_sent_at_once():
    """With Nagle's algorithm, the body of a response waits 40 ms for the client to acknowledge the header."""

    async def accepted():
        delayed = asyncio.get_running_loop().create_future()

        def answer(reader, writer):
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            delayed.set_result(not option)
            writer.close()

        with listen("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(answer, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                writer.close()
                return await delayed

    assert not asyncio.run(accepted())


class TestDescription:
    def test_schema_accepts_rows_and_answers(self, client, row):
        document = client.get("/openapi.json").json()
        assert document["openapi"].startswith("3.1")
        operation = document["paths"]["/predict"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        check = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
        check.validate([row])
        check.validate({"rows": [row, row]})
        check.validate(operation["requestBody"]["content"]["application/json"]["example"])
        for wrong in ([], [{"age": 1}], [row | {"bmi": [1]}]):
            assert not check.is_valid(wrong)
        answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
        check = jsonschema.Draft202012Validator({**answer, "components": document["components"]})
        found = client.post("/predict?risk=0.5&tolerance=100", json=[row]).json()
        check.validate(found)
        listed = document["components"]["schemas"]["progressPrediction"]["properties"]
        assert set(found["predictions"][0]) == set(listed)

    def test_example_is_answered(self, all_runs):
        document = all_runs.get("/openapi.json").json()
        paths = [path for path in document["paths"] if path.endswith("/predict")]
        assert len(paths) == 3
        for path in paths:
            body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            answer = all_runs.post(path, json=body["example"])
            assert answer.status_code == 200
            assert answer.json()["predictions"][0]["notes"] == ""

    def test_refusals_have_their_schema(self, client):
        schema = client.get("/openapi.json").json()["components"]["schemas"]["Error"]
        jsonschema.validate(client.post("/predict").json(), schema)

    def test_runs_and_columns(self, all_runs):
        runs = {one["name"]: one for one in all_runs.get("/runs").json()["runs"]}
        assert list(runs) == ["progress", "kind", "visits"]
        assert runs["kind"]["classes"] == ["Barbera d'Asti", "Barolo", "Grignolino"]
        assert runs["progress"]["calibration_rows"] == 120
        columns = {one["name"]: one for one in all_runs.get("/runs/progress/columns").json()["columns"]}
        assert list(columns) == ["age", "bmi", "bp", "s5", "clinic"]
        assert columns["clinic"]["levels"][0]["value"] == columns["clinic"]["example"]
        assert sum(level["fraction"] for level in columns["clinic"]["levels"]) == pytest.approx(1)
        assert columns["bmi"]["low"] == min(v for v in diabetes(120)["bmi"] if v is not None)
        days = all_runs.get("/runs/visits/columns").json()["columns"][0]
        assert days["kind"] == "date"
        assert re.fullmatch(r"2024-\d\d-\d\d", days["example"])
        assert days["low"] < days["example"] < days["high"]


def test_a_port_in_use_is_named():
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(InputError, match=f"--port: cannot listen on 127.0.0.1:{port} .*Pass another --port"):
            listen("127.0.0.1", port)
    with pytest.raises(InputError, match="--host: cannot listen on 300"):
        listen("300.1.1.1", 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_metrics_that_are_not_finite_are_null(client, value, monkeypatch):
    metrics = client.app.state.server.slots["progress"].current.run.figures
    monkeypatch.setitem(metrics, "rmse", value)
    assert client.get("/runs").json()["runs"][0]["metrics"]["rmse"] is None
    assert client.get("/columns").json()["metrics"]["rmse"] is None


class TestMetrics:
    def test_counts(self, numbers, row):
        with serving(numbers) as client:
            for _ in range(3):
                client.post("/predict", json=[row, row | {"age": None}])
            client.post("/predict", json=[row | {"age": 50}])
            client.post("/predict", content=b"{")
            text = client.get("/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert values['credibly_requests_total{path="/predict",method="POST",status="200"}'] == "4"
        assert values['credibly_requests_total{path="/predict",method="POST",status="415"}'] == "1"
        assert values['credibly_rows_total{run="progress"}'] == "7"
        assert values['credibly_rows_with_notes_total{run="progress"}'] == "4"
        assert int(values['credibly_rows_unusual_total{run="progress"}']) >= 1
        assert values['credibly_request_seconds_count{path="/predict"}'] == "5"
        assert values['credibly_queue_rows{run="progress"}'] == "0"
        assert float(values["process_resident_memory_bytes"]) > 1e7
        assert len(re.findall("^# TYPE credibly_request_seconds histogram$", text, re.MULTILINE)) == 1

    def test_histogram(self):
        found = Histogram((1, 10))
        for value in (0.5, 1, 2, 100):
            found.observe(value)
        assert found.lines("h", (("a", 'b"'),)) == [
            'h_bucket{a="b\\"",le="1"} 2',
            'h_bucket{a="b\\"",le="10"} 3',
            'h_bucket{a="b\\"",le="+Inf"} 4',
            'h_sum{a="b\\""} 103.5',
            'h_count{a="b\\""} 4',
        ]

    def test_unknown_addresses_do_not_grow_it(self, client):
        before = client.get("/metrics").text.count("\n")
        for number in range(20):
            client.get(f"/address-{number}")
            client.request(f"M{number}", "/runs")
        assert client.get("/metrics").text.count("\n") <= before + 40


def test_logs_hold_no_rows_queries_or_tokens(numbers, row, caplog, monkeypatch):
    secret = "Geheimnis-4711"
    with caplog.at_level(logging.INFO, "credibly.serve"), serving(numbers, token=TOKEN) as client:
        own = {"Authorization": f"Bearer {TOKEN}"}
        client.post("/predict?strict=false", json=[row | {"clinic": secret}], headers=own)
        client.post(f"/predict?level={secret}", json=[row], headers=own)
        client.post("/predict", json=[row | {"age": secret}], headers=own)
        client.get(f"/{secret}", headers=own)
        monkeypatch.setattr(ServedRun, "predict", lambda *given: int(secret))
        answer = client.post("/predict", json=[row], headers=own)
    error = refused(answer, 500)
    lines = [JsonLines().format(record) for record in caplog.records]
    assert secret not in "".join(lines)
    assert TOKEN not in "".join(lines)
    events = [json.loads(line) for line in lines]
    assert [one["status"] for one in events if one["event"] == "request"] == [200, 422, 422, 404, 500]
    failed = next(one for one in events if one["event"] == "error")
    assert failed["exception"] == "ValueError"
    assert failed["id"] in error["message"]
    assert failed["id"] == answer.headers["x-request-id"]
    assert events[0] | {"time": ""} == {"time": "", "level": "info", "event": "loaded", "run": "progress",
                                        "version": events[0]["version"]}  # fmt: skip


class TestReplacedFolders:
    @pytest.fixture
    def served(self, numbers, tmp_path):
        folder = tmp_path / "live"
        shutil.copytree(numbers, folder)
        with serving(folder) as client:
            yield client, folder

    def test_new_runs_answer_without_a_pause(self, served, numbers, tmp_path, row, second):
        client, folder = served
        versions = {
            str(path): json.loads((path / "table.json").read_text())["checksum"][:12] for path in (numbers, second)
        }
        stop, seen = threading.Event(), []

        def ask():
            with httpx.Client(base_url=client.base_url, timeout=60) as own:
                while not stop.is_set():
                    seen.append(own.post("/predict?guarantee=false", json=[row]))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait(lambda: len(seen) > 10)
        shutil.copytree(second, tmp_path / "new")
        swap(tmp_path / "new", folder)
        wait(lambda: seen[-1].json().get("version") == versions[str(second)])
        stop.set()
        for thread in threads:
            thread.join()
        assert {one.status_code for one in seen} == {200}
        answers = {(one.json()["version"], one.json()["predictions"][0]["mean"]) for one in seen}
        # One answer for each run: never that of a folder half replaced.
        assert {version for version, _ in answers} == set(versions.values())
        assert len({version: round(mean, 3) for version, mean in answers}) == 2
        assert len({round(mean, 3) for _, mean in answers}) == 2
        assert 'outcome="loaded"} 1' in client.get("/metrics").text

    def test_broken_ones_are_reported_and_the_old_goes_on(self, served, numbers, row):
        client, folder = served
        before = client.post("/predict", json=[row]).json()
        whole = (folder / "table.json").read_text()
        (folder / "table.json").write_text(whole[:200])
        wait(lambda: client.get("/ready").json()["failed_reloads"] == 1)
        problem = client.get("/runs").json()["runs"][0]["problem"]
        assert "table.json of 'live' is truncated or corrupt" in problem
        assert str(folder.parent) not in problem
        assert client.post("/predict", json=[row]).json() == before
        (folder / "table.json").write_text(whole)
        wait(lambda: client.get("/ready").json()["failed_reloads"] == 0)
        assert client.get("/runs").json()["runs"][0]["problem"] is None
        shutil.rmtree(folder)
        wait(lambda: client.get("/ready").json()["failed_reloads"] == 1)
        gap = row | {"bmi": None}
        # Nothing is read from the folder any more, not for missing cells and promises either.
        answer = client.post("/predict?risk=0.5&tolerance=100", json=[row, gap])
        assert answer.status_code == 200
        assert answer.json()["predictions"][0]["mean"] == pytest.approx(before["predictions"][0]["mean"], rel=1e-5)


@pytest.fixture(scope="session")
def second(place):
    """A regression with the columns of `numbers`, fitted by other means."""
    from credibly.tables import Config, fit_table, prepare

    config = Config(
        str(place / "progress.csv"),
        "progress",
        tune="none",
        hidden=(4,),
        method="map",
        settings={"steps": 40},
        holdout=0.0,
    )
    fit_table(prepare(config), place / "second", progress=False)
    return place / "second"


class TestCommand:
    def test_stops_gracefully(self, numbers, tmp_path, row):
        process = start("serve", numbers, "--port", "0", cwd=tmp_path, python=warm_python())
        try:
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
            with httpx.Client(base_url=address, timeout=60) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
                wait_for(lambda: _healthy(client), process)
                slow = pool.submit(client.post, "/predict", json=[row] * 4000)
                wait_for(lambda: _in_flight(address) == 2, process)
                process.send_signal(signal.SIGTERM)
                assert len(slow.result().json()["predictions"]) == 4000
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0, err
        events = [json.loads(line) for line in err.splitlines()]
        assert [events[0]["event"], events[-1]["event"]] == ["listening", "stopped"]
        assert out == ""

    def test_refusals(self, numbers, tmp_path):
        command_refused(call("serve", tmp_path / "nothing"), "RUN", "no such folder")
        command_refused(call("serve", numbers, "--port", "70000"), "--port", "65535")
        command_refused(call("serve", numbers, "--token", "short"), "--token", "16")
        command_refused(call("serve", numbers, numbers), "'progress'", "NAME=FOLDER")
        command_refused(call("serve", numbers, "--risk", "2", "--port", "0"), "risk", "2")
        assert call("serve").exit_code == 2

    def test_other_hosts_warn_without_a_token(self, numbers, monkeypatch):
        ran = []
        monkeypatch.setattr("credibly.web.serve.server.run_server", lambda *given, **options: ran.append(given))
        found = call("serve", numbers, "--host", "0.0.0.0", "--port", "0")
        assert found.exit_code == 0, found.output
        assert "anyone who can reach 0.0.0.0" in found.stderr
        monkeypatch.setenv("CREDIBLY_TOKEN", TOKEN)
        found = call("serve", f"houses={numbers}", "--host", "0.0.0.0", "--port", "0")
        assert found.exit_code == 0
        assert found.stderr == ""
        assert list(ran[1][0].state.server.slots) == ["houses"]
        monkeypatch.delenv("CREDIBLY_TOKEN")
        assert call("serve", numbers, "--port", "0").stderr == ""

    def test_without_the_extra(self, numbers, tmp_path):
        code = (
            "import sys; from importlib import util; plain = util.find_spec;"
            " util.find_spec = lambda name, *r: None if name == 'uvicorn' else plain(name, *r);"
            f" sys.argv = ['credibly', 'serve', {str(numbers)!r}]; from credibly.cli import main; main()"
        )
        found = subprocess.run([warm_python(), "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert found.returncode == 2
        assert found.stderr.strip().endswith('Install with pip install "credibly[web]"')
        assert "uvicorn" in found.stderr


def _healthy(client):
    try:
        return client.get("/health").status_code == 200
    except httpx.ConnectError:
        return False


def _in_flight(address):
    with httpx.Client(base_url=address) as client:
        return int(re.search(r"^credibly_in_flight (\d+)$", client.get("/metrics").text, re.MULTILINE)[1])
