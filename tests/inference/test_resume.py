"""A run that is stopped at any moment goes on to the bits of one that never was; anything else is refused with a reason."""

import copy
import errno
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.distributed.world import Mesh, World
from credibly.inference.sampling import folder as folders
from credibly.inference.sampling import noise as chain_noise
from credibly.inference.sampling import recording
from credibly.inference.sampling import run as sampler
from credibly.inference.sampling import sgmcmc as sgmcmc_run
from credibly.inference.sampling.hmc import HMCSampler
from credibly.inference.sampling.loop import _polite_interrupt
from credibly.inference.sampling.recording import FolderRecorder
from credibly.inference.sampling.sgmcmc import SGMCMCSampler
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson, StudentT
from credibly.posterior.draws import SampledPosterior
from credibly.priors.elementwise import Laplace, Normal
from credibly.storage import run_folder
from credibly.storage.manifest import load_tensors, read_manifest
from credibly.storage.run_folder import LOCK, RunFolder

fork = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.is_available(), reason="a forked process cannot compute gradients here"
)


class Crash(BaseException):
    """Stands for the end of the process: nothing in the package catches it."""


def ends(*_args):
    raise Crash


def make(seed=0, net=None, likelihood=None, prior=None, y=None, rows=20, **kwargs):
    """The problem of most tests; the network's own weights differ with the seed, which must not matter."""
    x = randn(20, 3)
    y = x.sum(1) + 0.1 * randn(20, seed=1) if y is None else y
    return cr.Problem(
        net or mlp(3, 4, 1, seed=seed),
        (x[:rows], y[:rows]),
        likelihood or Gaussian(0.5),
        prior or Normal(1.0),
        **kwargs,
    )


def density(name="banana", power=2.0, scale=1.0, dim=2, dtype=torch.float64):
    return cr.Density(
        lambda w: -0.5 * w[0] ** 2 - 0.5 * (w[1:] - w[0] ** power).square().sum(),
        dim,
        name=name,
        scale=scale,
        dtype=dtype,
    )


def hmc(**settings):
    given = {
        "chains": 3,
        "draws": 8,
        "warmup": 20,
        "trajectory_length": 0.3,
        "max_steps": 8,
        "init": "prior",
        "compile": False,
    }
    return cr.HMC(**{**given, **settings})


def quick(**settings):
    return hmc(**{"warmup": 2, "step_size": 0.05, "trajectory_length": 0.1, "draws": 5, "chains": 2, **settings})


def sg(kind, **settings):
    return kind(
        **{
            "chains": 3,
            "draws": 8,
            "warmup": 12,
            "thin": 3,
            "batch_size": 6,
            "init": "prior",
            "compile": False,
            **settings,
        }
    )


RUNS = {
    "hmc": (hmc(), make),
    "hmc, diagonal mass": (hmc(mass="diagonal", warmup=40), make),
    "hmc, tuned length": (hmc(trajectory_length="tuned", warmup=60, chains=2, draws=3, max_steps=4), make),
    "hmc, separate step sizes": (hmc(pooled=False), make),
    "hmc, persistent momentum": (hmc(refresh=0.4, jitter=0.3), make),
    "hmc, given step size": (hmc(step_size=0.05, warmup=0, thin=3), make),
    "hmc, float16 draws": (hmc(draw_dtype="float16", mass="prior", integrator="minimum-error"), make),
    "hmc, a learned scale": (hmc(), lambda seed=0: make(seed, likelihood=Gaussian())),
    "hmc, looped": (quick(), lambda seed=0: make(seed, plan="looped")),
    "hmc, one draw": (hmc(draws=1, chains=1), make),
    "hmc, a density": (hmc(), lambda seed=0: density()),
    "hmc, a density in float32": (hmc(), lambda seed=0: density(dtype=torch.float32)),
    "sgld": (sg(cr.SGLD), make),
    "sgld, polynomial and preconditioned": (sg(cr.SGLD, schedule="polynomial", preconditioner="rmsprop"), make),
    "sghmc": (sg(cr.SGHMC), make),
    "sghmc, preconditioned": (sg(cr.SGHMC, preconditioner="rmsprop"), make),
    "sghmc, cyclical": (sg(cr.SGHMC, schedule="cyclical", cycles=2), make),
    "sghmc, a density": (sg(cr.SGHMC, step_size=0.05, batch_size=None), lambda seed=0: density()),
}  # fmt: skip


