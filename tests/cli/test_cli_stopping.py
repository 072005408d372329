"""Commands on tables stopped by Ctrl-C, kill -9 or a full disk: they leave a complete result, or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import credibly as cr
from credibly.cli.error_handling import persistent_interrupt
from credibly.core import files
from credibly.inference.sampling.hmc import HMCSampler
from credibly.storage import run_folder
from credibly.storage.manifest import parse_manifest
from credibly.tables import TableRun
from own_tables import (
    ENSEMBLE,
    HMC,
    MAP,
    QUICK,
    SCRIPT,
    call,
    cancer,
    diabetes,
    names,
    refused,
    start,
    wait_for,
    write,
)
from warm_python import warm_python

pytestmark = pytest.mark.usefixtures("no_drawing_in_module")

LONG = (
    *QUICK,
    "--method",
    "hmc",
    "--set",
    "draws=250",
    "--set",
    "warmup=30",
    "--set",
    "chains=2",
    "--set",
    "thin=12",
    "--hidden",
    "6",
)


def without_holdout(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return options of a fit without its held-out part: metrics come from five folds."""
    place = words.index("--holdout")
    return (*words[:place], *words[place + 2 :])


def done(run: Path) -> int:
    """Return the iterations at the last checkpoint of a run; -1 if there is none."""
    try:
        manifest = parse_manifest(run / "posterior")
    except cr.StoreError:
        return -1
    return int(manifest["progress"]["iteration"]) if manifest.get("state") else -1


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Return a folder with a table and an uninterrupted HMC run whose chains take half a second or more."""
    place = tmp_path_factory.mktemp("known")
    write(diabetes(), place / "house.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        found = call("fit", "house.csv", "--target", "progress", "--out", "run", *LONG, "--json")
    assert found.exit_code == 0, found.output
    return place, json.loads(found.stdout)


def same(run: Path, known: tuple[Path, dict]) -> None:
    """Assert that a run has the draws and metrics of the uninterrupted one, and nothing else is left."""
    place, reported = known
    assert torch.equal(cr.load(run).draws, cr.load(place / "run").draws)
    assert TableRun.load(run).figures == reported["figures"]
    assert names(run) == names(place / "run")
    assert names(run / "posterior") == names(place / "run" / "posterior")
    mine = json.loads((run / "results.json").read_text())
    assert mine["diagnostics"] == reported["diagnostics"]


@pytest.mark.slow
class TestSamplers:
    def begun(self, place, known, *more, python=None):
        shutil.copy(known[0] / "house.csv", place)
        words = ("fit", "house.csv", "--target", "progress", "--out", "run", *LONG, *more)
        return start(*words, cwd=place, python=python)

    def test_ctrl_c_and_resume(self, tmp_path, known, monkeypatch):
        run = tmp_path / "run"
        with self.begun(tmp_path, known, python=warm_python()) as process:
            wait_for(lambda: done(run) >= 0, process)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err == "credibly: stopped; resume with `credibly resume run`\n"
        assert names(tmp_path) == ["house.csv", "run"]
        refused(call("predict", run, tmp_path / "house.csv"), "is not finished", "credibly resume", code=1)
        monkeypatch.chdir(tmp_path)
        found = call("resume", "run")
        assert (found.exit_code, found.stderr) == (0, "")
        assert "HMC, 2 chains of 250 draws, seed 0" in found.stdout
        assert "of 3,030 iterations are done" in found.stdout
        assert found.stdout.splitlines()[-1] == "run/report.html"
        same(run, known)

    def test_kill_and_resume(self, tmp_path, known):
        run = tmp_path / "run"
        with self.begun(tmp_path, known, "--json") as process:
            wait_for(lambda: done(run) >= 0, process)
            time.sleep(0.1)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        found = call("resume", run, "--json")
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["figures"] == known[1]["figures"]
        same(run, known)

    @pytest.mark.nightly
    def test_ctrl_c_while_replacing_a_run(self, tmp_path, known):
        shutil.copytree(known[0] / "run", tmp_path / "run")
        with self.begun(tmp_path, known, "--force", "--seed", "1", python=warm_python()) as process:
            wait_for(lambda: done(tmp_path / "run.new") >= 0, process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err == "credibly: stopped; run is unchanged; resume with `credibly resume run.new`\n"
        same(tmp_path / "run", known)
        assert names(tmp_path) == ["house.csv", "run", "run.new"]
        assert call("resume", tmp_path / "run.new", "--quiet").exit_code == 0
        assert TableRun.load(tmp_path / "run.new").config.seed == 1


@pytest.mark.slow
class TestOthers:
    def test_ctrl_c_in_a_fold_keeps_the_choice(self, tmp_path):
        write(diabetes(), tmp_path / "house.csv")
        words = ("--method", "ensemble", "--set", "steps=500000", "--hidden", "6")
        with start(
            "fit", "house.csv", "--target", "progress", "--out", "deep/run", *words, cwd=tmp_path, python=warm_python()
        ) as process:
            wait_for((tmp_path / "deep" / "run" / "training_sample.parquet").exists, process)
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        kept = "stopped; the choice of the model is kept; resume with `credibly resume deep/run`"
        assert (process.returncode, err) == (130, f"credibly: {kept}\n")
        assert names(tmp_path) == ["deep", "house.csv"]

    def test_killed_in_training_can_be_replaced(self, tmp_path):
        write(diabetes(), tmp_path / "house.csv")
        words = ("--method", "ensemble", "--set", "steps=500000", "--hidden", "6")
        with start("fit", "house.csv", "--target", "progress", *words, cwd=tmp_path) as process:
            wait_for((tmp_path / "run" / "training_sample.parquet").exists, process)
            process.kill()
        run = tmp_path / "run"
        found = call("fit", tmp_path / "house.csv", "--target", "progress", "--out", run, *MAP, "--force", "--quiet")
        assert found.exit_code == 0, found.output
        assert names(tmp_path) == ["house.csv", "run"]

    def test_ctrl_c_while_predicting_leaves_no_file(self, tmp_path, known):
        columns = diabetes()
        write({k: list(v) * 2500 for k, v in columns.items()}, tmp_path / "big.csv")
        with start(
            "predict", known[0] / "run", "big.csv", "--out", "p.csv", cwd=tmp_path, python=warm_python()
        ) as process:
            wait_for(lambda: any(n.endswith(".part") for n in names(tmp_path)), process)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "credibly: stopped; no predictions were written\n")
        assert names(tmp_path) == ["big.csv"]

    def test_ctrl_c_in_an_import_while_predicting_leaves_no_file(self, tmp_path, known):
        """Such a signal waits for the end of the import; ending the process at once would leave the unfinished file."""
        write(diabetes(), tmp_path / "some.csv")
        (tmp_path / "slow_module.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
        code = (
            "import signal, sys, time\n"
            "sys.dont_write_bytecode = True\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job that a shell started with &\n"
            f"sys.argv = ['credibly', 'predict', {str(known[0] / 'run')!r}, 'some.csv', '--out', 'p.csv']\n"
            "from credibly.tables.files.writing import TableWriter\n"
            "def write(self, columns):\n"
            "    import slow_module\n"
            "    time.sleep(30)\n"
            "TableWriter.write = write\n"
            "from credibly.__main__ import main\n"
            "main()\n"
        )
        words = [warm_python(), "-c", code]
        found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (found.returncode, found.stderr) == (130, "credibly: stopped; no predictions were written\n")
        assert names(tmp_path) == ["slow_module.py", "some.csv"]

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_ctrl_c_swallowed_by_a_finaliser_is_raised_again(self):
        class Finalised:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)  # where Python sees the signal and drops the exception

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with persistent_interrupt() as again:
                again()
                one = Finalised()
                del one
                with pytest.raises(KeyboardInterrupt):
                    again()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, before)

    def test_ctrl_c_while_comparing_leaves_nothing(self, tmp_path):
        write(diabetes(), tmp_path / "house.csv")
        words = ("--methods", "map,hmc", "--set", "map.steps=20", "--set", "hmc.draws=100000", "--hidden", "6")
        with start(
            "compare", "house.csv", "--target", "progress", "--out", "c", *words, cwd=tmp_path, python=warm_python()
        ) as process:
            wait_for(lambda: any(tmp_path.glob(".c.*.part/hmc/posterior/manifest.json")), process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err.splitlines()[-1] == "credibly: stopped; nothing was kept"
        assert names(tmp_path) == ["house.csv"]


@pytest.fixture
def ctrl_c():
    """Restore the default handling of Ctrl-C, which a shell turns off for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("force", [False, True])
