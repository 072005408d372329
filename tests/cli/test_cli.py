"""The command line: its output, its files and its errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import credibly as cr
from credibly.cli import app
from credibly.cli.error_handling import handle_errors
from credibly.demo.fits import TASKS
from credibly.inference.sampling.hmc import HMCSampler
from credibly.methods import METHODS
from own_tables import command

SCRIPT = Path(sys.executable).with_name("credibly")


def call(*words: str):
    return CliRunner().invoke(app, [str(word) for word in words])


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


class TestHelp:
    def test_help_shows_where_to_start(self):
        for words in (["--help"], ["-h"], []):
            found = call(*words)
            assert "credibly demo" in found.output
            assert "methods" in found.output
        for option in ("--out", "--methods", "--seed", "--quick", "--quiet", "--force", "--no-open"):
            assert option in call("demo", "--help").output
        for option in ("RUN", "--problem", "--quiet", "Ctrl-C"):
            assert option in call("resume", "--help").output

    def test_version(self):
        found = call("--version")
        assert (found.exit_code, found.output) == (0, f"credibly {cr.__version__}\n")

    def test_the_command_line_itself_imports_nothing_heavy(self):
        # Without the package's own __init__, so that only the imports of the command line count.
        code = f"""
import sys, types
package = types.ModuleType("credibly")
package.__path__ = [{str(Path(cr.__file__).parent)!r}]
sys.modules["credibly"] = package
from credibly.cli import main
sys.argv = ["credibly", "demo", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code
loaded = {{"torch", "numpy", "matplotlib", "jinja2", "sklearn", "scipy"}} & set(sys.modules)
sys.exit(f"loaded {{loaded}}" if loaded else 0)
"""
        found = python(code)
        assert found.returncode == 0, found.stderr
        assert "--quick" in found.stdout

    def test_help_does_not_import_torch(self):
        code = """
import sys
from credibly.cli import main
sys.argv = ["credibly", "--help"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
        assert python(code).returncode == 0


class TestMethods:
    def test_lists_every_method(self):
        found = call("methods")
        assert found.exit_code == 0
        for name, kind in METHODS.items():
            (line,) = [line for line in found.output.splitlines() if line.startswith(f"{name} ")]
            assert kind.__name__ in line
            assert kind.__doc__.splitlines()[0].rstrip(".")[:20] in line

    def test_json(self):
        rows = json.loads(call("methods", "--json").output)
        assert [row["name"] for row in rows] == list(METHODS)
        assert all(row["description"] and row["class"] for row in rows)


SCRIPT_OF_A_USER = """
import torch
from torch import nn

import credibly as cr
from beside import ROWS

x = torch.linspace(-1, 1, 3 * ROWS).reshape(ROWS, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1))

    def forward(self, x):
        return self.layers(x) * 2


def make(net=None):
    return cr.Problem(net or Net(), (x, x.sum(1)), cr.likelihoods.Gaussian(0.5), cr.priors.Normal())


own = make()
described = make(nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1)))
normal = cr.Density(lambda w: -0.5 * w.square().sum(), 2, name="normal")
number = 7
method = cr.HMC(chains=2, draws=30, warmup=5, step_size=0.02, trajectory_length=0.06, init="prior", compile=False)


def fails():
    raise ZeroDivisionError("nothing to divide by")
"""


@pytest.fixture
def script(tmp_path):
    """Write a user's script with problems, and a module beside it that it imports."""
    (tmp_path / "beside.py").write_text("ROWS = 20\n")
    (tmp_path / "train.py").write_text(SCRIPT_OF_A_USER)
    return tmp_path / "train.py"


def begin(script, problem, stop_at, monkeypatch):
    """Run a problem of the script, stopped by Ctrl-C before the given iteration; return the uninterrupted result."""
    from credibly.cli.user_script import load_problem

    found = load_problem(f"{script}:{problem}")
    method = sys.modules["credibly_script_train"].method
    known = method.fit(found, seed=3)
    stop_before(monkeypatch, stop_at)
    with pytest.raises(cr.Interrupted):
        method.fit(found, seed=3, out=script.with_name("run"))
    monkeypatch.setattr(HMCSampler, "advance", HMC_ADVANCE)
    return known


HMC_ADVANCE = HMCSampler.advance


def stop_before(monkeypatch, iteration):
    def stopped(self, stop):
        if self.done == iteration:
            monkeypatch.setattr(HMCSampler, "advance", HMC_ADVANCE)
            signal.raise_signal(signal.SIGINT)
        return HMC_ADVANCE(self, stop)

    monkeypatch.setattr(HMCSampler, "advance", stopped)


@pytest.fixture
def ctrl_c():
    """Restore the default handling of Ctrl-C, which a shell turns off for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
class TestResume:
    def test_resumes_and_describes_the_run(self, script, monkeypatch):
        known, run = begin(script, "described", 12, monkeypatch), script.with_name("run")
        found = call("resume", run)
        assert found.exit_code == 0, found.output
        what, how_far, done, *verdict = found.stdout.splitlines()
        assert what == "HMC, 2 chains of 30 draws, seed 3: a network with D = 21 random parameters on 20 rows."
        assert how_far.startswith("12 of 35 iterations are done (phase: sampling), 7 draws per chain, acceptance ")
        assert how_far.endswith(", 0 divergences.")
        assert done == f"Done. Load it with credibly.load({str(run)!r})."
        x = sys.modules["credibly_script_train"].x
        said = " ".join(verdict)
        assert said == f"{known.diagnostics(x, x.sum(1)).verdict} (Based on predictions at 20 training rows.)"
        assert len(verdict) <= 5
        assert found.stderr == ""
        assert torch.equal(cr.load(run).draws, known.draws)

    def test_a_run_that_is_complete(self, script, monkeypatch):
        known, run = begin(script, "own", 12, monkeypatch), script.with_name("run")
        assert call("resume", run, "--problem", f"{script}:own").exit_code == 0
        before = {p.name: p.read_bytes() for p in run.iterdir()}
        found = call("resume", run)  # the network is not needed for that
        assert found.exit_code == 0
        assert found.stdout.splitlines()[1:] == [
            f"The run is already complete. Load it with credibly.load({str(run)!r})."
        ]
        assert call("resume", run, "--quiet").stdout == f"{run}\n"
        assert {p.name: p.read_bytes() for p in run.iterdir()} == before
        net = sys.modules["credibly_script_train"].Net()
        assert torch.equal(cr.load(run, net).draws, known.draws)

    def test_quiet_prints_the_path_alone(self, script, monkeypatch):
        begin(script, "described", 1, monkeypatch)
        found = call("resume", script.with_name("run"), "--quiet")
        assert (found.exit_code, found.stdout, found.stderr) == (0, f"{script.with_name('run')}\n", "")

    @pytest.mark.parametrize("name", ["own", "make", "normal"])
    def test_a_problem_from_a_script_or_a_function_that_makes_it(self, script, monkeypatch, name):
        known, run = begin(script, name, 20, monkeypatch), script.with_name("run")
        refused = call("resume", run)
        assert refused.exit_code == 1
        assert "--problem your_script.py:problem" in refused.stderr
        assert refused.stderr.count("\n") == 1
        found = call("resume", run, "--problem", f"{script}:{name}")
        assert found.exit_code == 0, found.output
        if name == "normal":
            assert "the density normal, D = 2." in found.stdout
        net = None if name == "normal" else sys.modules["credibly_script_train"].Net()
        assert torch.equal(cr.load(run, net).draws, known.draws)

    def test_ctrl_c_shows_how_to_resume(self, script, monkeypatch):
        known, run = begin(script, "own", 3, monkeypatch), script.with_name("run")
        stop_before(monkeypatch, 11)
        words = ["resume", run, "--problem", f"{script}:own"]
        found = call(*words)
        assert found.exit_code == 130
        again = f"credibly resume {run} --problem {script}:own"
        assert found.stderr == f"credibly: stopped. The folder holds 11 of 35 iterations; resume with `{again}`\n"
        monkeypatch.setattr(cr.HMC, "resume", lambda *_: signal.raise_signal(signal.SIGINT))
        assert call(*words).exit_code == 130  # also before the work starts
        monkeypatch.undo()
        assert call(*words).exit_code == 0
        assert torch.equal(cr.load(run, sys.modules["credibly_script_train"].Net()).draws, known.draws)

    def test_stopped_before_the_first_iteration(self, script, monkeypatch):
        from credibly.inference.sampling import run as sampler

        begin(script, "described", 0, monkeypatch)
        run, find = script.with_name("run"), sampler.starts
        shutil.rmtree(run)
        monkeypatch.setattr(sampler, "starts", lambda *_: signal.raise_signal(signal.SIGINT))
        module = sys.modules["credibly_script_train"]
        with pytest.raises(cr.Interrupted):
            module.method.fit(module.described, seed=3, out=run)
        found = call("resume", run)
        assert found.exit_code == 130
        assert "It was stopped before the first iteration." in found.stdout
        assert found.stderr == f"credibly: stopped. Nothing is lost; resume with `credibly resume {run}`\n"
        monkeypatch.setattr(sampler, "starts", find)
        assert call("resume", run).exit_code == 0

    @pytest.mark.parametrize(
        "words, reason",
        [
            ("train.py", "--problem must be SCRIPT.py:NAME, such as train.py:problem, got 'train.py'"),
            ("train.py:", "--problem must be SCRIPT.py:NAME, such as train.py:problem, got 'train.py:'"),
            (":own", "--problem must be SCRIPT.py:NAME, such as train.py:problem, got ':own'"),
            ("nowhere.py:own", "no such script: 'nowhere.py'"),
            ("notes.txt:own", "no such script: 'notes.txt'"),
            ("train.py:other", "train.py has no 'other'. Its problems are own, described, normal"),
            ("train.py:number", "train.py:number must be a credibly.Problem or credibly.Density, got int"),
            ("train.py:fails", "train.py, line 32 raised ZeroDivisionError: nothing to divide by"),
            ("broken.py:own", "broken.py, line 2 raised NameError: name 'missing' is not defined"),
            ("wrong.py:own", "wrong.py raised SyntaxError"),
            ("ends.py:own", "ends.py, line 1 raised SystemExit: 3"),
            ("train.py:described", "was started with another problem: net: layers.0.weight has no such tensor"),
        ],
    )
    def test_scripts_that_cannot_be_used(self, script, monkeypatch, words, reason):
        begin(script, "own", 3, monkeypatch)
        monkeypatch.chdir(script.parent)
        Path("notes.txt").write_text("own = 1")
        Path("broken.py").write_text("own = 1\nmissing\n")
        Path("wrong.py").write_text("own = \n")
        Path("ends.py").write_text("raise SystemExit(3)\n")
        found = call("resume", "run", "--problem", words)
        assert found.exit_code in (1, 2)
        assert reason in found.stderr
        assert found.stderr.count("\n") == 1

    def test_folders_that_cannot_be_used(self, tmp_path):
        from credibly.storage.run_folder import RunFolder

        (tmp_path / "mine").mkdir()
        for name, reason, code in (("nowhere", "no such folder", 2), ("mine", "is not a run folder", 1)):
            found = call("resume", tmp_path / name)
            assert found.exit_code == code
            assert reason in found.stderr
            assert found.stderr.count("\n") == 1
        assert list((tmp_path / "mine").iterdir()) == []
        density = cr.Density(lambda w: -0.5 * w.square().sum(), 2)
        cr.HMC(chains=1, draws=5, warmup=0, step_size=0.5, compile=False).fit(density, out=tmp_path / "run")
        with RunFolder(tmp_path / "run", {}):
            assert call("resume", tmp_path / "run").exit_code == 0  # it is complete, and nothing is written

    def test_a_folder_in_use(self, script, monkeypatch):
        from credibly.storage.run_folder import RunFolder

        begin(script, "described", 3, monkeypatch)
        with RunFolder(script.with_name("run"), {}):
            found = call("resume", script.with_name("run"))
        assert found.exit_code == 1
        assert f"is in use by process {os.getpid()} on" in found.stderr

    def test_a_sampler_that_cannot_continue(self, script, monkeypatch):
        begin(script, "described", 3, monkeypatch)

        def fails(self, stop):
            raise cr.SamplingError("step_size: every trajectory diverged")

        monkeypatch.setattr(HMCSampler, "advance", fails)
        found = call("resume", script.with_name("run"))
        assert (found.exit_code, found.stderr) == (1, "credibly: step_size: every trajectory diverged\n")

    def test_too_few_draws_for_a_verdict(self, tmp_path, monkeypatch):
        density = cr.Density(lambda w: -0.5 * w.square().sum(), 2)
        monkeypatch.setattr("credibly.cli.resume.load_problem", lambda words: density)
        stop_before(monkeypatch, 1)
        with pytest.raises(cr.Interrupted):
            cr.HMC(chains=1, draws=2, warmup=0, step_size=0.5, compile=False).fit(density, out=tmp_path / "run")
        (tmp_path / "a.py").touch()
        found = call("resume", tmp_path / "run", "--problem", f"{tmp_path / 'a.py'}:b")
        assert found.exit_code == 0, found.output
        assert found.stdout.splitlines()[0] == "HMC, 1 chain of 2 draws, seed 0: the density (without a name), D = 2."
        assert found.stdout.splitlines()[-1] == "Too few draws for a verdict."


@pytest.mark.skipif(not SCRIPT.exists(), reason="the console script is not installed beside this Python")
def test_the_installed_script(tmp_path):
    words = [str(SCRIPT), "demo", "--quick", "--methods", "map"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == str(Path("demo") / "index.html")
    assert (tmp_path / "demo" / "index.html").stat().st_size > 10_000
    assert sum(line.startswith("map ") for line in done.stdout.splitlines()) == len(TASKS)
    again = command(*words[1:], cwd=tmp_path)
    assert again.returncode == 2
    assert "Traceback" not in again.stderr


def test_errors_become_one_line(capsys):
    import typer

    cases = [
        (cr.InputError("x", "found 1", "Pass 2"), 2, "credibly: x: found 1. Pass 2\n"),
        (cr.StoreError("cut\n  short"), 1, "credibly: cut short\n"),
        (cr.SamplingError("it diverged"), 1, "credibly: it diverged\n"),
        (PermissionError(13, "Permission denied", "/there"), 1, "credibly: Permission denied (/there)\n"),
        (OSError("plain"), 1, "credibly: plain\n"),
    ]
    for error, code, text in cases:
        with pytest.raises(typer.Exit) as end, handle_errors():
            raise error
        assert end.value.exit_code == code
        assert capsys.readouterr().err == text
    with pytest.raises(ZeroDivisionError), handle_errors():
        _ = 1 / 0  # a bug keeps its traceback
