"""A run folder that is being written: atomic checkpoints, one process at a time, no unfinished files left behind."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import signal
import stat
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import credibly as cr
from conftest import randn
from credibly.storage import run_folder
from credibly.storage.replacing import LOCK
from credibly.storage.run_folder import RunFolder, write_tensors
from warm_python import warm_python

FACTS = {"format": "credibly-run"}


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path / "run", FACTS, {"fixed.safetensors": {"fixed/a": randn(3)}}) as made:
        yield made


def stored(path):
    return json.loads((path / "manifest.json").read_text())


def names(path):
    return sorted(p.name for p in path.iterdir())


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


class TestCheckpoints:
    def test_a_new_folder_has_its_files_and_nothing_else(self, folder, tmp_path):
        assert names(tmp_path) == ["run"]
        assert names(folder.path) == ["fixed.safetensors", LOCK, "manifest.json"]
        manifest = stored(folder.path)
        content = (folder.path / "fixed.safetensors").read_bytes()
        assert manifest["format"] == "credibly-run"
        assert manifest["files"] == {
            "fixed.safetensors": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        }

    def test_a_file_is_listed_from_the_commit_on(self, folder):
        folder.write("draws-00000.safetensors", {"draws/00000": randn(2, 3)})
        assert "draws-00000.safetensors" not in stored(folder.path)["files"]
        folder.commit(status="running")
        assert "draws-00000.safetensors" in stored(folder.path)["files"]
        assert stored(folder.path)["status"] == "running"
        folder.drop("draws-00000.safetensors")
        assert (folder.path / "draws-00000.safetensors").exists()
        folder.commit()
        assert not (folder.path / "draws-00000.safetensors").exists()

    @pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name open files")
    def test_the_order_of_a_commit_is_files_names_manifest_names(self, folder, monkeypatch):
        """So a manifest on disk never lists a missing file, even if the machine crashes between two writes."""
        seen = []
        fsync, replace = os.fsync, os.replace

        def recorded_fsync(number):
            seen.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{number}"))))
            fsync(number)

        def recorded_replace(source, target):
            seen.append(("rename", os.path.basename(target)))
            replace(source, target)

        monkeypatch.setattr(os, "fsync", recorded_fsync)
        monkeypatch.setattr(os, "replace", recorded_replace)
        folder.write("state-00000.safetensors", {"a": randn(2)})
        folder.commit(state="state-00000.safetensors")
        assert seen == [
            ("fsync", "state-00000.safetensors.part"),
            ("rename", "state-00000.safetensors"),
            ("fsync", "run"),
            ("fsync", "manifest.json.part"),
            ("rename", "manifest.json"),
            ("fsync", "run"),
        ]

    def test_only_its_own_files_are_ever_removed(self, folder):
        foreign = [
            "notes.txt",
            "weights.safetensors",
            "draws.safetensors",
            "state-x.safetensors",
            "thesis.part",
            "draws-00000.safetensors.bak",
        ]
        unfinished = [
            "draws-00000.safetensors",
            "stats-00000.safetensors.part",
            "state-00012.safetensors",
            "manifest.json.part",
            "data.safetensors.part",
        ]
        for name in foreign + unfinished:
            (folder.path / name).write_text("x")
        folder.commit()
        assert names(folder.path) == sorted(["fixed.safetensors", LOCK, "manifest.json", *foreign])

    def test_a_write_that_fails_explains_how_to_resume(self, folder, monkeypatch):
        before = (folder.path / "manifest.json").read_bytes()
        monkeypatch.setattr(os, "fsync", full_disk)
        how = r"cannot write to .* \(No space left on device\)\. The run is intact .*"
        how += "resume it with `credibly resume .*run`"
        with pytest.raises(cr.StoreError, match=how):
            folder.write("draws-00000.safetensors", {"draws/00000": randn(2, 3)})
        with pytest.raises(cr.StoreError, match=how):
            folder.commit(status="lost")
        monkeypatch.undo()
        assert (folder.path / "manifest.json").read_bytes() == before
        # The truncated file is gone.
        assert names(folder.path) == ["fixed.safetensors", LOCK, "manifest.json"]

    def test_a_real_write_error(self, tmp_path):
        """A limit on file sizes, set by the system: writes stop in the middle."""
        code = f"""
import resource, sys, torch, credibly as cr
from credibly.storage.run_folder import RunFolder
folder = RunFolder.create({str(tmp_path / "run")!r}, {{}}, {{}})
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    folder.write("draws-00000.safetensors", {{"draws/00000": torch.zeros(10_000)}})
except cr.StoreError as error:
    sys.exit(0 if "File too large" in str(error) else str(error))
