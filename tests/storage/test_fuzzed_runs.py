"""Mutated run folders: refused in words or harmless. `tools/fuzz_runs.py` repeats this two thousand times."""

import json
import os
import resource
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import credibly as cr
from credibly.storage.json_files import MOST_BYTES
from credibly.tables import TableRun
from credibly.tables.stored_rows import MOST_BYTES as MOST_STORED
from own_tables import call, refused
from tools import fuzz_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return fuzz_runs.make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copied(runs, tmp_path):
    """Copies of the four runs, by name."""
    for run in runs:
        shutil.copytree(run, tmp_path / run.name)
    return {run.name: tmp_path / run.name for run in runs}


def test_sixty_mutations(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz_runs, "make_runs", lambda place: runs)
    monkeypatch.setattr(fuzz_runs, "BOMB_ROWS", 300_000)
    found = fuzz_runs.attack(tmp_path, 60, seed=1)
    assert found.wrong == []
    assert sum(found.counts.values()) == 60
    assert sum(n for (_, how), n in found.counts.items() if how == "refused") > 30


class TestBoundTogether:
    """Each of these changed predictions or reports without a word before the parts of a run were bound together."""

    def test_another_activation(self, copied):
        manifest = copied["saved"] / "manifest.json"
        manifest.write_text(manifest.read_text().replace("nn.SiLU", "nn.ReLU"))
        with pytest.raises(cr.StoreError, match=r"manifest of .* was modified \(its checksum does not match\)"):
            cr.load(copied["saved"])

    @pytest.mark.parametrize("part", ["table.json", "config.toml", "held_out.parquet", "training_sample.parquet"])
    def test_a_part_of_another_run(self, copied, part):
        shutil.copyfile(copied["other"] / part, copied["one"] / part)
        with pytest.raises(cr.StoreError, match="was modified, or is of another run") as found:
            TableRun.load(copied["one"])
        name = "posterior/manifest.json" if part == "table.json" else part
        if part != "table.json":
            assert f"path: {name} of" in str(found.value)

    @pytest.mark.parametrize("part", ["posterior", "folds/0"])
    def test_a_posterior_of_another_run(self, copied, part):
        shutil.rmtree(copied["one"] / part)
        shutil.copytree(copied["other"] / part, copied["one"] / part)
        with pytest.raises(cr.StoreError, match=f"path: {part}/manifest.json of .* was modified, or is of another run"):
            TableRun.load(copied["one"])
        with pytest.raises(cr.StoreError, match="another run"):
            cr.load(copied["one"])

    def test_a_run_of_an_earlier_version_loads_with_a_note(self, copied, caplog):
        known = fuzz_runs.answer(copied["one"])
        for path in copied["one"].rglob("manifest.json"):
            manifest = json.loads(path.read_text())
            if not manifest.get("streamed"):
                manifest.pop("checksum")
            path.write_text(json.dumps(manifest | {"format_version": 1}))
        facts = json.loads((copied["one"] / "table.json").read_text()) | {"format_version": 1}
        del facts["files"]
        (copied["one"] / "table.json").write_text(json.dumps(facts))
        fuzz_runs.seal(copied["one"])
        assert fuzz_runs.answer(copied["one"]) == known
        assert "earlier version of credibly, without checksums of its files" in caplog.text
        found = call("verify", copied["one"])
        assert found.exit_code == 1
        assert "table.json lists no files of the run: an earlier version wrote it" in found.stdout


