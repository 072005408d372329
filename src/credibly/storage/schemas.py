"""Schemas of the JSON files of a run, checked in one place before anything is built from them.

A field that is missing, of another type or out of range is named in the error. Fields that are not listed here are
left to the code that reads them, which `guarding.as_store_errors` guards.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Dtype = Literal["torch.float16", "torch.bfloat16", "torch.float32", "torch.float64"]
RowDtype = Literal[
    "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool", "complex64",
    "complex128",
]  # fmt: skip
Count = Annotated[int, Field(ge=0, lt=2**63)]
Shape = Annotated[list[Count], Field(max_length=16)]
Status = Literal["fitting", "complete"]

# Values in the largest row of inputs, of which one is allocated when a run is loaded.
MOST_ROW_VALUES = 2**26


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=True, protected_namespaces=())


class _Exact(_Strict):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=True, protected_namespaces=())


class StoredFile(_Exact):
    """A file of a run folder."""

    bytes: Count
    sha256: str


class LayoutEntry(_Exact):
    """One tensor of the network or of the likelihood."""

    name: str
    shape: Shape
    role: Literal["random", "extra", "fixed"]


class RowPart(_Exact):
    """One tensor of a row of inputs."""

    name: str
    shape: Shape
    dtype: RowDtype
    least: int | None = None


class Row(_Exact):
    """A row of inputs."""

    form: Literal["tensor", "tuple", "dict"]
    parts: Annotated[list[RowPart], Field(min_length=1)]


class StoredRecord(_Exact):
    """How a posterior was obtained, see `credibly.storage.record.Record`."""

    method: str
    settings: dict[str, Any]
    seed: Count
    n: Count
    fingerprint: str
    prior: Any
    tempering: dict[str, float]
    history: dict[str, Any]
    status: str


class FrozenBody(_Strict):
    """How the part of a network without random parameters is evaluated."""

    looped: bool


class Manifest(_Strict):
    """The fields that every manifest has."""

    kind: str
    record: StoredRecord
    files: dict[str, StoredFile]
    description: Any = None
    checksum: str | None = None
    streamed: bool | None = None
    status: str | None = None
    state: str | None = None


class NetworkManifest(Manifest):
    """The manifest of a network's posterior."""

    layout: list[LayoutEntry]
    random: list[str]
    dtype: Dtype
    likelihood: dict[str, Any]
    row: Row
    looped: bool
    precision: str | None = None
    network: dict[str, Any] | None = None
    frozen_body: FrozenBody | None = None


class Backend(_Strict):
    """The backend of a sampler's run."""

    name: str
    compiled: bool
    library: bool | None
    compiler: bool


class StreamedFields(_Strict):
    """Further fields in the manifest of a sampler's run."""

    status: Literal["running", "interrupted", "complete", "partial"]
    noted: list[str]
    progress: dict[str, Any]
    arithmetic: dict[str, Any]
    probe: list[float]
    backend: Backend | None = None


class TrainingFields(_Strict):
    """Further fields in the manifest of a fit that trains, until it is complete."""

    status: Literal["running"]
    state: str
    stages: list[dict[str, Any]]
    training: dict[str, Any]
    arithmetic: dict[str, Any]
    probe: list[float]
    backend: Backend


class DensityFields(_Strict):
    """Further fields in the manifest of a run on a plain density."""

    density: dict[str, Any]


class TableFacts(_Strict):
    """table.json of a run, from the start of the fit."""

    status: Status
    config: dict[str, Any]
    preparation: dict[str, Any]
    rows: Count
    held_out: Count
    folds: Annotated[Count, Field(le=1000)]
    fold_of_row: list[Count]
    parameters: Count
    threads: Annotated[int, Field(ge=1, le=4096)]
    files: dict[str, str]
    why: str
    warnings: list[str]
    candidates: list[Any]
    versions: dict[str, str]


class CompleteTableFacts(TableFacts):
    """table.json of a complete run."""

    seconds: float
    on: Literal["cross-validated", "held-out", "training"]
    figures: dict[str, Any]
    ood_levels: list[float] | None
    calibration: dict[str, Any] | None
    guarantee: Any


def manifest_problems(manifest: dict[str, Any]) -> list[str]:
    """Return the names of fields of a manifest that are missing or invalid."""
    kinds: list[type[BaseModel]] = [Manifest if manifest.get("kind") == "density" else NetworkManifest]
    if manifest.get("streamed") is True:
        kinds += [StreamedFields, *([DensityFields] if manifest.get("kind") == "density" else [])]
    if manifest.get("kind") == "training" and manifest.get("state") is not None:
        kinds.append(TrainingFields)
    problems = list(dict.fromkeys(name for kind in kinds for name in _problems(kind, manifest)))
    if not problems and kinds[0] is NetworkManifest:
        problems = _size_problems(manifest)
    return problems


def facts_problems(facts: dict[str, Any]) -> list[str]:
    """Return the names of fields of table.json that are missing or invalid."""
    complete = facts.get("status") == "complete"
    found = _problems(CompleteTableFacts if complete else TableFacts, facts)
    if complete and facts.get("format_version") != 1 and "posterior/manifest.json" not in facts.get("files", {}):
        found.append("the posterior in files")
    return found


def _size_problems(manifest: dict[str, Any]) -> list[str]:
    """Compare what would be allocated with what the files hold: every value takes a byte there, at least."""
    stored = sum(entry["bytes"] for entry in manifest["files"].values())
    if sum(prod(entry["shape"]) for entry in manifest["layout"]) > stored:
        return ["layout, which has more values than the files"]
    values = sum(prod(part["shape"]) for part in manifest["row"]["parts"])
    return [f"row, which has {values:,} values"] if values > MOST_ROW_VALUES else []


def _problems(kind: type[BaseModel], values: dict[str, Any]) -> list[str]:
    try:
        TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        return list(dict.fromkeys(_name(item["loc"]) for item in error.errors(include_url=False, include_input=False)))
    return []


def _name(place: tuple[int | str, ...]) -> str:
    first, *rest = (str(part)[:80] for part in place)
    if first == "record" and rest:
        return f"{rest[0]!r} in the record"
    if first == "files" and rest:
        return f"the entry of {rest[0]}"
    return ".".join([first, *rest])
