"""The command line under torchrun: the files of one process, output and errors shown once, resuming after a loss."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

import credibly as cr
from credibly.distributed.world import World
from credibly.errors import PeerError, TrainingError
from credibly.storage.sealed import read_facts, write_facts
from credibly.tables import TableRun, model
from credibly.tables import run as tables_run
from own_tables import QUICK, call, diabetes, names, refused, write
from studies.shared_cells import share_out
from uci_sets import make
from warm_python import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_drawing_in_module")]

SETTINGS = (f"--set={setting}" for setting in ("draws=10", "warmup=20", "chains=4", "thin=1", "start_steps=100"))
HMC = (*QUICK, "--method", "hmc", *SETTINGS, "--hidden", "6")
# The prior scale is chosen by folds, and the metrics come from folds.
CHOSEN = (*HMC[len(QUICK) :], "--noise", "learned", "--transform", "none", "--inputs", "standard")
ENSEMBLE = (*QUICK, "--method", "ensemble", "--set", "steps=60", "--set", "members=4", "--hidden", "6")
SHORT = ("--set", "map.steps=30", "--set", "ensemble.steps=30")
COMPARED = ("--methods", "map,ensemble", *SHORT, "--holdout", "0.2", "--hidden", "6")
BENCH = ("bench", "uci", "--root", "data", "--quick", "--methods", "map,ensemble", "--splits", "2")

# Runs commands one after another in every process, after the changes that a test makes.
DRIVER = """
import json, os, signal, sys
from pathlib import Path
import credibly.report.pictures as pictures
import credibly.tables.model as model
pictures._draw = lambda name, paint, size: "<svg></svg>"  # takes longer than all the rest
model.BLOCK = model.LEAST = 64  # small blocks for a small table
rank, again = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
exec(sys.argv[1])
from credibly.cli import app
for words in json.loads(sys.argv[2]):
    status = app(words, standalone_mode=False)
    if status:
        sys.exit(status)
"""
NOTE_CELLS = """
from studies import uci_bench
real = uci_bench.run_cell
def noted(root, name, split, method, *more, **options):
    with open("cells.txt", "a") as file:
        file.write(f"{name} {split} {method}\\n")
    return real(root, name, split, method, *more, **options)
uci_bench.run_cell = noted
"""
LOSE_ONE = """
from credibly.inference.sampling import recording
from credibly.inference.sampling import loop as sampling
recording.EVERY_SECONDS = sampling.EVERY_SECONDS = 0.0
real, made = recording.FolderRecorder.checkpoint, []
def checkpoint(self, process, **options):
    real(self, process, **options)
    made.append(self.kept)
    if rank == 1 and not again and self.kept == 4:
        Path("lost").write_text(str(len(made)))
        os.kill(os.getpid(), signal.SIGKILL)
recording.FolderRecorder.checkpoint = checkpoint
"""
FAIL_IN_ONE = """
from credibly.errors import StoreError
real, seen = model.TableModel.columns, []
def columns(self, *predicted):
    seen.append(1)
    if rank == 1 and len(seen) == 2:
        raise StoreError("made to fail")
    return real(self, *predicted)
model.TableModel.columns = columns
"""


def torchrun(*words, cwd, restarts=0):
    # The checkout is importable here by pytest's settings, and must be in the processes too: it holds `studies`.
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    launch = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), *map(str, words)]
    return subprocess.run(
        [warm_python(), "-m", "torch.distributed.run", *launch],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ
        | {"CREDIBLY_TIMEOUT": "120", "CREDIBLY_CPU": "1", "PYTHONPATH": path, "PYTHON_EXEC": warm_python()},
        check=False,
    )


def drive(place, commands, change="", **options):
    (place / "drive.py").write_text(DRIVER)
    return torchrun(
        "drive.py", change, json.dumps([[str(w) for w in words] for words in commands]), cwd=place, **options
    )


def lines(text):
    """Return what credibly wrote to standard error, without the launcher's lines."""
    return [line for line in text.splitlines() if line.startswith("credibly:")]


