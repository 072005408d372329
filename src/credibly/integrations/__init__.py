"""credibly inside other libraries' training: callbacks for Lightning and for the Trainer of transformers."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["lightning", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"credibly.integrations.{name}")
    raise AttributeError(f"module 'credibly.integrations' has no attribute {name!r}")
