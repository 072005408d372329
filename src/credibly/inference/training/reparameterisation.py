"""Where the noise of a mean-field draw enters: on the weights, on the layers' outputs, or by random signs per row.

All three estimate the same gradient of the same free energy; they differ in variance and cost.

    weights   one draw w = mu + sigma e of every weight, for all rows of the batch
    local     outputs N(x mu', x^2 sigma^2') drawn per row (Kingma et al. 2015); the weights are never drawn
    flipout   x mu' + ((x r) (sigma e)') s with signs r, s per row (Wen et al. 2018): a pseudo-independent draw per row

The user's network is not changed: in a copy of it, layers with the same parameters have a forward that takes the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credibly.core.inputs import Inputs, arguments, call, map_inputs
from credibly.core.rng import draw_noise
from credibly.core.rows import sum_rows
from credibly.errors import InputError
from credibly.networks.calling import call_with, find_ties
from credibly.networks.copying import copy_module
from credibly.problem import Problem

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LayerNoise:
    """The estimator of one fit; this base class is "weights", without noise on layers.

    Attributes:
        reason: why it was chosen.
        whole: whether every random parameter belongs to a layer with its own noise.
        shapes: the noise of one pass: buffer, shape, whether it contains signs.
    """

    name = "weights"
    whole = False
    shapes: Sequence[tuple[str, tuple[int, ...], bool]] = ()

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def draw(self, samples: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the noise (1, K, ...) of the layers for a step, in the form that `credibly.core.rng.normal` takes."""
        return ()

    def cut(self, noise: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, ...]:
        """Return the part of the layers' noise that some rows of a batch use."""
        return noise


