"""Replacing a folder: whatever operation on the disk is the last one, the old folder or the new one is complete."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.core import files
from credibly.posterior import saving
from credibly.storage import replacing, run_folder
from credibly.storage.replacing import recover, remove_leftovers, replace_folder


@pytest.fixture(scope="module")
def posteriors():
    """Two posteriors of one network that predict differently."""
    data = (randn(12, 3), randn(12, seed=1))
    problem = cr.Problem(mlp(3, 4, 1), data, cr.likelihoods.Gaussian(), cr.priors.Normal())
    return [cr.MAP(steps=5, init="fresh").fit(problem, seed=seed) for seed in (0, 1)]


X = randn(5, 3, seed=9)


def prediction(folder):
    return cr.load(folder).predict(X).mean


class Stopped(BaseException):
    """The process ends here: no handler of the package gets to run any more."""


class Disk:
    """Counts operations on the disk and stops before or after the n-th one; later ones are refused, as after a kill."""

    def __init__(self, patch, number, error=Stopped, exchange=True):
        self.seen, self.number, self.error = 0, number, error
        for module, name in (
            (os, "rename"), (os, "replace"), (os, "fsync"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"),
            (run_folder, "write_bytes"), (files, "write_bytes"), (shutil, "rmtree"), (replacing, "exchange"),
        ):  # fmt: skip
            plain = getattr(module, name)
            if name == "exchange" and not exchange:
                plain = no_exchange
            patch.setattr(module, name, self.counted(plain))

    def counted(self, plain):
        def call(*args, **kwargs):
            self.step()
            found = plain(*args, **kwargs)
            self.step()
            return found

        return call

    def step(self):
        self.seen += 1
        if self.number is not None and self.seen >= self.number:
            raise self.error


def no_exchange(one, other):
    return False


def left_by(pid, folder):
    """Rename what this process left to what a dead one would have left."""
    for path in list(folder.iterdir()):
        if f".{os.getpid()}." in path.name:
            path.rename(path.with_name(path.name.replace(f".{os.getpid()}.", f".{pid}.")))


@pytest.fixture(scope="module")
def dead():
    """The number of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed"])
def test_save_over_a_folder_stopped_at_every_operation(tmp_path, posteriors, dead, exchange):
    old, new = (posterior.predict(X).mean for posterior in posteriors)
    assert not torch.equal(old, new)
    outcomes = {"old": 0, "new": 0}
    for number in range(1, 1000):
        place = tmp_path / str(number)
        posteriors[0].save(place / "run")
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, number, exchange=exchange)
            try:
                posteriors[1].save(place / "run", overwrite=True)
                ended = True
            except Stopped:
                ended = False
        left_by(dead, place)
        found = prediction(place / "run")  # recovers the folder, if need be
        assert torch.equal(found, old) or torch.equal(found, new), number
        outcomes["new" if torch.equal(found, new) else "old"] += 1
        posteriors[1].save(place / "run", overwrite=True)  # clears what was left, and goes through
        assert torch.equal(prediction(place / "run"), new)
        assert [p.name for p in place.iterdir()] == ["run"], number
        if ended:
            break
    assert ended
    assert disk.seen == number - 1 > 20
    assert outcomes["old"] > 20
    assert outcomes["new"] > 1


def test_save_that_the_disk_refuses_at_every_operation_keeps_the_old_folder_or_has_the_new(tmp_path, posteriors):
    full = OSError(errno.ENOSPC, "No space left on device")
    old, new = (posterior.predict(X).mean for posterior in posteriors)
    for number in range(1, 1000):
        place = tmp_path / str(number)
        posteriors[0].save(place / "run")
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, number, full)
            try:
                posteriors[1].save(place / "run", overwrite=True)
                break
            except (OSError, cr.StoreError):
                pass
        found = prediction(place / "run")
        assert torch.equal(found, old) or torch.equal(found, new), number
    assert number > 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("point", ["write_manifest", "replace_folder", "exchange"])
