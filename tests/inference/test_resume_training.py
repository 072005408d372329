"""Fits that train, stopped at any checkpoint and resumed: the result is bit-for-bit that of an uninterrupted fit."""

import json
import signal

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.backends.cpp import in_use
from credibly.inference import module_leaves
from credibly.inference.training import journal, module_step
from credibly.inference.training.folder_journal import FolderJournal
from credibly.inference.training.run import Stage
from credibly.likelihoods import Gaussian
from credibly.priors.elementwise import Normal

PLAIN = {"steps": 14, "batch_size": 6}


class Crash(BaseException):
    """Simulates the end of the process: nothing in the package catches it."""


def problem(seed=0, **settings):
    """The seed changes the network's own weights, which must not matter to a fit that is resumed."""
    x = randn(20, 3)
    y = x.sum(1) + 0.1 * randn(20, seed=1)
    return cr.Problem(mlp(3, 4, 1, seed=seed), (x, y), Gaussian(), Normal(1.0), **settings)


METHODS = {
    "map": cr.MAP(**PLAIN),
    "map in torch": cr.MAP(**PLAIN, compile=False, optimiser="sgd", lr=0.01),
    "held-out noise": cr.MAP(**PLAIN, noise_from="held-out"),
    "ensemble": cr.DeepEnsemble(members=3, anchored=True, init="prior", **PLAIN),
    "stopped early": cr.DeepEnsemble(members=3, validation=0.3, patience=2, lr=0.1, steps=40, batch_size=5),
    "given start": cr.DeepEnsemble(members=2, init=randn(2, 22, seed=4), **PLAIN),
    "bbb": cr.BayesByBackprop(**PLAIN, compile=False),
    "bbb from map": cr.BayesByBackprop(**PLAIN, init="map"),
    "dropout": cr.MCDropout(insert="*", rate=(0.05, 0.3), **PLAIN),
    "concrete": cr.MCDropout(insert="*", concrete=True, **PLAIN, compile=False),
    "ivon": cr.IVON(**PLAIN),
    "swag": cr.SWAG(rank=2, iterates=4, every=5, **PLAIN),
    "laplace": cr.Laplace(structure="full", **PLAIN),
}


@pytest.fixture
def tight(monkeypatch):
    """Write a checkpoint after every call of a step, without waiting for the disk."""
    monkeypatch.setattr(journal, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(journal, "FRACTION", float("inf"))
    monkeypatch.setattr("os.fsync", lambda number: None)


@pytest.fixture
def crash(monkeypatch):
    """Return `crash`: crash(n) ends the process after n checkpoints, crash(None) lets it continue."""
    left = [None]
    write = FolderJournal.write

    def counted(self, stage, state):
        write(self, stage, state)
        if left[0] is not None:
            left[0] -= 1
            if left[0] <= 0:
                raise Crash

    monkeypatch.setattr(FolderJournal, "write", counted)

    def set_to(count):
        left[0] = count

    return set_to


def same(a, b):
    mine, theirs = a.tensors(), b.tensors()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    assert json.loads(json.dumps(vars(a.record))) == json.loads(json.dumps(vars(b.record)))


@pytest.mark.parametrize("name", METHODS)
def test_stopped_and_resumed(tmp_path, tight, crash, name):
    method = METHODS[name]
    known = method.fit(problem(), seed=1)
    stops = 0
    for after in (1, 2, 7, 20):
        out = tmp_path / str(after)
        crash(after)
        try:
            method.fit(problem(), seed=1, out=out)
        except Crash:
            stops += 1
        crash(None)
        if after == 1:
            with pytest.raises(cr.StoreError, match="is not finished. Resume it with `credibly resume"):
                cr.load(out)
        if after == 2:
            # Stopped once more.
            crash(2)
            with pytest.raises(Crash):
                cr.resume(out, problem(seed=5))
            crash(None)
        if not (out / "manifest.json").exists():
            continue
        given = problem(seed=5) if after != 7 else None  # rebuilt from the folder
        if json.loads((out / "manifest.json").read_text())["kind"] == "training":
            same(cr.resume(out, given), known)
        same(cr.load(out, mlp(3, 4, 1, seed=5)), known)
        files = json.loads((out / "manifest.json").read_text())["files"]
        assert sorted(p.name for p in out.iterdir()) == sorted([*files, "manifest.json"])
    assert stops >= 2


def test_large_networks_as_modules_and_members_in_turn(tmp_path, tight, crash, monkeypatch):
    for module in (module_leaves, module_step):
        monkeypatch.setattr(module, "LARGE", 1)
    method = cr.DeepEnsemble(members=2, **PLAIN)
    known = method.fit(problem(), seed=1)
    for after in (3, 16):
        crash(after)
        with pytest.raises(Crash):
            method.fit(problem(), seed=1, out=tmp_path / str(after))
        crash(None)
        same(cr.resume(tmp_path / str(after), problem(seed=5)), known)
    assert method.check_memory(problem()) is None


def test_ctrl_c_keeps_the_last_step(tmp_path, monkeypatch):
    method = cr.MAP(steps=100, batch_size=6, compile=False)
    known, keep = method.fit(problem(), seed=1), Stage.keep

    def press(self, done, stop):
        if done == 77:
            signal.raise_signal(signal.SIGINT)
            stop = True
        keep(self, done, stop)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Stage, "keep", press)
            with pytest.raises(cr.Interrupted, match="stopped after 77 of 100 steps; resume with `credibly resume"):
                method.fit(problem(), seed=1, out=tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    same(cr.resume(tmp_path / "run", problem()), known)


class TestRefusals:
    @pytest.fixture
    def stopped(self, tmp_path, tight, crash):
        crash(1)
        with pytest.raises(Crash):
            METHODS["map"].fit(problem(), seed=1, out=tmp_path / "run")
        crash(None)
        return tmp_path / "run"

    def test_another_problem(self, stopped):
        other = cr.Problem(mlp(3, 5, 1), (randn(20, 3), randn(20)), Gaussian(), Normal(1.0))
        with pytest.raises(cr.StoreError, match="was started with another problem"):
            cr.resume(stopped, other)

    @pytest.mark.skipif(in_use.load_library() is None, reason="needs the C++ library")
    def test_without_the_library(self, stopped, monkeypatch):
        monkeypatch.setattr(in_use, "load_library", lambda: None)
        with pytest.raises(cr.StoreError, match=r"started with the C\+\+ library and would continue with torch alone"):
            cr.resume(stopped, problem())

    def test_a_folder_that_exists(self, stopped):
        with pytest.raises(cr.StoreError, match="already exists"):
            METHODS["map"].fit(problem(), seed=1, out=stopped)

    def test_functions_are_not_stored(self, tmp_path, tight):
        method = cr.MAP(**PLAIN, optimiser=lambda p: torch.optim.SGD(p, lr=0.01))
        method.fit(problem(), seed=1, out=tmp_path / "run")
        assert cr.load(tmp_path / "run").draws.shape == (1, 1, 22)

    def test_a_fit_that_diverges_keeps_what_it_reached_as_before(self, tmp_path, tight):
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        data = (randn(20, 3), randn(20) * 1e6)
        hard = cr.Problem(net, data, Gaussian(1e-6), Normal(1.0))
        with pytest.raises(cr.TrainingError):
            cr.MAP(steps=400, lr=1e8, optimiser="sgd").fit(hard, seed=1, out=tmp_path / "run")
        if (tmp_path / "run").exists():
            assert cr.load(tmp_path / "run", net).record.status == "partial"
