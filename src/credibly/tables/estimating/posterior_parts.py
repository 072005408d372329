"""A posterior as parts that can be pickled and converted to float64."""

from __future__ import annotations

from typing import Any

from credibly.core.inputs import blank_row, describe, map_inputs
from credibly.forward import Forward
from credibly.networks.layout import Layout
from credibly.posterior.base import Posterior
from credibly.posterior.loading import POSTERIORS
from credibly.posterior.model import Model


def to_parts(posterior: Posterior) -> dict[str, Any]:
    """Return the parts of a posterior without its forward pass, which consists of functions that cannot be pickled."""
    model = posterior.model
    return {
        "kind": posterior.kind,
        "layout": model.layout,
        "likelihood": model.likelihood,
        "row": model.row,
        "looped": model.forward.looped,
        "precision": model.forward.precision,
        "record": posterior.record,
        "tensors": posterior.tensors(),
        "description": posterior.description(),
    }


def in_float64(parts: dict[str, Any]) -> dict[str, Any]:
    """Convert the parts of a posterior to float64."""
    layout: Layout = parts["layout"]
    extra = {e.name: e.shape for e in layout.entries if e.name in layout.extra}
    tensors = {k: v.double() if v.is_floating_point() else v for k, v in parts["tensors"].items()}
    row = describe(map_inputs(lambda t: t.double(), blank_row(parts["row"], layout.device)))
    # Layout copies the module, so the one of the fit may be converted in place.
    return parts | {"layout": Layout(layout.module.double(), layout.random, extra), "tensors": tensors, "row": row}


def from_parts(parts: dict[str, Any]) -> Posterior:
    """Restore a posterior from the result of `to_parts`."""
    layout = parts["layout"]
    trial = blank_row(parts["row"], layout.device)
    forward = Forward(layout, "looped" if parts["looped"] else "batched", trial, precision=parts["precision"])
    model = Model(layout, parts["likelihood"], forward, parts["row"])
    return POSTERIORS[parts["kind"]].from_tensors(model, parts["tensors"], parts["record"], parts["description"])