def tighten(monkeypatch):
    """Shards of a few draws, a checkpoint after every iteration, and no waiting for the disk."""
    monkeypatch.setattr(recording, "SHARD_BYTES", 1200)
    monkeypatch.setattr(recording, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(recording, "SHARE", math.inf)
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr(sgmcmc_run, "BLOCK", 2)


def crashes(monkeypatch):
    """crash(n): the process ends after so many checkpoints; crash(None): it does not."""
    left = [None]
    original = FolderRecorder.checkpoint

    def checkpoint(self, process, **how):
        original(self, process, **how)
        if left[0] is not None:
            left[0] -= 1
            if left[0] <= 0:
                raise Crash

    monkeypatch.setattr(FolderRecorder, "checkpoint", checkpoint)

    def within(count):
        left[0] = count

    return within


@pytest.fixture
def tight(monkeypatch):
    tighten(monkeypatch)


@pytest.fixture
def crash(monkeypatch):
    return crashes(monkeypatch)


def begin(method, problem, path, crash, after):
    """A run that ended after so many checkpoints, the first of which is at its start."""
    crash(after)
    with pytest.raises(Crash):
        method.fit(problem, seed=1, out=path)
    crash(None)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that ended with five of eight draws: a shard of three, and two beside the state. And what it would have given."""
    path = tmp_path_factory.mktemp("ended") / "run"
    with pytest.MonkeyPatch.context() as patch:
        tighten(patch)
        begin(hmc(), make(), path, crashes(patch), 26)
        return path, hmc().fit(make(), seed=1)


@pytest.fixture
def begun(ended, tmp_path):
    """The same, to go on with."""
    return Path(shutil.copytree(ended[0], tmp_path / "run")), ended[1]


def same(a: SampledPosterior, b: SampledPosterior):
    """The same draws, notes and record; only the time it took may differ, and the reason for a plan that was found before."""
    assert a.draws.dtype == b.draws.dtype
    assert torch.equal(a.draws, b.draws)
    assert list(a.statistics) == list(b.statistics)
    for name, values in a.statistics.items():
        assert torch.equal(values, b.statistics[name]), name
    ours, theirs = (json.loads(json.dumps(vars(p.record))) for p in (a, b))
    for record in (ours, theirs):
        assert record["history"].pop("seconds") > 0
        assert record["history"].pop("plan").startswith(("batched", "looped"))
    assert ours == theirs


def attempt(work):
    """What the work gives, or what a StoreError says."""
    try:
        return work(), ""
    except cr.StoreError as error:
        return None, str(error)


def manifest_of(path):
    return json.loads((path / "manifest.json").read_text())


def tidy(path):
    """A folder that has ended holds its draws and what is needed to open them, and nothing else."""
    manifest = manifest_of(path)
    assert manifest["status"] == manifest["record"]["status"] == "complete"
    assert "state" not in manifest
    assert sorted(p.name for p in path.iterdir()) == sorted([*manifest["files"], "manifest.json"])
    assert all(name.startswith(("draws-", "stats-", "fixed.")) for name in manifest["files"])
    read_manifest(path)


# -- the same bits ---------------------------------------------------------------------------------------------------------
class TestSameBits:
    @pytest.mark.parametrize("name", RUNS)
    def test_a_run_that_ends_after_every_iteration(self, tmp_path, tight, crash, name):
        """Each iteration (or three of them) is done by a new process: what it depends on has gone through the disk."""
        method, problem = RUNS[name]
        each = 1 if name in ("hmc, diagonal mass", "sghmc, preconditioned", "sghmc, cyclical") else 3
        path = tmp_path / "run"
        known = method.fit(problem(), seed=1)
        begin(method, problem(), path, crash, 1)
        for relay in range(1, 1000):
            crash(each)
            try:
                done = cr.resume(path, problem(seed=relay))
                break
            except Crash:
                assert manifest_of(path)["progress"]["iteration"] > 0
        assert relay > 2
        same(done, known)
        tidy(path)
        assert len(done._draws.files) == math.ceil(method.draws / done._draws.counts[0])
        same(cr.load(path, None if isinstance(problem(), cr.Density) else problem(seed=9).layout.module), known)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("method", [hmc(mass="diagonal"), sg(cr.SGHMC)], ids=["hmc", "sghmc"])
    def test_on_a_gpu_and_from_the_folder_alone(self, tmp_path, tight, crash, method):
        path, problem = tmp_path / "run", make(device="cuda")
        known = method.fit(problem, seed=1)
        begin(method, problem, path, crash, 1)
        for _ in range(1000):
            crash(5)
            try:
                done = cr.resume(path)
                break
            except Crash:
                assert manifest_of(path)["arithmetic"]["device"] == "cuda:0"
        assert done.draws.is_cuda
        same(done, known)
        same(cr.load(path, problem.layout.module), known)

    @pytest.mark.parametrize("large", [1, 10**9], ids=["chains in turn", "chains together"])
    def test_noise_that_comes_as_bits(self, tmp_path, tight, crash, monkeypatch, large):
        monkeypatch.setattr(chain_noise, "MANY", 1)
        monkeypatch.setattr(sgmcmc_run, "LARGE", large)
        method = sg(cr.SGHMC)
        known = method.fit(make(), seed=1)
        for after in (2, 9):
            begin(method, make(), tmp_path / str(after), crash, after)
            same(cr.resume(tmp_path / str(after)), known)

    def test_some_runs_have_several_shards_and_a_rest(self, tmp_path, tight):
        counts = RUNS["hmc"][0].fit(make(), seed=1, out=tmp_path / "run")._draws.counts
        assert counts == [3, 3, 2]

    @pytest.mark.parametrize(
        "method", [hmc(mass="diagonal"), sg(cr.SGHMC, preconditioner="rmsprop")], ids=["hmc", "sghmc"]
    )
    def test_what_came_after_the_last_checkpoint_is_drawn_again(self, tmp_path, tight, monkeypatch, method):
        """Checkpoints that are far apart: the process ends with iterations, and whole shards, that no manifest lists."""
        known = method.fit(make(), seed=1)
        monkeypatch.setattr(recording, "EVERY_SECONDS", 1e9)
        kind = HMCSampler if isinstance(method, cr.HMC) else SGMCMCSampler
        advance, steps = kind.advance, [0]

        def counted(self, stop):
            steps[0] += 1
            if steps[0] == limit:
                raise Crash
            return advance(self, stop)

        monkeypatch.setattr(kind, "advance", counted)
        limit = 26 if kind is HMCSampler else 17
        path = tmp_path / "run"
        with pytest.raises(Crash):
            method.fit(make(), seed=1, out=path)
        left = {p.name for p in path.iterdir() if p.suffix == ".safetensors"}
        assert "draws-00000.safetensors" in left - set(manifest_of(path)["files"])
        same(cr.resume(path, make()), known)
        tidy(path)

    def test_starts_that_take_time_are_found_again(self, tmp_path, tight, monkeypatch):
        """Ended while the MAP fits were on: the network passed later has other weights, and the starts are the same."""
        begun = sampler.starts

        def ends(*args):
            begun(*args)
            raise Crash

        for init in ("map", "ensemble", "network"):
            method, path = quick(init=init, start_steps=15), tmp_path / init
            known = method.fit(make(seed=0), seed=1)
            monkeypatch.setattr(sampler, "starts", ends)
            with pytest.raises(Crash):
                method.fit(make(seed=0), seed=1, out=path)
            with pytest.raises(Crash):
                cr.resume(path, make(seed=5))
            monkeypatch.setattr(sampler, "starts", begun)
            assert "state" not in manifest_of(path)
            with pytest.raises(cr.StoreError, match="has no draws yet"):
                cr.load(path, mlp(3, 4, 1))
            other = make(seed=5)
            weights = other.layout.read(other.layout.module)
            same(cr.resume(path, other), known)
            assert torch.equal(other.layout.read(other.layout.module), weights)  # the caller's own are as they were
            tidy(path)

    @pytest.mark.parametrize("kind", ["tensor", "posterior"])
    def test_starts_that_were_passed_are_kept(self, tmp_path, tight, crash, kind):
        first = cr.DeepEnsemble(members=4, steps=3, compile=False).fit(make(), seed=0)
        method = quick(init=first if kind == "posterior" else first.sample(2, seed=8))
        known = method.fit(make(), seed=1)
        for after in (1, 4):
            path = tmp_path / str(after)
            begin(method, make(), path, crash, after)
            same(cr.resume(path, make(seed=3)), known)
            tidy(path)

    def test_the_same_whatever_shards_and_checkpoints_there_are(self, tmp_path, monkeypatch, tight, crash):
        """Also where they change on the way, as between two releases."""
        known = hmc().fit(make(), seed=1)
        begin(hmc(), make(), tmp_path / "run", crash, 25)
        monkeypatch.setattr(recording, "SHARD_BYTES", 2**20)
        done = cr.resume(tmp_path / "run", make())
        same(done, known)
        assert done._draws.counts == [3, 3, 2]

    def test_a_huge_thin_is_written_down_between_draws(self, tmp_path, tight, crash):
        for method in (quick(draws=2, thin=30), sg(cr.SGLD, draws=2, thin=250, warmup=1)):
            path = tmp_path / method.name
            known = method.fit(make(), seed=1)
            begin(method, make(), path, crash, 4)
            assert 0 < manifest_of(path)["progress"]["iteration"] < method.warmup + method.thin
            with pytest.raises(cr.StoreError, match="has no draws yet"):
                cr.load(path)
            same(cr.resume(path), known)

    def test_the_time_of_all_parts_is_added_up(self, tmp_path, tight, crash):
        clock = time.monotonic
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: clock() * 1e6)
            begin(quick(), make(), tmp_path / "run", crash, 3)
        before = float(load_tensors(tmp_path / "run" / manifest_of(tmp_path / "run")["state"])["recorder.seconds"])
        assert before > 1000
        begun = clock()
        done = cr.resume(tmp_path / "run")
        assert before < done.record.history["seconds"] < before + clock() - begun


# -- ends of every kind ------------------------------------------------------------------------------------------------------
def in_child(work):
    """Does the work in a process of its own; its exit status, negative where a signal ended it."""
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
    """The work in a process that SIGKILL ends at the n-th thing it does to the disk: in the middle of a write, or
    before or after a rename, or before a file is removed."""

    def mortal():
        seen = [0]
        write, replace, unlink = run_folder._write, os.replace, Path.unlink

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

        run_folder._write, os.replace, Path.unlink = half, renamed, removed
        work()

    return in_child(mortal)


@fork
class TestKilled:
    def test_at_everything_it_does_to_the_disk(self, tmp_path, tight, monkeypatch):
        monkeypatch.setattr(recording, "SHARD_BYTES", 600)  # two draws
        method = quick(draws=3, warmup=1)
        known = method.fit(make(), seed=1)
        moments = {"before": 0, "start": 0, "warm-up": 0, "draws": 0, "complete": 0}
        for number in range(1, 1000):
            place = tmp_path / str(number)
            place.mkdir()
            path = place / "run"
            status = killed_at(number, partial(method.fit, make(), seed=1, out=path))
            if status == 0:
                break
            assert status == -signal.SIGKILL
            if not path.exists():
                moments["before"] += 1
                same(method.fit(make(), seed=1, out=path), known)
            else:
                manifest = read_manifest(path)  # whole, whenever it was
                shown = "complete" if manifest["status"] == "complete" else manifest["progress"]["phase"]
                moments[{"step size": "warm-up", "sampling": "draws", "done": "draws"}.get(shown, shown)] += 1
                moments["start"] += "state" not in manifest
                same(cr.resume(path, make(seed=number)), known)
            tidy(path)
            assert [p.name for p in place.iterdir()] == ["run"]  # drafts are cleared away too
        assert all(moments.values()), moments
        assert number > 50

    @pytest.mark.parametrize("every", [17, 23, 31])
    def test_again_and_again(self, tmp_path, tight, every):
        """The process that goes on is killed as well."""
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

    def test_a_reader_beside_a_run_sees_one_checkpoint_or_the_next(self, tmp_path, tight):
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


class TestFailures:
    def test_a_disk_that_is_full_at_any_write(self, tmp_path, tight, monkeypatch):
        method = quick()
        known = method.fit(make(), seed=1)
        write = run_folder._write
        for number in range(1, 1000):
            left, path = [number], tmp_path / str(number)

            def full(draft, content, left=left):
                left[0] -= 1
                if left[0] == 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                write(draft, content)

            monkeypatch.setattr(run_folder, "_write", full)
            done, error = attempt(partial(method.fit, make(), seed=1, out=path))
            if done is not None:
                break
            assert re.search(r"cannot write (to )?'.*' \(No space left on device\)", error)
            assert path.exists() == (f"resume it with `credibly resume {path}`" in error)
            monkeypatch.setattr(run_folder, "_write", write)
            if path.exists():
                assert not (path / LOCK).exists()
                same(cr.resume(path, make()), known)
                tidy(path)
        assert number > 20
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]

    def test_a_start_that_is_refused_leaves_nothing(self, tmp_path):
        never = cr.Density(lambda w: torch.log(w - 1e9).sum(), 2)
        with pytest.raises(cr.InputError, match="init"):
            hmc().fit(never, seed=0, out=tmp_path / "run")
        assert list(tmp_path.iterdir()) == []

    def test_a_run_that_fails_on_the_way_keeps_its_draws(self, tmp_path, tight, monkeypatch):
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


# -- real processes ----------------------------------------------------------------------------------------------------------
DRIVER = """
import math, pathlib, signal, sys, time
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
    print("ready", flush=True)
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
    """The script of a user, the problem and method in it, and how to start it."""
    (tmp_path / "driver.py").write_text(DRIVER)
    own: dict = {"__name__": "driver", "__file__": str(tmp_path / "driver.py")}
    kept = recording.SHARD_BYTES, recording.EVERY_SECONDS, recording.FRACTION
    exec(DRIVER, own)
    recording.SHARD_BYTES, recording.EVERY_SECONDS, recording.FRACTION = kept

    def start():
        words = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "run")]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

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


