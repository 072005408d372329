"""A posterior as a BoTorch model: every draw of the weights is one function, so points are sampled jointly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, blank_row
from credibly.errors import InputError
from credibly.posterior.model import Model
from credibly.predictive.base import Predictive

if TYPE_CHECKING:
    from credibly.predictive.source import DrawSource


def botorch_model(source: DrawSource, model: Model) -> Any:
    """Return a `botorch.models.ensemble.EnsembleModel` of the functions E(y | x, w_s) of a source of draws.

    Args:
        source: the draws and the network.
        model: the network; one row of x has to be a single vector.
    """
    try:
        from botorch.models.ensemble import EnsembleModel
    except ImportError as error:
        raise _missing() from error
    inputs, outputs = _sizes(source, model)

    class PosteriorModel(EnsembleModel):  # type: ignore[misc, unused-ignore]
        """Functions E(y | x, w_s) of the draws, without observation noise, differentiable in X."""

        _num_outputs = max(1, outputs)

        @property
        def batch_shape(self) -> torch.Size:
            """One model: no batch of models."""
            return torch.Size([])

        def forward(self, X: Tensor) -> Tensor:
            """Return function values (batch, draws, q, outputs) at points X (batch, q, d)."""
            values = Predictive(source, _rows(X, inputs, model)).functions()
            values = values if outputs else values.unsqueeze(-1)
            return values.reshape(len(values), *X.shape[:-1], values.shape[-1]).movedim(0, -3).to(X)

    return PosteriorModel()


def botorch_mixture(source: DrawSource, model: Model) -> Any:
    """Return a fully Bayesian BoTorch model, (1/S) sum_s N(E(y | x, w_s), Var(y | x, w_s)), for one real target.

    Points are independent given a draw. The arguments are those of `botorch_model`.
    """
    try:
        from botorch.models.model import Model as BotorchModel
        from botorch.posteriors.fully_bayesian import GaussianMixturePosterior
        from gpytorch.distributions import MultivariateNormal
        from linear_operator.operators import DiagLinearOperator
    except ImportError as error:
        raise _missing() from error
    inputs, outputs = _sizes(source, model)
    likelihood = source.likelihood
    if outputs > 1 or likelihood.support != "real":
        found = f"must be False for {type(likelihood).__name__} with {max(1, outputs)} targets, got True"
        raise InputError("mixture", found, "A mixture of Gaussians is for one real target")

    def moments(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
        mean, variance = likelihood.moments(output, extra)
        return torch.stack([mean, variance.expand_as(mean)]).squeeze(-1)

    class MixtureModel(BotorchModel):  # type: ignore[misc, unused-ignore]
        """A mixture of Gaussians over the draws, with observation noise, differentiable in X."""

        _is_ensemble = _is_fully_bayesian = True
        num_outputs = 1

        @property
        def batch_shape(self) -> torch.Size:
            """One model per draw."""
            return torch.Size([source.count])

        def posterior(self, X: Tensor, *_: Any, posterior_transform: Any = None, **__: Any) -> Any:
            """Return the mixture at points X (batch, q, d), with draws on the third axis from the end."""
            predictive = Predictive(source, _rows(X, inputs, model))
            both = torch.cat(list(predictive.map_blocks(moments)), 2)
            mean, variance = both.reshape(2, source.count, *X.shape[:-1]).movedim(1, -2).to(X)
            found = GaussianMixturePosterior(MultivariateNormal(mean, DiagLinearOperator(variance)))
            return found if posterior_transform is None else posterior_transform(found, X=X)

    return MixtureModel()


def _sizes(source: DrawSource, model: Model) -> tuple[int, int]:
    """Return the number of inputs, and of outputs, which is 0 for a target without an axis. Raise on other shapes."""
    blank = blank_row(model.row, model.layout.device)
    if not isinstance(blank, Tensor) or blank.ndim != 2 or not blank.is_floating_point():
        raise InputError("as_botorch", "BoTorch's points are vectors of numbers, and a row of x is not", "Wrap the net")
    if source.likelihood.support == "heads":
        raise InputError("as_botorch", "the network has several heads", "Optimise a model of one of them")
    trial = Predictive(source, _rows(blank, blank.shape[-1], model)).functions()
    if trial.ndim > 3:
        raise InputError("as_botorch", f"each prediction has shape {tuple(trial.shape[2:])}", "Predict single values")
    return blank.shape[-1], 0 if trial.ndim == 2 else trial.shape[-1]


def _rows(X: Tensor, inputs: int, model: Model) -> Inputs:
    """Return points (batch, q, d) as rows for the network, or the activations of its frozen body."""
    if X.shape[-1] != inputs:
        raise InputError("X", f"has {X.shape[-1]} inputs per point, the network takes {inputs}")
    rows = X.reshape(-1, inputs).to(model.layout.device, model.layout.input_dtype)
    return rows if model.frozen is None else model.frozen.features(rows)


def _missing() -> InputError:
    return InputError("as_botorch", "needs botorch, which is not installed", 'pip install "credibly[botorch]"')
