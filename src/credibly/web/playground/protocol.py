"""Requests of the page, read from JSON and checked before any work; PROTOCOL.md describes the messages."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from credibly.core.checks import check_choice
from credibly.errors import InputError

# Bytes of one message, and rows of data: beyond these a fit would be too slow to be interactive.
MAX_BYTES = 256 * 1024
MAX_POINTS = 400
MAX_PANELS = 4
MAX_GRID = 10_000
SCENES = ("regression", "classification", "hmc", "vi")
ACTIVATIONS = ("tanh", "silu", "relu")
DENSITIES = ("banana", "funnel", "modes", "network")
FAMILIES = ("mean-field", "full-rank")
PREDICTED = "predicted"
# Largest absolute value of an input, a target or a coordinate.
MAX_VALUE = 1e4
# Options by method, each with its smallest and largest value.
STEPS: dict[str, tuple[float, float]] = {"steps": (1, 5000)}
CHAINS: dict[str, tuple[float, float]] = {"chains": (1, 16), "draws": (4, 500), "warmup": (20, 2000)}
OPTIONS: dict[str, dict[str, tuple[float, float]]] = {
    "mle": STEPS,
    "map": STEPS,
    "ensemble": {**STEPS, "members": (1, 30)},
    "dropout": {**STEPS, "rate": (0.0, 0.9)},
    "bbb": {**STEPS, "lr": (1e-3, 0.1)},
    "laplace": STEPS,
    "sghmc": {**CHAINS, "thin": (1, 100)},
    "hmc": {**CHAINS, "trajectory_length": (0.01, 10.0)},
}
REAL = ("rate", "lr", "trajectory_length")


@dataclass(frozen=True)
class Data:
    """Inputs, one list per row, and targets or labels."""

    x: tuple[tuple[float, ...], ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class ModelSpec:
    """The model of a fit; see PROTOCOL.md for the density that it defines."""

    hidden: tuple[int, ...] = (16, 16)
    activation: str = "tanh"
    prior_scale: float = 3.0
    likelihood_temperature: float = 1.0
    prior_temperature: float = 1.0
    noise: float | str = 0.1


@dataclass(frozen=True)
class PanelSpec:
    """A method and its options."""

    method: str
    options: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FitRequest:
    """Panels to fit to the same data and model, and the grid on which their predictions are shown."""

    id: int
    scene: str
    data: Data
    model: ModelSpec
    panels: tuple[PanelSpec, ...]
    seed: int
    # (from, to, count) per input.
    grid: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True)
class ProbeRequest:
    """One input at which every panel, or one of them, shows its predictive."""

    id: int
    x: tuple[float, ...]
    panel: int | None = None


@dataclass(frozen=True)
class HMCRequest:
    """Leapfrog trajectories on a density of two variables."""

    id: int
    density: str
    step_size: float
    trajectory_length: float
    chains: int
    trajectories: int
    seed: int
    # For the posterior of a network.
    data: Data | None
    model: ModelSpec | None


@dataclass(frozen=True)
class VIRequest:
    """A Gaussian fitted to the posterior of two weights."""

    id: int
    data: Data
    noise: float
    prior_scale: float
    family: str
    start: tuple[float, float]
    steps: int
    seed: int


@dataclass(frozen=True)
class CancelRequest:
    """Stop what is running."""

    id: int


Request = FitRequest | ProbeRequest | HMCRequest | VIRequest | CancelRequest


class Fields:
    """The fields of a JSON object, read one by one with checks; errors name the field."""

    def __init__(self, value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise InputError(name, f"must be an object, got {_kind(value)}")
        self.value, self.name = value, name

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field as it is. Raise if it is missing and there is no default."""
        if key in self.value:
            return self.value[key]
        if default is None:
            raise InputError(key, f"is missing from the {self.name}")
        return default

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a number within limits."""
        return number(key, self.get(key, default), low, high)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer within limits."""
        return integer(key, self.get(key, default), low, high)

    def choice(self, key: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """Return one of several words."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise InputError(key, f"must be one of {', '.join(choices)}, got {_kind(value)}")
        check_choice(key, value, choices)
        return value

    def items(self, key: str, most: int, least: int = 0) -> list[Any]:
        """Return a list of a limited length."""
        value = self.get(key)
        if not isinstance(value, list) or not least <= len(value) <= most:
            found = f"{len(value)} entries" if isinstance(value, list) else _kind(value)
            raise InputError(key, f"must be a list of {least} to {most} entries, got {found}")
        return value


def read(text: str | bytes) -> Request:
    """Return the request in a message. Raise `InputError` if it is not one."""
    if len(text) > MAX_BYTES:
        raise InputError("message", f"must have at most {MAX_BYTES:,} bytes, got {len(text):,}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("message", "must be JSON, got something else") from None
    fields = Fields(value, "message")
    kind = fields.choice("type", ("fit", "probe", "hmc", "vi", "cancel"))
    if kind == "cancel":
        return CancelRequest(request_id(value) or 0)
    number_ = fields.integer("id", 0, 2**31)
    if kind == "probe":
        x = tuple(number("x", v, -MAX_VALUE, MAX_VALUE) for v in fields.items("x", 2, 1))
        one = fields.integer("panel", 0, MAX_PANELS - 1) if "panel" in value else None
        return ProbeRequest(number_, x, one)
    if kind == "hmc":
        return _hmc(fields, number_)
    return _vi(fields, number_) if kind == "vi" else _fit(fields, number_)


def request_id(value: Any) -> int | None:
    """Return the id of a message that may be anything, or None."""
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def number(name: str, value: Any, low: float, high: float) -> float:
    """Return a finite number within limits, or raise."""
    # Compared before any conversion: an integer of hundreds of digits is too large for a float. NaN is not in order.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InputError(name, f"must be a number from {low:g} to {high:g}, got {_kind(value)}")
    return float(value)


def integer(name: str, value: Any, low: int, high: int) -> int:
    """Return an integer within limits, or raise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(name, f"must be an integer from {low} to {high}, got {_kind(value)}")
    return value


def _fit(fields: Fields, number_: int) -> FitRequest:
    scene = fields.choice("scene", ("regression", "classification"))
    inputs = 1 if scene == "regression" else 2
    panels = tuple(_panel(Fields(p, "panel")) for p in fields.items("panels", MAX_PANELS, 1))
    axes = Fields(fields.get("grid"), "grid")
    grid = tuple(_axis(key, axes.items(key, 3, 3)) for key in ("x", "y")[:inputs])
    if math.prod(count for _, _, count in grid) > MAX_GRID:
        raise InputError("grid", f"must have at most {MAX_GRID:,} points")
    data = _data(fields, inputs, labels=scene == "classification")
    return FitRequest(number_, scene, data, _model(fields), panels, fields.integer("seed", 0, 2**31, 0), grid)


def _hmc(fields: Fields, number_: int) -> HMCRequest:
    density = fields.choice("density", DENSITIES)
    network = density == "network"
    return HMCRequest(
        number_,
        density,
        fields.number("step_size", 0.005, 3.0),
        fields.number("trajectory_length", 0.01, 20.0),
        fields.integer("chains", 1, 4, 1),
        fields.integer("trajectories", 1, 300, 30),
        fields.integer("seed", 0, 2**31, 0),
        _data(fields, 1, labels=False) if network else None,
        _model(fields) if network else None,
    )


def _vi(fields: Fields, number_: int) -> VIRequest:
    a, b = (number("start", v, -10, 10) for v in fields.items("start", 2, 2))
    return VIRequest(
        number_,
        _data(fields, 1, labels=False),
        fields.number("noise", 0.01, 10),
        fields.number("prior_scale", 0.05, 20),
        fields.choice("family", FAMILIES, FAMILIES[0]),
        (a, b),
        fields.integer("steps", 20, 3000, 600),
        fields.integer("seed", 0, 2**31, 0),
    )


def _data(fields: Fields, inputs: int, *, labels: bool) -> Data:
    data = Fields(fields.get("data"), "data")
    rows = data.items("x", MAX_POINTS, 1)
    targets = data.items("y", MAX_POINTS, 1)
    if len(rows) != len(targets):
        raise InputError("data", f"must have as many x as y, got {len(rows)} and {len(targets)}")
    for row in rows:
        if not isinstance(row, list) or len(row) != inputs:
            raise InputError("x", f"must have {inputs} {'number' if inputs == 1 else 'numbers'} per row")
    x = tuple(tuple(number("x", v, -MAX_VALUE, MAX_VALUE) for v in row) for row in rows)
    if labels:
        return Data(x, tuple(float(integer("y", v, 0, 1)) for v in targets))
    return Data(x, tuple(number("y", v, -MAX_VALUE, MAX_VALUE) for v in targets))


def _model(fields: Fields) -> ModelSpec:
    model = Fields(fields.get("model"), "model")
    noise = model.get("noise", 0.1)
    return ModelSpec(
        tuple(integer("hidden", h, 1, 64) for h in model.items("hidden", 3, 1)),
        model.choice("activation", ACTIVATIONS, "tanh"),
        model.number("prior_scale", 0.05, 20),
        model.number("likelihood_temperature", 1e-4, 1e4, 1.0),
        model.number("prior_temperature", 1e-4, 1e4, 1.0),
        PREDICTED if noise == PREDICTED else number("noise", noise, 0.01, 10),
    )


def _panel(panel: Fields) -> PanelSpec:
    method = panel.choice("method", tuple(OPTIONS))
    given, limits = Fields(panel.get("options", {}), "options"), OPTIONS[method]
    unknown = sorted(set(given.value) - set(limits))
    if unknown:
        raise InputError(unknown[0][:40], f"is not an option of {method}; its options are {', '.join(limits)}")
    options: dict[str, float] = {}
    for key in given.value:
        low, high = limits[key]
        options[key] = given.number(key, low, high) if key in REAL else given.integer(key, int(low), int(high))
    return PanelSpec(method, options)


def _axis(name: str, values: list[Any]) -> tuple[float, float, int]:
    low, high = (number(name, v, -MAX_VALUE, MAX_VALUE) for v in values[:2])
    if low >= high:
        raise InputError(name, f"must run from a smaller to a larger value, got {low:g} and {high:g}")
    return low, high, integer(name, values[2], 2, 401)


def _kind(value: Any) -> str:
    """Return a short description of a JSON value for messages."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
