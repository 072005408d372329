"""The command `credibly demo`: its files, its tables and what it refuses."""

from __future__ import annotations

import dataclasses
import json

import pytest

import credibly as cr
from conftest import undrawn
from credibly.demo.fits import TASKS
from credibly.methods import METHODS
from own_tables import call


@pytest.fixture(scope="module")
def demo(tmp_path_factory, quick_demo):
    """Write the quick demo of every method that test_demo.py checks, without its pictures."""

    def run_demo(methods, *, seed, quick, progress):
        assert (tuple(methods), seed, quick) == (tuple(METHODS), quick_demo.seed, quick_demo.quick)
        return quick_demo

    out = tmp_path_factory.mktemp("demo") / "deep" / "demo"
    with undrawn(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("credibly.demo.fits.run_demo", run_demo)
        return call("demo", "--quick", "--out", out), out


class TestDemo:
    def test_writes_page_and_results_with_every_method(self, demo):
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
            assert page.count(f'<th scope="row">{name}</th>') == 1 + len(TASKS) + (name != "hmc")
            assert set(results["against_hmc"]["diabetes"][name]) == {"total_variation", "mean_shift"}
        assert results["diagnostics"]["star_classification"]["hmc"]["verdict"]

    def test_prints_a_table_for_each_task_and_then_the_path(self, demo):
        found, out = demo
        *lines, last = found.output.replace("\n" + str(out.parent), "\n@").splitlines()
        assert last.endswith("demo/index.html")
        for name in METHODS:
            assert sum(line.startswith(f"{name} ") for line in lines) == len(TASKS) + 1
        assert any(line.startswith("Total variation distance from HMC") for line in lines)
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

    @pytest.mark.parametrize("asked", ["mle,gibbs", "gibbs", ",", ""])
    def test_unknown_methods_are_refused_before_any_work(self, tmp_path, monkeypatch, asked):
        monkeypatch.setattr("credibly.demo.fits.run_demo", lambda *_, **__: pytest.fail("work was done"))
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

    def test_a_failure_during_the_work_leaves_nothing(self, tmp_path, monkeypatch):
        def fail(*_, **__):
            raise cr.TrainingError("the loss was not finite", step=3, member=0)

        monkeypatch.setattr("credibly.demo.fits.run_demo", fail)
        found = call("demo", "--out", tmp_path / "demo")
        assert (found.exit_code, found.stderr) == (1, "credibly: the loss was not finite\n")
        assert list(tmp_path.iterdir()) == []

    def test_an_unwritable_location(self, tmp_path):
        (tmp_path / "file").write_text("")
        found = call("demo", "--out", tmp_path / "file" / "demo")
        assert found.exit_code == 2
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
