"""Predictions as a response body: JSON, JSON lines or CSV, by the code that writes prediction files."""

from __future__ import annotations

import json
import math
from typing import Any

from credibly.tables.files.writing import written
from credibly.web.serve.errors import RequestError
from credibly.web.serve.rows import CSV, JSON

LINES = "application/x-ndjson"
TYPES = {JSON: JSON, LINES: LINES, CSV: f"{CSV}; charset=utf-8"}


def accepted_type(header: str) -> str:
    """Return the media type that an Accept header prefers. Raise if it accepts none of TYPES."""
    best, weight = "", 0.0
    for part in header.split(",") if header.strip() else ["*/*"]:
        name, *parameters = (p.strip().lower() for p in part.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        try:
            value = float(quality)
        except ValueError:
            value = 0.0
        found = next((t for t in TYPES if name in (t, "*/*", f"{t.split('/')[0]}/*")), "")
        if found and value > weight:
            best, weight = found, value
    if not best:
        advice = f"Accept one of {', '.join(TYPES)}"
        raise RequestError(406, "none of the types in the Accept header is supported", argument="Accept", advice=advice)
    return best


def strict_json(value: Any) -> Any:
    """Return a JSON value with null in place of NaN and infinite numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {key: strict_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def encode(columns: dict[str, Any], kind: str, facts: dict[str, Any]) -> bytes:
    """Return columns of predictions in one of TYPES; JSON also holds `facts` on the run, before the predictions."""
    if kind == CSV:
        return written(columns, ".csv")
    lines = written(columns, ".jsonl")
    if kind == LINES:
        return lines
    # The lines are objects already, without line breaks in them.
    start = json.dumps(strict_json(facts), ensure_ascii=False)[:-1].encode()
    return b'%s, "predictions": [%s]}\n' % (start, lines.rstrip(b"\n").replace(b"\n", b", "))