sys.exit("it was written")
"""
        done = subprocess.run([warm_python(), "-c", code], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert names(tmp_path / "run") == [LOCK, "manifest.json"]  # it exited without deleting its lock file

    def test_the_folder_is_found_after_a_change_of_directory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with RunFolder.create("run", FACTS, {}) as folder:
            (tmp_path / "elsewhere").mkdir()
            monkeypatch.chdir(tmp_path / "elsewhere")
            folder.write("state-00000.safetensors", {"a": randn(2)})
            folder.commit(status="here")
            assert folder.name == "run"
        assert stored(tmp_path / "run")["status"] == "here"
        monkeypatch.chdir(tmp_path)
        with RunFolder("run", stored(tmp_path / "run")) as again:
            monkeypatch.chdir(tmp_path / "elsewhere")
            again.commit(status="again")
        assert stored(tmp_path / "run")["status"] == "again"
        assert names(tmp_path / "elsewhere") == []


class TestFiles:
    def test_tensors_come_back_bit_for_bit(self, tmp_path):
        base = randn(4, 6)
        tensors = {
            "slice": base[:, 1:3],
            "transposed": base.T,
            "whole": base,
            "same": base,
            "row": base[2],
            "one": torch.tensor(0.1 + 0.2, dtype=torch.float64),
            "half": randn(3).half(),
            "count": torch.arange(5),
            "empty": torch.zeros(0, 3),
            "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
        }
        facts = write_tensors(tmp_path / "a.safetensors", tensors)
        back = load_file(tmp_path / "a.safetensors")
        assert set(back) == set(tensors)
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype
            assert back[name].shape == tensor.shape
            assert bits(back[name]) == bits(tensor)
        assert facts["bytes"] == (tmp_path / "a.safetensors").stat().st_size

    def test_files_get_the_permissions_of_the_umask(self, tmp_path):
        before = os.umask(0o022)
        try:
            write_tensors(tmp_path / "a.safetensors", {"a": randn(2)})
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o644


class TestCreate:
    def test_an_existing_path_is_refused_and_left_alone(self, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "file").write_text("mine")
        for name in ("run", "file"):
            with pytest.raises(cr.StoreError, match=r"out: .* already exists. Resume it with `credibly resume"):
                RunFolder.create(tmp_path / name, FACTS, {})
        assert names(tmp_path) == ["file", "run"]
        assert (tmp_path / "file").read_text() == "mine"

    def test_of_two_that_start_at_once_one_wins(self, tmp_path, monkeypatch):
        manifest = run_folder.write_manifest

        def slow(folder, facts):
            manifest(folder, facts)
            if not (tmp_path / "run").exists():
                monkeypatch.undo()
                os.mkdir(tmp_path / "other")
                (tmp_path / "other" / "manifest.json").write_text("{}")
                os.rename(tmp_path / "other", tmp_path / "run")  # the other one wins

        monkeypatch.setattr(run_folder, "write_manifest", slow)
        with pytest.raises(cr.StoreError, match="already exists"):
            RunFolder.create(tmp_path / "run", FACTS, {})
        assert names(tmp_path) == ["run"]
        assert names(tmp_path / "run") == ["manifest.json"]

    def test_one_that_fails_leaves_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(cr.StoreError, match=r"out: cannot write .*run' \(No space left on device\)"):
            RunFolder.create(tmp_path / "run", FACTS, {"fixed.safetensors": {"a": randn(2)}})
        assert names(tmp_path) == []

    def test_a_path_where_nothing_can_be_created(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(cr.StoreError, match=r"out: cannot write .*run' \((Not a directory|File exists)\)"):
            RunFolder.create(tmp_path / "file" / "run", FACTS, {})

    def test_parent_folders_are_created(self, tmp_path):
        RunFolder.create(tmp_path / "a" / "b" / "run", FACTS, {}).close()
        assert names(tmp_path / "a" / "b") == ["run"]

    def test_drafts_of_killed_processes_are_cleared_away(self, tmp_path):
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        dead = tmp_path / f".run.{ended.pid}.part"
        live = tmp_path / f".run.{os.getppid()}.part"  # a running process
        foreign = tmp_path / f".other.{ended.pid}.part"
        other = tmp_path / f".run.{ended.pid + 1_000_000}.part"  # has neither lock nor manifest, so it is not a run's
        for draft in (dead, live, foreign, other):
            draft.mkdir()
            (draft / ("notes.txt" if draft is other else LOCK)).write_text("process")
        RunFolder.create(tmp_path / "run", FACTS, {}).close()
        assert names(tmp_path) == sorted([live.name, foreign.name, other.name, "run"])

    def test_discarding_removes_it(self, tmp_path):
        with RunFolder.create(tmp_path / "run", FACTS, {"fixed.safetensors": {"a": randn(2)}}) as folder:
            folder.discard()
        assert names(tmp_path) == []


class TestLock:
    def test_one_process_at_a_time(self, folder):
        with pytest.raises(cr.StoreError, match=rf"is in use by process {os.getpid()} on .*\. Wait until it ends"):
            RunFolder(folder.path, {})
        folder.close()
        RunFolder(folder.path, {}).close()

    def test_the_lock_file_is_deleted_with_the_lock(self, folder):
        folder.close()
        assert names(folder.path) == ["fixed.safetensors", "manifest.json"]

    def test_another_process_holds_it_until_it_is_killed(self, tmp_path):
        RunFolder.create(tmp_path / "run", FACTS, {}).close()
        code = f"""