def fit(out, *more):
    return "fit", "house.csv", "--target", "progress", "--out", out, *more


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A folder with tables, and the results of one process."""
    place = tmp_path_factory.mktemp("one")
    write(diabetes(), place / "house.csv")
    write(diabetes(430), place / "new.csv")
    write(diabetes(430), place / "new.parquet")
    make(place / "data", "mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(model, "BLOCK", 64)
        patch.setattr(model, "LEAST", 64)
        for words in (
            fit("hmc", *HMC),
            fit("ensemble", *ENSEMBLE),
            ("predict", "hmc", "new.csv", "--out", "p.csv"),
            ("predict", "hmc", "new.parquet", "--out", "p.parquet"),
            (*BENCH, "--jobs", "1"),
        ):
            found = call(*words)
            assert found.exit_code == 0, found.output
    return place


def with_tables(one, place):
    for name in ("house.csv", "new.csv", "new.parquet", "data"):
        (place / name).symlink_to(one / name)
    return place


@pytest.fixture(scope="module")
def two(one, tmp_path_factory):
    """The results of two processes."""
    place = with_tables(one, tmp_path_factory.mktemp("two"))
    commands = [
        fit("hmc", *HMC),
        fit("ensemble", *ENSEMBLE, "--quiet"),
        ("predict", "hmc", "new.csv", "--out", "p.csv", "--json"),
        ("predict", "hmc", "new.parquet", "--out", "p.parquet", "--quiet"),
        (*BENCH, "--quiet"),
        ("compare", "house.csv", "--target", "progress", "--out", "comparison", "--quiet", *COMPARED),
        ("evaluate", "hmc", "house.csv", "--json"),
        ("resume", "hmc", "--quiet"),
    ]
    found = drive(place, commands, NOTE_CELLS)
    assert found.returncode == 0, found.stderr
    return place, found.stdout


class TestTwoProcesses:
    def test_a_sampler_draws_the_same(self, one, two):
        place, _ = two
        assert torch.equal(cr.load(place / "hmc").draws, cr.load(one / "hmc").draws)
        assert TableRun.load(place / "hmc").figures == TableRun.load(one / "hmc").figures
        assert names(place / "hmc") == names(one / "hmc")

    def test_an_ensemble_is_the_same(self, one, two):
        place, _ = two
        assert torch.equal(cr.load(place / "ensemble").draws, cr.load(one / "ensemble").draws)
        assert names(place / "ensemble") == names(one / "ensemble")

    def test_predictions_are_the_same_bytes(self, one, two):
        """Seven blocks, four of them from the first process."""
        place, _ = two
        assert (place / "p.csv").read_bytes() == (one / "p.csv").read_bytes()
        assert pq.read_table(place / "p.parquet").equals(pq.read_table(one / "p.parquet"))
        assert pq.ParquetFile(place / "p.parquet").num_row_groups == 7

    def test_cells_are_the_same_and_none_is_run_twice(self, one, two):
        place, _ = two
        cells = sorted((place / "bench-uci" / "cells").iterdir())
        assert len(cells) == 6  # two splits by two methods, and the choices of each split
        for cell in cells:
            mine, other = (json.loads(f.read_text()) for f in (cell, one / "bench-uci" / "cells" / cell.name))
            assert {k: v for k, v in mine.items() if k != "seconds"} == {
                k: v for k, v in other.items() if k != "seconds"
            }
        made = (place / "cells.txt").read_text().splitlines()
        assert sorted(made) == [f"mine {split} {method}" for split in (0, 1) for method in ("ensemble", "map")]
        assert (place / "bench-uci" / "index.html").is_file()

    def test_only_one_process_prints(self, two):
        place, out = two
        assert out.count("Method: hmc (requested).") == 1
        assert out.splitlines().count("hmc/report.html") == 2  # of the fit, and of the completed run
        assert out.splitlines().count("ensemble/report.html") == 1
        assert out.count('"rows": 430') == 1
        assert out.count('"rows": 160') == 1  # evaluate
        assert out.splitlines().count("bench-uci/index.html") == 1
        assert out.splitlines().count("comparison/index.html") == 1
        assert {"index.html", "results.json", "map", "ensemble"} <= set(names(place / "comparison"))
        assert not [name for name in os.listdir(place) if name.startswith(".")]


def test_an_error_is_shown_once(one, tmp_path):
    with_tables(one, tmp_path)
    found = torchrun(*("-m", "credibly", "fit", "house.csv", "--target", "nothing", "--out", "run"), cwd=tmp_path)
    assert found.returncode == 1
    said = [line for line in lines(found.stderr) if "nothing" in line]
    assert len(said) == 1, found.stderr
    assert "house.csv" in said[0] or "column" in said[0]
    assert all("stops: process" in line for line in lines(found.stderr) if line not in said)
    assert found.stdout == ""
    assert not (tmp_path / "run").exists()


@pytest.fixture
def restarted(monkeypatch):
    """The environment after the launcher has restarted this process, its only one."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 1}.items():
        monkeypatch.setenv(name, str(value))


