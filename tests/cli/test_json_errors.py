"""With --json, whatever goes wrong is one JSON object on standard output and nothing else."""

from __future__ import annotations

import json

import pytest

import credibly as cr
from credibly.cli import evaluate, fit, predict
from own_tables import MAP, call, cancer, write

KEYS = ["type", "argument", "message", "advice", "exit_code"]


def error_of(*words, code=2):
    found = call(*words, "--json")
    assert found.exit_code == code, (found.output, found.exception)
    assert found.stderr == ""
    plain = json.loads(found.stdout)
    assert list(plain) == ["error"]
    assert list(plain["error"]) == KEYS
    assert plain["error"]["exit_code"] == code
    return plain["error"]


def test_an_input_error_has_its_parts(tmp_path):
    error = error_of("fit", tmp_path / "no.csv", "--target", "y")
    assert error["type"] == "InputError"
    assert error["argument"] == "table"
    assert error["message"] == f"table: no such file: '{tmp_path / 'no.csv'}'"
    table = write(cancer(60), tmp_path / "t.csv")
    error = error_of("fit", table, "--target", "bening", "--out", tmp_path / "run", *MAP)
    assert (error["argument"], error["message"]) == ("--target", "--target: no column 'bening'")
    assert error["advice"].startswith("Did you mean 'benign'?")


@pytest.mark.parametrize("verb", ["predict", "evaluate", "report", "resume"])
def test_a_missing_run_has_the_same_code_everywhere(tmp_path, verb):
    table = write(cancer(60), tmp_path / "t.csv")
    words = (tmp_path / "no", table) if verb in ("predict", "evaluate") else (tmp_path / "no",)
    assert error_of(verb, *words)["argument"] == "RUN"


@pytest.mark.parametrize(
    "words, argument, said",
    [
        (("predict",), "RUN", "Missing argument 'RUN'"),
        (("fit", "t.csv", "--sed", "3"), "--sed", "No such option"),
        (("fit", "t.csv", "--seed", "x"), "--seed", "Invalid value for '--seed'"),
        (("fitt",), None, "No such command 'fitt'"),
    ],
)
def test_usage_errors(words, argument, said):
    error = error_of(*words)
    assert (error["type"], error["argument"]) == ("UsageError", argument)
    assert said in error["message"]
    assert error["advice"].endswith("--help")


@pytest.mark.parametrize(
    "raised, kind, code",
    [
        (cr.StoreError("path: broken"), "StoreError", 1),
        (cr.SamplingError("it diverges"), "SamplingError", 1),
        (FileNotFoundError(2, "No such file or directory", "x"), "FileNotFoundError", 2),
        (OSError(28, "No space left on device", "x"), "OSError", 1),
        (MemoryError(), "MemoryError", 1),
        (KeyboardInterrupt(), "Interrupted", 130),
    ],
)
def test_failures_during_the_run(tmp_path, monkeypatch, raised, kind, code):
    def fail(*args, **kwargs):
        raise raised

    monkeypatch.setattr(fit, "config_from", fail)
    table = write(cancer(60), tmp_path / "t.csv")
    assert error_of("fit", table, "--target", "benign", "--out", tmp_path / "run", code=code)["type"] == kind


def test_the_leader_reports_its_own_refusal_even_if_another_process_was_faster(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        try:
            raise cr.InputError("--task", "must be one of 'a', 'b', got 'c'")
        except cr.InputError:
            raise cr.PeerError("process 0 stops: process 1 failed") from None

    monkeypatch.setattr(fit, "config_from", fail)
    table = write(cancer(60), tmp_path / "t.csv")
    error = error_of("fit", table, "--target", "benign", "--out", tmp_path / "run")
    assert (error["type"], error["argument"]) == ("InputError", "--task")


def test_an_interrupt_before_the_command_starts(tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "handle_errors", stop)
    error = error_of("predict", tmp_path, tmp_path / "t.csv", code=130)
    assert (error["type"], error["message"]) == ("Interrupted", "stopped")


def test_a_defect_is_reported_too(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(evaluate, "handle_errors", fail)
    found = call("evaluate", tmp_path, tmp_path / "t.csv", "--json")
    # The traceback follows on standard error.
    assert isinstance(found.exception, ZeroDivisionError)
    assert json.loads(found.stdout)["error"]["type"] == "ZeroDivisionError"


def test_a_name_after_two_dashes_is_no_option(tmp_path):
    found = call("report", "--", "--json")
    assert found.exit_code == 2
    assert found.stdout == ""
    assert found.stderr == "credibly: RUN: no such folder: '--json'. Pass the --out of `credibly fit`\n"
