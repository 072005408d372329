"""Tables: files of most formats in, predictions with uncertainty out.

from credibly.tables import Config, TableRun, fit_table, prepare
run = fit_table(prepare(Config("house.csv", "price")), "run/")     # credibly fit house.csv --target price --out run/
TableRun.load("run/").model.predict_file("new.csv", "predictions.csv")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from credibly.tables.config import Config
    from credibly.tables.prepared import prepare
    from credibly.tables.run import TableRun, fit_table, resume_table

__all__ = ["Config", "TableRun", "fit_table", "prepare", "resume_table"]

# Names are resolved on first use, so that the command line can check file names without torch.
_HOMES = {
    "Config": "config",
    "TableRun": "run",
    "fit_table": "run",
    "prepare": "prepared",
    "resume_table": "run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"credibly.tables.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'credibly.tables' has no attribute {name!r}")
