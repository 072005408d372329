"""Draws as an ArviZ DataTree (formerly InferenceData), for its plots, model comparison and file formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from credibly.errors import InputError

Array = Tensor | npt.NDArray[Any]

# ArviZ's names for our samplers' statistics.
NAMES = {"acceptance": "acceptance_rate", "divergent": "diverging"}


def to_arviz(
    weights: Mapping[str, Array],
    *,
    statistics: Mapping[str, Array] | None = None,
    functions: Array | None = None,
    predictive: Array | Mapping[str, Array] | None = None,
    observed: Array | Mapping[str, Array] | None = None,
    log_likelihood: Array | Mapping[str, Array] | None = None,
) -> Any:
    """Return an `xarray.DataTree` in ArviZ's layout. Requires arviz-base.

    Args:
        weights: draws by tensor name, (chain, draw, *shape) each: group `posterior`.
        statistics: sampler statistics per draw, (chain, draw) each, such as acceptance, divergent, energy: group
            `sample_stats`, with acceptance as acceptance_rate and divergent as diverging.
        functions: E[y | x, w] of each draw, (chain, draw, ...): variable `functions` of `posterior`, as it is a
            function of the weights. ArviZ's R-hat and ESS tables then cover the function space too.
        predictive: draws of y, (chain, draw, ...): group `posterior_predictive`.
        observed: the observed y: group `observed_data`.
        log_likelihood: log p(y_i | x_i, w) of each draw, (chain, draw, ...): group `log_likelihood`.

    The last three are arrays by name, or one array, which is named `y`.
    """
    try:
        from arviz_base import from_dict
    except ModuleNotFoundError as error:
        advice = "to_arviz needs arviz-base: pip install arviz-base (or credibly[arviz])"
        raise ModuleNotFoundError(advice, name=error.name) from error
    from credibly import __version__

    if not weights:
        raise InputError("weights", "is empty", "Pass draws by tensor name, (chain, draw, *shape) each")
    posterior = _group("weights", weights)
    lead = next(iter(posterior.values())).shape[:2]
    if functions is not None:
        if "functions" in posterior:
            raise InputError("functions", "is also the name of a tensor", "Rename that tensor")
        posterior |= _group("functions", {"functions": functions})
    groups = {
        "posterior": posterior,
        "sample_stats": {NAMES.get(k, k): v for k, v in _group("statistics", statistics or {}).items()},
        "posterior_predictive": _group("predictive", _named(predictive)),
        "log_likelihood": _group("log_likelihood", _named(log_likelihood)),
    }
    for name, group in groups.items():
        for variable, values in group.items():
            if values.shape[:2] != lead:
                found = f"{variable} of {name} has shape {values.shape}"
                raise InputError("weights", found, f"All arrays need the same chains and draws, {lead}")
    if "diverging" in groups["sample_stats"]:
        groups["sample_stats"]["diverging"] = groups["sample_stats"]["diverging"].astype(bool)
    groups["observed_data"] = {name: _array("observed", values) for name, values in _named(observed).items()}
    about = {"inference_library": "credibly", "inference_library_version": __version__}
    # More chains than draws is legitimate here, so ArviZ's check for swapped axes is off.
    filled = {name: group for name, group in groups.items() if group}
    return from_dict(filled, attrs={"/": about}, check_conventions=False)


def _named(values: Array | Mapping[str, Array] | None) -> Mapping[str, Array]:
    if values is None:
        return {}
    return values if isinstance(values, Mapping) else {"y": values}


def _group(argument: str, values: Mapping[str, Array]) -> dict[str, npt.NDArray[Any]]:
    found = {name: _array(argument, value) for name, value in values.items()}
    for name, value in found.items():
        if value.ndim < 2:
            raise InputError(argument, f"{name} must have shape (chain, draw, ...), got {value.shape}")
    return found


def _array(argument: str, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return np.asarray(value if value.dtype.itemsize != 2 or not value.is_floating_point() else value.float())
    if not isinstance(value, np.ndarray):
        raise InputError(argument, f"must hold tensors or arrays, got a {type(value).__name__}")
    return value
