"""`posterior.export(path)`: the Bayesian model average as one ONNX or torch.export file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credibly import __version__
from credibly.core.checks import check_integer, check_probability
from credibly.core.inputs import Inputs, blank_row, map_inputs, row_count, tensors_of
from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.export.files import Case, Exported, check_path, check_size, to_onnx, write_checked
from credibly.export.graph import DrawsGraph, PredictiveGraph, trace
from credibly.export.networks import StackedNetwork, stacked_network
from credibly.export.quantiles import has_quantiles
from credibly.export.summary import LABELS, NUMBERS, output_names, quantile_name
from credibly.likelihoods import Heads, Likelihood
from credibly.posterior.base import CalibratedPosterior, Posterior
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.dropout import DropoutPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.laplace import LaplacePosterior
from credibly.predictive.base import Predictive

LEVELS = (0.05, 0.5, 0.95)
# Rows of the comparison with `predict`, and of the trace; another number shows that rows are not built in.
ROWS = 5
TRACED = 3
LINEARISED = (
    "Linearised predictions are exported for plain stacks of Linear layers and activations, and for Gaussians over the"
    ' last layer (Laplace(random="last layer")). Fit one of these, or an ensemble or SWAG'
)


def export_posterior(
    posterior: Posterior,
    path: str | os.PathLike[str],
    *,
    x: Any = None,
    levels: Sequence[float] | None = None,
    draws: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> Exported:
    """Write a posterior as a graph of its predictions; see `Posterior.export`."""
    file = check_path(path, overwrite)
    settings, how = predict_settings(posterior, draws, seed)
    likelihood = posterior.likelihood
    levels, notes = _checked_levels(likelihood, levels)
    rows = example_rows(posterior, x)
    predictive = posterior.predict(rows, **settings)
    network = stacked_network(predictive.source, posterior.model)
    if file.suffix == ".onnx":
        check_size(network.bytes, network.draws)
    tensors = [tensor for _, tensor in tensors_of(rows)]
    names = input_names(posterior.model.row)
    outputs = output_names(likelihood, levels)
    graph = PredictiveGraph(DrawsGraph(network, _first_rows(tensors, TRACED)), likelihood, levels)
    program = trace(graph, tuple(_first_rows(tensors, TRACED)), (({0: torch.export.Dim.DYNAMIC},) * len(tensors),))
    notes = (how, *notes)
    content = program
    if file.suffix == ".onnx":
        content = to_onnx(program, names, outputs, metadata(posterior, network, notes))
    cases = [_case(posterior, settings, rows, names, levels, count) for count in (1, len(tensors[0]))]
    found = write_checked(file, content, cases, LINEARISED if isinstance(posterior, LaplacePosterior) else "")
    return Exported(file, file.stat().st_size, names, outputs, network.draws, found, notes)


def predict_settings(posterior: Posterior, draws: int | None, seed: int) -> tuple[dict[str, Any], str]:
    """Return the settings of `predict` whose predictions are exported, and a sentence on the draws they use.

    Raise for posteriors that cannot be exported.
    """
    check_seed(seed)
    if draws is not None:
        check_integer("draws", draws)
    if isinstance(posterior, CalibratedPosterior):
        raise InputError(
            "posterior",
            "is calibrated, and a graph of a posterior has no guarantee",
            "Export posterior.posterior. Runs of `credibly fit` keep their guarantee: credibly export run/ model.onnx",
        )
    if isinstance(posterior, DrawsPosterior):
        total = posterior.shape[0] * posterior.shape[1]
        if draws is not None and draws > total:
            raise InputError("draws", f"must be at most {total}, the number of stored draws, got {draws}")
        if total == 1:
            return {"draws": draws}, "There is one set of weights, so no model average."
        which = f"all {total:,} stored draws" if draws in (None, total) else f"{draws:,} of {total:,} stored draws"
        return {"draws": draws}, f"The model average is over {which}."
    if isinstance(posterior, GaussianPosterior):
        count = 100 if draws is None else draws
        return {"draws": count, "seed": seed}, f"The model average is over {count:,} draws of q(w), by seed {seed}."
    if isinstance(posterior, DropoutPosterior):
        count = 100 if draws is None else draws
        return {"passes": count, "seed": seed}, f"The model average is over {count:,} dropout masks, by seed {seed}."
    if isinstance(posterior, LaplacePosterior):
        count = 128 if draws is None else draws
        how = (
            f"The model average is over {count:,} draws of the linearised network, by seed {seed}: predict(joint=True)."
        )
        return {"draws": count, "seed": seed, "joint": True}, how
    raise InputError(
        "posterior", f"{type(posterior).__name__} has no network to export", "Fit a credibly.Problem with a network"
    )


def _checked_levels(
    likelihood: Likelihood, levels: Sequence[float] | None
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Return the levels of the quantiles, and notes about them."""
    if isinstance(likelihood, Heads):
        found = f"has the heads {', '.join(likelihood.heads)}, and a graph has the outputs of one likelihood"
        raise InputError("posterior", found, "Fit a network for each head, or serve the run with credibly itself")
    chosen = LEVELS if levels is None else tuple(levels)
    for level in chosen:
        check_probability("levels", level)
    if len(set(chosen)) < len(chosen):
        raise InputError("levels", f"must be different probabilities, got {list(chosen)}")
    if not chosen or has_quantiles(likelihood):
        return chosen, ()
    kind = type(likelihood).__name__
    if levels is None:
        return (), () if likelihood.support in ("class", "binary") else (f"Quantiles of {kind} are not exported.",)
    found = f"quantiles of {kind} outcomes cannot be exported"
    raise InputError("levels", found, "Pass levels=(), or leave it out. Gaussian, HeteroscedasticGaussian and StudentT"
                     " have them")  # fmt: skip


