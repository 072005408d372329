"""Help that is instant, and shell completion."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from credibly.cli import app
from credibly.cli.options import _method_list, _methods
from credibly.methods import METHODS
from own_tables import SCRIPT, diabetes, wine, write
from warm_python import warm_python

VERBS = ("demo", "fit", "predict", "evaluate", "compare", "report", "resume", "verify", "methods")


class TestHelpAndCompletion:
    def test_help_of_every_verb_loads_nothing_heavy(self):
        code = f"""
import sys
from credibly.cli import app
for verb in {VERBS!r}:
    try:
        app([verb, "--help"], prog_name="credibly")
    except SystemExit as end:
        assert not end.code
try:
    app(["--help"], prog_name="credibly")
except SystemExit as end:
    assert not end.code
heavy = {{"torch", "numpy", "pandas", "pyarrow", "sklearn", "matplotlib", "jinja2", "scipy"}} & set(sys.modules)
sys.exit(f"loaded {{heavy}}" if heavy else 0)
"""
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        for verb in VERBS:
            assert f"credibly {verb} " in found.stdout
        shown = re.sub(r"[\s│]+", " ", found.stdout)
        for default in ("0.2", "five folds, in which every row is predicted", "folds", "silu"):
            assert f"(Default: {default}.)" in shown
        for default in ("50", "learned", "none", "1 for regression, 2 for classification"):
            assert shown.count(f"(Default: {default}, or chosen by `fit --tune`.)") == 2  # of fit and compare

    @pytest.mark.parametrize("width", [60, 80, 120])
    @pytest.mark.parametrize("words", [[], ["fit"], ["serve"], ["export"]])
    def test_help_is_wrapped_at_the_width_of_the_terminal(self, words, width):
        """Not at that of the source as well, which leaves lines of one word."""
        found = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(width)})
        about = found.output.split("\u256d")[0].split("Usage:")[1]
        paragraphs = [part.strip("\n").splitlines() for part in re.split(r"\n\s*\n", about)[1:]]
        # A line ends only where the next word does not fit.
        broken = [
            (here, there)
            for part in paragraphs
            for here, there in itertools.pairwise(line.rstrip() for line in part)
            if len(here) + 1 + len(there.split()[0]) < width
        ]
        assert max(map(len, paragraphs)) > 1
        assert broken == []

    def test_every_method_can_be_named(self, monkeypatch):
        assert _methods("") == ["auto", *METHODS]
        # From the source, as in a shell.
        monkeypatch.delitem(sys.modules, "credibly.methods")
        assert sorted(_methods("")) == sorted(["auto", *METHODS])
        assert sorted(_method_list("")) == sorted(METHODS)

    @pytest.mark.parametrize(
        "line, wanted, not_wanted",
        [
            ("credibly ", set(VERBS), set()),
            ("credibly fit wine.parquet --method h", {"hmc"}, {"map"}),
            ("credibly fit house.csv --target ", {"age", "bmi", "clinic", "progress"}, set()),
            ("credibly fit house.csv --target p", {"progress"}, {"age"}),
            ("credibly fit wine.parquet --target k", {"kind"}, {"ash"}),
            ("credibly fit house.csv --drop age,b", {"age,bmi", "age,bp"}, {"bmi"}),
            ("credibly compare house.csv --methods map,s", {"map,sgld", "map,sghmc"}, {"map,hmc"}),
            ("credibly fit house.csv --task r", {"regression"}, {"classification"}),
            ("credibly fit nothing.csv --target ", set(), {"age"}),
            ("credibly fit broken.parquet --target ", set(), {"age"}),
        ],
    )
    def test_completion(self, tmp_path, line, wanted, not_wanted):
        write(diabetes(12), tmp_path / "house.csv")
        write(wine(), tmp_path / "wine.parquet")
        (tmp_path / "broken.parquet").write_bytes(b"PAR1")
        env = os.environ | {
            "_CREDIBLY_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        }
        found = subprocess.run([str(SCRIPT)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert (found.returncode, found.stderr) == (0, "")
        offered = set(found.stdout.split())
        assert wanted <= offered
        assert not offered & not_wanted

    def test_a_closed_output_is_not_an_error(self):
        with subprocess.Popen(
            [warm_python(), str(SCRIPT), "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            process.stdout.close()
            err = process.stderr.read()
        assert "Traceback" not in err
