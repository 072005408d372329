"""Run folders during a run: the draws so far, progress, checkpoints, and memory that does not grow."""

import os
from itertools import pairwise

import pytest
import torch
from stopped_runs import StoppedRuns, begin, make, manifest_of, same, sg

import credibly as cr
from conftest import mlp, randn
from credibly.distributed.world import Mesh, World
from credibly.inference.sampling import recording
from credibly.inference.sampling.recording import FolderRecorder
from credibly.storage.run_folder import RunFolder


class TestUnfinishedRuns(StoppedRuns):
    def test_the_draws_so_far_can_be_loaded_and_predict(self, tmp_path, stopped):
        path, known = stopped
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

    def test_the_manifest_shows_the_progress_of_every_chain(self, tmp_path, tight, crash, stopped):
        path, _ = stopped
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

    def test_checkpoints_are_seconds_apart_and_rarer_if_they_are_slow(self, tmp_path, monkeypatch):
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