def test_ctrl_c_while_the_folds_are_fitted_keeps_those_that_are_done(tmp_path, monkeypatch, ctrl_c, force):
    table, run = write(cancer(60), tmp_path / "t.csv"), tmp_path / "run"
    words = ("fit", table, "--target", "benign", "--out", run, "--quiet")
    whole = tmp_path / "whole"
    assert call(*words[:5], whole, "--quiet", *without_holdout(HMC)).exit_code == 0
    if force:
        assert call(*words, *MAP).exit_code == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    work = tmp_path / "run.new" if force else run
    advance, began = HMCSampler.advance, []

    def stop(self, until):
        folds = names(work / "folds") if (work / "folds").is_dir() else []
        if len(folds) == 2 and not began:
            began.append(folds)
            signal.raise_signal(signal.SIGINT)
        return advance(self, until)

    monkeypatch.setattr(HMCSampler, "advance", stop)
    found = call(*words, *without_holdout(HMC), *(["--force"] if force else []))
    kept = f"2 of 5 fits to folds are kept; resume with `credibly resume {work}`"
    unchanged = f"{run} is unchanged; " if force else ""
    assert refused(found, code=130) == f"credibly: stopped; {unchanged}{kept}\n"
    assert began == [["0", "1"]]
    assert {p: p.read_bytes() for p in before} == before
    times = {k: (work / "folds" / k / "manifest.json").stat().st_mtime_ns for k in "01"}
    found = call("resume", work)
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("2 of 5 fits to folds are done.\n")
    assert {k: (work / "folds" / k / "manifest.json").stat().st_mtime_ns for k in "01"} == times
    one, other = TableRun.load(whole), TableRun.load(work)
    assert one.figures == other.figures
    assert torch.equal(one.model.posterior.draws, other.model.posterior.draws)