import time
from credibly.storage.run_folder import RunFolder
folder = RunFolder({str(tmp_path / "run")!r}, {{}})
print("locked", flush=True)
time.sleep(60)
"""
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout.readline() == "locked\n"
            with pytest.raises(cr.StoreError, match=f"in use by process {other.pid} on "):
                RunFolder(tmp_path / "run", {})
            other.send_signal(signal.SIGKILL)
            other.wait()
        assert (tmp_path / "run" / LOCK).exists()  # the file remains, the lock does not
        RunFolder(tmp_path / "run", {}).close()

    def test_it_is_created_with_the_folder(self, tmp_path, monkeypatch):
        """The folder never exists under its final name without a lock."""
        replace, seen = os.replace, []

        def watched(source, target):
            replace(source, target)
            if os.path.isdir(target):
                with pytest.raises(cr.StoreError, match="in use"):
                    RunFolder(target, {})
                seen.append(target)

        monkeypatch.setattr(os, "replace", watched)
        RunFolder.create(tmp_path / "run", FACTS, {}).close()
        assert seen == [tmp_path / "run"]

    def test_the_file_is_deleted_before_the_lock_is_released(self, folder):
        """Otherwise the next holder's file could be deleted, and a third process could acquire the lock too."""
        close, seen = folder._lock.close, []

        class Watched:
            def close(self):
                seen.append((folder.path / LOCK).exists())
                close()

        folder._lock = Watched()
        folder.close()
        assert seen == [False]

    def test_a_lock_on_a_file_that_was_deleted_meanwhile_is_acquired_again(self, folder, monkeypatch):
        folder.close()
        flock, calls = fcntl.flock, []

        def late(handle, how):
            calls.append(how)
            if len(calls) == 1:
                (folder.path / LOCK).unlink()  # its holder ended between our open and our flock
            flock(handle, how)

        monkeypatch.setattr(fcntl, "flock", late)
        with RunFolder(folder.path, {}) as mine:
            assert len(calls) == 2
            assert os.path.samestat(os.fstat(mine._lock.fileno()), (folder.path / LOCK).stat())
            with pytest.raises(cr.StoreError, match="in use"):
                RunFolder(folder.path, {})

    def test_a_file_system_without_locks_is_no_reason_to_stop(self, tmp_path, monkeypatch, caplog):
        def unknown(*_args):
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", unknown)
        with caplog.at_level(logging.WARNING, "credibly"), RunFolder.create(tmp_path / "run", FACTS, {}) as folder:
            folder.commit(status="running")
        assert "is not locked" in caplog.text
        assert stored(tmp_path / "run")["status"] == "running"

    def test_a_full_disk_does_not_prevent_locking(self, folder, monkeypatch):
        folder.close()
        monkeypatch.setattr(run_folder.platform, "node", full_disk)
        RunFolder(folder.path, {}).close()

    @pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
    def test_a_folder_that_may_not_be_written_to(self, folder):
        folder.close()
        folder.path.chmod(0o500)
        with pytest.raises(cr.StoreError, match=r"cannot write to .*run\' \(Permission denied\)"):
            RunFolder(folder.path, {})
        folder.path.chmod(0o700)


def test_the_command_is_quoted_for_the_shell():
    assert run_folder.resume_command("run") == "`credibly resume run`"
    assert run_folder.resume_command("my runs/a") == "`credibly resume 'my runs/a'`"