class TestProcesses:
    def test_killed_at_random_moments_until_it_ends(self, tmp_path, driver):
        target, method, start = driver
        begun = time.monotonic()
        known = method.fit(target, seed=4)
        whole = time.monotonic() - begun
        path, kills = tmp_path / "run", 0
        while True:
            with start() as process:
                assert process.stdout.readline() == "ready\n"
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
            wait_for(lambda: iterations(path) > 150)
            with pytest.raises(cr.StoreError, match=f"in use by process {process.pid} on "):
                cr.resume(path, target)
            with pytest.raises(
                cr.StoreError, match="holds a run that has not ended. Go on with it by `credibly resume"
            ):
                method.fit(target, seed=4, out=path)
            with pytest.raises(cr.StoreError, match="in use by process"):
                known.save(path, overwrite=True)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 7, err
        assert f"go on with `credibly resume {path}` or credibly.resume({str(path)!r}, problem)" in out
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
            assert process.poll() is None  # it waits for the end of the step
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
    """The usual handling of Ctrl-C, which a shell turns off for jobs behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
class TestInterrupted:
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
            cr.Interrupted, match=r"stopped after \d+ of \d+ iterations; go on with `credibly resume"
        ) as caught:
            method.fit(make(), seed=1, out=path)
        assert caught.value.posterior is None
        manifest = manifest_of(path)
        assert manifest["status"] == "interrupted"
        assert abs(manifest["progress"]["iteration"] - min(at, last)) <= 12
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with monkeypatch.context() as patch:
            patch.setattr(kind, "advance", ends)
            with pytest.raises(Crash):
                cr.resume(path)
        assert manifest_of(path)["status"] == "running"
        same(cr.resume(path), known)
        tidy(path)

    def test_ctrl_c_while_the_starts_are_found(self, tmp_path, monkeypatch):
        def stopped(*_args):
            signal.raise_signal(signal.SIGINT)

        known = quick().fit(make(), seed=1)
        found = sampler.starts
        monkeypatch.setattr(sampler, "starts", stopped)
        with pytest.raises(cr.Interrupted, match="stopped before the first iteration; go on with `credibly resume"):
            quick().fit(make(), seed=1, out=tmp_path / "run")
        with pytest.raises(KeyboardInterrupt) as caught:
            quick().fit(make(), seed=1)
        assert not isinstance(caught.value, cr.Interrupted)
        monkeypatch.setattr(sampler, "starts", found)
        same(cr.resume(tmp_path / "run"), known)

    def test_where_ctrl_c_is_turned_off_it_stays_off(self):
        for handler in (signal.SIG_IGN, lambda number, frame: None):
            signal.signal(signal.SIGINT, handler)
            with _polite_interrupt() as asked:
                ours = signal.getsignal(signal.SIGINT) is not handler
                assert ours == (handler is not signal.SIG_IGN)
                signal.raise_signal(signal.SIGINT)
                assert asked() == ours
            assert signal.getsignal(signal.SIGINT) is handler

    def test_in_another_thread_nothing_is_touched(self):
        found = []

        def work():
            with _polite_interrupt() as asked:
                found.append((asked(), signal.getsignal(signal.SIGINT)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [(False, signal.default_int_handler)]


# -- what is on the way ------------------------------------------------------------------------------------------------------
class TestOnTheWay:
    def test_the_draws_so_far_can_be_opened_and_predict(self, tmp_path, begun):
        path, known = begun
        posterior = cr.load(path)
        assert posterior._draws.counts == [3, 2]
        assert posterior.record.status == "running"
        assert torch.equal(posterior.draws, known.draws[:, :5])
        for name, values in known.statistics.items():
            assert torch.equal(posterior.statistics[name], values[:, :5])
        x = randn(6, 3, seed=5)
        beside = cr.DrawsPosterior(known.model, known.draws[:, :5], known.record)
        assert torch.equal(posterior.predict(x).mean, beside.predict(x).mean)
        assert torch.equal(cr.load(path, mlp(3, 4, 1, seed=7)).predict(x).epistemic, beside.predict(x).epistemic)
        posterior.save(tmp_path / "copy")
        assert torch.equal(cr.load(tmp_path / "copy").draws, known.draws[:, :5])
        same(cr.resume(path), known)

    def test_the_manifest_tells_how_far_every_chain_is(self, tmp_path, tight, crash, begun):
        path, _ = begun
        progress = manifest_of(path)["progress"]
        assert (progress["iteration"], progress["of"], progress["phase"]) == (25, 28, "sampling")
        acceptance = cr.load(path).statistics["acceptance"].mean(1)
        for chain, seen in enumerate(progress["chains"]):
            assert seen["draws"] == 5
            assert seen["acceptance"] == pytest.approx(float(acceptance[chain]), rel=1e-12)
            assert seen["divergences"] == 0
            assert seen["step_size"] > 0
        assert len(progress["chains"]) == 3
        begin(sg(cr.SGLD), make(), tmp_path / "sgld", crash, 9)
        progress = manifest_of(tmp_path / "sgld")["progress"]
        assert [c["draws"] for c in progress["chains"]] == [progress["iteration"] // 3 - 4] * 3

    def test_memory_does_not_grow_with_the_draws(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "fsync", lambda number: None)

        def held(recorder):
            tensors = [v for v in vars(recorder).values() if isinstance(v, torch.Tensor)]
            return sum(t.untyped_storage().nbytes() for t in tensors)

        for dim, chains in ((1, 1), (50, 4), (100_000, 2), (3_000_000, 3)):
            sizes = []
            for draws in (10_000_000, 100_000_000_000):
                with RunFolder.create(tmp_path / f"{dim}-{draws}", {}, {}) as folder:
                    like = {"dtype": torch.float32, "device": torch.device("cpu"), "layout_dtype": torch.float32}
                    sizes.append(held(FolderRecorder(folder, chains, draws, dim, ("a", "b"), Mesh(World()), **like)))
            assert sizes[0] == sizes[1]
            assert sizes[0] <= max(recording.SHARD_BYTES, chains * (4 * dim + 16))
        monkeypatch.setattr(recording, "SHARD_BYTES", 1_000)
        with RunFolder.create(tmp_path / "run", {}, {}) as folder:
            recorder = FolderRecorder(folder, 2, 1_000, 10, ("a",), Mesh(World()), **like)
            before = held(recorder)
            for number in range(500):
                recorder.add(torch.full((2, 10), float(number)), {"a": torch.zeros(2)})
            assert held(recorder) == before
            assert recorder.kept == 500
            assert recorder.result()[0].tensor()[0, :, 0].tolist() == list(range(recorder.shards * recorder.block))

    def test_checkpoints_are_seconds_apart_and_rarer_where_they_are_slow(self, tmp_path, monkeypatch):
        now, written = [100.0], []
        monkeypatch.setattr(recording.time, "monotonic", lambda: now[0])
        like = {"dtype": torch.float32, "device": torch.device("cpu"), "layout_dtype": torch.float32}

        class Idle:
            def tensors(self):
                return {}

            def report(self):
                return {}

        with RunFolder.create(tmp_path / "run", {}, {}) as folder:
            recorder = FolderRecorder(folder, 1, 10, 2, (), Mesh(World()), **like)
            commit, cost = folder.commit, [0.05]

            def slow(**fields):
                written.append(now[0] - 100)
                now[0] += cost[0]
                commit(**fields)

            monkeypatch.setattr(folder, "commit", slow)
            recorder.checkpoint(Idle(), force=True)
            while now[0] < 135:
                now[0] += 0.01
                recorder.checkpoint(Idle())
            assert written == pytest.approx([0, 10.06, 20.12, 30.18], abs=0.05)
            cost[0] = 1.0
            while now[0] < 450:
                now[0] += 0.1
                recorder.checkpoint(Idle())
            assert [b - a for a, b in pairwise(written[4:])] == pytest.approx([101, 101, 101], abs=1)


# -- problems ----------------------------------------------------------------------------------------------------------------
def conv():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1))


class Own(nn.Module):
    """A network that no folder can describe."""

    def __init__(self, seed=0):
        super().__init__()
        self.net = mlp(3, 4, 1, seed=seed)
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x):
        return self.net(x) + self.shift


class OwnPrior(Normal):
    """A prior of the user's own class."""


