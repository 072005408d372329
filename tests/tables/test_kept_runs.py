"""A run that can be resumed or loaded outlives every error; replacing one is safe at every operation on the disk."""

import errno
import mmap
import os
import shutil
import subprocess
import sys

import pytest
import torch

import credibly as cr
from credibly.core.allocation import allocation_failure
from credibly.core.files import write_atomic
from credibly.errors import InputError, StoreError
from credibly.inference.sampling.hmc import HMCSampler
from credibly.storage import replacing
from credibly.storage.sealed import read_facts, sealed_files, write_facts
from credibly.tables import run as tables_run
from credibly.tables.config import Config
from credibly.tables.folder import check_out, new_run
from credibly.tables.prepared import prepare
from credibly.tables.run import fit_table, resume_table
from own_tables import call, cancer, names, refused, write
from storage.test_replacing import Disk, Stopped, left_by


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write(cancer(60), tmp_path_factory.mktemp("table") / "t.csv")


def fit(table, run):
    settings = {"draws": 10, "warmup": 20, "chains": 2, "thin": 1}
    config = Config(str(table), "benign", method="hmc", settings=settings, hidden=(4,), tune="none", holdout=0.2)
    return fit_table(prepare(config), run, progress=False)


@pytest.fixture(scope="module")
def known(table):
    """The draws of a fit that nothing disturbs."""
    return fit(table, table.parent / "known").model.posterior.draws


def out_of_memory(*_):
    raise MemoryError


def defect():
    raise ZeroDivisionError("a defect")


class TestErrorsInAFit:
    @pytest.mark.parametrize("fail, error", [(out_of_memory, StoreError), (defect, ZeroDivisionError)])
    def test_in_the_middle_of_sampling(self, table, known, tmp_path, monkeypatch, fail, error):
        run, advance = tmp_path / "run", HMCSampler.advance

        def failing(self, stop):
            # Not in the fits to folds, which keep nothing.
            if self.done == 9 and (run / "posterior").exists():
                fail()
            return advance(self, stop)

        with monkeypatch.context() as patch:
            patch.setattr(HMCSampler, "advance", failing)
            with pytest.raises(error) as found:
                fit(table, run)
        if error is StoreError:
            assert str(found.value) == (
                "out of memory. The run is intact up to its last checkpoint: free some memory, then resume with "
                f"`credibly resume {run}`"
            )
        else:
            assert "intact up to its last checkpoint; resume with" in found.value.__notes__[0]
        assert torch.equal(resume_table(run, progress=False).model.posterior.draws, known)

    @pytest.mark.parametrize("how", ["mapping", "side file"])
    def test_after_the_last_draw(self, table, known, tmp_path, monkeypatch, how):
        run, stored = tmp_path / "run", tables_run.stored_rows
        kept = tmp_path / "kept.parquet"

        def failing(folder, name, *rest):
            if how == "mapping":
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            (run / name).rename(kept)
            return stored(folder, name, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(tables_run, "stored_rows", failing)
            with pytest.raises(StoreError) as found:
                fit(table, run)
        said = " ".join([str(found.value), *getattr(found.value, "__notes__", [])])
        assert "credibly resume" in said
        assert ("out of memory" in said) == (how == "mapping")
        if how == "side file":
            assert "held_out.parquet" in said
            kept.rename(run / "held_out.parquet")
        assert torch.equal(resume_table(run, progress=False).model.posterior.draws, known)

    def test_one_that_left_nothing_to_resume_is_removed(self, table, tmp_path, monkeypatch):
        monkeypatch.setattr(tables_run, "fit_folds", out_of_memory)
        with pytest.raises(StoreError, match=r"^out of memory\. .*nothing was kept"):
            fit(table, tmp_path / "run")
        assert names(tmp_path) == []


def test_real_errors_of_allocators_are_recognised():
    with pytest.raises(RuntimeError) as by_torch:
        torch.empty(2**52, dtype=torch.float64)
    assert allocation_failure(by_torch.value).startswith("out of memory (asked for 36028797018963968 bytes")
    with pytest.raises(OSError, match="Cannot allocate") as by_mapping:
        mmap.mmap(-1, 2**47 - 2**12)
    assert allocation_failure(by_mapping.value) == "out of memory"
    with pytest.raises(MemoryError) as by_python:
        bytearray(2**62)
    assert allocation_failure(by_python.value) == "out of memory"
    wrapped = StoreError("cannot read")
    wrapped.__cause__ = by_mapping.value
    assert allocation_failure(wrapped) == "out of memory"
    assert allocation_failure(ValueError("out of memory")) is None
    assert allocation_failure(OSError(errno.ENOSPC, "No space left on device")) is None


FACTS = {
    "status": "fitting", "config": {}, "preparation": {}, "rows": 1, "held_out": 0, "folds": 0, "fold_of_row": [],
    "parameters": 1, "threads": 1, "warnings": [], "candidates": [], "versions": {}, "files": {},
}  # fmt: skip


def build(folder, name):
    """Build a run as a fit does, without its fits."""
    with new_run(folder) as made:
        write_facts(made, {**FACTS, "why": name})
        write_atomic(made / "config.toml", name)
        write_facts(made, {**FACTS, "why": name, "files": sealed_files(made, ["config.toml"])})


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed"])
def test_a_run_replaced_with_force_and_stopped_at_every_operation(tmp_path, exchange):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    outcomes = {"old": 0, "new": 0}
    for number in range(1, 1000):
        place = tmp_path / str(number)
        build(place / "run", "old")
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, number, exchange=exchange)
            try:
                build(place / "run", "new")
                complete = True
            except Stopped:
                complete = False
        left_by(ended.pid, place)
        facts = read_facts(place / "run")
        assert facts["files"]
        outcomes[facts["why"]] += 1
        check_out(place / "run", force=True)
        build(place / "run", "newer")
        assert read_facts(place / "run")["why"] == "newer"
        assert names(place) == ["run"], number
        shutil.rmtree(place)
        if complete:
            break
    assert outcomes["old"] > 20
    assert outcomes["new"] >= 4


def test_a_run_killed_before_its_first_file_is_in_place_can_be_replaced(tmp_path):
    for number in range(1, 5):
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, number)
            with pytest.raises(Stopped):
                build(tmp_path / "run", "first")
        check_out(tmp_path / "run", force=False)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / ".table.json.999999.part").write_text('{"format": "credib')
    check_out(tmp_path / "run", force=False)
    build(tmp_path / "run", "second")
    assert names(tmp_path / "run") == ["config.toml", "table.json"]
    (tmp_path / "run" / "table.json").unlink()
    with pytest.raises(InputError, match="is not a run of `credibly fit`"):
        check_out(tmp_path / "run", force=True)


def test_a_run_that_was_moved_aside_is_found_by_every_command(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    build(tmp_path / "run", "old")
    os.rename(tmp_path / "run", tmp_path / f".run.{ended.pid}.old")
    refused(call("resume", tmp_path / "run", "--quiet"), code=1)
    assert names(tmp_path) == ["run"]
    assert replacing.recover(tmp_path / "run")
    assert read_facts(tmp_path / "run")["why"] == "old"
    with pytest.raises(cr.StoreError):
        cr.load(tmp_path / "nowhere")
