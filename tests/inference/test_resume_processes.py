"""Runs that are killed, interrupted or fail: what is on disk can always be resumed."""

import errno
import os
import random
import re
import signal
import subprocess
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from stopped_runs import Crash, StoppedRuns, attempt, end, hmc, make, manifest_of, quick, same, sg, tidy

import credibly as cr
from credibly.core.interrupts import polite_interrupt
from credibly.inference.sampling import recording
from credibly.inference.sampling import run as sampling_run
from credibly.inference.sampling.hmc import HMCSampler
from credibly.inference.sampling.sgmcmc import SGMCMCSampler
from credibly.storage import run_folder
from credibly.storage.manifest import read_manifest
from credibly.storage.run_folder import LOCK
from warm_python import warm_python

fork = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.is_available(), reason="a forked process cannot compute gradients here"
)


def in_child(work):
    """Run the work in a forked process; return its exit status, negative if a signal ended it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(number, work):
    """Run the work in a process that SIGKILL ends at its n-th operation on the disk.

    That is in the middle of a write, before or after a rename, or before a file is removed.
    """

    def mortal():
        seen = [0]
        write, replace, unlink = run_folder.write_bytes, os.replace, Path.unlink

        def step():
            seen[0] += 1
            return seen[0] == number

        def die():
            os.kill(os.getpid(), signal.SIGKILL)

        def half(draft, content):
            if step():
                Path(draft).write_bytes(content[: len(content) // 2])
                die()
            write(draft, content)

        def renamed(source, target):
            if step():
                die()
            replace(source, target)
            if step():
                die()

        def removed(self, **how):
            if step():
                die()
            unlink(self, **how)

        run_folder.write_bytes, os.replace, Path.unlink = half, renamed, removed
        work()

    return in_child(mortal)


@fork
class TestKilled(StoppedRuns):
    def test_at_every_operation_on_the_disk(self, tmp_path, tight, monkeypatch):
        monkeypatch.setattr(recording, "SHARD_BYTES", 600)  # two draws
        method = quick(draws=3, warmup=1)
        known = method.fit(make(), seed=1)
        moments = {"before": 0, "start": 0, "warm-up": 0, "draws": 0, "complete": 0}
        for number in range(1, 1000):
            parent = tmp_path / str(number)
            parent.mkdir()
            path = parent / "run"
            status = killed_at(number, partial(method.fit, make(), seed=1, out=path))
            if status == 0:
                break
            assert status == -signal.SIGKILL
            if not path.exists():
                moments["before"] += 1
                same(method.fit(make(), seed=1, out=path), known)
            else:
                manifest = read_manifest(path)  # intact at any moment
                shown = "complete" if manifest["status"] == "complete" else manifest["progress"]["phase"]
                moments[{"step size": "warm-up", "sampling": "draws", "done": "draws"}.get(shown, shown)] += 1
                moments["start"] += "state" not in manifest
                same(cr.resume(path, make(seed=number)), known)
            tidy(path)
            assert [p.name for p in parent.iterdir()] == ["run"]  # drafts are removed too
        assert all(moments.values()), moments
        assert number > 50

    @pytest.mark.parametrize("every", [17, 23, 31])
    def test_repeatedly(self, tmp_path, tight, every):
        """The processes that resume are killed as well."""
        method, path = quick(), tmp_path / "run"
        known = method.fit(make(), seed=1)
        assert killed_at(every, partial(method.fit, make(), seed=1, out=path)) == -signal.SIGKILL
        kills = 1
        while killed_at(every, partial(cr.resume, path, make())):
            kills += 1
            assert kills < 100
        assert kills > 2
        same(cr.resume(path), known)
        tidy(path)

    def test_a_concurrent_reader_sees_one_checkpoint_or_the_next(self, tmp_path, tight):
        method, path = quick(draws=150, thin=2), tmp_path / "run"
        known = method.fit(make(), seed=1)
        pid = os.fork()
        if pid == 0:
            try:
                method.fit(make(), seed=1, out=path)
            finally:
                os._exit(0)
        counts = set()
        while not os.waitpid(pid, os.WNOHANG)[0]:
            seen, error = attempt(partial(cr.load, path))
            if seen is None:
                assert "there is no folder" in error or "has no draws yet" in error, error
                continue
            draws, count = seen.draws, seen.draws.shape[1]
            counts.add(count)
            assert torch.equal(draws, known.draws[:, :count])
            assert torch.equal(seen.statistics["energy"], known.statistics["energy"][:, :count])
        assert len(counts) > 5
        same(cr.load(path), known)


class TestFailures(StoppedRuns):
    def test_a_disk_that_is_full_at_any_write(self, tmp_path, tight, monkeypatch):
        method = quick()
        known = method.fit(make(), seed=1)
        write = run_folder.write_bytes
        for number in range(1, 1000):
            left, path = [number], tmp_path / str(number)

            def full(draft, content, left=left):
                left[0] -= 1
                if left[0] == 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                write(draft, content)

            monkeypatch.setattr(run_folder, "write_bytes", full)
            done, error = attempt(partial(method.fit, make(), seed=1, out=path))
            if done is not None:
                break
            assert re.search(r"cannot write (to )?'.*' \(No space left on device\)", error)
            assert path.exists() == (f"resume it with `credibly resume {path}`" in error)
            monkeypatch.setattr(run_folder, "write_bytes", write)
            if path.exists():
                assert not (path / LOCK).exists()
                same(cr.resume(path, make()), known)
                tidy(path)
        assert number > 20
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]

    def test_a_start_that_is_refused_leaves_no_folder(self, tmp_path):
        never = cr.Density(lambda w: torch.log(w - 1e9).sum(), 2)
        with pytest.raises(cr.InputError, match="init"):
            hmc().fit(never, seed=0, out=tmp_path / "run")
        assert list(tmp_path.iterdir()) == []

    def test_a_run_that_fails_keeps_its_draws(self, tmp_path, tight, monkeypatch):
        advance = HMCSampler.advance

        def fails(self, stop):
            if self.done == 5:
                raise cr.SamplingError("it left the range of numbers")
            return advance(self, stop)

        known = quick().fit(make(), seed=1)
        monkeypatch.setattr(HMCSampler, "advance", fails)
        with pytest.raises(cr.SamplingError, match="range of numbers"):
            quick().fit(make(), seed=1, out=tmp_path / "run")
        assert torch.equal(cr.load(tmp_path / "run").draws, known.draws[:, :3])


DRIVER = """
import math, os, pathlib, signal, sys, time
import torch
import credibly as cr
from torch import nn
from credibly.inference.sampling import folder as folders
from credibly.inference.sampling import recording

