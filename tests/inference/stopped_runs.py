"""Runs that stop at a checkpoint, and what a resumed run is compared with: helpers of the tests of resuming."""

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
from credibly.posterior.base import SampledPosterior
from credibly.priors.elementwise import Normal
from credibly.storage.manifest import read_manifest


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


def tighten(monkeypatch):
    """Shards of a few draws, a checkpoint after every iteration, and no waiting for the disk."""
    monkeypatch.setattr(recording, "SHARD_BYTES", 1200)
    monkeypatch.setattr(recording, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(recording, "FRACTION", math.inf)
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


def begin(method, problem, path, crash, after):
    """A run that ended after so many checkpoints, the first of which is at its start."""
    crash(after)
    with pytest.raises(Crash):
        method.fit(problem, seed=1, out=path)
    crash(None)


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


class StoppedRuns:
    """Fixtures for test classes to inherit; a conftest.py of this folder would hide the one above it."""

    @pytest.fixture
    def tight(self, monkeypatch):
        tighten(monkeypatch)

    @pytest.fixture
    def crash(self, monkeypatch):
        return crashes(monkeypatch)

    @pytest.fixture(scope="module")
    def ended(self, tmp_path_factory):
        """A run that ended with five of eight draws: a shard of three, and two beside the state. And what it would have given."""
        path = tmp_path_factory.mktemp("ended") / "run"
        with pytest.MonkeyPatch.context() as patch:
            tighten(patch)
            begin(hmc(), make(), path, crashes(patch), 26)
            return path, hmc().fit(make(), seed=1)

    @pytest.fixture
    def begun(self, ended, tmp_path):
        """The same, to go on with."""
        return Path(shutil.copytree(ended[0], tmp_path / "run")), ended[1]
