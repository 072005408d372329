"""The OpenAPI description of the server, made from the columns of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from credibly import __version__
from credibly.web.serve.columns import answer_columns, describe_columns
from credibly.web.serve.parameters import NAMES

if TYPE_CHECKING:
    from credibly.web.serve.runs import ServedRun

TYPES = {
    "level": {"type": "string", "default": "0.9"},
    "at": {"type": "string"},
    "draws": {"type": "integer", "minimum": 1},
    "allow_empty": {"type": "boolean", "default": False},
    "guarantee": {"type": "boolean", "default": True},
    "strict": {"type": "boolean", "default": True},
    "risk": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "confidence": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "default": 0.95},
    "tolerance": {"type": "number", "exclusiveMinimum": 0},
}
TEXT_COLUMNS = ("prediction", "notes")
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "status", "argument", "message", "advice"],
            "properties": {
                "type": {"type": "string"},
                "status": {"type": "integer"},
                "argument": {"type": ["string", "null"]},
                "message": {"type": "string"},
                "advice": {"type": "string"},
            },
        }
    },
}


def openapi(runs: Mapping[str, ServedRun], *, token: bool, max_rows: int) -> dict[str, Any]:
    """Return the document. A single run is also described at the root."""
    schemas: dict[str, Any] = {"Error": ERROR}
    paths: dict[str, Any] = {}
    for name, run in runs.items():
        key = _component(name, list(runs))
        schemas[f"{key}Row"] = _row(run)
        schemas[f"{key}Prediction"] = _prediction(run)
        prefix = f"/runs/{quote(name)}"
        for root in ("", prefix) if len(runs) == 1 else (prefix,):
            paths[f"{root}/predict"] = {"post": _predict(run, key, max_rows)}
            paths[f"{root}/picture"] = {"post": _picture(run, key)}
            paths[f"{root}/columns"] = {"get": _plain(f"Input columns of {name} with their distribution.")}
    paths["/runs"] = {"get": _plain("The runs, with their metrics and guarantee.")}
    paths["/health"] = {"get": _plain("Whether the process is alive.", open_to_all=True)}
    paths["/ready"] = {"get": _plain("Whether all runs are loaded.", open_to_all=True)}
    paths["/metrics"] = {"get": _plain("Metrics in the text format of Prometheus.", "text/plain")}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "credibly serve",
            "version": __version__,
            "description": "Predictions with uncertainty. Responses have the columns that `credibly predict` writes.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if token:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


def _component(name: str, names: list[str]) -> str:
    """Return the prefix of a run's schemas, whose names may only hold letters, digits, points and dashes."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
    return plain if len(names) == 1 or plain == name else f"{plain}_{names.index(name)}"


def _row(run: ServedRun) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for column in describe_columns(run):
        if column["kind"] == "numeric":
            about = f"Training rows: {column['low']:.6g} to {column['high']:.6g}."
            kind: dict[str, Any] = {"type": ["number", "string", "null"]}
        elif column["kind"] == "date":
            about, kind = f"A date. Training rows: {column['low']} to {column['high']}.", {"type": ["string", "null"]}
        else:
            some = ", ".join(repr(level["value"]) for level in column["levels"][:10])
            about = f"A category: {some}{', ...' if len(column['levels']) > 10 else ''}. Others are treated as unknown."
            kind = {"type": ["string", "number", "boolean", "null"]}
        # The note on a date begins with the same range.
        parts = [part for part in column["note"].split("; ") if part not in about]
        note = f" {'; '.join(parts).capitalize()}." if parts and parts[0] else ""
        properties[column["name"]] = kind | {"description": f"{about}{note}", "examples": [column["example"]]}
    return {
        "type": "object",
        "description": "null is a missing value. Columns of the training table that are not inputs may be sent too.",
        "properties": properties,
        "required": list(properties),
    }


def _prediction(run: ServedRun) -> dict[str, Any]:
    def kind(name: str) -> dict[str, Any]:
        text = name in TEXT_COLUMNS or name.startswith("set_")
        # Infinite values are text, since JSON has no number for them.
        return {"type": "string"} if text else {"type": ["number", "string", "null"]}

    properties = {name: kind(name) for name in answer_columns(run)} | {"abstain": {"type": "boolean"}}
    return {
        "type": "object",
        "description": "The columns of `credibly predict`. `abstain` is present if `risk` is given.",
        "properties": properties,
    }


def _predict(run: ServedRun, key: str, max_rows: int) -> dict[str, Any]:
    row, prediction = ({"$ref": f"#/components/schemas/{key}{part}"} for part in ("Row", "Prediction"))
    rows = {"type": "array", "items": row, "minItems": 1, "maxItems": max_rows}
    body = {"oneOf": [rows, {"type": "object", "properties": {"rows": rows}, "required": ["rows"]}]}
    example = [{column["name"]: column["example"] for column in describe_columns(run)}]
    known = run.model.preparation
    answer = {
        "type": "object",
        "properties": {
            "run": {"type": "string"},
            "version": {"type": "string"},
            "abstention": {"type": "object"},
            "predictions": {"type": "array", "items": prediction},
        },
        "required": ["run", "version", "predictions"],
    }
    # What a request to this run could not use.
    skipped = {"allow_empty" if known.classes is None else "tolerance"}
    if known.task != "survival":
        skipped.add("at")
    return {
        "summary": f"Predict {known.target} for each row.",
        "parameters": [
            {"name": name, "in": "query", "description": about, "schema": TYPES[name]}
            for name, about in NAMES.items()
            if name not in skipped
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": body, "example": example},
                "text/csv": {"schema": {"type": "string"}},
            },
        },
        "responses": {
            "200": {
                "description": "A prediction per row, in the order of the rows.",
                "content": {
                    "application/json": {"schema": answer},
                    "application/x-ndjson": {"schema": prediction},
                    "text/csv": {"schema": {"type": "string"}},
                },
            },
            **_errors(400, 401, 406, 408, 413, 415, 422, 503),
        },
    }


def _picture(run: ServedRun, key: str) -> dict[str, Any]:
    found = _plain(f"Predict {run.model.preparation.target} for one row, with the values that a picture needs.")
    row = {"$ref": f"#/components/schemas/{key}Row"}
    found["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": {"type": "array", "items": row, "minItems": 1, "maxItems": 1}}},
    }
    found["responses"] |= _errors(400, 413, 415, 422, 503)
    return found


def _plain(summary: str, kind: str = "application/json", *, open_to_all: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": {kind: {"schema": {}}}}},
    }
    return found | ({"security": []} if open_to_all else {})


def _errors(*statuses: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    meaning = {
        400: "The body cannot be read.",
        401: "The token is missing or wrong.",
        406: "None of the accepted content types is supported.",
        408: "The body did not arrive in time.",
        413: "Too many bytes or rows.",
        415: "The content type is not supported.",
        422: "A column, cell or parameter cannot be used.",
        503: "Too many rows are waiting, or the request timed out.",
    }
    return {str(s): {"description": meaning[s], "content": {"application/json": {"schema": schema}}} for s in statuses}