def images(channels, y):
    return lambda likelihood: cr.Problem(conv(), (randn(6, channels, 4, 4), y), likelihood, Normal())


OTHERS = {
    "data": (lambda: make(y=randn(20, seed=9)), r"the data differ"),
    "rows": (lambda: make(rows=19), r"rows: found 19, the folder has 20"),
    "prior": (lambda: make(prior=Normal(2.0)), r'prior: found .*"scale": 2.0.*, the folder has .*"scale": 1.0'),
    "likelihood": (lambda: make(likelihood=Gaussian(0.4)), r"likelihood: found .*0.4.* the folder has .*0.5"),
    "temperature": (lambda: make(temperature=0.5), r"temperature: found .*0.5.*, the folder has .*1.0"),
    "shape": (lambda: make(net=mlp(3, 5, 1)), r"net: 0.weight has shape \(5, 3\), the stored run has \(4, 3\)"),
    "depth": (lambda: make(net=mlp(3, 4, 4, 1)), r"net: 2.weight has shape"),
    "dtype": (lambda: make(dtype=torch.float64), r"dtype: found \"torch.float64\", the folder has \"torch.float32\""),
    "random": (lambda: make(random="2.*"), r"net: its tensors have other roles"),
    "activation": (lambda: make(net=mlp(3, 4, 1, activation=nn.Tanh)), r"the network computes something else"),
    "micro_batch": (lambda: make(micro_batch=7), r"micro_batch: found 7, the folder has null"),
    "plan": (lambda: make(plan="looped"), r"plan: found \"looped\", the folder has \"batched\""),
    "precision": (lambda: make(precision="bf16"), r"precision: found \"bf16\", the folder has null"),
    "density": (density, r"it is a network's, and this is a plain density"),
}  # fmt: skip


