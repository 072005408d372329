"""New initial values for a network, from the initialisers of its modules.

In the order in which a network is built, so that later ones have the last word:

    1. `reset_parameters()`, `_reset_parameters()` or `_init_weights()` of every module, children first
    2. `_init_weights(module)` of an enclosing model, as in Hugging Face's transformers and many others, for all modules
       in it that have no closer one
    3. `reset_lora_parameters(adapter, rule)` of the LoRA layers of peft, by the rule of the adapter's configuration

All of these are recognised by their names; neither package is imported. Parameters that none of them writes are
perturbed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from credibly.core.rng import global_stream
from credibly.networks.copying import copy_module

# An initial value that no initialiser has: whatever still differs from the given values by this was not written.
MARK = 1.6180339887
# Standard deviation of a perturbation, relative to that of the tensor and to the absolute value of its mean. The second
# keeps gains near 1.
OF_STD, OF_MEAN = 0.5, 0.02
# Standard deviation of the perturbation of a tensor of zeros.
OF_ZERO = 0.02
# Rules of peft that do not depend on the weights of the adapted layer.
LORA_RULES = (True, False, "gaussian")


def reinitialise(module: nn.Module) -> None:
    """Draw new initial values in place, from torch's global generator. What no initialiser writes keeps its value."""
    with torch.no_grad():
        dependent = {id(m) for layer, rule in _lora_layers(module) if rule not in LORA_RULES for m in _adapters(layer)}
        _reset(module, dependent)
        _initialise_models(module, None)
        for layer, rule in _lora_layers(module):
            if rule in LORA_RULES:
                for adapter in _adapter_names(layer):
                    layer.reset_lora_parameters(adapter, rule)


def uninitialised(module: nn.Module) -> set[str]:
    """Return the names of the parameters that no initialiser writes."""
    trial = copy_module(module).cpu()
    with torch.no_grad():
        for parameter in trial.parameters():
            if parameter.is_floating_point():
                parameter.add_(MARK)
    before = {name: parameter.detach().clone() for name, parameter in trial.named_parameters()}
    with global_stream(0, "initialisers"):
        reinitialise(trial)
    return {name for name, parameter in trial.named_parameters() if torch.equal(parameter, before[name])}


def perturb(parameter: Tensor, generator: torch.Generator) -> None:
    """Add normal noise in place, small enough that the values keep their meaning."""
    values = parameter.detach().double()
    if not values.numel():
        return
    scale = max(OF_STD * float(values.std(correction=0)), OF_MEAN * abs(float(values.mean())))
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        parameter.add_((noise * (scale or OF_ZERO)).to(parameter))


def _reset(module: nn.Module, done: set[int]) -> None:
    """Reset a module after its children, as the constructors do, unless it is in `done`."""
    if id(module) in done:
        return
    done.add(id(module))
    for child in module.children():
        _reset(child, done)
    for name in ("reset_parameters", "_reset_parameters", "_init_weights"):
        method = getattr(module, name, None)
        if callable(method) and _required(method) == 0:
            method()
            return


def _initialise_models(module: nn.Module, rule: Callable[[nn.Module], Any] | None) -> None:
    """Apply the `_init_weights` of the closest enclosing model to every module, children first."""
    # Looked up on the class: wrappers such as peft's forward the attributes of the model inside.
    if callable(getattr(type(module), "_init_weights", None)):
        own: Any = module._init_weights
        rule = own if _required(own) == 1 else rule
    is_lora = _is_lora(module)
    for name, child in module.named_children():
        if not is_lora or name == "base_layer":
            _initialise_models(child, rule)
    if rule is not None and not is_lora:
        rule(module)


def _lora_layers(module: nn.Module) -> list[tuple[Any, object]]:
    """Return the LoRA layers, each with the rule that its adapters were initialised by."""
    found: list[tuple[Any, object]] = []

    def visit(part: nn.Module, rule: object) -> None:
        configurations = vars(part).get("peft_config")
        if isinstance(configurations, Mapping) and configurations:
            rule = getattr(next(iter(configurations.values())), "init_lora_weights", True)
        if _is_lora(part):
            found.append((part, rule))
        for child in part.children():
            visit(child, rule)

    visit(module, True)
    return found


def _is_lora(module: nn.Module) -> bool:
    return callable(getattr(type(module), "reset_lora_parameters", None))


def _adapters(layer: nn.Module) -> list[nn.Module]:
    return [child for name, child in layer.named_children() if name != "base_layer"]


def _adapter_names(layer: nn.Module) -> list[str]:
    names: dict[str, None] = {}
    for attribute in ("lora_A", "lora_embedding_A"):
        names.update(dict.fromkeys(getattr(layer, attribute, {}).keys()))
    return list(names)


def _required(method: Callable[..., Any]) -> int:
    """Return the number of arguments that a method cannot be called without."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters: Sequence[inspect.Parameter] = tuple(inspect.signature(method).parameters.values())
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)
