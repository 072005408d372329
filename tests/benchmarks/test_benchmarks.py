"""The logic of the benchmark suite, at sizes too small for meaningful timings."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import floors, mixing, peers, prediction, results, scale, suite
from benchmarks.case import Case, Setting
from benchmarks.floors import Floor, Rates
from benchmarks.jax_client import JaxSide, PeerError
from benchmarks.timing import Goal, Row, interleaved
from credibly.cli import app, bench, checkout
from warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
RATES = Rates(1e9, ((1000, 4e9), (10**6, 1e9)))


def case(name, run, **more):
    return Case(name, f"Work of {name}.", f"Limit of {name}.", run, 0.1, **more)


def two_rows(setting):
    yield Row("a", [1.0, 2.0, 3.0], [4.0, 4.0, 9.0], Goal(">=", 2), inverse=True, peer="P", floor=Floor(1e9))
    yield Row("b", [1.0], [], Goal(">=", 2), inverse=True)
    setting.note("a remark")


class TestRows:
    def test_ratio_is_of_medians_and_spread_of_repetitions(self):
        row = next(two_rows(Setting()))
        assert row.ratio == 2.0
        assert row.spread == (2.0, 4.0)
        assert row.met is True
        assert Row("a", [1.0], [1.9], Goal(">=", 2), inverse=True).met is False

    def test_without_a_peer_there_is_no_verdict(self):
        row = Row("b", [1.0], [], Goal(">=", 2), inverse=True)
        assert (row.ratio, row.spread, row.met) == (None, None, None)
        assert row.record()["credibly_s"] == 1.0
        assert row.cells()[-1] == ""

    def test_a_remote_implementation_is_timed_there(self):
        class Remote:
            calls = 0

            def __call__(self):
                self.time_calls(1)

            def time_calls(self, calls):
                self.calls += calls
                return 0.25

        remote = Remote()
        times = interleaved({"local": lambda: None, "remote": remote}, repeats=2, seconds=1e-4)
        assert times["remote"] == [0.25, 0.25]
        assert remote.calls >= 2


class TestFloors:
    def test_the_slower_of_arithmetic_and_memory_counts(self):
        assert Floor(3e9, 100).seconds(RATES) == 3.0
        assert Floor(0, 500).seconds(RATES) == 500 / 4e9  # fits the small array, which is copied faster
        assert Floor(0, 5000).seconds(RATES) == 5000 / 1e9
        assert Floor(0, 10**9).seconds(RATES) == 1.0  # beyond the largest: at the largest one's rate

    def test_flops_of_a_gradient(self):
        # 2 N ab per layer and forward pass; the backward pass twice that, except for the input's gradient.
        assert floors.forward_flops([3, 5, 2], 7) == 2 * 7 * (15 + 10)
        assert floors.gradient_flops([3, 5, 2], 7) == 2 * 7 * (2 * 15 + 3 * 10)

    def test_rates_are_measured(self):
        found = floors.measure(seconds=0.001)
        assert found.matrix > 0
        assert [size for size, _ in found.bandwidth] == list(floors.MEMORY["cpu"])
        assert "GFLOP/s" in str(found)


class TestPeers:
    def test_an_installed_and_a_missing_peer(self):
        found = {one.name: one for one in peers.find({"torch": "torch", "no-such-peer": "no_such_peer"})}
        assert found["torch"].version == torch.__version__.split("+")[0] or found["torch"].version == torch.__version__
        assert found["no-such-peer"].version is None
        assert "left out (not installed)" in str(found["no-such-peer"])

    def test_no_interpreter_and_a_missing_one(self, tmp_path):
        assert {one.version for one in peers.find_jax(None)} == {None}
        broken = peers.find_jax(str(tmp_path / "python"))
        assert all("does not respond" in one.reason for one in broken)

    def test_find_imports_nothing(self):
        loaded = "{'pyro', 'arviz_stats'} & set(sys.modules)"
        code = f"from benchmarks import peers; import sys; peers.find(); sys.exit(bool({loaded}))"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0

    def test_single_files_do_not_import_the_package(self, tmp_path, monkeypatch):
        package = tmp_path / "heavy_peer" / "inner"
        package.mkdir(parents=True)
        (tmp_path / "heavy_peer" / "__init__.py").write_text("raise RuntimeError('imported as a whole')")
        (package / "base.py").write_text("VALUE = 3")
        (package / "light.py").write_text("from .base import VALUE\nTWICE = 2 * VALUE")
        monkeypatch.syspath_prepend(str(tmp_path))
        found = peers.single_files("heavy_peer", ["inner/light.py"])
        assert found is not None
        assert found[0].TWICE == 6
        assert peers.single_files("heavy_peer", ["inner/absent.py"]) is None
        assert peers.single_files("no_such_peer", ["light.py"]) is None

    def test_an_environment_is_created_once(self, tmp_path, monkeypatch):
        calls = []
        monkeypatch.setattr(peers.venv, "create", lambda folder, with_pip: calls.append(("venv", folder)))
        monkeypatch.setattr(peers.subprocess, "run", lambda command, **_: calls.append(("pip", command[3:])))
        monkeypatch.setattr(peers, "find_jax", lambda python: [peers.Found("jax", None, "")])
        peers.make_jax(tmp_path)
        assert calls == [("venv", tmp_path), ("pip", ["install", "--quiet", "jax", "blackjax", "numpyro"])]

    def test_an_interpreter_without_jax_raises(self):
        with pytest.raises(PeerError, match="is jax installed"):
            JaxSide(sys.executable)


class TestCases:
    def test_names_are_unique_and_every_field_is_filled(self):
        found = suite.all_cases()
        assert len({one.name for one in found}) == len(found)
        for one in found:
            assert one.work.endswith(".")
            assert one.limits.endswith(".")
            assert one.peers
        assert sum(one.minutes for one in found if one.device == "cpu") <= 15

    def test_choice_by_name_and_by_prefix(self):
        cases = [
            case("hmc-a", two_rows),
            case("hmc-b", two_rows),
            case("hm", two_rows),
            case("g", two_rows, device="cuda"),
        ]
        assert [one.name for one in suite.choose(cases, "hmc", "cpu")] == ["hmc-a", "hmc-b"]
        assert [one.name for one in suite.choose(cases, "hm,hmc-b", "cpu")] == ["hmc-b", "hm"]
        assert [one.name for one in suite.choose(cases, None, "cuda")] == ["g"]
        with pytest.raises(SystemExit, match="no case 'g' for cpu"):
            suite.choose(cases, "g", "cpu")

    def test_a_failure_keeps_the_rows_before_it(self, capsys):
        def failing(setting):
            yield from two_rows(setting)
            raise ValueError("in the middle\nof it")

        found = suite.run_in_process(case("f", failing), Setting())
        assert found["failure"] == "ValueError: in the middle"
        assert [row["what"] for row in found["rows"]] == ["a", "b"]
        assert "in the middle" in capsys.readouterr().err

    def test_an_exit_is_a_failure_of_that_case(self, capsys):
        def exiting(setting):
            raise SystemExit("other values: nothing to compare")
            yield

        assert "nothing to compare" in suite.run_in_process(case("r", exiting), Setting())["failure"]

    def test_cases_beyond_the_budget_are_skipped(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(suite, "run_in_subprocess", lambda one, setting, out: {"case": one.name, "failure": None})
        cases = [case("a", two_rows), Case("long", "W.", "L.", two_rows, 20.0), case("b", two_rows)]
        found = suite.run_all(cases, Setting(), tmp_path, budget=1.0)
        assert [one["failure"] is None for one in found] == [True, False, True]
        assert "budget" in found[1]["failure"]

    def test_prediction_equals_the_loop(self):
        rows = list(prediction.comparisons(Setting(repeats=1, seconds=1e-3, quick=True)))
        assert [row.peer for row in rows] == ["loop over draws"]
        assert rows[0].floor == Floor(20 * floors.forward_flops([13, 50, 1], 500))

    def test_different_predictions_raise(self, monkeypatch):
        monkeypatch.setattr(prediction, "loop", lambda posterior, x: (torch.ones(len(x)), torch.ones(len(x))))
        with pytest.raises(SystemExit, match="nothing to compare"):
            list(prediction.comparisons(Setting(repeats=1, seconds=1e-3, quick=True)))

    def test_processes_with_different_results_raise(self):
        chains, rows = ({**scale.CASES[name]} for name in ("scale-chains", "scale-rows"))
        scale.compare(chains, [-100.0, 3.0], [-100.0, 3.0])
        scale.compare(rows, [-100.0, 3.0], [-100.0001, 3.0])  # summation order
        for case, other in ((chains, -100.00000001), (rows, -100.1)):
            with pytest.raises(SystemExit, match="nothing to compare"):
                scale.compare(case, [-100.0, 3.0], [other, 3.0])

    @pytest.mark.nightly
    def test_two_processes_against_one(self):
        found = list(scale.comparisons("scale-rows", Setting(repeats=2, seconds=1e-3, quick=True)))
        assert [row.peer for row in found] == ["one process"]
        assert len(found[0].ours) == len(found[0].baseline) == 2

    def test_a_process_that_dies_is_reported(self, tmp_path, monkeypatch):
        monkeypatch.setattr(suite.sys, "executable", warm_python())
        found = suite.run_in_subprocess(case("no-such-case", two_rows), Setting(), tmp_path)
        assert found["failure"].startswith("exited with status")


ABOUT = {"machine": {"cores": 2}, "peers": {"p": "1.0", "q": None}, "repeats": 3, "turn_s": 0.1}


class TestResults:
    def found(self):
        good = suite.run_in_process(case("good", two_rows), Setting())
        bad = suite.run_in_process(case("bad", partial(next, iter(()))), Setting())
        return [good, bad]

    def test_table_and_json(self, tmp_path):
        text = results.write(tmp_path, ABOUT, self.found(), RATES)
        line = next(line for line in text.splitlines() if line.startswith("| good"))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells == ["good", "a", "P", "2 s", "4 s", "2", "2 .. 4", ">= 2", "met", "1 s", "2.0 x"]
        assert "| none found |" in text
        assert "Peers: p 1.0 (not found: q)" in text
        assert "- `good`: Limit of good." in text
        assert "- `good`: a remark" in text
        assert "`bad`: TypeError" in text
        record = json.loads((tmp_path / "results.json").read_text())
        row = record["cases"][0]["rows"][0]
        assert (row["floor_s"], row["over_floor"], row["ratio"]) == (1.0, 2.0, 2.0)
        assert record["cases"][0]["rows"][1]["ratio"] is None
        assert math.isclose(record["rates"]["matrix_flop_s"], 1e9)

    def test_the_page_is_rewritten_between_its_markers_only(self, tmp_path):
        page = tmp_path / "page.md"
        begin, end = results.marks("cpu")
        other, last = results.marks("cuda")
        page.write_text(f"Before\n{begin}\nold\n{end}\nBetween\n{other}\ngpu\n{last}\nAfter\n")
        results.rewrite_page(page, "cpu", "new\n")
        results.rewrite_page(page, "cpu", "newer\n")
        assert page.read_text() == (
            f"Before\n{begin}\n## Results on the CPU\n\nnewer\n{end}\nBetween\n{other}\ngpu\n{last}\nAfter\n"
        )
        page.write_text("nothing marked")
        with pytest.raises(SystemExit, match="needs one line"):
            results.check_page(page, "cpu")
        with pytest.raises(SystemExit, match="needs one line"):
            results.rewrite_page(page, "cpu", "new\n")
        assert page.read_text() == "nothing marked"

    def test_the_docs_have_the_markers(self):
        for device in ("cpu", "cuda"):
            results.check_page(ROOT / "docs" / "performance.md", device)


class TestCommand:
    def test_list(self, capsys):
        assert command.main(["--list"]) == 0
        printed = capsys.readouterr().out
        assert "hmc-small-8" in printed
        assert "bayesian-torch" in printed

    def test_a_run_from_end_to_end(self, tmp_path, monkeypatch, capsys):
        """The case runs in its own process."""
        monkeypatch.setattr(floors, "MATRICES", (64,))
        monkeypatch.setattr(suite.sys, "executable", warm_python())
        assert next(c for c in suite.all_cases(["mixing"]) if c.name == "mixing").run is mixing.comparisons
        page = tmp_path / "page.md"
        page.write_text("\n".join(["# Speed", *results.marks("cpu"), ""]))
        argv = ["--cases", "mixing", "--quick", "--threads", "1", "--out", str(tmp_path / "o"), "--page", str(page)]
        before = torch.get_num_threads()
        try:
            assert command.main(argv) == 0
        finally:
            torch.set_num_threads(before)
        (found,) = json.loads((tmp_path / "o" / "results.json").read_text())["cases"]
        assert (found["case"], found["failure"]) == ("mixing", None)
        assert found["rows"][0]["credibly_s"] > 0
        assert "| mixing" in page.read_text()
        assert (tmp_path / "o" / "results.md").read_text() in page.read_text()

    def test_credibly_bench_speed(self, monkeypatch, tmp_path):
        calls = []

        def record(command, env, check):
            calls.append((command[1:], env["PYTHONPATH"]))
            return subprocess.CompletedProcess(command, 3)

        monkeypatch.setattr(bench.subprocess, "run", record)
        words = ["bench", "speed", "--cases", "hmc", "--list", "--root"]
        done = CliRunner().invoke(app, [*words, str(tmp_path)])
        assert done.exit_code == 3
        argv, path = calls[0]
        assert argv == ["-m", "benchmarks", "--device", "cpu", "--root", str(tmp_path), "--cases", "hmc", "--list"]
        assert path.startswith(str(ROOT))
        done = CliRunner().invoke(app, [*words, str(tmp_path / "nowhere")])
        assert (done.exit_code, "--root: no such folder" in done.stderr, len(calls)) == (2, True, 1)

    @pytest.mark.parametrize("words", [("bench", "speed"), ("bench", "uci", "--root", "."), ("study",)])
    def test_commands_that_need_a_checkout_say_so(self, monkeypatch, tmp_path, words):
        monkeypatch.setattr(checkout, "_candidates", lambda: [tmp_path])
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        assert "checkout" in done.stderr

    def test_options_of_speed_are_not_those_of_uci(self, tmp_path):
        done = CliRunner().invoke(app, ["bench", "uci", "--root", str(tmp_path), "--repeats", "3"])
        assert (done.exit_code, "no such option: --repeats" in done.stderr) == (2, True)
