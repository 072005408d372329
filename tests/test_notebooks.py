"""The notebooks of the documentation: executed, without traces of a machine, and their code still runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_five():
    assert [path.name[0] for path in NOTEBOOKS] == list("12345")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_executed_in_order_without_errors(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    # Progress and tables of credibly's own.
    html = "".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)
    assert "<table" in html


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_have_no_traces_of_a_machine(path):
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        text = "".join(cell["source"]) + json.dumps([o for o in cell.get("outputs", []) if "image/png" not in str(o)])
        assert not re.search(r"/(home|root|work|tmp|Users|usr|opt)/|[A-Z]:\\\\", text)
    assert path.stat().st_size < 400_000


# The fourth takes as long as the others together; tests of tables and of conformal prediction run what it shows.
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.nightly if p.name.startswith("4") else (), id=p.stem) for p in NOTEBOOKS],
)
def test_code_of_notebooks_runs(path, tmp_path, monkeypatch):
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    namespace = {"__name__": "notebook"}
    try:
        for number, cell in enumerate(code_cells(path), 1):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), namespace)
    finally:
        plt.close("all")


KERNEL = """
import sys, tempfile
import nbclient, nbformat
from nbformat.v4 import new_code_cell, new_notebook

first = '''import torch
import credibly as cr
net = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
x = torch.linspace(-1, 1, 8).unsqueeze(1)
problem = cr.Problem(net, (x, x[:, 0]), cr.likelihoods.Gaussian(0.1), cr.priors.Normal())
posterior = cr.MAP(steps=20).fit(problem, seed=0)
posterior'''
plots = ["cr.plot.bands(posterior.predict(x), x);", "cr.plot.bands(posterior.predict(x), x);"]
notebook = new_notebook(cells=[new_code_cell(source) for source in (first, *plots)])
with tempfile.TemporaryDirectory() as folder:
    nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
for cell in notebook.cells:
    print([sorted(output.get("data", {})) for output in cell.outputs], len(cell.outputs))
print(notebook.cells[0].outputs[0].data["text/html"])
print(notebook.cells[0].outputs[1].data["text/html"])
"""


@pytest.mark.slow
def test_a_kernel_shows_progress_tables_and_every_picture():
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    shown, first, second, progress, table = run.stdout.strip().splitlines()[:5]
    assert shown == "[['text/html', 'text/plain'], ['text/html', 'text/plain']] 2"
    assert "image/png" in first
    assert "image/png" in second
    assert 'value="20" max="20"' in progress
    assert "DrawsPosterior" in table
