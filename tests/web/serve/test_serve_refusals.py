"""Bad requests: always a 4xx with a plain message that names the column or parameter, and never a traceback."""

from __future__ import annotations

import json
import socket
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from served import CSV, JSON, first_lines, records, refused, serving

# Since 3.14 the limit of Python's JSON decoder is the size of the stack; the list in place of a cell is then the fault.
NESTED = (400, ["nested"]) if sys.version_info < (3, 14) else (422, ["rows[0].age", "a list"])


@pytest.fixture(scope="module")
def row(numbers):
    return records(numbers.with_suffix(".csv"), 1)[0]


def send(client, content, headers=JSON, query=""):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return client.post(f"/runs/progress/predict{query}", content=body, headers=headers)


class TestBodies:
    @pytest.mark.parametrize(
        "body, status, words",
        [
            (b"", 400, ["empty"]),
            (b"  \n", 400, ["empty"]),
            (b"{", 400, ["not JSON", "line 1, column 2"]),
            (b"[1]", 422, ["rows[0]", "object", "number"]),
            (b"7", 422, ["rows", "list"]),
            (b"[]", 422, ["at least one row"]),
            (b'{"rows": {}}', 422, ["rows", "list", "an object"]),
            (b'{"age": 1}', 422, ["'rows'", "'age'"]),
            (b'{"rows": [], "more": 1}', 422, ["'more'"]),
            (b"\xff\xfe", 400, ["UTF-8"]),
            (b"[" * 100_000, 400, ["nested"]),
            (b'[{"age": ' * 5_000 + b"1" + b"}]" * 5_000, *NESTED),
            (b'[{"age": ' + b"9" * 5_000 + b"}]", 400, ["too long"]),
            (b'[{"age": NaN}]', 400, ["NaN", "null"]),
            (b'[{"age": -Infinity}]', 400, ["-Infinity", "null"]),
            (b"[null]", 422, ["rows[0]", "null"]),
            (b"[{}]", 422, ["none of the columns", "'age'"]),
        ],
    )
    def test_json(self, all_runs, body, status, words):
        refused(send(all_runs, body), status, *words)

    @pytest.mark.parametrize(
        "change, argument, words",
        [
            ({"age": "old"}, "age", ["rows[0]", "age", "'old'", "not a number", "strict=false"]),
            ({"age": 1e999}, None, ["Infinity"]),
            ({"age": "1e999"}, "age", ["inf is not finite"]),
            ({"age": 10**30}, None, []),
            ({"age": 10**400}, "age", ["not finite"]),
            ({"age": {"a": 1}}, "rows[0].age", ["must be a number, text or null", "an object"]),
            ({"clinic": [1]}, "rows[0].clinic", ["a list"]),
            ({"age": True}, "age", ["'true' is not a number"]),
            ({"agee": 1}, "rows[0]", ["unknown column 'agee'", "'age'"]),
            ({"\n\x1b[31m": 1}, "rows[0]", ["unknown column", "\\x1b[31m"]),
            ({"clinic": "\ud800"}, "clinic", ["Unicode"]),
            ({"age": "a\u2028\x07b"}, "age", ["\\u2028\\x07"]),
        ],
    )
    def test_cells_and_columns(self, all_runs, row, change, argument, words):
        answer = send(all_runs, [row | change])
        if not words:
            assert "far outside the training range" in answer.json()["predictions"][0]["notes"]
        elif words == ["Infinity"]:
            refused(answer, 400, *words)
        else:
            assert refused(answer, 422, *words)["argument"] == argument

    def test_a_missing_column_is_named_with_its_row(self, all_runs, row):
        short = {name: value for name, value in row.items() if name != "bmi"}
        refused(send(all_runs, [row, short]), 422, "rows[1]", "'bmi'", "null", "strict=false")
        found = send(all_runs, [row, short], query="?strict=false").json()["predictions"]
        assert [one["notes"] for one in found] == ["", "bmi is missing"]

    def test_columns_that_are_no_inputs_may_be_sent(self, all_runs, row):
        assert {"year", "progress"} <= row.keys()
        assert send(all_runs, [row]).status_code == 200

    def test_dates(self, all_runs):
        good = {"day": "2024-03-01", "size": 0.5}
        assert all_runs.post("/runs/visits/predict", json=[good]).status_code == 200
        error = refused(
            all_runs.post("/runs/visits/predict", json=[good, good | {"day": "soon"}]), 422, "rows[1]", "soon"
        )
        assert error["argument"] == "day"

    @pytest.mark.parametrize(
        "body, words",
        [
            (b"age,bmi,bp,s5,clinic\n", ["no rows"]),
            (b"age,bmi,bp,s5,clinic\n1,2\n", ["line 2", "2 cells"]),
            (b"age,age\n1,2\n", ["more than one column", "'age'"]),
            (b"\x00\x01\x02", ["binary"]),
            (b'age,bmi,bp,s5,clinic\n"1,2,3,4,5\n', ["quote"]),
            (b"age,bmi,bp,s5,clinic\n1,much,3,4,5\n", ["rows[0]", "bmi", "'much'"]),
            (b"PK\x03\x04abc", ["zip"]),
        ],
    )
    def test_csv(self, all_runs, body, words):
        refused(send(all_runs, body, CSV), 422, *words)

    @pytest.mark.parametrize(
        "headers, status, words",
        [
            ({}, 415, ["Content-Type", "application/json"]),
            ({"Content-Type": "text/plain"}, 415, ["text/plain"]),
            ({"Content-Type": "application/json; charset=utf-16"}, 415, ["utf-16"]),
            (JSON | {"Content-Encoding": "gzip"}, 415, ["gzip"]),
            (JSON | {"Accept": "image/png"}, 406, ["Accept", "text/csv"]),
        ],
    )
    def test_headers(self, all_runs, row, headers, status, words):
        answer = send(all_runs, [row], headers)
        error = refused(answer, status)
        text = f"{error['argument']} {error['message']} {error['advice']}"
        assert all(word in text for word in words), text

    def test_too_many_rows_and_bytes(self, all_runs, row, numbers):
        refused(send(all_runs, [row] * 501), 413, "500 rows", "501")
        line = first_lines(numbers.with_suffix(".csv"), 1).splitlines(keepends=True)
        refused(send(all_runs, line[0] + line[1] * 800, CSV), 413, "500 rows", "more")
        refused(send(all_runs, b" " * 200_001), 413, "200,000 bytes")

        def chunks():
            for _ in range(40):
                yield b" " * 10_000

        # Without a stated length.
        answer = all_runs.post("/runs/progress/predict", content=chunks(), headers=JSON)
        refused(answer, 413, "200,000 bytes")