class TestRestarted:
    """Which folders count as those of the same command."""

    @pytest.fixture
    def place(self, one, tmp_path, monkeypatch):
        monkeypatch.chdir(with_tables(one, tmp_path))
        shutil.copytree(one / "hmc", tmp_path / "hmc")
        return tmp_path

    def unfinished(self, folder):
        facts = read_facts(folder)
        files = {name: digest for name, digest in facts["files"].items() if "manifest" not in name}
        known = {k: v for k, v in facts.items() if k not in ("figures", "ood_levels")}
        write_facts(folder, known | {"status": "fitting", "files": files})

    def test_a_completed_one_is_reported_again(self, one, place, restarted):
        found = call(*fit("hmc", *HMC, "--json"))
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["figures"] == TableRun.load(one / "hmc").figures

    def test_one_that_was_started_is_resumed(self, one, place, restarted, monkeypatch):
        self.unfinished(place / "hmc")
        monkeypatch.setattr(cr.HMC, "fit", None)  # the draws are all there
        assert call(*fit("hmc", *HMC)).exit_code == 0
        assert TableRun.load(place / "hmc").figures == TableRun.load(one / "hmc").figures

    def test_one_whose_settings_were_chosen_is_resumed(self, place, restarted, monkeypatch):
        """Nothing is chosen again: a choice that came out differently would not find the fit."""
        words = fit("chosen", *CHOSEN)
        assert call(*words).exit_code == 0
        done = read_facts(place / "chosen")
        assert done["folds"] == 5
        assert done["config"]["prior_scale"] is not None
        self.unfinished(place / "chosen")
        monkeypatch.setattr(cr.HMC, "fit", None)
        refused(call(*words, "--noise", "student"), "chosen already exists")
        assert call(*words).exit_code == 0
        again = read_facts(place / "chosen")
        assert (again["config"], again["figures"]) == (done["config"], done["figures"])

    @pytest.mark.nightly
    def test_one_stopped_between_its_folds_is_resumed(self, place, restarted):
        words = fit("chosen", *CHOSEN)
        assert call(*words).exit_code == 0
        before = cr.load(place / "chosen").draws.clone()
        self.unfinished(place / "chosen")
        for part in ("posterior", "folds/3", "folds/4"):
            shutil.rmtree(place / "chosen" / part)
        kept = (place / "chosen" / "folds" / "2" / "manifest.json").stat().st_mtime_ns
        assert call(*words).exit_code == 0
        assert (place / "chosen" / "folds" / "2" / "manifest.json").stat().st_mtime_ns == kept
        assert names(place / "chosen" / "folds") == [str(k) for k in range(5)]
        assert torch.equal(cr.load(place / "chosen").draws, before)

    def test_one_without_draws_is_fitted(self, one, place, restarted):
        self.unfinished(place / "hmc")
        shutil.rmtree(place / "hmc" / "posterior")
        assert call(*fit("hmc", *HMC)).exit_code == 0
        assert torch.equal(cr.load(place / "hmc").draws, cr.load(one / "hmc").draws)

    def test_one_beside_the_run_that_it_replaces(self, one, place, restarted, monkeypatch):
        shutil.copytree(place / "hmc", place / "hmc.new")
        self.unfinished(place / "hmc.new")
        (place / "hmc" / "old").touch()
        monkeypatch.setattr(cr.HMC, "fit", None)
        assert call(*fit("hmc", *HMC, "--force")).exit_code == 0
        assert names(place / "hmc") == names(one / "hmc")
        assert not (place / "hmc.new").exists()

    @pytest.mark.parametrize("more", [("--seed", "1"), ("--set", "draws=11")])
    def test_one_of_other_settings_is_refused(self, place, restarted, more):
        self.unfinished(place / "hmc")
        refused(call(*fit("hmc", *HMC, *more)), "hmc already exists")
        assert (place / "hmc" / "posterior").is_dir()

    def test_a_first_start_refuses_its_own_folder_too(self, place):
        self.unfinished(place / "hmc")
        refused(call(*fit("hmc", *HMC)), "hmc already exists")