class TestProblems:
    """Built again from the folder alone, it is the problem that it was."""

    @pytest.mark.parametrize(
        "problem",
        [
            lambda: make(likelihood=Gaussian()),
            lambda: make(likelihood=Gaussian((0.1, 0.7)), net=mlp(3, 4, 2), y=randn(20, 2)),
            lambda: make(likelihood=Gaussian(per_target=True), net=mlp(3, 4, 2), y=randn(20, 2)),
            lambda: make(likelihood=Gaussian(0.3), y=randn(20, 1)),
            lambda: make(likelihood=StudentT(df=3.5)),
            lambda: make(likelihood=HeteroscedasticGaussian(), net=mlp(3, 4, 2)),
            lambda: make(likelihood=Bernoulli(), y=torch.arange(20) % 2),
            lambda: make(likelihood=Categorical(), net=mlp(3, 4, 3), y=torch.arange(20) % 3),
            lambda: make(likelihood=Poisson(), y=torch.arange(20) % 4),
            lambda: images(1, randn(6, 2, 4, 4))(Gaussian(0.5, axis=1)),
            lambda: images(1, torch.arange(96).reshape(6, 4, 4) % 2)(Categorical(axis=1)),
            lambda: make(prior={"*.weight": Normal(0.5, fan_in=True), "*": Laplace(2.0)}),
            lambda: make(temperature=cr.Tempering(0.5, 2.0)),
            lambda: make(random="2.*"),
            lambda: make(net=mlp(3, 4, 1, dtype=torch.float64), y=randn(20, dtype=torch.float64), dtype=torch.float64),
            lambda: make(micro_batch=7),
            lambda: make(plan="looped"),
            lambda: make(precision="bf16"),
            lambda: make(net=nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))),
            lambda: make(net=nn.Linear(3, 1)),
        ],
    )
    def test_from_the_folder_alone(self, tmp_path, tight, crash, problem):
        method = quick(draws=2, step_size=0.01, trajectory_length=0.02, init="network")
        for after in (1, 3):
            one = problem()
            known = method.fit(one, seed=1)
            path = tmp_path / str(after)
            begin(method, one, path, crash, after)
            if after == 1:  # as if it had ended before its first checkpoint: the network's own weights are needed
                manifest = manifest_of(path)
                del manifest["files"][manifest.pop("state")]
                run_folder._write_manifest(path, manifest)
            same(cr.resume(path), known)
            tidy(path)

    def test_what_a_folder_cannot_describe_has_to_be_passed(self, tmp_path, tight, crash, monkeypatch):
        how = r"Pass the problem: credibly.resume\('.*', problem\), or `credibly resume .* --problem your_script.py:problem`"
        cases = {
            "net": (make(net=Own()), "the folder does not describe the network"),
            "density": (density(), "is of a plain density, which a folder cannot describe"),
            "prior": (make(prior=OwnPrior(1.0)), "likelihood or prior of .* are not this package's own"),
        }
        for name, (problem, reason) in cases.items():
            known = quick().fit(problem, seed=1)
            begin(quick(), problem, tmp_path / name, crash, 3)
            with pytest.raises(cr.StoreError, match=f"{reason}.*{how}"):
                cr.resume(tmp_path / name)
            assert not (tmp_path / name / LOCK).exists()
            same(cr.resume(tmp_path / name, problem), known)
        monkeypatch.setattr(folders, "KEPT_DATA", 100)
        begin(quick(), make(), tmp_path / "large", crash, 3)
        with pytest.raises(cr.StoreError, match=f"the data of .* were too large to be kept in it.*{how}"):
            cr.resume(tmp_path / "large")
        assert "data.safetensors" not in manifest_of(tmp_path / "large")["files"]
        same(cr.resume(tmp_path / "large", make()), quick().fit(make(), seed=1))

    @pytest.mark.parametrize("name", OTHERS)
    def test_another_problem_is_refused_with_what_differs(self, tmp_path, tight, crash, name):
        path = tmp_path / "run"
        begin(quick(), make(), path, crash, 3)
        before = {p.name: p.read_bytes() for p in path.iterdir()}
        other, reason = OTHERS[name]
        with pytest.raises(cr.StoreError, match=f"path: '.*run' was begun with another problem: {reason}"):
            cr.resume(path, other())
        assert {p.name: p.read_bytes() for p in path.iterdir()} == before

    @pytest.mark.parametrize(
        "other, reason",
        [
            (lambda: density(name="other"), "the name of the density differs: found 'other', the folder has 'banana'"),
            (lambda: density(dim=3), "the dim of the density differs: found 3, the folder has 2"),
            (lambda: density(scale=2.0), "the scale of the density differs"),
            (lambda: density(power=3.0), "the density has other values"),
            (lambda: density(dtype=torch.float32), "dtype: found torch.float32, the folder has torch.float64"),
            (make, "it is of a plain density, and this is a network's"),
        ],
    )
    def test_another_density(self, tmp_path, tight, crash, other, reason):
        begin(quick(), density(), tmp_path / "run", crash, 3)
        with pytest.raises(cr.StoreError, match=reason):
            cr.resume(tmp_path / "run", other())

    def test_other_fixed_values(self, tmp_path, tight, crash):
        begin(quick(), make(net=Own()), tmp_path / "buffer", crash, 3)
        net = Own()
        net.shift += 1
        with pytest.raises(cr.StoreError, match="the network computes something else|the values of shift"):
            cr.resume(tmp_path / "buffer", make(net=net))
        begin(quick(), make(random="2.*"), tmp_path / "fixed", crash, 3)
        with pytest.raises(cr.StoreError, match="another problem"):
            cr.resume(tmp_path / "fixed", make(random="2.*", seed=4))
        net = mlp(3, 4, 1)
        with torch.no_grad():
            net[0].weight[0, 0] *= 1 + 1e-6
        with pytest.raises(cr.StoreError, match="the values of 0.weight, which is not random, differ"):
            cr.resume(tmp_path / "fixed", make(random="2.*", net=net))
        same(cr.resume(tmp_path / "fixed", make(random="2.*")), quick().fit(make(random="2.*"), seed=1))

    def test_a_prior_of_ones_own_class_is_known_again(self, tmp_path, tight, crash):
        begin(quick(), make(prior=OwnPrior(1.0)), tmp_path / "run", crash, 3)
        with pytest.raises(cr.StoreError, match="prior: found"):
            cr.resume(tmp_path / "run", make(prior=OwnPrior(3.0)))
        cr.resume(tmp_path / "run", make(prior=OwnPrior(1.0)))

    def test_something_that_is_no_problem(self, tmp_path, tight, crash):
        begin(quick(), make(), tmp_path / "run", crash, 3)
        with pytest.raises(cr.InputError, match="problem: found Sequential"):
            cr.resume(tmp_path / "run", mlp(3, 4, 1))

    def test_another_torch_or_device_is_told(self, tmp_path, tight, crash, caplog):
        begin(quick(), make(), tmp_path / "run", crash, 3)
        with caplog.at_level(logging.WARNING, "credibly"):
            manifest = manifest_of(tmp_path / "run")
            manifest["arithmetic"] |= {"torch": "1.0", "threads": 64}
            run_folder._write_manifest(tmp_path / "run", manifest)
            cr.resume(tmp_path / "run")
        assert f"begun with torch 1.0 and goes on with {torch.__version__}" in caplog.text
        assert "begun with threads 64 and goes on with 1" in caplog.text
        begin(quick(), make(), tmp_path / "other", crash, 3)
        manifest = manifest_of(tmp_path / "other")
        manifest["arithmetic"]["device"] = "cuda:7"
        run_folder._write_manifest(tmp_path / "other", manifest)
        with pytest.raises(cr.StoreError, match="was begun on cuda:7, which is not here"):
            cr.resume(tmp_path / "other")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "credibly"):
            same(cr.resume(tmp_path / "other", make()), quick().fit(make(), seed=1))
        assert "begun with device cuda:7 and goes on with cpu" in caplog.text


