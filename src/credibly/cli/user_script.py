"""Load a problem from a user's script, given as script.py:name."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from credibly.errors import InputError

if TYPE_CHECKING:
    from credibly.inference.density import Density
    from credibly.problem import Problem

OPTION = "--problem"


def load_problem(reference: str) -> Problem | Density:
    """Run a script and return what `script.py:name` refers to: a problem, a density, or the result of a function."""
    file, name = check_reference(reference)
    script = Path(file)
    module = _run(script)
    if not hasattr(module, name):
        there = [n for n, value in vars(module).items() if _is_problem(value)]
        advice = (
            f"Its problems are {', '.join(there)}"
            if there
            else "Pass the name of a problem or of a function that returns one"
        )
        raise InputError(OPTION, f"{file} has no {name!r}", advice)
    found: Any = getattr(module, name)
    if callable(found) and not _is_problem(found):
        with _explain_errors(script):
            found = found()
    if not _is_problem(found):
        raise InputError(
            OPTION, f"{reference} must be a credibly.Problem or credibly.Density, got {type(found).__name__}"
        )
    result: Problem | Density = found
    return result


def check_reference(reference: str) -> tuple[str, str]:
    """Return the script and the name in `script.py:name`. Raise if there is no such script."""
    file, _, name = reference.rpartition(":")
    if not file or not name.isidentifier():
        raise InputError(OPTION, f"must be SCRIPT.py:NAME, such as train.py:problem, got {reference!r}")
    if not Path(file).is_file() or not file.endswith(".py"):
        raise InputError(OPTION, f"no such script: {file!r}", "Pass the .py file that creates the problem")
    return file, name


def _run(script: Path) -> ModuleType:
    """Import the script under a module name of its own, with its folder on the path as if it were run directly."""
    path = script.resolve()
    spec = importlib.util.spec_from_file_location(f"credibly_script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    with _explain_errors(path):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _explain_errors(script: Path) -> Iterator[None]:
    """Turn an error in the script into an `InputError` with its line number."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == script.resolve()]
        at = f", line {lines[-1]}" if lines else ""
        raise InputError(
            OPTION,
            f"{script.name}{at} raised {type(error).__name__}: {error}",
            'Run it directly to debug; put code that is not needed here under if __name__ == "__main__"',
        ) from error


def _is_problem(value: object) -> bool:
    from credibly.inference.density import Density
    from credibly.problem import Problem

    return isinstance(value, (Problem, Density))