def test_a_lost_process_keeps_a_sampling_run_and_removes_a_training_run(one, tmp_path, monkeypatch):
    monkeypatch.chdir(with_tables(one, tmp_path))

    def lost(*_):
        raise PeerError("process 1 of 2 did not answer")

    monkeypatch.setattr(tables_run, "_finish", lost)
    found = call(*fit("hmc", *HMC))
    assert found.exit_code == 1
    assert names(tmp_path / "hmc" / "posterior") == names(one / "hmc" / "posterior")
    monkeypatch.setattr(cr.DeepEnsemble, "fit", lost)
    assert call(*fit("ensemble", *ENSEMBLE)).exit_code == 1
    assert not (tmp_path / "ensemble").exists()


@pytest.mark.nightly
def test_a_lost_process_is_restarted_and_the_run_resumes(one, tmp_path):
    with_tables(one, tmp_path)
    found = drive(tmp_path, [fit("hmc", *HMC)], LOSE_ONE, restarts=1)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "lost").is_file()
    assert torch.equal(cr.load(tmp_path / "hmc").draws, cr.load(one / "hmc").draws)
    assert TableRun.load(tmp_path / "hmc").figures == TableRun.load(one / "hmc").figures
    assert names(tmp_path / "hmc") == names(one / "hmc")


def test_predictions_that_fail_in_one_process_leave_nothing(one, tmp_path):
    with_tables(one, tmp_path)
    found = drive(tmp_path, [("predict", one / "hmc", "new.csv", "--out", "p.csv")], FAIL_IN_ONE)
    assert found.returncode == 1
    assert lines(found.stderr).count("credibly: made to fail") == 1, found.stderr
    assert sorted(os.listdir(tmp_path)) == ["data", "drive.py", "house.csv", "new.csv", "new.parquet"]


class Thread(World):
    """A world whose processes are threads."""

    def barrier(self):
        self.collective_calls += 1
        self.threads.wait()


def test_cells_of_the_others_are_kept_where_one_fails():
    store, barrier, did, ends = dist.HashStore(), threading.Barrier(2), [], {}

    def work(cell):
        if cell == 1:
            raise TrainingError("made to fail", step=0, member=0)
        did.append(cell)

    def run(rank):
        everyone = Thread(rank, 2, store=store)
        everyone.threads = barrier
        try:
            share_out(everyone, range(6), work)
        except Exception as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(did) == [0, 2, 3, 4, 5]
    failed, other = sorted(ends.values(), key=lambda e: isinstance(e, PeerError))
    assert isinstance(failed, TrainingError)
    assert "failed; finished cells are kept" in str(other)
