"""A problem from the user's own script, which the command line names as script.py:name."""

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


def problem_of(words: str) -> Problem | Density:
    """What `script.py:name` names: a problem, a density, or a function that makes one. The script runs for it."""
    file, _, name = words.rpartition(":")
    if not file or not name.isidentifier():
        raise InputError(OPTION, f"found {words!r}", "Name a script and what is in it, as in train.py:problem")
    script = Path(file)
    if not script.is_file() or script.suffix != ".py":
        raise InputError(OPTION, f"there is no script {file!r}", "Name the .py file that makes the problem")
    module = _run(script)
    if not hasattr(module, name):
        there = [n for n, value in vars(module).items() if _is_problem(value)]
        advice = (
            f"The problems in it are {', '.join(there)}" if there else "Name the problem, or a function that makes it"
        )
        raise InputError(OPTION, f"{file} has no {name!r}", advice)
    found: Any = getattr(module, name)
    if callable(found) and not _is_problem(found):
        with _told(script):
            found = found()
    if not _is_problem(found):
        raise InputError(
            OPTION, f"{words} is of type {type(found).__name__}", "Name a credibly.Problem or credibly.Density"
        )
    result: Problem | Density = found
    return result


def _run(script: Path) -> ModuleType:
    """The script as a module of its own name, with its folder on the path as if it were run by itself."""
    path = script.resolve()
    spec = importlib.util.spec_from_file_location(f"credibly_script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    with _told(path):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _told(script: Path) -> Iterator[None]:
    """What goes wrong in the script, in one line with its place there."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == script.resolve()]
        at = f", line {lines[-1]}" if lines else ""
        raise InputError(
            OPTION,
            f"{script.name}{at} raised {type(error).__name__}: {error}",
            'See what it does when run by itself; what is not needed here belongs under if __name__ == "__main__"',
        ) from error


def _is_problem(value: object) -> bool:
    from credibly.inference.density import Density
    from credibly.problem import Problem

    return isinstance(value, (Problem, Density))