class OnLayers(LayerNoise):
    """ "local" or "flipout": noise on Linear and convolution layers, drawn weights everywhere else."""

    def __init__(self, name: str, problem: Problem, found: dict[str, _Seen], reason: str) -> None:
        super().__init__(reason)
        self.name = name
        self.module = copy_module(problem.forward.module)
        self.ties = find_ties(self.module)
        self.dtype, self.device = problem.layout.dtype, problem.device
        shapes: list[tuple[str, tuple[int, ...], bool]] = []
        self.layers: list[str] = []
        # Of the noise on each layer: a network may have several dtypes.
        self.dtypes: list[torch.dtype] = []
        for layer_name, seen in found.items():
            layer: Any = self.module.get_submodule(layer_name) if layer_name else self.module
            self.layers.append(layer_name)
            layer.__class__ = _class_of(layer, name)
            layer.register_buffer("weight_scale", torch.zeros_like(layer.weight))
            if layer.bias is not None:
                layer.register_buffer("bias_scale", torch.zeros_like(layer.bias))
            for buffer, shape, signs in _noise_shapes(layer, name, seen.output):
                layer.register_buffer(buffer, torch.zeros(shape, dtype=layer.weight.dtype, device=self.device))
                self.dtypes.append(layer.weight.dtype)
                shapes.append((f"{layer_name}.{buffer}".lstrip("."), shape, signs))
        self.shapes = tuple(shapes)
        covered = {f"{layer}.{p}".lstrip(".") for layer in self.layers for p in ("weight", "bias")}
        self.whole = {e.name for e in problem.layout.entries} <= covered

    def draw(self, samples: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw normal numbers, or signs, for every layer: (1, K, *shape) each."""
        drawn = []
        for _, shape, signs in self.shapes:
            full = (1, samples, *shape)
            drawn.append((draw_signs if signs else draw_noise)(full, generator, self.dtype))
        return tuple(drawn)

    def cut(self, noise: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, ...]:
        """Return the given rows of output noise and signs; noise on weights is shared by all rows."""
        per_row = [signs or self.name == "local" for _, _, signs in self.shapes]
        return tuple(drawn[:, :, rows] if cut else drawn for drawn, cut in zip(noise, per_row))

    def log_likelihood(
        self,
        problem: Problem,
        mu: Tensor,
        sigma: Tensor,
        noise: tuple[Tensor, ...],
        x: Inputs,
        y: Tensor,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return E_q log p(batch | w) from mu and sigma (D,), over K passes, with the weights of the rows (B,)."""
        means, scales = problem.layout.split(mu)[0], problem.layout.split(sigma)[0]
        total: Tensor | None = None
        samples = noise[0].shape[1]
        args, kwargs = arguments(problem.forward.arranged(x))
        for k in range(samples):
            drawn = mu if self.whole else mu + sigma * noise[0][0, k]
            values = dict(problem.layout.split(drawn)[0])
            for layer in self.layers:
                for parameter in ("weight", "bias"):
                    full = f"{layer}.{parameter}" if layer else parameter
                    if full in means:
                        values[full], values[f"{full}_scale"] = means[full], scales[full]
            own = zip(self.shapes, self.dtypes, noise[1:])
            values |= {buffer: tensor[0, k].to(dtype) for (buffer, _, _), dtype, tensor in own}
            output = problem.layout.output(call_with(self.module, values, args, kwargs, self.ties)).unsqueeze(0)
            output = problem.likelihood.arrange(output, 1)
            rows = problem.likelihood.log_prob(output, y, problem.extra(drawn.unsqueeze(0)))
            value = rows.sum() if weight is None else sum_rows(rows, weight).sum()
            total = value if total is None else total + value
        assert total is not None
        return total / samples


def draw_signs(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draw random signs, -1 and 1, from the bits of integers: 32 signs per number."""
    count = math.prod(shape)
    words = torch.randint(
        -(2**31), 2**31, (-(-count // 32), 1), generator=generator, dtype=torch.int32, device=generator.device
    )
    bits = (words >> torch.arange(32, dtype=torch.int32, device=generator.device)).bitwise_and_(1)
    return bits.to(dtype).mul_(2).sub_(1).reshape(-1)[:count].reshape(shape)


def choose_estimator(asked: str, problem: Problem, batch: int, *, mean_field: bool) -> LayerNoise:
    """Return the requested estimator, or one that suits the network. Raise if the network does not support it."""
    if asked == "weights":
        return LayerNoise("asked for")
    if not mean_field:
        if asked != "auto":
            raise InputError(
                "estimator",
                f'must be "weights" with another family or several members, got "{asked}"',
                "Noise on layers is for one mean-field Gaussian",
            )
        return LayerNoise("draws from other families and from mixtures are full weight vectors")
    found, problems = _trace(problem, batch)
    if not found:
        problems = ["no Linear or convolution layer was found"]
    if asked == "auto":
        if problems:
            return LayerNoise(problems[0])
        plain = all(isinstance(_layer(problem, n), nn.Linear) and len(seen.output) == 2 for n, seen in found.items())
        if plain:
            return OnLayers("local", problem, found, "the layers that can take noise are Linear on rows")
        return OnLayers("flipout", problem, found, "positions share weights in some layer")
    if problems:
        advice = 'Use estimator="weights", which works for every module'
        raise InputError("estimator", f'"{asked}" does not support this network: {problems[0]}', advice)
    return OnLayers(asked, problem, found, "asked for")


class _Seen:
    """A layer as seen in trial passes: its calls, and the shapes of its output for two numbers of rows."""

    def __init__(self) -> None:
        self.calls = 0
        self.output: tuple[int, ...] = ()
        self.other: tuple[int, ...] = ()


def _trace(problem: Problem, batch: int) -> tuple[dict[str, _Seen], list[str]]:
    """Return supported layers with their output shapes for a batch, and reasons why noise on layers would be wrong."""
    module = problem.layout.module
    random = {e.name for e in problem.layout.entries}
    found: dict[str, _Seen] = {}
    handles = []
    for name, layer in module.named_modules():
        if type(layer) in LAYERS and f"{name}.weight".lstrip(".") in random:
            found[name] = seen = _Seen()

            def record(_m: nn.Module, _a: Any, out: Any, seen: _Seen = seen) -> None:
                seen.calls += 1
                seen.output = tuple(out.shape)

            handles.append(layer.register_forward_hook(record))
    other = batch - 1 or min(2, problem.n)
    try:
        with torch.no_grad():
            for rows in (other, batch):
                for seen in found.values():
                    seen.calls, seen.other = 0, seen.output
                call(module, map_inputs(lambda t, n=rows: t[:n], problem.sample.x))  # type: ignore[misc]
    finally:
        for handle in handles:
            handle.remove()
    problems = []
    for name, seen in found.items():
        mode = getattr(_layer(problem, name), "padding_mode", "zeros")
        if seen.calls != 1:
            problems.append(f"layer {name!r} is called {seen.calls} times in one pass, with the same weights")
        elif (seen.output[0], *seen.other[:1]) != (batch, other):
            problems.append(f"layer {name!r} does not keep the rows on its first axis")
        elif mode != "zeros":
            problems.append(f"layer {name!r} pads with {mode!r}")
    problems += [f"parameter {a!r} is tied to {first!r}" for a, first in problem.layout.aliases.items() if a != first]
    return found, problems


def _layer(problem: Problem, name: str) -> nn.Module:
    return problem.layout.module.get_submodule(name) if name else problem.layout.module


def _channels(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return int(layer.in_channels), int(layer.out_channels)


def _noise_shapes(layer: Any, name: str, output: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return the noise buffers of a layer with outputs of that shape: name, shape, whether it contains signs."""
    if name == "local":
        return [("noise", output, False)]
    rows, space, (inward, outward) = output[0], (1,) * (len(output) - 2), _channels(layer)
    linear = isinstance(layer, nn.Linear)
    shapes: list[tuple[str, tuple[int, ...], bool]] = [
        ("weight_noise", tuple(layer.weight.shape), False),
        ("sign_in", (rows, *space, inward) if linear else (rows, inward, *space), True),
        ("sign_out", (rows, *space, outward) if linear else (rows, outward, *space), True),
    ]
    return shapes + ([("bias_noise", tuple(layer.bias.shape), False)] if layer.bias is not None else [])


def _apply(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    result: Tensor = layer._conv_forward(x, weight, bias)
    return result


def _local(self: Any, x: Tensor) -> Tensor:
    mean = _apply(self, x, self.weight, self.bias)
    bias = torch.square(self.bias_scale) if self.bias is not None else None
    variance = _apply(self, torch.square(x), torch.square(self.weight_scale), bias)
    # Without a bias, zero inputs have zero variance; the clamp keeps the gradient of the root finite there.
    noise: Tensor = self.noise
    return mean + torch.sqrt(variance.clamp_min(1e-16)) * noise


def _flipout(self: Any, x: Tensor) -> Tensor:
    mean = _apply(self, x, self.weight, self.bias)
    shift = _apply(self, x * self.sign_in, self.weight_scale * self.weight_noise, None)
    if self.bias is not None:
        offset = self.bias_scale * self.bias_noise
        shift = shift + (offset if isinstance(self, nn.Linear) else offset.reshape(-1, *(1,) * (shift.ndim - 2)))
    signs: Tensor = self.sign_out
    return mean + shift * signs


def _class_of(layer: nn.Module, name: str) -> type[nn.Module]:
    """Return a subclass of the layer's class whose forward takes the noise."""
    return type(
        f"{name.capitalize()}{type(layer).__name__}",
        (type(layer),),
        {"forward": _local if name == "local" else _flipout},
    )