def test_a_real_kill_in_the_middle_of_a_save(tmp_path, posteriors, point):
    posteriors[0].save(tmp_path / "run")
    pid = os.fork()
    if not pid:  # pragma: no cover  (the child, which is killed)

        def die(*args):
            if point == "exchange":
                os.rename(args[1], replacing_old(args[1]))
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(replacing if point == "exchange" else saving, point, die)
        try:
            posteriors[1].save(tmp_path / "run", overwrite=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "run").exists() == (point != "exchange")
    assert torch.equal(prediction(tmp_path / "run"), posteriors[0].predict(X).mean)
    posteriors[1].save(tmp_path / "run", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def replacing_old(path):
    """The name to which a folder is moved aside."""
    return Path(path).with_name(f".{Path(path).name}.{os.getpid()}.old")


def folder(path, text):
    path.mkdir()
    (path / "manifest.json").write_text(text)
    return path


class TestLeftovers:
    def test_a_folder_that_was_moved_aside_comes_back_only_if_its_place_is_free(self, tmp_path, dead):
        folder(tmp_path / f".run.{dead}.old", "old")
        assert recover(tmp_path / "run")
        assert (tmp_path / "run" / "manifest.json").read_text() == "old"
        folder(tmp_path / f".run.{dead}.old", "older")
        assert recover(tmp_path / "run")
        assert (tmp_path / "run" / "manifest.json").read_text() == "old"
        remove_leftovers(tmp_path / "run")
        assert [p.name for p in tmp_path.iterdir()] == ["run"]

    @pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed"])
    def test_a_replaced_folder_never_comes_back(self, tmp_path, dead, monkeypatch, exchange):
        """Also not if the process is killed while it removes the old folder, and the new one is deleted later."""
        folder(tmp_path / "run", "old")
        (tmp_path / "run" / "draws").write_text("")
        if not exchange:
            monkeypatch.setattr(replacing, "exchange", no_exchange)

        def stop(*args, **kwargs):
            raise Stopped

        monkeypatch.setattr(Path, "unlink", stop)
        with pytest.raises(Stopped):
            replace_folder(folder(tmp_path / "new", "new"), tmp_path / "run")
        monkeypatch.undo()
        left_by(dead, tmp_path)
        assert (tmp_path / "run" / "manifest.json").read_text() == "new"
        shutil.rmtree(tmp_path / "run")
        assert not recover(tmp_path / "run")
        remove_leftovers(tmp_path / "run")
        assert list(tmp_path.iterdir()) == []

    def test_the_rest_of_a_removed_folder_is_removed_at_every_point(self, tmp_path, dead):
        for number in range(1, 100):
            aside = folder(tmp_path / f".run.{dead}.replaced", "old")
            for name in ("draws", "lock", "table.json", "zzz"):
                (aside / name).write_text("")
            (aside / "posterior").mkdir()
            with pytest.MonkeyPatch.context() as patch:
                Disk(patch, number)
                with contextlib.suppress(Stopped):
                    remove_leftovers(tmp_path / "run")
                ended = not aside.exists()
            remove_leftovers(tmp_path / "run")
            assert not aside.exists(), number
            if ended:
                break
        assert number > 8

    @pytest.mark.parametrize("ending", ["part", "old", "replaced"])
    def test_folders_that_are_not_crediblys_stay(self, tmp_path, dead, ending):
        other = tmp_path / f".mine.{dead}.{ending}"
        other.mkdir()
        (other / "thesis.txt").write_text("")
        remove_leftovers(tmp_path / "mine")
        folder(tmp_path / "mine", "new")
        remove_leftovers(tmp_path / "mine")
        assert (other / "thesis.txt").exists()

    def test_what_a_live_process_holds_stays(self, tmp_path):
        folder(tmp_path / f".run.{os.getppid()}.old", "old")
        assert not recover(tmp_path / "run")
        remove_leftovers(tmp_path / "run")
        assert [p.name for p in tmp_path.iterdir()] == [f".run.{os.getppid()}.old"]

    def test_a_link_keeps_pointing_to_its_folder(self, tmp_path):
        folder(tmp_path / "real", "old")
        (tmp_path / "run").symlink_to("real")
        replace_folder(folder(tmp_path / "new", "new"), tmp_path / "run")
        assert (tmp_path / "run").is_symlink()
        assert (tmp_path / "real" / "manifest.json").read_text() == "new"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["real", "run"]

    def test_drafts_of_files_do_not_occupy_a_folder(self, tmp_path):
        (tmp_path / ".table.json.12.part").write_text("{")
        assert not files.is_occupied(tmp_path)
        (tmp_path / "notes.txt").write_text("")
        assert files.is_occupied(tmp_path)
        files.remove_drafts(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
