"""Methods that train, on two processes: the result of one process, mismatches that name both, propagated errors.

All fits run in one launch of torchrun and again in this process; see world_fits.py.
"""

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import world_fits as fits

import credibly as cr
from credibly.distributed.heartbeat import Heartbeat
from credibly.distributed.world import FAILURE_KEY, Mesh, World
from credibly.methods.ensemble import join_histories
from warm_python import warm_python

pytestmark = pytest.mark.slow

SCRIPT = Path(fits.__file__)
LIMIT = 180  # seconds for a launch on a loaded machine; on an idle one it takes about six
# Rounding errors, relative to the largest value. The sums over rows differ by about 1e-16 per step, which 50 steps of
# training on a smooth loss amplify to 1e-13. SWAG's rate comes from a difference quotient with steps of 1e-6, and
# Laplace inverts a matrix: both may lose six digits.
TOLERANCE = {"swag": 1e-7, "laplace": 1e-7, "frozen laplace": 1e-7}


def launch(*arguments):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "CREDIBLY_MESH")}
    done = subprocess.run(
        [warm_python(), *arguments],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": warm_python()},
        timeout=LIMIT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def alone():
    return fits.fit_all(fits.problem(seed=0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), "results", str(path))
    return path


@pytest.fixture(scope="module")
def two(folder):
    """Tensors and histories of both processes."""
    return [
        (torch.load(folder / f"tensors-{rank}.pt"), json.loads((folder / f"histories-{rank}.json").read_text()))
        for rank in range(2)
    ]


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The errors of both processes, by the kind of failure."""
    path = tmp_path_factory.mktemp("failed")
    launch(str(SCRIPT), "failures", str(path))

    def errors(case):
        return [json.loads((path / f"{case.__name__}-{rank}.json").read_text()) for rank in range(2)]

    return {case: errors(case) for case in fits.FAILURES} | {"folder": path}


@pytest.mark.parametrize("name", [*fits.BIT_FOR_BIT, *fits.TO_ROUNDING])
def test_both_processes_have_the_same(two, name):
    (first, history), (second, other) = two
    assert first[name].keys() == second[name].keys()
    for key, values in first[name].items():
        assert torch.equal(values, second[name][key])
    assert history[name] == other[name]


@pytest.mark.parametrize("name", [name for name in [*fits.BIT_FOR_BIT, *fits.TO_ROUNDING] if name.startswith("frozen")])
def test_the_body_is_cut_in_both_processes(two, name):
    for _, history in two:
        assert history[name]["frozen_body"]["boundary"] == "input of 4 (5 values per row)"


@pytest.mark.parametrize("name", fits.BIT_FOR_BIT)
def test_members_are_bit_for_bit_those_of_one_process(alone, two, name):
    for key, values in alone[0][name].items():
        assert torch.equal(two[0][0][name][key], values)
    assert two[0][1][name] == alone[1][name]


@pytest.mark.parametrize("name", fits.TO_ROUNDING)
def test_shared_rows_give_the_fit_of_one_process_to_rounding(alone, two, name):
    limit = TOLERANCE.get(name, 1e-9)
    for key, values in alone[0][name].items():
        gap = (two[0][0][name][key] - values).abs().max()
        assert float(gap) <= limit * float(values.abs().max()), key
    mine, theirs = alone[1][name], two[0][1][name]
    assert mine.keys() == theirs.keys()
    torch.testing.assert_close(torch.tensor(theirs["loss"]), torch.tensor(mine["loss"]), rtol=limit, atol=limit)
    for part, values in mine["parts"].items():
        torch.testing.assert_close(torch.tensor(theirs["parts"][part]), torch.tensor(values), rtol=limit, atol=limit)


def test_members_of_the_two_processes_stopped_at_different_steps(alone):
    history = alone[1]["stopped early"]
    scores = torch.tensor(history["validation"])  # (evaluations, members)
    stops = [next(e for e in range(1, len(scores)) if scores[e, m] <= scores[:e, m].max()) for m in range(3)]
    assert max(stops[:2]) != stops[2]  # or the test of that fit would prove nothing
    assert history["steps"] == history["validation_step"][max(stops)] < history["steps_planned"]


def test_one_process_writes_for_all(folder):
    loaded = cr.load(folder / "saved")
    again = cr.MAP(**fits.PLAIN).fit(fits.problem(seed=0), seed=3)
    torch.testing.assert_close(loaded.draws, again.draws, rtol=1e-9, atol=1e-12)
    assert loaded.record.settings == again.record.settings


def test_different_data_are_refused_by_both_naming_both(failed):
    for error in failed[fits.other_data]:
        assert error["kind"] == "InputError"
        assert "data must be the same in all processes, got" in error["message"]
        assert "in process 0 and" in error["message"]
        assert "in process 1. Load the same rows in the same order in every process" in error["message"]


def test_a_library_that_one_process_lacks_is_refused_by_both(failed):
    for error in failed[fits.library_in_one]:
        assert error["kind"] == "InputError"
        reason = "must be the same in all processes, got 'C++' in process 0 and 'torch' in process 1"
        assert f"backend {reason}. Install a C++ compiler" in error["message"]


def test_different_settings_are_refused_naming_what_differs(failed):
    for error in failed[fits.other_settings]:
        assert error["kind"] == "InputError"
        reason = "must be the same in all processes, got members 2 in process 0 and members 3 in process 1"
        assert f"settings {reason}" in error["message"]


def test_an_error_in_one_process_reaches_the_other_with_its_message(failed):
    leader, other = failed[fits.error_in_one]
    assert other["kind"] == "ArithmeticError"
    assert leader["kind"] == "PeerError"
    assert "process 1 of 2 failed" in leader["message"]
    assert "ArithmeticError: the seventh evaluation went wrong" in leader["message"]
    assert leader["seconds"] < 30  # not the 600 seconds of a collective call


def test_a_member_that_diverges_is_named_by_its_number_among_all(failed):
    leader, other = failed[fits.diverging_member]
    assert other["kind"] == "TrainingError"
    assert "member 2" in other["message"]
    assert leader["kind"] == "PeerError"
    assert "member 2" in leader["message"]
    assert not (failed["folder"] / "diverged").exists()


def test_a_failure_to_write_reaches_all(failed):
    leader, other = failed[fits.no_place_to_write]
    assert leader["kind"] in ("FileExistsError", "NotADirectoryError", "StoreError")
    assert other["kind"] == "PeerError"
    assert leader["kind"] in other["message"]


def test_histories_of_one_process_are_unchanged():
    history = {"loss": [[1.0, 2.0]], "parts": {}, "validation": []}
    assert join_histories(Mesh(World()), history) is history


def heartbeat(store, rank):
    return Heartbeat(World(rank=rank, size=2, timeout=0.5, store=store))


def test_a_working_process_is_waited_for_beyond_the_time_limit():
    store, worked = torch.distributed.HashStore(), []

    def work():
        other, end = heartbeat(store, 1), time.monotonic() + 1.5
        while time.monotonic() < end:
            other.tick()
            time.sleep(0.01)
        worked.append(True)
        other.wait()

    thread = threading.Thread(target=work)
    thread.start()
    heartbeat(store, 0).wait()
    assert worked
    thread.join()


def test_a_silent_or_failed_process_is_not_waited_for():
    store, started = torch.distributed.HashStore(), time.monotonic()
    mine = heartbeat(store, 0)
    mine.wait()
    assert 0.5 <= time.monotonic() - started < 10
    store.set(FAILURE_KEY, "an error")
    mine.world.timeout = 1000.0
    mine.wait()  # returns at once


def test_a_single_process_does_not_wait():
    mine = Heartbeat(World())
    mine.tick()
    mine.wait()
