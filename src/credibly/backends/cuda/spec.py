"""The specialisation of the CUDA kernel: sizes of a network, its padded parameter vector, and a warp's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from credibly.backends.cpp.likelihood import LIKELIHOODS, noise_scales, supports
from credibly.backends.cpp.stack import Stack
from credibly.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from credibly.networks.layout import Layout

SOURCES = [Path(__file__).with_name(f"{part}.cu") for part in ("api", "layers", "likelihood", "mlp")]
MAX_SUMS = 160  # numbers that a lane can keep in registers beside its temporaries
MAX_WARPS = 16  # per block
MIN_BLOCK_WARPS = 8  # per block where several blocks share a chain: helpers add up the sums of blocks
MAX_TARGETS = 32
MAX_WIDTH = 128  # units of a layer


@dataclass(frozen=True)
class KernelSpec:
    """Sizes of a network, and offsets in its padded parameter vector (slots) and in the memory of a warp."""

    stack: Stack
    kind: int
    targets: int
    log_scale: int  # offset in a parameter vector, or -1
    per_target: bool

    @property
    def bytes(self) -> int:
        """Bytes per number."""
        return 4 if self.stack.dtype == torch.float32 else 8

    @property
    def pack(self) -> int:
        """Numbers in 16 bytes."""
        return 16 // self.bytes

    @property
    def pitch(self) -> int:
        """Distance from one unit to the next in the memory of a warp."""
        return 32 + self.pack

    def sums(self) -> int:
        """Return the number of gradient sums that a lane keeps in registers."""
        sides = [(max(i, o), min(i, o)) for i, o, *_ in self.stack.layers]
        return sum(-(-wide // 32) * (narrow + 1) for wide, narrow in sides)

    def slots(self) -> tuple[list[int], list[int], int, list[int]]:
        """Return the slots of weights, biases (or -1) and log scales (or -1), and the offset of every slot (or -1)."""
        weights: list[int] = []
        biases: list[int] = []
        offsets: list[int] = []
        for inputs, outputs, weight, bias, _ in self.stack.layers:
            wide = -(-inputs // self.pack) * self.pack
            weights.append(len(offsets))
            for unit in range(outputs):
                offsets += [weight + unit * inputs + i if i < inputs else -1 for i in range(wide)]
            biases.append(len(offsets) if bias >= 0 else -1)
            offsets += [bias + unit for unit in range(outputs)] if bias >= 0 else []
            offsets += [-1] * (-len(offsets) % self.pack)
        scale = len(offsets) if self.log_scale >= 0 else -1
        if scale >= 0:
            offsets += [self.log_scale + k for k in range(self.targets if self.per_target else 1)]
        offsets += [-1] * (-len(offsets) % 4)
        return weights, biases, scale, offsets

    def layer_memory(self) -> tuple[list[int], list[int], list[int], int]:
        """Return the offsets of inputs, values and derivatives of every layer in a warp's memory, and their size."""
        layers = self.stack.layers
        values, derivatives, size = [], [], layers[0][0] * self.pitch
        for position, (_, outputs, *_) in enumerate(layers):
            values.append(size)
            size += outputs * self.pitch
            derivatives.append(size if position + 1 < len(layers) else -1)
            size += outputs * self.pitch if position + 1 < len(layers) else 0
        return [0, *values[:-1]], values, derivatives, size

    def warp_memory(self) -> int:
        """Return the size of a warp's memory: values, overwritten by sums, those over blocks with a little more."""
        return max(self.layer_memory()[3], self.stack.inputs * self.pitch + len(self.slots()[3]) + MAX_WARPS)

    def shared(self, warps: int) -> int:
        """Return the bytes of shared memory per block."""
        slots = len(self.slots()[3])
        return (3 * slots + warps * self.warp_memory()) * self.bytes + 8 * warps + 4 * slots

    def source(self, warps: int, blocks: int, drifts: int) -> str:
        """Return the source of the kernel with its constants."""
        weights, biases, scale, offsets = self.slots()
        inputs, values, derivatives, _ = self.layer_memory()
        columns = list(zip(*self.stack.layers))
        arrays = {
            "IN": columns[0],
            "OUT": columns[1],
            "ACT": columns[4],
            "WEIGHT": weights,
            "BIAS": biases,
            "INPUTS": inputs,
            "VALUES": values,
            "DERIVATIVES": derivatives,
        }
        numbers = {
            "LAYERS": len(self.stack.layers),
            "SLOTS": len(offsets),
            "KIND": self.kind,
            "TARGETS": self.targets,
            "LOG_SCALE": scale,
            "PER_TARGET": int(self.per_target),
            "WARPS": warps,
            "BLOCK_WARPS": block_warps(warps, blocks),
            "BLOCKS": blocks,
            "WARP_MEMORY": self.warp_memory(),
            "DRIFTS": drifts,
            "INPUT_SIZE": self.stack.inputs * self.pitch,
        }
        lines = [f"typedef {'float' if self.bytes == 4 else 'double'} REAL;"]
        lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
        lines += [f"__device__ constexpr int {name}[] = {{{', '.join(map(str, v))}}};" for name, v in arrays.items()]
        return "\n".join([*lines, *(path.read_text() for path in SOURCES)])


def block_warps(warps: int, blocks: int) -> int:
    """Return the warps per block: those that process rows, and helpers that only add up."""
    return warps if blocks == 1 else max(warps, MIN_BLOCK_WARPS)


def kernel_spec(
    stack: Stack | None, layout: Layout, x: Any, y: Tensor, likelihood: Likelihood, prior: Any
) -> KernelSpec | None:
    """Return the specialisation for a problem, or None if the kernel does not support it."""
    if stack is None or not supports(x, y, likelihood, prior):
        return None
    if isinstance(likelihood, HeteroscedasticGaussian) and likelihood.floor:
        return None
    targets = stack.outputs if isinstance(likelihood, Categorical) else (1 if y.ndim == 1 else y.shape[1])
    outputs = 2 * targets if isinstance(likelihood, HeteroscedasticGaussian) else targets
    if stack.outputs != outputs or targets > MAX_TARGETS or stack.layers[-1][4]:
        return None
    _, offset, per_target = noise_scales(likelihood, layout, targets)
    spec = KernelSpec(stack, LIKELIHOODS[type(likelihood)], targets, offset, bool(per_target))
    widest = max(max(layer[:2]) for layer in stack.layers)
    sums = spec.sums() * (spec.bytes // 4)
    return spec if widest <= MAX_WIDTH and sums <= MAX_SUMS else None
