"""The modules that a fit passes through stay few: a reader should be able to follow it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "trace_fit.py"
# Modules of the packages methods and inference that a fit in memory visits, for samplers with init="prior". Lower a
# number when the path gets shorter; raise it only for a module that a reader needs.
# SGHMC visits one more without the C++ backend. Among them are those that record the backend of a run, measure its
# temperature and keep checkpoints of training.
# The state of a training run and its stage are in a file beside the loop, `training.run`.
MOST = {"hmc": 20, "sghmc": 20, "ensemble": 16}


@pytest.fixture(scope="module")
def printed():
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", MOST)
def test_a_fit_visits_few_modules(printed, method):
    (block,) = [part for part in printed.split("\n\n") if part.startswith(f"{method}\n")]
    visited = re.findall(r"^ +\d+  ((?:methods|inference)\.\S+)$", block, re.M)
    assert f"  methods and inference: {len(visited)}\n" in block
    assert len(visited) <= MOST[method], visited
    assert f"inference.{'training' if method == 'ensemble' else 'sampling'}.loop" in visited
    assert re.search(r"^ +\d+  predictive\.base$", block, re.M)


def test_the_import_closure_is_counted(printed):
    modules, lines = map(int, re.search(r"loads (\d+) modules with (\d+) lines", printed).groups())
    assert 50 < modules < lines
