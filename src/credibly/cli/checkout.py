"""Access to `studies/` and `benchmarks/`, which are in a checkout of the repository but not in the package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from credibly.errors import InputError

ADVICE = "Run it in a checkout of the repository, with credibly installed from there: pip install -e '.[peers]'"


def find_checkout(package: str, command: str) -> Path:
    """Return the checkout that contains this package, or else the current folder if it is one."""
    found = next((root for root in _candidates() if (root / package / "__init__.py").is_file()), None)
    if found is None:
        raise InputError(command, f"{package}/ is not part of the installed package", ADVICE)
    return found


def _candidates() -> list[Path]:
    return [Path(__file__).resolve().parents[3], Path.cwd()]


def checkout_module(name: str, command: str) -> ModuleType:
    """Import a module such as `studies.study` from the checkout."""
    root = str(find_checkout(name.partition(".")[0], command))
    if root not in sys.path:
        sys.path.append(root)
    return importlib.import_module(name)