torch.set_num_threads(1)
recording.SHARD_BYTES, recording.EVERY_SECONDS, recording.FRACTION = 20_000, 0.02, math.inf
here = pathlib.Path(__file__).parent

def log_prob(w):
    if (here / "slow").exists():
        (here / "sleeping").touch()
        time.sleep(60)
    return -0.5 * (w.square() / torch.tensor([1.0, 4.0, 0.3], dtype=w.dtype)).sum()

target = cr.Density(log_prob, 3, name="slow")
method = cr.HMC(chains=2, draws=900, warmup=100, init="prior", compile=False, trajectory_length=1.0)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("ready", os.getpid(), flush=True)
    try:
        if pathlib.Path(sys.argv[1]).exists():
            done = cr.resume(sys.argv[1], target)
        else:
            done = method.fit(target, seed=4, out=sys.argv[1])
    except cr.Interrupted as error:
        print(error)
        sys.exit(7)
    print(done)
"""


@pytest.fixture
def driver(tmp_path):
    """A user's script: its problem and method, and a function that starts it."""
    (tmp_path / "driver.py").write_text(DRIVER)
    own: dict = {"__name__": "driver", "__file__": str(tmp_path / "driver.py")}
    kept = recording.SHARD_BYTES, recording.EVERY_SECONDS, recording.FRACTION
    exec(DRIVER, own)
    recording.SHARD_BYTES, recording.EVERY_SECONDS, recording.FRACTION = kept

    def start():
        command = [warm_python(), str(tmp_path / "driver.py"), str(tmp_path / "run")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return own["target"], own["method"], start


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def iterations(path):
    try:
        return manifest_of(path)["progress"]["iteration"]
    except FileNotFoundError:
        return -1


class TestProcesses(StoppedRuns):
    @pytest.mark.nightly
    def test_killed_at_random_moments_until_complete(self, tmp_path, driver):
        target, method, start = driver
        began = time.monotonic()
        known = method.fit(target, seed=4)
        whole = time.monotonic() - began
        path, kills = tmp_path / "run", 0
        while True:
            with start() as process:
                assert process.stdout.readline().startswith("ready ")
                if kills < 4:
                    time.sleep(random.random() * 0.4 * whole)
                    process.kill()
                out, err = process.communicate()
            if process.returncode != -signal.SIGKILL:
                break
            kills += 1
            if path.exists():
                read_manifest(path)
        assert process.returncode == 0, err
        assert "2 x 900 draws" in out
        assert kills >= 2
        same(cr.load(path), known)
        tidy(path)

    def test_ctrl_c_lock_and_a_second_ctrl_c(self, tmp_path, driver):
        target, method, start = driver
        known, path = method.fit(target, seed=4), tmp_path / "run"
        with start() as process:
            pid = process.stdout.readline().split()[1]
            wait_for(lambda: iterations(path) > 150)
            # It waits, so that it cannot end before the signal.
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(cr.StoreError, match=f"in use by process {pid} on "):
                cr.resume(path, target)
            with pytest.raises(cr.StoreError, match="holds an unfinished run. Resume it with `credibly resume"):
                method.fit(target, seed=4, out=path)
            with pytest.raises(cr.StoreError, match="in use by process"):
                known.save(path, overwrite=True)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 7, err
        assert f"resume with `credibly resume {path}` or credibly.resume({str(path)!r}, problem)" in out
        manifest = read_manifest(path)
        assert manifest["status"] == "interrupted"
        assert f"stopped after {manifest['progress']['iteration']} of 1000 iterations" in out
        assert not (path / LOCK).exists()
        partial = cr.load(path)
        assert partial.record.status == "interrupted"
        assert torch.equal(partial.draws, known.draws[:, : partial.draws.shape[1]])
        before = iterations(path)
        with start() as process:
            wait_for(lambda: iterations(path) > before + 50)
            (tmp_path / "slow").touch()
            wait_for((tmp_path / "sleeping").exists)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert process.poll() is None  # it finishes the step first
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in err
        (tmp_path / "slow").unlink()
        assert before < iterations(path) < 1000
        same(cr.resume(path, target), known)
        tidy(path)


@pytest.fixture
def ctrl_c():
    """The default handling of Ctrl-C, which a shell turns off for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
class TestInterrupted(StoppedRuns):
    @pytest.mark.parametrize("method", [hmc(), sg(cr.SGHMC)], ids=["hmc", "sghmc"])
    @pytest.mark.parametrize("at", [0, 3, 9, 1000])
    def test_ctrl_c_at_an_iteration(self, tmp_path, tight, monkeypatch, method, at):
        kind = HMCSampler if isinstance(method, cr.HMC) else SGMCMCSampler
        known = method.fit(make(), seed=1)
        advance = kind.advance
        last = method.draws + method.warmup - 1 if kind is HMCSampler else 33

        def stopped(self, stop):
            if self.done >= min(at, last):
                monkeypatch.setattr(kind, "advance", advance)
                signal.raise_signal(signal.SIGINT)
            return advance(self, stop)

        monkeypatch.setattr(kind, "advance", stopped)
        path = tmp_path / "run"
        with pytest.raises(
            cr.Interrupted, match=r"stopped after \d+ of \d+ iterations; resume with `credibly resume"
        ) as caught:
            method.fit(make(), seed=1, out=path)
        assert caught.value.posterior is None
        manifest = manifest_of(path)
        assert manifest["status"] == "interrupted"
        assert abs(manifest["progress"]["iteration"] - min(at, last)) <= 12
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with monkeypatch.context() as patch:
            patch.setattr(kind, "advance", end)
            with pytest.raises(Crash):
                cr.resume(path)
        assert manifest_of(path)["status"] == "running"
        same(cr.resume(path), known)
        tidy(path)

    def test_ctrl_c_before_the_first_iteration(self, tmp_path, monkeypatch):
        def stopped(*_args):
            signal.raise_signal(signal.SIGINT)

        known = quick().fit(make(), seed=1)
        found = sampling_run.starts
        monkeypatch.setattr(sampling_run, "starts", stopped)
        with pytest.raises(cr.Interrupted, match="stopped before the first iteration; resume with `credibly resume"):
            quick().fit(make(), seed=1, out=tmp_path / "run")
        with pytest.raises(KeyboardInterrupt) as caught:
            quick().fit(make(), seed=1)
        assert not isinstance(caught.value, cr.Interrupted)
        monkeypatch.setattr(sampling_run, "starts", found)
        same(cr.resume(tmp_path / "run"), known)

    def test_ctrl_c_that_is_turned_off_stays_off(self):
        for handler in (signal.SIG_IGN, lambda number, frame: None):
            signal.signal(signal.SIGINT, handler)
            with polite_interrupt() as asked:
                ours = signal.getsignal(signal.SIGINT) is not handler
                assert ours == (handler is not signal.SIG_IGN)
                signal.raise_signal(signal.SIGINT)
                assert asked() == ours
            assert signal.getsignal(signal.SIGINT) is handler

    def test_other_threads_leave_the_handler_alone(self):
        found = []

        def work():
            with polite_interrupt() as asked:
                found.append((asked(), signal.getsignal(signal.SIGINT)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [(False, signal.default_int_handler)]
