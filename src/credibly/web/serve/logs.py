"""Structured logs: one JSON object per line. They never hold rows, query strings, headers or tokens."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("credibly.serve")
FIELDS = "credibly_fields"


class JsonLines(logging.Formatter):
    """Formatter of records as JSON lines.

    The message of an exception may quote what a client sent: only its type and where it was raised are written.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        found: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        found |= getattr(record, FIELDS, {})
        if record.exc_info and record.exc_info[0] is not None:
            found["exception"] = record.exc_info[0].__name__
            frames = traceback.extract_tb(record.exc_info[2])
            found["raised_at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-8:]]
        return json.dumps(found)


def event(name: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Log an event with fields."""
    log.log(level, name, extra={FIELDS: fields}, exc_info=error)


def write_logs(level: int = logging.INFO) -> None:
    """Write the events of the server and of uvicorn to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, least in (("credibly", level), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)
