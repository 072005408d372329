"""Web programs: the prediction server and the playground. They need the extra `credibly[web]`.

Importing this package loads neither torch nor the extra.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from credibly.errors import InputError

if TYPE_CHECKING:
    from starlette.applications import Starlette

EXTRA = ("starlette", "uvicorn", "websockets")
INSTALL = 'pip install "credibly[web]"'


def check_extra(program: str) -> None:
    """Raise with the command that installs the extra, if one of its libraries is absent."""
    absent = [name for name in EXTRA if find_spec(name) is None]
    if absent:
        raise InputError(program, f"needs {', '.join(absent)}, not installed here", f"Install with {INSTALL}")


def app(*runs: str | os.PathLike[str], **settings: Any) -> Starlette:
    """Return an ASGI application that serves predictions of run folders; see `credibly.web.serve.Settings`.

    Args:
        runs: folders written by `credibly fit`, each optionally with a name for its address: "houses=runs/3/".
        settings: fields of `Settings`, such as `token` and `max_rows`.
    """
    check_extra("credibly.web.app")
    from credibly.web.serve.app import make_app
    from credibly.web.serve.settings import Settings

    return make_app(runs, Settings(**settings))
