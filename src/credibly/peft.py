"""Adapters of Hugging Face models (LoRA and others of peft) as Bayesian problems.

    problem = credibly.peft.problem(model, data=(batch, labels))
    posterior = credibly.Laplace(start="network").fit(problem)
    p = posterior.predict(new_batch)

The random parameters are those that peft trains: the adapter and the layers in `modules_to_save`, such as a new
classification head. Everything else is fixed. The outputs are the model's logits, which stay functions of the weights
of the adapter: nothing is merged, and the loss that transformers computes from `labels` is not used.

LoRA multiplies two matrices, W + (alpha/r) B A, and B starts at zero. With `Normal(1.0, fan_in=True)` on both, B A has
entries of variance 1/in, as a new layer has. Neither library is imported: models are recognised by their attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from credibly.errors import InputError
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from credibly.priors.elementwise import Normal, Prior
from credibly.priors.gaussian import GaussianPrior
from credibly.problem import Problem

LABELS = ("labels", "label")


def problem(
    model: nn.Module,
    data: Any,
    likelihood: Likelihood | None = None,
    prior: Prior | Mapping[str, Prior] | GaussianPrior | None = None,
    *,
    dropout: bool = False,
    **options: Any,
) -> Problem:
    """Return the problem whose random parameters are those that peft trains.

    Args:
        model: a model from `peft.get_peft_model` or `PeftModel.from_pretrained(..., is_trainable=True)`. It is copied.
        data: (inputs, labels) with inputs a dict such as a tokenizer returns (`input_ids`, `attention_mask`), or one
            such dict with the labels under "labels"; or a Dataset or DataLoader of pairs.
        likelihood: of the labels given the logits. By default that of the model's configuration: Categorical for
            several labels, Bernoulli for `multi_label_classification`, Gaussian for regression (`num_labels=1`).
        prior: Normal(1.0, fan_in=True) by default.
        dropout: whether the rates of dropout layers are kept, for `MCDropout`. By default they are set to zero:
            no other method uses them.
        options: further arguments of `Problem`, such as `temperature`, `sample_weight` or `device`.
    """
    adapter_parameters(model)
    net = _copy(model, dropout)
    chosen = _likelihood(model) if likelihood is None else likelihood
    return Problem(net, _pair(data), chosen, Normal(1.0, fan_in=True) if prior is None else prior, **options)


def adapter_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that peft trains. Raise if the model has no adapter, or a frozen one."""
    if not isinstance(model, nn.Module):
        raise InputError("model", f"must be a model with an adapter of peft, got {type(model).__name__}")
    if not isinstance(getattr(model, "peft_config", None), Mapping):
        raise InputError(
            "model",
            f"is a {type(model).__name__} without an adapter",
            "Pass peft.get_peft_model(model, LoraConfig(...)); credibly.Problem takes any other network",
        )
    names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if not names:
        raise InputError(
            "model",
            "has an adapter without trainable parameters",
            "Load it with is_trainable=True, or set_adapter(name)",
        )
    return names


def _copy(model: nn.Module, dropout: bool) -> nn.Module:
    net = copy.deepcopy(model)
    for part in net.modules():
        if not dropout and isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    config = getattr(net, "config", None)
    if getattr(config, "use_cache", False):
        # Keys and values of earlier tokens are for generation.
        config.use_cache = False  # type: ignore[union-attr]
    return net


def _likelihood(model: nn.Module) -> Likelihood:
    """Return the likelihood that the configuration of a model implies, as transformers chooses a loss."""
    config = getattr(model, "config", None)
    kind, labels = getattr(config, "problem_type", None), getattr(config, "num_labels", None)
    if kind == "multi_label_classification":
        return Bernoulli()
    if kind == "regression" or (kind is None and labels == 1):
        return Gaussian()
    return Categorical()


def _pair(data: Any) -> Any:
    """Return (inputs, labels), with the labels removed from a dict of inputs."""
    if not isinstance(data, Mapping):
        return data
    found = [name for name in LABELS if name in data]
    if not found:
        names = ", ".join(str(name) for name in data)
        raise InputError("data", f"is a dict without labels ({names})", 'Pass (inputs, labels), or add "labels" to it')
    return {name: data[name] for name in data if name not in LABELS}, data[found[0]]