class TestBombs:
    """Small files that ask for a lot, with checksums that match."""

    @pytest.fixture(autouse=True)
    def limited(self):
        """No more than a gigabyte beyond what is there already."""
        with open("/proc/self/statm") as handle:
            now = int(handle.read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_AS, before)

    def rewritten(self, folder, change):
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        fuzz_runs.seal(folder)
        with pytest.raises(cr.StoreError) as found:
            cr.load(folder)
        assert "out of memory" not in str(found.value)
        return str(found.value)

    def test_shapes_that_no_file_holds(self, copied):
        def widen(manifest):
            manifest["layout"][0]["shape"] = [50_000, 50_000]
            manifest["network"]["network"]["children"][0][1]["arguments"] |= {
                "in_features": 50_000,
                "out_features": 50_000,
            }

        assert "more values than the files" in self.rewritten(copied["saved"], widen)

    def test_a_network_that_is_not_the_stored_one(self, copied):
        def widen(manifest):
            manifest["network"]["network"]["children"][0][1]["arguments"]["out_features"] = 10**9

        assert "more than the limit of" in self.rewritten(copied["saved"], widen)

    def test_a_row_of_a_terabyte(self, copied):
        said = self.rewritten(copied["saved"], lambda m: m["row"]["parts"][0].update(shape=[10**12]))
        assert "row, which has 1,000,000,000,000 values" in said

    def test_thirty_million_rows_in_a_small_file(self, copied):
        path = copied["one"] / "held_out.parquet"
        same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(30_000_000, np.int8)), pa.array(["0"]))
        pq.write_table(pa.table({"a": same}), path)
        assert path.stat().st_size < 500_000
        fuzz_runs.seal(copied["one"])
        with pytest.raises(cr.StoreError, match=r"it has 30,000,000 rows, 10 expected"):
            TableRun.load(copied["one"]).rows()

    @pytest.mark.parametrize("kind", [pa.string(), pa.binary(2**23)], ids=["text", "fixed"])
    def test_one_long_text_in_every_row_of_a_small_file(self, copied, kind):
        """Half a gigabyte if it is expanded; the metadata count it once."""
        path = copied["one"] / "training_sample.parquet"
        table = pq.read_table(path)
        rows = table.num_rows
        assert rows * 2**23 > MOST_STORED
        value = pa.array([b"a" * 2**23], kind) if kind != pa.string() else pa.array(["a" * 2**23])
        same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), value)
        pq.write_table(table.set_column(0, table.column_names[0], same), path, compression="zstd")
        assert path.stat().st_size < 50_000
        fuzz_runs.seal(copied["one"])
        before = pa.default_memory_pool().max_memory()
        with pytest.raises(cr.StoreError, match=r"training_sample.parquet of .* was modified \(it would take"):
            TableRun.load(copied["one"]).sample()
        assert pa.default_memory_pool().max_memory() - before < MOST_STORED

    @pytest.mark.parametrize(
        "text, reason",
        [
            ("[" * 100_000, "nested more than 64 levels"),
            ('{"a": ' + "9" * 4300 + "}", "a number has 4,300 digits"),
            ('{"a": ' + "9" * 5000 + "}", "a number has 5,000 digits"),
            (" " * (MOST_BYTES + 1), "at most"),
            ("\udc80", "not UTF-8"),
        ],
        ids=["deep", "digits", "more digits", "long", "bytes"],
    )
    @pytest.mark.parametrize("name", ["saved/manifest.json", "one/table.json"])
    def test_json(self, copied, tmp_path, name, text, reason):
        (tmp_path / name).write_text(text, errors="surrogateescape")
        with pytest.raises(cr.StoreError, match=reason):
            cr.load((tmp_path / name).parent)

    @pytest.mark.parametrize("name", ["manifest.json", "draws-00000.safetensors", "fixed.safetensors"])
    @pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
    def test_no_file(self, copied, name, kind):
        path = copied["saved"] / name
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        words = {"folder": "it is a folder", "pipe": "it is a named pipe", "device": "it is a device"}
        with pytest.raises(cr.StoreError, match=f"{words[kind]}, not a file"):
            cr.load(copied["saved"])


class TestVerify:
    def test_intact_runs(self, copied):
        for name, files in (("one", 16), ("saved", 3)):
            found = call("verify", copied[name])
            assert (found.exit_code, found.stdout) == (
                0, f"{copied[name]}: {files} files, all match their checksums\n"
            )  # fmt: skip

    def test_which_file_was_changed(self, copied):
        run = copied["one"]
        (run / "config.toml").write_text("")
        draws = sorted((run / "posterior").glob("draws-*"))[0]
        draws.write_bytes(draws.read_bytes()[:-1] + b"\1")
        (run / "folds" / "0" / "fixed.safetensors").unlink()
        found = call("verify", run)
        assert found.exit_code == 1
        assert found.stdout.splitlines()[:-1] == [
            "config.toml was modified, or is of another run (its checksum does not match)",
            f"posterior/{draws.name} was modified (its checksum does not match)",
            "folds/0/fixed.safetensors is missing",
        ]
        plain = json.loads(call("verify", run, "--json").stdout)
        assert not plain["intact"]
        assert sum(problem is not None for problem in plain["files"].values()) == 3
        assert call("verify", run, "--quiet").stdout == ""

    def test_what_is_not_a_run(self, tmp_path):
        refused(call("verify", tmp_path / "nowhere"), "no such folder")
        found = call("verify", tmp_path)
        assert found.exit_code == 1
        assert "is not a run folder" in found.stdout


def test_predictions_of_the_runs_are_those_of_their_posteriors(runs):
    """What the fuzzer compares with: an answer that changes if the weights do."""
    saved = cr.load(runs[2]).predict(fuzz_runs.X)
    assert fuzz_runs.answer(runs[2])[0] == saved.mean.numpy().tobytes()
    assert not torch.equal(saved.mean, cr.load(runs[3]).predict(fuzz_runs.X).mean)