class TestParameters:
    @pytest.mark.parametrize(
        "query, words",
        [
            ("level=2", ["level", "0.02"]),
            ("level=0.9,0.9", ["level", "twice"]),
            ("level=", ["level", "got 0"]),
            ("level=" + ",".join(str(i / 100) for i in range(1, 40)), ["level", "39"]),
            ("level=0.99999", ["level", "needs", "rows", "guarantee=false"]),
            ("level=nan", ["level"]),
            ("level=0.5&level=0.6", ["level", "once"]),
            ("draws=0", ["draws", "positive integer"]),
            ("draws=1e3", ["draws"]),
            ("draws=" + "9" * 30, ["draws"]),
            ("strict=yes", ["strict", "'yes'"]),
            ("allow_empty=true", ["allow_empty", "prediction sets"]),
            ("at=12", ["at", "censored"]),
            ("risk=1.5", ["risk", "1.5"]),
            ("risk=a", ["risk", "'a'"]),
            ("risk=0.1&tolerance=-1", ["tolerance", "-1"]),
            ("confidence=0", ["confidence"]),
            ("levels=0.5", ["levels", "not a parameter", "level"]),
            ("%00%1b=1", ["\\x00"]),
        ],
    )
    def test_refused(self, all_runs, row, query, words):
        refused(send(all_runs, [row], query=f"?{query}"), 422, *words)

    def test_of_classes(self, all_runs, classes):
        rows = records(classes.with_suffix(".csv"), 1)
        refused(all_runs.post("/runs/kind/predict?risk=0.1&tolerance=3", json=rows), 422, "tolerance", "classes")
        refused(all_runs.post("/runs/kind/predict?guarantee=false&level=0.5", json=rows), 422, "level")


