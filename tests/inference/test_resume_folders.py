"""Folders that are complete, locked, damaged or of another method: loaded, or refused with a reason."""

import copy
import json
from functools import partial

import pytest
import torch
from stopped_runs import (
    Crash,
    StoppedRuns,
    attempt,
    begin,
    density,
    make,
    quick,
    same,
    tidy,
)

import credibly as cr
from conftest import randn
from credibly.storage import run_folder


class TestFolders(StoppedRuns):
    def test_a_complete_run_is_loaded(self, tmp_path, tight, crash):
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

    def test_another_process_completes_it_while_we_wait_for_the_lock(self, tmp_path, tight, crash, monkeypatch):
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

    def test_a_state_that_is_replaced_while_it_is_read(self, stopped, tight, crash, monkeypatch):
        from credibly.storage import manifest as manifests

        path, known = stopped
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

    def test_loaded_draws_stay_readable_when_the_run_completes(self, stopped):
        path, known = stopped
        partial = cr.load(path)
        cr.resume(path)
        assert torch.equal(partial.draws, known.draws[:, :5])

    def test_fits_of_other_methods_cannot_be_resumed(self, tmp_path):
        cr.MAP(steps=3, compile=False).fit(make(), seed=0, out=tmp_path / "map")
        with pytest.raises(cr.StoreError, match="was saved after it finished; there is nothing to resume"):
            cr.resume(tmp_path / "map")
        quick().fit(make(), seed=0).save(tmp_path / "saved")
        with pytest.raises(cr.StoreError, match="was saved after it finished"):
            cr.resume(tmp_path / "saved")
        for name, reason in (("nowhere", "there is no folder"), ("", "is not a run folder")):
            with pytest.raises(cr.StoreError, match=reason):
                cr.resume(tmp_path / name)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["map", "saved"]

    def test_an_existing_out_is_refused_before_any_work(self, tmp_path, tight, crash, monkeypatch):
        quick().fit(make(), seed=1, out=tmp_path / "done")
        begin(quick(), make(), tmp_path / "stopped", crash, 3)
        (tmp_path / "mine").mkdir()
        monkeypatch.setattr(cr.HMC, "sampler", lambda *_: pytest.fail("work was done"))
        for name, reason in (
            ("done", "already exists"),
            ("stopped", "holds an unfinished run. Resume it with"),
            ("mine", "exists"),
        ):
            before = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
            with pytest.raises(cr.StoreError, match=f"out: .*{name}.*{reason}"):
                quick().fit(make(), seed=1, out=tmp_path / name)
            assert {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} == before

    @pytest.mark.parametrize("file", ["draws-00000", "stats-00000", "state-", "fixed", "data", "initial"])
    @pytest.mark.parametrize("damage", ["cut short", "emptied", "altered", "missing"])
    def test_damage_is_found_and_named(self, stopped, file, damage):
        path, known = stopped
        (damaged,) = path.glob(f"{file}*.safetensors")
        content = damaged.read_bytes()
        if damage == "missing":
            damaged.unlink()
        else:
            altered = content[:-1] + bytes([content[-1] ^ 1])
            damaged.write_bytes({"cut short": content[:-5], "emptied": b"", "altered": altered}[damage])
        reason = {"missing": "is missing", "altered": "was modified"}.get(damage, "is truncated or was modified")
        with pytest.raises(cr.StoreError, match=f"{damaged.name}.* {reason}"):
            cr.resume(path, make())
        if file in ("data", "initial"):
            assert cr.load(path).draws.shape == (3, 5, 21)  # neither is needed to load it
        else:
            with pytest.raises(cr.StoreError, match=f"{damaged.name}.* {reason}"):
                cr.load(path)
        if damage == "missing":
            damaged.write_bytes(content)
            same(cr.resume(path), known)

    def test_half_written_files_of_a_dead_process_are_removed(self, stopped):
        path, known = stopped
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
