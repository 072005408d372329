"""A posterior as a BoTorch model: every draw of the weights is one function, so points are sampled jointly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from credibly.core.inputs import blank_row
from credibly.errors import InputError
from credibly.predictive.base import Predictive

if TYPE_CHECKING:
    from credibly.predictive.source import DrawSource


def botorch_model(source: DrawSource, row: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Return a `botorch.models.ensemble.EnsembleModel` of the functions E(y | x, w_s) of a source of draws.

    Args:
        source: the draws and the network.
        row: structure of one row of x, which has to be a single vector.
        device, dtype: of the network.
    """
    try:
        from botorch.models.ensemble import EnsembleModel
    except ImportError as error:
        raise InputError(
            "as_botorch", "needs botorch, which is not installed", 'pip install "credibly[botorch]"'
        ) from error
    blank = blank_row(row, device)
    if not isinstance(blank, Tensor) or blank.ndim != 2 or not blank.is_floating_point():
        raise InputError("as_botorch", "BoTorch's points are vectors of numbers, and a row of x is not", "Wrap the net")
    trial = Predictive(source, blank).functions()
    if trial.ndim > 3:
        raise InputError("as_botorch", f"each prediction has shape {tuple(trial.shape[2:])}", "Predict single values")
    plain, inputs = trial.ndim == 2, blank.shape[-1]

    class PosteriorModel(EnsembleModel):  # type: ignore[misc, unused-ignore]
        """Functions E(y | x, w_s) of the draws, without observation noise, differentiable in X."""

        _num_outputs = 1 if plain else trial.shape[-1]

        @property
        def batch_shape(self) -> torch.Size:
            """One model: no batch of models."""
            return torch.Size([])

        def forward(self, X: Tensor) -> Tensor:
            """Return function values (batch, draws, q, outputs) at points X (batch, q, d)."""
            if X.shape[-1] != inputs:
                raise InputError("X", f"has {X.shape[-1]} inputs per point, the network takes {inputs}")
            rows = X.reshape(-1, X.shape[-1]).to(device, dtype)
            values = Predictive(source, rows).functions()
            values = values.unsqueeze(-1) if plain else values
            values = values.reshape(len(values), *X.shape[:-1], values.shape[-1])
            return values.movedim(0, -3).to(X)

    return PosteriorModel()