def example_rows(posterior: Posterior, x: Any) -> Inputs:
    """Return rows for the trace and the comparison, on the CPU: of x, or random ones in the shape of the inputs."""
    model = posterior.model
    if x is not None:
        checked = model.as_fitted(model.layout.inputs(x, True))
        rows = map_inputs(lambda t: t[:ROWS].cpu(), checked)
        short = ROWS - row_count(rows)
        return map_inputs(lambda t: torch.cat([t, t[:1].expand(short, *t.shape[1:])]), rows) if short else rows

    generator = stream(0, "export rows")

    def random(blank: Tensor) -> Tensor:
        shape = (ROWS, *blank.shape[1:])
        if not blank.is_floating_point():
            return blank.expand(shape).clone()
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(blank.dtype)

    return map_inputs(random, blank_row(model.row, torch.device("cpu")))


def input_names(row: Any) -> tuple[str, ...]:
    """Return the names of the inputs of a graph: "x", "x0" and "x1" for a tuple, the keys of a dict."""
    if row["form"] == "tuple":
        return tuple(f"x{number}" for number in range(len(row["parts"])))
    return ("x",) if row["form"] == "tensor" else tuple(part["name"] for part in row["parts"])


def metadata(posterior: Posterior, network: StackedNetwork, notes: Sequence[str]) -> dict[str, str]:
    """Return the metadata of an ONNX file, as text by key."""
    record = posterior.record
    facts = {"method": record.method, "seed": record.seed, "training_rows": record.n, "draws": network.draws}
    facts |= {"likelihood": type(network.likelihood).__name__, "notes": list(notes)}
    return {"credibly": __version__, "credibly_export": json.dumps(facts)}


def expected_outputs(predictive: Predictive, levels: Sequence[float]) -> dict[str, Tensor]:
    """Return the outputs, by name, that a graph must have for the rows of a predictive."""
    names = LABELS if predictive.likelihood.support in ("class", "binary") else NUMBERS
    found = {name: getattr(predictive, name) for name in names}
    if levels:
        found |= dict(zip(map(quantile_name, levels), predictive.quantile(list(levels))))
    return found


def scales_of(expected: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the size of one unit of difference for means, quantiles and parts of the variance."""
    if "variance" not in expected:
        return {}
    variance = np.where(np.isfinite(expected["variance"]), expected["variance"], 1).astype(np.float64)
    found = {}
    for name, value in expected.items():
        spread = variance if name in NUMBERS[1:] else np.sqrt(variance) + np.abs(value)
        found[name] = np.maximum(spread, np.finfo(np.float64).tiny)
    return found


def _case(
    posterior: Posterior,
    settings: dict[str, Any],
    rows: Inputs,
    names: Sequence[str],
    levels: Sequence[float],
    count: int,
) -> Case:
    some = map_inputs(lambda t: t[:count], rows)
    tensors = expected_outputs(posterior.predict(some, **settings), levels)
    expected = {name: value.detach().cpu().numpy() for name, value in tensors.items()}
    given = {name: tensor.numpy() for name, (_, tensor) in zip(names, tensors_of(some))}
    return Case(given, expected, scales_of(expected))


def _first_rows(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    return [tensor[:count].clone() for tensor in tensors]