def test_folds_of_a_table_that_has_changed_are_not_resumed(tmp_path, monkeypatch, ctrl_c):
    table, run = write(cancer(60), tmp_path / "t.csv"), tmp_path / "run"

    def stop(self, until):
        if (run / "folds").is_dir():
            signal.raise_signal(signal.SIGINT)
        return advance(self, until)

    advance = HMCSampler.advance
    with monkeypatch.context() as patch:
        patch.setattr(HMCSampler, "advance", stop)
        call("fit", table, "--target", "benign", "--out", run, "--quiet", *without_holdout(HMC))
    write(cancer(61), table)
    refused(call("resume", run), "cannot be resumed", "has changed since the run", "Start again with", code=1)


def test_ctrl_c_while_the_page_is_drawn(tmp_path, monkeypatch):
    from credibly.report import several

    table = write(cancer(60), tmp_path / "t.csv")
    with monkeypatch.context() as patch:
        patch.setattr(several, "fit_page", lambda facts: (_ for _ in ()).throw(KeyboardInterrupt))
        found = call("fit", table, "--target", "benign", "--out", tmp_path / "run", *MAP, "--quiet")
    refused(found, "stopped; the fit is complete", f"credibly report {tmp_path / 'run'}", code=130)
    assert call("report", tmp_path / "run").exit_code == 0