class TestAddresses:
    @pytest.mark.parametrize(
        "path",
        ["/nothing", "/runs/none/predict", "/pages/../app.py", "/pages/%2e%2e/app.py", "/runs/..%2f..%2fetc/columns"],
    )
    def test_unknown(self, all_runs, path):
        refused(all_runs.get(path) if "predict" not in path else all_runs.post(path), 404)

    def test_no_file_but_the_pages_is_answered(self, all_runs, numbers):
        """Raw paths, which clients would normalise."""
        host = all_runs.base_url.host, all_runs.base_url.port
        for path in (
            b"/../table.json",
            b"/pages/../../../../etc/passwd",
            f"/runs/progress/{numbers}/table.json".encode(),
        ):
            with socket.create_connection(host) as raw:
                raw.sendall(b"GET %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % path)
                answer = b"".join(iter(lambda raw=raw: raw.recv(65536), b""))
            assert answer.startswith(b"HTTP/1.1 404"), path

    def test_several_runs_have_no_predict_at_the_root(self, all_runs, row):
        refused(all_runs.post("/predict", json=[row]), 404, "3 runs", "/runs/progress/predict")

    def test_methods(self, all_runs):
        refused(all_runs.get("/runs/progress/predict"), 405, "'GET'", "POST")
        refused(all_runs.post("/runs"), 405)


# Cells and structures that JSON can hold, near to what is expected and far from it.
cells = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2),
    st.sampled_from(["Süd", "1,5", "$3", "2024-01-01", "", "nan", "inf"]),
)  # fmt: skip
columns = st.sampled_from(["age", "bmi", "bp", "s5", "clinic", "year", "progress"])
rows = st.dictionaries(columns | st.text(max_size=5), cells, max_size=7)
bodies = st.one_of(
    st.lists(rows, max_size=3).map(json.dumps).map(str.encode),
    st.recursive(
        cells, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    )
    .map(json.dumps)
    .map(str.encode),
    st.binary(max_size=60),
    st.text("age,bmps5clin;\t\n\"'0123456789.-eE", max_size=80).map(str.encode),
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies, kind=st.sampled_from([JSON, CSV]), strict=st.booleans())
@example(body=b"age\n" + b"1" * 30_000, kind=CSV, strict=False)
@example(body=b"age,bmi\n\n\n", kind=CSV, strict=False)
@example(body=b'[{"age": 1e308}]', kind=JSON, strict=False)
@example(body=b'[{"\\ud800": 1, "age": 2}]', kind=JSON, strict=True)
def test_any_body_is_predicted_or_refused_plainly(all_runs, body, kind, strict):
    answer = send(all_runs, body, kind, f"?strict={str(strict).lower()}&guarantee=false")
    if answer.status_code == 200:
        assert len(answer.json()["predictions"]) >= 1
    else:
        assert answer.status_code in (400, 413, 415, 422)
        refused(answer, answer.status_code)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    query=st.dictionaries(
        st.sampled_from(["level", "draws", "risk", "at", "strict", "x"]), st.text(max_size=6), max_size=2
    )
)
def test_any_query_is_answered_or_refused_plainly(all_runs, row, query):
    answer = all_runs.post("/runs/progress/predict", params=query | {"guarantee": "false"}, json=[row])
    if answer.status_code != 200:
        refused(answer, 422)


def test_a_slow_body_and_a_slow_prediction_end(numbers, row, monkeypatch):
    import time

    from credibly.web.serve.runs import ServedRun

    with serving(numbers, timeout=0.4) as client:
        host = client.base_url.host, client.base_url.port
        with socket.create_connection(host) as raw:
            raw.sendall(
                b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n["
            )
            answer = b"".join(iter(lambda: raw.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"did not arrive within 0.4 s" in answer
        plain = ServedRun.predict
        monkeypatch.setattr(ServedRun, "predict", lambda *given: (time.sleep(0.8), plain(*given))[1])
        refused(client.post("/predict", json=[row]), 503, "0.4 s")
        monkeypatch.undo()
        assert client.post("/predict?guarantee=false", json=[row]).status_code in (200, 503)


def test_a_full_queue_is_refused(numbers, row, monkeypatch):
    import concurrent.futures
    import threading

    from credibly.web.serve.runs import ServedRun

    free = threading.Event()
    with serving(numbers, max_queue=3, batch_rows=1) as client:
        plain = ServedRun.predict
        monkeypatch.setattr(ServedRun, "predict", lambda *given: (free.wait(30), plain(*given))[1])
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            sent = [pool.submit(client.post, "/predict", json=[row]) for _ in range(8)]
            found = next(concurrent.futures.as_completed(sent)).result()
            refused(found, 503, "busy", "waiting")
            assert found.headers["retry-after"] == "1"
            free.set()
            done = [one.result().status_code for one in sent]
    # Three wait, and one is being predicted unless it came after them.
    assert done.count(200) in (3, 4)
    assert done.count(200) + done.count(503) == 8
