"""Requests of the page: what is understood, and words for everything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import credibly as cr
from credibly.web.playground.engine import Engine
from credibly.web.playground.protocol import MAX_BYTES, FitRequest, read

FIT = {
    "type": "fit",
    "id": 3,
    "scene": "regression",
    "data": {"x": [[0.0], [1.0]], "y": [0.5, 1]},
    "model": {"hidden": [4], "activation": "silu", "prior_scale": 2.0, "noise": 0.2},
    "panels": [{"method": "hmc", "options": {"chains": 2, "trajectory_length": 0.5}}],
    "grid": {"x": [-1, 1, 5]},
}


def test_a_fit_is_understood():
    request = read(json.dumps(FIT))
    assert isinstance(request, FitRequest)
    assert request.data.x == ((0.0,), (1.0,))
    assert request.model.hidden == (4,)
    assert (request.model.likelihood_temperature, request.model.noise) == (1.0, 0.2)
    assert request.panels[0].options == {"chains": 2, "trajectory_length": 0.5}
    assert request.grid == ((-1.0, 1.0, 5),)


def changed(**changes):
    return {**FIT, **changes}


@pytest.mark.parametrize(
    "request_, words",
    [
        (changed(type="train"), "type must be one of"),
        (changed(id="7"), "id must be an integer"),
        (changed(scene="poker"), "scene must be one of"),
        (changed(data={"x": [], "y": []}), "x must be a list of 1 to 400 entries, got 0 entries"),
        (changed(data={"x": [[0]] * 401, "y": [0] * 401}), "got 401 entries"),
        (changed(data={"x": [[0]], "y": [0, 1]}), "as many x as y, got 1 and 2"),
        (changed(data={"x": [[0, 1]], "y": [0]}), "x must have 1 number per row"),
        (changed(data={"x": [[None]], "y": [0]}), "x must be a number from -10000 to 10000, got None"),
        (changed(data={"x": [[1e9]], "y": [0]}), "got 1000000000.0"),
        (changed(model={"hidden": [65], "prior_scale": 1}), "hidden must be an integer from 1 to 64, got 65"),
        (changed(model={"hidden": [4], "prior_scale": -1}), "prior_scale must be a number from 0.05 to 20, got -1"),
        (changed(model={"hidden": [4], "prior_scale": 1, "noise": "loud"}), "noise must be a number"),
        (changed(model={"hidden": [4], "prior_scale": True}), "prior_scale must be a number"),
        (changed(panels=[{"method": "magic"}]), "method must be one of"),
        (changed(panels=[{"method": "map", "options": {"callback": 1}}]), "callback: is not an option of map"),
        (changed(panels=[{"method": "map", "options": {"steps": 1e9}}]), "steps must be an integer from 1 to 5000"),
        (changed(panels=[{"method": "map"}] * 5), "panels must be a list of 1 to 4 entries"),
        (changed(grid={"x": [1, -1, 5]}), "must run from a smaller to a larger value"),
        (changed(grid={"x": [-1, 1, 10**6]}), "x must be an integer from 2 to 401"),
        (
            changed(scene="classification", data={"x": [[0, 0]], "y": [2]}, grid={"x": [0, 1, 2], "y": [0, 1, 2]}),
            "y must",
        ),
        ({"type": "hmc", "id": 1, "density": "banana", "step_size": 0, "trajectory_length": 1}, "step_size must"),
        ({"type": "vi", "id": 1, "start": [0]}, "start must be a list of 2 to 2 entries"),
        ({"type": "probe", "id": 1, "x": [float("inf")]}, "x must be a number"),
        ({"type": "probe", "id": 1, "x": [float("nan")]}, "x must be a number"),
        ({"type": "probe", "id": 1, "x": [10**400]}, "x must be a number from -10000 to 10000, got 1000"),
        ([], "message must be an object, got a list"),
    ],
)
def test_errors_say_what_is_wrong(request_, words):
    sent = []
    Engine(sent.append).handle(json.dumps(request_))
    assert len(sent) == 1
    assert sent[0]["type"] == "error"
    assert words in sent[0]["message"]
    assert sent[0]["id"] == (request_["id"] if isinstance(request_, dict) and request_["id"] != "7" else None)


def test_large_messages_are_refused_unread():
    sent = []
    Engine(sent.append).handle(json.dumps(changed(padding="x" * MAX_BYTES)))
    assert sent[0]["message"].startswith("message must have at most 262,144 bytes")


def test_a_bug_becomes_a_sentence(monkeypatch):
    """No message may end the socket."""
    sent = []
    engine = Engine(sent.append)
    monkeypatch.setattr(engine, "answer", lambda: 1 / 0)
    engine.handle(json.dumps({"type": "probe", "id": 9, "x": [0]}))
    assert sent == [{"type": "error", "id": 9, "message": "division by zero"}]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIT, "x", "y", "hidden"]), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*FIT]), VALUES, st.sampled_from(["fit", "probe", "hmc", "vi", "cancel", "nonsense"]))
def test_nothing_but_words_for_anything(key, value, kind):
    """Whatever a field holds, the request is read or refused in one line."""
    words = ""
    try:
        read(json.dumps({**FIT, "type": kind, key: value}))
    except cr.InputError as error:
        words = str(error)
    assert "\n" not in words
    assert len(words) < 400


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000, b"\xff\xfe", "NaN"])
def test_what_is_not_json(text):
    sent = []
    Engine(sent.append).handle(text)
    assert [message["type"] for message in sent] == ["error"]
