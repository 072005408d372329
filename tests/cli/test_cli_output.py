"""Text from tables and folders cannot control a terminal, a spreadsheet or memory; Ctrl-C ends in one line."""

import csv
import gzip
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest

from credibly.cli.output import PrintableFormatter, in_markup
from credibly.core import interrupts
from credibly.core.text import printable
from credibly.tables.files.reading import read_table
from credibly.tables.files.row_samples import sample_rows
from credibly.tables.files.writing import TableWriter
from own_tables import MAP, call, refused, write

CLEAR = "\x1b[2J"
NAME = f"t{CLEAR}.parquet"


class TestControlCharacters:
    def test_what_is_written_out(self):
        assert printable("a\x1b[2J\x07\u202eb\x9b") == "a\\x1b[2J\\x07\\u202eb\\x9b"
        assert printable("Süd, 東, 🙂\tx\n") == "Süd, 東, 🙂\tx\n"
        assert in_markup(f"[bold]{CLEAR}") == "\\[bold]\\x1b[2J"
        record = logging.LogRecord("x", logging.WARNING, "", 0, "%s", (CLEAR,), None)
        assert PrintableFormatter().format(record) == "\\x1b[2J"

    def test_names_labels_and_files_of_a_fit(self, tmp_path, no_drawing):
        columns = {f"a{CLEAR}": [float(i % 5) for i in range(40)], "b": [f"{'uv'[i % 2]}{CLEAR}" for i in range(40)]}
        table = write(columns | {"y": [f"{'yes' if i % 3 else 'no'}{CLEAR}" for i in range(40)]}, tmp_path / NAME)
        found = call("fit", table, "--target", "y", "--out", tmp_path / f"run{CLEAR}", *MAP)
        assert found.exit_code == 0, found.output
        assert "\\x1b[2J" in found.stdout
        assert not re.search("[\x00-\x08\x0b-\x1f]", found.output)
        said = refused(call("predict", tmp_path / f"run{CLEAR}", tmp_path / f"none{CLEAR}.csv"), code=2)
        assert "\x1b" not in said


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
def test_cells_that_a_spreadsheet_would_evaluate(tmp_path, suffix):
    columns = {"=name": ["=1+1", "+2", "-3", "@x", "\tx", "fine", "", None], "mean": [-1.5] * 8}
    opened = gzip.open if suffix.endswith("gz") else open
    found = {}
    for safe in (False, True):
        path = tmp_path / f"{safe}{suffix}"
        with TableWriter(path, excel_safe=safe) as writer:
            writer.write(columns)
        with opened(path, "rt", newline="") as handle:
            found[safe] = list(csv.reader(handle, delimiter="\t" if suffix == ".tsv" else ","))
    assert [row[0] for row in found[False]] == ["=name", "=1+1", "+2", "-3", "@x", "\tx", "fine", "", ""]
    assert [row[0] for row in found[True]] == ["'=name", "'=1+1", "'+2", "'-3", "'@x", "'\tx", "fine", "", ""]
    # Numbers stay numbers.
    assert {row[1] for row in found[True][1:]} == {"-1.5"}


class TestLargeTables:
    def blocks(self, rows, size=100):
        for start in range(0, rows, size):
            yield pa.RecordBatch.from_pydict({"i": np.arange(start, min(rows, start + size), dtype=np.float64)})

    def test_a_sample_is_bounded_in_order_and_spread_over_the_table(self):
        kept, count, seen = sample_rows(self.blocks(100_000), most=8_000)
        values = np.concatenate([block.column("i").to_numpy() for block in kept])
        assert (seen, count) == (100_000, len(values))
        assert 250 <= count <= 1_000
        assert sum(block.nbytes for block in kept) <= 8_000
        assert (np.diff(values) > 0).all()
        # Every tenth of the table has a tenth of the rows, up to a few.
        shares = np.histogram(values, 10, (0, 100_000))[0]
        assert np.abs(shares - count / 10).max() < 0.03 * count
        # No period: neither all rows even, nor all of one residue.
        assert np.unique(values % 7).size == 7

    def test_small_tables_are_read_whole(self):
        kept, count, seen = sample_rows(self.blocks(950), most=2**20)
        assert count == seen == 950
        assert len(kept) == 10

    def test_a_fit_says_so(self, tmp_path):
        path = tmp_path / "t.csv.gz"
        with gzip.open(path, "wb") as handle:
            handle.write(b"a,y\n" + b"1.5,2\n" * 50_000)
        table = read_table(path, most=100_000)
        assert 1_000 < table.num_rows < 8_000
        note = json.loads(table.schema.metadata[b"credibly"])["notes"][0] if b"credibly" in (
            table.schema.metadata or {}
        ) else str(table.schema.metadata)  # fmt: skip
        assert f"{table.num_rows:,} of its 50,000 rows, chosen at random, are used" in note
        assert read_table(path).num_rows == 50_000


class TestCtrlC:
    def run(self, delay, *words):
        """Send SIGINT to a command after some seconds; return its exit code, output and errors."""
        process = subprocess.Popen(
            [sys.executable, "-m", "credibly", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    @pytest.mark.slow
    def test_at_several_moments(self, tmp_path):
        (tmp_path / "t.csv").write_text("a,y\n" + "\n".join(f"{i},{i % 7}" for i in range(60)) + "\n")
        words = ("fit", str(tmp_path / "t.csv"), "--target", "y", "--out", str(tmp_path / "run"), "--method", "hmc")
        seen = set()
        for delay in (0.15, 0.3, 0.6, 1.2, 2.5):
            code, _, err = self.run(delay, *words, "--quiet", "--tune", "none", "--set", "draws=100000")
            if "Traceback" in err and "credibly/__main__.py" not in err:
                # Before Python has handed over: its own start, which no program can change.
                continue
            assert code == 130, (delay, err)
            assert err.startswith("credibly: stopped"), (delay, err)
            assert err.count("\n") == 1, (delay, err)
            seen.add(err.strip())
            assert not (tmp_path / "run").exists() or "resume" in err
            if (tmp_path / "run").exists():
                break
        assert seen

    def test_before_and_after_a_command_the_process_ends_at_once(self):
        for words, stream in ((["credibly"], 2), (["credibly", "--json"], 1)):
            code = (
                "import sys, signal, time\n"
                f"sys.argv = {words!r}\n"
                "from credibly.core import interrupts\n"
                "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
                "interrupts.install()\n"
                "sys.stdout.write('')\n"
                "signal.raise_signal(signal.SIGINT)\n"
                "time.sleep(30)\n"
            )
            found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
            assert found.returncode == 130
            said = found.stdout if stream == 1 else found.stderr
            if stream == 1:
                assert json.loads(said)["error"]["exit_code"] == 130
            else:
                assert said == "credibly: stopped\n"

    def test_within_an_import_it_waits_and_within_a_command_it_raises(self, tmp_path, monkeypatch):
        (tmp_path / "slow_module.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nfinished = True\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            interrupts.install()
            with interrupts.within_command(), interrupts.holding_output():
                import slow_module

                assert slow_module.finished
                with pytest.raises(KeyboardInterrupt):
                    time.sleep(5)
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)
            sys.modules.pop("slow_module", None)


def test_the_entry_point_loads_nothing_slow_before_ctrl_c_is_handled():
    code = "import sys, credibly.__main__; print('typer' in sys.modules, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.split() == ["False", "False"]
