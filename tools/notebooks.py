"""Execute the notebooks of docs/notebooks and write them back without machine-specific metadata.

`python tools/notebooks.py` runs all of them, `python tools/notebooks.py NAME...` some. Needs nbclient and ipykernel.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path) -> Any:
    """Return the notebook after running all of its cells in a new kernel. An error in a cell is raised."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute()
    return cleaned(notebook)


def cleaned(notebook: Any) -> Any:
    """Remove time stamps, versions and random names, so that a notebook changes only if its content does."""
    notebook.metadata = METADATA
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        for output in cell.get("outputs", []):
            output.pop("transient", None)
            if "metadata" in output:
                output.metadata = {}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def main(names: list[str]) -> None:
    """Run the named notebooks, or all of them."""
    import nbformat

    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            notebook = execute(path)
            nbformat.write(notebook, path)
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