# -- folders -----------------------------------------------------------------------------------------------------------------
class TestFolders:
    def test_a_run_that_has_ended_is_loaded(self, tmp_path, tight, crash):
        known, path = quick().fit(make(), seed=1), tmp_path / "run"
        begin(quick(), make(), path, crash, 3)
        same(cr.resume(path), known)
        before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.iterdir()}
        for problem in (None, make(seed=3)):
            again = cr.resume(path, problem)
            same(again, known)
            assert torch.equal(again.predict(randn(3, 3)).mean, known.predict(randn(3, 3)).mean)
        assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.iterdir()} == before
        assert quick().fit(density(), seed=1, out=tmp_path / "density").draws.shape == (2, 5, 2)
        same(cr.resume(tmp_path / "density"), quick().fit(density(), seed=1))

    def test_another_process_that_ends_it_while_we_wait_for_the_lock(self, tmp_path, tight, crash, monkeypatch):
        known, path = quick().fit(make(), seed=1), tmp_path / "run"
        begin(quick(), make(), path, crash, 3)
        lock = run_folder._acquire_lock

        def late(*args):
            monkeypatch.setattr(run_folder, "_acquire_lock", lock)
            cr.resume(path)
            return lock(*args)

        monkeypatch.setattr(run_folder, "_acquire_lock", late)
        same(cr.resume(path, make()), known)
        tidy(path)

    def test_a_state_that_is_replaced_while_it_is_read(self, begun, tight, crash, monkeypatch):
        from credibly.storage import manifest as manifests

        path, known = begun
        check = manifests._check_file

        def late(*args):
            monkeypatch.setattr(manifests, "_check_file", check)
            crash(1)
            with pytest.raises(Crash):
                cr.resume(path)
            crash(None)
            return check(*args)

        monkeypatch.setattr(manifests, "_check_file", late)
        assert torch.equal(cr.load(path).draws, known.draws[:, :6])

    def test_it_stays_readable_when_the_run_ends_meanwhile(self, begun):
        path, known = begun
        partial = cr.load(path)
        cr.resume(path)
        assert torch.equal(partial.draws, known.draws[:, :5])

    def test_fits_of_other_methods_have_nothing_to_go_on_with(self, tmp_path):
        cr.MAP(steps=3, compile=False).fit(make(), seed=0, out=tmp_path / "map")
        with pytest.raises(cr.StoreError, match="was saved when it had ended; there is nothing to go on with"):
            cr.resume(tmp_path / "map")
        quick().fit(make(), seed=0).save(tmp_path / "saved")
        with pytest.raises(cr.StoreError, match="was saved when it had ended"):
            cr.resume(tmp_path / "saved")
        for name, reason in (("nowhere", "there is no folder"), ("", "is not a run folder")):
            with pytest.raises(cr.StoreError, match=reason):
                cr.resume(tmp_path / name)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["map", "saved"]

    def test_an_existing_out_is_refused_before_any_work(self, tmp_path, tight, crash, monkeypatch):
        quick().fit(make(), seed=1, out=tmp_path / "done")
        begin(quick(), make(), tmp_path / "begun", crash, 3)
        (tmp_path / "mine").mkdir()
        monkeypatch.setattr(cr.HMC, "process", lambda *_: pytest.fail("work was done"))
        for name, reason in (
            ("done", "exists already"),
            ("begun", "has not ended. Go on with it by"),
            ("mine", "exists"),
        ):
            before = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
            with pytest.raises(cr.StoreError, match=f"out: .*{name}.*{reason}"):
                quick().fit(make(), seed=1, out=tmp_path / name)
            assert {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} == before

    @pytest.mark.parametrize("file", ["draws-00000", "stats-00000", "state-", "fixed", "data", "initial"])
    @pytest.mark.parametrize("damage", ["cut short", "emptied", "altered", "missing"])
    def test_damage_is_found_and_named(self, begun, file, damage):
        path, known = begun
        (place,) = path.glob(f"{file}*.safetensors")
        content = place.read_bytes()
        if damage == "missing":
            place.unlink()
        else:
            altered = content[:-1] + bytes([content[-1] ^ 1])
            place.write_bytes({"cut short": content[:-5], "emptied": b"", "altered": altered}[damage])
        reason = {"missing": "is missing", "altered": "was modified"}.get(damage, "is truncated or was modified")
        with pytest.raises(cr.StoreError, match=f"{place.name}.* {reason}"):
            cr.resume(path, make())
        if file in ("data", "initial"):
            assert cr.load(path).draws.shape == (3, 5, 21)  # neither is needed to open it
        else:
            with pytest.raises(cr.StoreError, match=f"{place.name}.* {reason}"):
                cr.load(path)
        if damage == "missing":
            place.write_bytes(content)
            same(cr.resume(path), known)

    def test_half_written_files_of_a_dead_process_are_thrown_away(self, begun):
        path, known = begun
        for name in (
            "draws-00001.safetensors",
            "stats-00001.safetensors.part",
            "state-00099.safetensors",
            "manifest.json.part",
        ):
            (path / name).write_bytes(b"half")
        (path / "mine.txt").write_text("mine")
        same(cr.resume(path), known)
        assert (path / "mine.txt").read_text() == "mine"
        (path / "mine.txt").unlink()
        tidy(path)

    def test_a_manifest_with_any_entry_altered_is_refused(self, tmp_path, tight, crash):
        path = tmp_path / "run"
        begin(quick(), make(), path, crash, 5)
        text = (path / "manifest.json").read_text()
        good = json.loads(text)
        entries = [
            *((k,) for k in good),
            *(("record", k) for k in good["record"]),
            *(("files", k) for k in good["files"]),
        ]
        for entry in entries:
            for how in ("missing", None, "x", 7, [], {}, 1.5):
                altered = copy.deepcopy(good)
                inner = altered if len(entry) == 1 else altered[entry[0]]
                if how == "missing":
                    del inner[entry[-1]]
                else:
                    inner[entry[-1]] = how
                if altered == good:
                    continue
                (path / "manifest.json").write_text(json.dumps(altered))
                for work in (partial(cr.load, path), partial(cr.resume, path)):
                    assert attempt(work)[0] is None, (entry, how)
        for cut in (0, 1, len(text) // 2, len(text) - 3):
            (path / "manifest.json").write_text(text[:cut])
            assert "truncated or was modified" in attempt(partial(cr.resume, path))[1]
        (path / "manifest.json").write_text(text.replace('"seed": 1,', '"seed": 2,'))
        with pytest.raises(cr.StoreError, match=r"the manifest of .* was modified \(its checksum does not match\)"):
            cr.resume(path)
        (path / "manifest.json").write_text(text)
        same(cr.resume(path), quick().fit(make(), seed=1))
