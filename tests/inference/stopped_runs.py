"""Helpers of the tests of resuming: small runs, how to stop them at a checkpoint, and comparisons of results."""

import functools
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.inference.sampling import recording
from credibly.inference.sampling import sgmcmc as sgmcmc_run
from credibly.inference.sampling.recording import FolderRecorder
from credibly.likelihoods import Gaussian
from credibly.posterior.draws import SampledPosterior
from credibly.priors.elementwise import Normal
from credibly.storage.manifest import read_manifest


class Crash(BaseException):
    """Simulates the end of the process: nothing in the package catches it."""


def end(*_args):
    raise Crash


def make(seed=0, net=None, likelihood=None, prior=None, y=None, rows=20, **kwargs):
    """The problem of most tests. The seed changes the network's own weights, which must not affect the draws."""
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


def nuts(**settings):
    given = {"chains": 3, "draws": 8, "warmup": 20, "max_depth": 3, "init": "prior", "compile": False}
    return cr.NUTS(**{**given, **settings})


def chees(**settings):
    given = {"chains": 3, "draws": 8, "warmup": 20, "max_steps": 8, "init": "prior", "compile": False}
    return cr.ChEES(**{**given, **settings})


def mile(**settings):
    given = {"chains": 3, "draws": 8, "warmup": 40, "max_steps": 3, "start_steps": 10, "compile": False}
    return cr.MILE(**{**given, **settings})


def mclmc(**settings):
    given = {"chains": 3, "draws": 8, "warmup": 40, "max_steps": 3, "init": "prior", "compile": False}
    return cr.MCLMC(**{**given, **settings})


def tempering(**settings):
    given = {"chains": 2, "draws": 8, "warmup": 20, "temperatures": 3, "trajectory_length": 0.3, "max_steps": 4}
    return cr.ParallelTempering(**{**given, "init": "prior", "compile": False, **settings})


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


def tighten(monkeypatch):
    """Make shards of a few draws and a checkpoint after every iteration, without waiting for the disk."""
    monkeypatch.setattr(recording, "SHARD_BYTES", 1200)
    monkeypatch.setattr(recording, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(recording, "FRACTION", math.inf)
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr(sgmcmc_run, "BLOCK", 2)


def crashes(monkeypatch):
    """Return `crash`: crash(n) makes the process end after n checkpoints, crash(None) lets it continue."""
    left = [None]
    original = FolderRecorder.checkpoint

    def checkpoint(self, process, **how):
        original(self, process, **how)
        if left[0] is not None:
            left[0] -= 1
            if left[0] <= 0:
                raise Crash

    monkeypatch.setattr(FolderRecorder, "checkpoint", checkpoint)

    def crash(count):
        left[0] = count

    return crash


def begin(method, problem, path, crash, after):
    """Start a run that ends after the given number of checkpoints, the first of which is at its start."""
    crash(after)
    with pytest.raises(Crash):
        method.fit(problem, seed=1, out=path)
    crash(None)


def same(a: SampledPosterior, b: SampledPosterior):
    """Assert equal draws, statistics and record; only the time may differ, and the reason for a known plan."""
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
    """Return the result of the work and the message of its StoreError; one of them is empty."""
    try:
        return work(), ""
    except cr.StoreError as error:
        return None, str(error)


def manifest_of(path):
    return json.loads((path / "manifest.json").read_text())


def tidy(path):
    """Assert that a complete folder holds its draws and what is needed to open them, and nothing else."""
    manifest = manifest_of(path)
    assert manifest["status"] == manifest["record"]["status"] == "complete"
    assert "state" not in manifest
    assert sorted(p.name for p in path.iterdir()) == sorted([*manifest["files"], "manifest.json"])
    assert all(name.startswith(("draws-", "stats-", "fixed.")) for name in manifest["files"])
    read_manifest(path)


@functools.cache
def unfinished(path):
    """A run that ended after five of eight draws, a shard of three and two beside the state; and the whole run."""
    with pytest.MonkeyPatch.context() as patch:
        tighten(patch)
        begin(hmc(), make(), path, crashes(patch), 26)
        return path, hmc().fit(make(), seed=1)


class StoppedRuns:
    """Fixtures for test classes to inherit: a conftest.py in this folder would hide the one above it."""

    @pytest.fixture
    def tight(self, monkeypatch):
        tighten(monkeypatch)

    @pytest.fixture
    def crash(self, monkeypatch):
        return crashes(monkeypatch)

    @pytest.fixture
    def stopped(self, tmp_path_factory, tmp_path):
        """A copy of an unfinished run to resume, and the posterior of the uninterrupted run."""
        path, known = unfinished(tmp_path_factory.getbasetemp() / "unfinished")
        return Path(shutil.copytree(path, tmp_path / "run")), known