class Full:
    """A disk on which the n-th write and all later ones fail after half of their bytes, as on a real one."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        write_bytes, write_table = files.write_bytes, pq.write_table

        def half(draft: Path, content: bytes) -> None:
            if self.is_full():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft))
            write_bytes(draft, content)

        def table(columns: object, path: Path, **kwargs: object) -> None:
            if self.is_full():
                Path(path).write_bytes(b"PAR1")
                raise OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device")
            write_table(columns, path, **kwargs)

        patch.setattr(files, "write_bytes", half)
        patch.setattr(run_folder, "write_bytes", half)
        patch.setattr(pq, "write_table", table)

    def is_full(self) -> bool:
        self.left -= 1
        return self.left < 0


def tidy(place: Path) -> None:
    """Assert that no hidden or partial file is left in the folder or in any run in it."""
    assert [str(p) for p in place.rglob("*") if p.name.startswith(".") or p.name.endswith((".part", ".old"))] == []


class TestFullDisk:
    @pytest.mark.parametrize(
        "method, force, folds",
        [
            (MAP, False, 1),
            (MAP, True, 1),
            pytest.param(HMC, False, 1, marks=pytest.mark.nightly),
            (without_holdout(MAP), False, 5),
        ],
        ids=["map", "force", "hmc", "folds"],
    )
    def test_in_a_fit(self, tmp_path, method, force, folds):
        table = write(cancer(60), tmp_path / "t.csv")
        run = tmp_path / "run"
        words = ["fit", table, "--target", "benign", "--out", run, "--quiet"]
        name = method[method.index("--method") + 1]
        kept = None
        if force:
            assert call(*words, *ENSEMBLE, "--set", "steps=10").exit_code == 0
            kept = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
        failures = {"nothing": 0, "resumable": 0, "no page": 0}
        for number in range(100):
            with pytest.MonkeyPatch.context() as patch:
                Full(patch, number)
                found = call(*words, *method, *(["--force"] if force else []))
            tidy(tmp_path)
            if found.exit_code == 0:
                break
            said = refused(found, "No space left on device", code=1)
            fresh = tmp_path / "run.new" if force else run
            if "credibly report" in said:
                failures["no page"] += 1
                assert TableRun.load(run).config.method == name  # it is complete and in place
                assert call("report", run).exit_code == 0
                if force:
                    break  # the earlier run has been replaced
                shutil.rmtree(run)
                continue
            if force:
                assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == kept
            if "credibly resume" in said:
                failures["resumable"] += 1
                assert f"credibly resume {fresh}" in said
                found = call("resume", fresh, "--quiet")
                assert found.exit_code == 0, found.output
                assert TableRun.load(fresh).config.method == name
                shutil.rmtree(fresh)
            else:
                failures["nothing"] += 1
                assert "nothing was kept" in said
                assert not fresh.exists()
        assert all(failures.values()), failures
        assert sum(failures.values()) >= 8
        assert failures["nothing"] >= 4 + folds  # four files before the fit, and at least one of every fold
        assert len(names(run / "folds")) == folds

    def test_in_a_report(self, tmp_path):
        table = write(cancer(60), tmp_path / "t.csv")
        run = tmp_path / "run"
        assert call("fit", table, "--target", "benign", "--out", run, *MAP, "--quiet").exit_code == 0
        before = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
        for number in range(2):
            with pytest.MonkeyPatch.context() as patch:
                Full(patch, number)
                refused(call("report", run), "No space left on device", code=1)
            assert {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()} == before
            tidy(tmp_path)

    def test_in_a_comparison(self, tmp_path):
        table = write(cancer(60), tmp_path / "t.csv")
        words = [
            "compare",
            table,
            "--target",
            "benign",
            "--out",
            tmp_path / "deep" / "c",
            "--methods",
            "map,hmc",
            "--hidden",
            "4",
            "--set",
            "map.steps=5",
            "--set",
            "hmc.draws=10",
            "--set",
            "hmc.warmup=20",
            "--set",
            "hmc.chains=2",
            "--quiet",
        ]
        for number in (0, 3, 5, 8, 9, 13, 16, 20):
            with pytest.MonkeyPatch.context() as patch:
                Full(patch, number)
                found = call(*words)
            said = refused(found, "No space left on device", code=1)
            assert "resume" not in said  # there is nothing left to resume
            assert names(tmp_path) == ["t.csv"]

    @pytest.mark.parametrize("suffix", ["csv", "parquet", "csv.gz"])
    def test_in_predictions(self, tmp_path, known, suffix):
        """Set a real limit on the file size, in a separate process."""
        columns = diabetes()
        write({k: list(v) * 20 for k, v in columns.items()}, tmp_path / "big.csv")
        (tmp_path / f"p.{suffix}").write_text("mine")
        words = ["predict", str(known[0] / "run"), "big.csv", "--out", f"p.{suffix}", "--draws", "2", "--force"]
        code = (
            "import resource, runpy, sys\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, 3_000))\n"
            f"sys.argv = {[str(SCRIPT), *words]!r}\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        )
        found = subprocess.run([warm_python(), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 1, found.stderr
        assert found.stderr.startswith("credibly: ")
        assert "File too large" in found.stderr
        assert found.stderr.count("\n") == 1
        assert names(tmp_path) == ["big.csv", f"p.{suffix}"]
        assert (tmp_path / f"p.{suffix}").read_text() == "mine"

    def test_standard_output_that_is_full(self):
        if not Path("/dev/full").exists():
            pytest.skip("there is no /dev/full")
        with open("/dev/full", "w") as full:
            found = subprocess.run(
                [warm_python(), str(SCRIPT), "methods"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert found.returncode != 0
        assert "Traceback" not in found.stderr
        assert "No space left on device" in found.stderr
