"""What lives in a checkout of the repository beside the package: `studies/` and `benchmarks/`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from credibly.errors import InputError

ADVICE = "Run it in a checkout of the repository, with credibly installed from there: pip install -e '.[peers]'"


def find_checkout(package: str, command: str) -> Path:
    """Return the checkout that this package, or else the current folder, belongs to."""
    found = next((place for place in _places() if (place / package / "__init__.py").is_file()), None)
    if found is None:
        raise InputError(command, f"{package}/ is not part of the installed package", ADVICE)
    return found


def _places() -> list[Path]:
    return [Path(__file__).resolve().parents[3], Path.cwd()]


def checkout_module(name: str, command: str) -> ModuleType:
    """Import a module such as `studies.study` from the checkout."""
    root = str(find_checkout(name.partition(".")[0], command))
    if root not in sys.path:
        sys.path.append(root)
    return importlib.import_module(name)
