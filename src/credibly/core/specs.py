"""Dataclasses (priors, likelihoods, methods) to and from JSON, by class name and fields. Nothing is ever executed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from credibly.errors import StoreError

# Stored names are part of the format of run folders: classes keep theirs when their module moves to another package.
STORED_PREFIXES = {
    "credibly.gaussians.families": "families",
    "credibly.networks.fused_unit": "fused_unit",
    "credibly.networks.normalisation": "norms",
    "credibly.networks.zoo": "zoo",
}


def kind_name(cls: type) -> str:
    """Return the name a class is stored under.

    "priors.Normal", "likelihoods.Gaussian"; a class of another package by its full name.
    """
    package, _, rest = cls.__module__.partition(".")
    if package != "credibly":
        return f"{cls.__module__}.{cls.__qualname__}"
    return f"{STORED_PREFIXES.get(cls.__module__, rest.split('.')[0])}.{cls.__qualname__}"


def kinds_of(*classes: type) -> dict[str, type]:
    """Return classes by the names they are stored under."""
    return {kind_name(cls): cls for cls in classes}


def to_spec(value: Any) -> Any:
    """Return a dataclass as {"kind": class name, field: value, ...}, and containers and scalars as JSON values.

    An object with a `spec` method describes itself.
    """
    if not isinstance(value, type) and callable(getattr(value, "spec", None)):
        return value.spec()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_spec(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": kind_name(type(value)), **fields}
    if isinstance(value, Mapping):
        return {str(k): to_spec(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_spec(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)  # for the reader only; `from_spec` never sees these


def from_spec(spec: Any, kinds: Mapping[str, type]) -> Any:
    """Invert `to_spec` for the classes in `kinds`. Raise for any other name."""
    if isinstance(spec, list):
        return tuple(from_spec(v, kinds) for v in spec)
    if not isinstance(spec, Mapping):
        return spec
    if "kind" not in spec:
        return {k: from_spec(v, kinds) for k, v in spec.items()}
    kind = spec["kind"]
    if kind not in kinds:
        raise StoreError(
            f"the run was made with {kind!r}, which this version does not know. Known are {', '.join(sorted(kinds))}"
        )
    fields = {k: from_spec(v, kinds) for k, v in spec.items() if k != "kind"}
    try:
        return kinds[kind](**fields)
    except (TypeError, ValueError) as error:
        raise StoreError(f"the stored description of {kind} cannot be used: {error}") from error


def check_field_types(made: Any) -> None:
    """Raise TypeError if a plain field of a dataclass has a value of another type, as only a modified file has."""
    kinds: dict[Any, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
    for one in dataclasses.fields(made):
        value, name = (
            getattr(made, one.name),
            one.type if isinstance(one.type, str) else getattr(one.type, "__name__", ""),
        )
        if name in kinds and (not isinstance(value, kinds[name]) or (isinstance(value, bool) and name != "bool")):
            raise TypeError(f"{one.name} must be {name}, got {type(value).__name__}")
        if name == "tuple[str, ...]" and not all(isinstance(item, str) for item in value):
            raise TypeError(f"{one.name} must be a list of text")
