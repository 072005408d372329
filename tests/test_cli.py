"""The command line: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import credibly as cr
from credibly.cli import app
from credibly.cli.failures import plainly
from credibly.demo import TASKS
from credibly.methods import METHODS

SCRIPT = Path(sys.executable).with_name("credibly")


def call(*words: str):
    return CliRunner().invoke(app, [str(word) for word in words])


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


class TestHelp:
    def test_help_teaches_where_to_begin(self):
        for words in (["--help"], ["-h"], []):
            found = call(*words)
            assert "credibly demo" in found.output
            assert "methods" in found.output
        for option in ("--out", "--methods", "--seed", "--quick", "--quiet", "--force", "--no-open"):
            assert option in call("demo", "--help").output

    def test_version(self):
        found = call("--version")
        assert (found.exit_code, found.output) == (0, f"credibly {cr.__version__}\n")

    def test_the_command_line_itself_imports_nothing_heavy(self):
        # The package's own __init__ is left out, so that what is seen here is what the command line asks for.
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


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One quick demo of every method through the command."""
    out = tmp_path_factory.mktemp("demo") / "deep" / "demo"
    return call("demo", "--quick", "--out", out), out


class TestDemo:
    def test_writes_page_and_figures_with_every_method(self, demo):
        found, out = demo
        assert found.exit_code == 0, found.output
        assert sorted(p.name for p in out.iterdir()) == ["index.html", "results.json"]
        assert [p.name for p in out.parent.iterdir()] == ["demo"]
        page = (out / "index.html").read_text()
        results = json.loads((out / "results.json").read_text())
        assert set(results["figures"]) == set(TASKS)
        for task in TASKS:
            assert list(results["figures"][task]) == list(METHODS)
        for name in METHODS:
            assert page.count(f'<th scope="row">{name}</th>') == 1 + len(TASKS)

    def test_prints_a_table_for_each_task_and_then_the_path(self, demo):
        found, out = demo
        *lines, last = found.output.replace("\n" + str(out.parent), "\n@").splitlines()
        assert last.endswith("demo/index.html")
        for name in METHODS:
            assert sum(line.startswith(f"{name} ") for line in lines) == len(TASKS)
        results = json.loads((out / "results.json").read_text())
        rmse = results["figures"]["diabetes"]["map"]["rmse"]
        assert any(line.startswith("map ") and f"{rmse:.3f}" in line for line in lines)

    def test_a_folder_in_use_is_refused_and_left_as_it_was(self, demo):
        _, out = demo
        before = {p.name: p.read_bytes() for p in out.iterdir()}
        found = call("demo", "--quick", "--out", out)
        assert found.exit_code == 2
        assert found.stderr.startswith("credibly: --out: ")
        assert found.stderr.count("\n") == 1
        assert "--force" in found.stderr
        assert {p.name: p.read_bytes() for p in out.iterdir()} == before

    def test_force_replaces_its_own_files_only(self, tmp_path):
        (tmp_path / "index.html").write_text("old")
        (tmp_path / "mine.txt").write_text("mine")
        found = call("demo", "--quick", "--quiet", "--force", "--methods", "map", "--out", tmp_path)
        assert found.exit_code == 0
        assert found.stdout == f"{tmp_path / 'index.html'}\n"
        assert found.stderr == ""
        assert sorted(p.name for p in tmp_path.iterdir()) == ["index.html", "mine.txt", "results.json"]
        assert (tmp_path / "mine.txt").read_text() == "mine"
        assert "<title>" in (tmp_path / "index.html").read_text()

    @pytest.mark.parametrize("asked", ["mle,nuts", "nuts", ",", ""])
    def test_unknown_methods_are_refused_before_any_work(self, tmp_path, monkeypatch, asked):
        monkeypatch.setattr("credibly.demo.run_demo", lambda *_, **__: pytest.fail("work was done"))
        found = call("demo", "--methods", asked, "--out", tmp_path / "demo")
        assert found.exit_code == 2
        assert found.stderr.count("\n") == 1
        assert all(name in found.stderr for name in METHODS)
        assert list(tmp_path.iterdir()) == []

    def test_a_bad_seed_and_a_file_as_folder(self, tmp_path):
        (tmp_path / "file").write_text("")
        assert call("demo", "--seed", "-1", "--out", tmp_path / "demo").exit_code == 2
        found = call("demo", "--out", tmp_path / "file")
        assert found.exit_code == 2
        assert "is a file" in found.stderr
        assert [p.name for p in tmp_path.iterdir()] == ["file"]

    def test_a_failure_on_the_way_leaves_nothing(self, tmp_path, monkeypatch):
        def fail(*_, **__):
            raise cr.TrainingError("the loss was not finite", step=3, member=0)

        monkeypatch.setattr("credibly.demo.run_demo", fail)
        found = call("demo", "--out", tmp_path / "demo")
        assert (found.exit_code, found.stderr) == (1, "credibly: the loss was not finite\n")
        assert list(tmp_path.iterdir()) == []

    def test_a_place_where_nothing_can_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        found = call("demo", "--out", tmp_path / "file" / "demo")
        assert found.exit_code == 1
        assert found.stderr.count("\n") == 1
        assert str(tmp_path / "file") in found.stderr

    def test_a_method_added_later_joins(self, tmp_path, monkeypatch):
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Later(cr.MAP):
            """A method of tomorrow."""

            steps: int | None = 5
            compile: bool = False

        monkeypatch.setitem(METHODS, "later", Later)
        assert "A method of tomorrow" in call("methods").output
        found = call("demo", "--quick", "--methods", "later, map,later", "--out", tmp_path / "demo")
        assert found.exit_code == 0, found.output
        results = json.loads((tmp_path / "demo" / "results.json").read_text())
        assert list(results["figures"]["breast_cancer"]) == ["later", "map"]

    def test_open_shows_the_page(self, tmp_path, monkeypatch):
        seen = []
        monkeypatch.setattr("webbrowser.open", seen.append)
        assert call("demo", "--quick", "--methods", "mle", "--open", "--out", tmp_path / "demo").exit_code == 0
        assert seen == [(tmp_path / "demo" / "index.html").as_uri()]


@pytest.mark.skipif(not SCRIPT.exists(), reason="the console script is not installed beside this Python")
def test_the_installed_script(tmp_path):
    words = [str(SCRIPT), "demo", "--quick"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == str(Path("demo") / "index.html")
    assert (tmp_path / "demo" / "index.html").stat().st_size > 10_000
    for name in METHODS:
        assert sum(line.startswith(f"{name} ") for line in done.stdout.splitlines()) == len(TASKS)
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert again.returncode == 2
    assert "Traceback" not in again.stderr


def test_errors_become_one_line(capsys):
    import typer

    cases = [
        (cr.InputError("x", "found 1", "Pass 2"), 2, "credibly: x: found 1. Pass 2\n"),
        (cr.StoreError("cut\n  short"), 1, "credibly: cut short\n"),
        (PermissionError(13, "Permission denied", "/there"), 1, "credibly: Permission denied (/there)\n"),
        (OSError("plain"), 1, "credibly: plain\n"),
    ]
    for error, code, text in cases:
        with pytest.raises(typer.Exit) as end, plainly():
            raise error
        assert end.value.exit_code == code
        assert capsys.readouterr().err == text
    with pytest.raises(ZeroDivisionError), plainly():
        _ = 1 / 0  # a fault of ours keeps its trace
