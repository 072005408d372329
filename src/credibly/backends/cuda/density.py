"""The density of a small network on a GPU, in one kernel for whole trajectories: what `density.py` is on a processor."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from credibly.backends.cpp.density import LIKELIHOODS, noise_scales, supports
from credibly.backends.cpp.stack import Stack
from credibly.backends.cuda.driver import CudaError, Kernel, compiled
from credibly.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from credibly.networks.layout import Layout
from credibly.priors.flat import BoundPrior

log = logging.getLogger("credibly")

SOURCE = Path(__file__).with_name("mlp.cu")
HEAD = """
#define PAUSE __nanosleep(20)
#define SHARED(name) extern __shared__ __align__(16) unsigned char name[]
template <class T> __device__ inline T fresh(const T* from) { return __ldcg(from); }
"""
MOST_SUMS = 160  # numbers that a lane can keep in its registers beside what it works with
MOST_WARPS = 16  # of a block
HELPERS = 8  # warps of a block at least, where blocks meet and their sums have to be added up
FEW_SUMS = 56  # so many leave room for sixteen warps, more for eight
MOST_TARGETS = 32
CALL = 2e11  # multiplications in one call, about a tenth of a second: Ctrl-C is looked at in between
WIDEST = 128  # units of a layer


@dataclass(frozen=True)
class Form:
    """A network as the kernel is written for it: sizes, places in padded slots and in a warp's memory."""

    stack: Stack
    kind: int
    targets: int
    log_scale: int  # place in a parameter vector, or -1
    per_target: bool

    @property
    def bytes(self) -> int:
        """Of a number."""
        return 4 if self.stack.dtype == torch.float32 else 8

    @property
    def pack(self) -> int:
        """Numbers in 16 bytes."""
        return 16 // self.bytes

    @property
    def pitch(self) -> int:
        """From one unit to the next, in a warp's memory."""
        return 32 + self.pack

    def sums(self) -> int:
        """Numbers that a lane keeps for the gradient."""
        sides = [(max(i, o), min(i, o)) for i, o, *_ in self.stack.layers]
        return sum(-(-wide // 32) * (narrow + 1) for wide, narrow in sides)

    def slots(self) -> tuple[list[int], list[int], int, list[int]]:
        """Places of weights, of biases (or -1) and of log scales in slots, and the parameter vector's place of each slot, or -1."""
        weights: list[int] = []
        biases: list[int] = []
        flat: list[int] = []
        for inputs, outputs, weight, bias, _ in self.stack.layers:
            wide = -(-inputs // self.pack) * self.pack
            weights.append(len(flat))
            for unit in range(outputs):
                flat += [weight + unit * inputs + i if i < inputs else -1 for i in range(wide)]
            biases.append(len(flat) if bias >= 0 else -1)
            flat += [bias + unit for unit in range(outputs)] if bias >= 0 else []
            flat += [-1] * (-len(flat) % self.pack)
        scale = len(flat) if self.log_scale >= 0 else -1
        if scale >= 0:
            flat += [self.log_scale + k for k in range(self.targets if self.per_target else 1)]
        flat += [-1] * (-len(flat) % 4)
        return weights, biases, scale, flat

    def memory(self) -> tuple[list[int], list[int], list[int], int]:
        """Where a warp keeps the inputs of each layer, its values and its slopes; and how much it needs for them."""
        layers = self.stack.layers
        values, slopes, at = [], [], layers[0][0] * self.pitch
        for place, (_, outputs, *_) in enumerate(layers):
            values.append(at)
            at += outputs * self.pitch
            slopes.append(at if place + 1 < len(layers) else -1)
            at += outputs * self.pitch if place + 1 < len(layers) else 0
        return [0, *values[:-1]], values, slopes, at

    def space(self) -> int:
        """Numbers in a warp's memory: values, and sums in their place afterwards, those over blocks with a few numbers more."""
        return max(self.memory()[3], self.stack.inputs * self.pitch + len(self.slots()[3]) + MOST_WARPS)

    def shared(self, warps: int) -> int:
        """Bytes of a block's memory."""
        slots = len(self.slots()[3])
        return (3 * slots + warps * self.space()) * self.bytes + 8 * warps + 4 * slots

    def source(self, warps: int, group: int, drifts: int) -> str:
        """The kernel's text, with its constants."""
        weights, biases, scale, flat = self.slots()
        inputs, values, slopes, _ = self.memory()
        columns = list(zip(*self.stack.layers))
        arrays = {
            "IN": columns[0], "OUT": columns[1], "ACT": columns[4], "WEIGHT": weights, "BIAS": biases, "INPUT": inputs, "PLACE": values,
            "SLOPE": slopes,
        }  # fmt: skip
        numbers = {
            "LAYERS": len(self.stack.layers), "SLOTS": len(flat), "KIND": self.kind, "TARGETS": self.targets, "LOG_SCALE": scale,
            "PER_TARGET": int(self.per_target), "WARPS": warps, "TEAM": team(warps, group), "GROUP": group, "SPACE": self.space(), "DRIFTS": drifts,
            "INPUT_SIZE": self.stack.inputs * self.pitch,
        }  # fmt: skip
        lines = [f"typedef {'float' if self.bytes == 4 else 'double'} REAL;"]
        lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
        lines += [f"__device__ constexpr int {name}[] = {{{', '.join(map(str, v))}}};" for name, v in arrays.items()]
        return "\n".join([*lines, SOURCE.read_text()])


def team(warps: int, group: int) -> int:
    """Warps of a block, those that take rows and those that only add up."""
    return warps if group == 1 else max(warps, HELPERS)


def arguments_struct(drifts: int) -> type[ctypes.Structure]:
    """`Data` of the kernel."""
    pointers = [(name, ctypes.c_void_p) for name in ("x", "y", "loc", "precision", "scale", "flat")]
    numbers = [(name, ctypes.c_int64) for name in ("rows", "padded", "dim")]
    lengths = [("kick", ctypes.c_double * (drifts + 1)), ("drift", ctypes.c_double * drifts)]
    return type("Data", (ctypes.Structure,), {"_fields_": [*pointers, *numbers, ("weight", ctypes.c_double), *lengths]})


class GpuDensity:
    """log p = weights[0] * log likelihood + weights[1] * log prior of a stack on all of its rows, on a GPU.

    A chain has one block of threads, or several where there are more multiprocessors than chains and rows enough for them. How
    many is settled by `like`, the number of chains that one process would take, so that a chain has the same bits however the
    chains are spread.
    """

    def __init__(
        self, form: Form, x: Tensor, y: Tensor, prior: BoundPrior, weights: tuple[float, float], scale: list[float]
    ) -> None:  # fmt: skip
        self.prepare(form, x, y, prior, weights, scale)
        properties = torch.cuda.get_device_properties(x.device)
        self.processors = int(properties.multi_processor_count)
        self.most_shared = int(getattr(properties, "shared_memory_per_block_optin", 2**15 + 2**14))
        self.capability = (int(properties.major), int(properties.minor))
        self._kernels: dict[tuple[int, int, int], Kernel] = {}
        self._plans: dict[int, tuple[int, int]] = {}

    def prepare(
        self, form: Form, x: Tensor, y: Tensor, prior: BoundPrior, weights: tuple[float, float], scale: list[float]
    ) -> None:  # fmt: skip
        """Lays the rows and the prior out as the kernel reads them."""
        self.form, device = form, x.device
        targets = y.unsqueeze(1) if y.ndim == 1 else y
        padded = -(-len(x) // 32) * 32
        columns = [torch.zeros(v.shape[1], padded, dtype=form.stack.dtype, device=device) for v in (x, targets)]
        for place, given in zip(columns, (x, targets)):
            place[:, : len(x)] = given.T
        flat = torch.tensor(form.slots()[3], device=device, dtype=torch.int32)
        there = flat.clamp_min(0).long()
        loc, precision = prior.loc.to(device), (weights[1] / prior.std.double() ** 2).to(device)
        slots = [v.expand(form.stack.dim)[there].to(form.stack.dtype).contiguous() for v in (loc, precision)]
        scales = torch.tensor(scale, dtype=torch.float64, device=device)
        self.kept = (*columns, *slots, scales, flat)
        self.rows, self.padded, self.weight, self.device = len(x), padded, weights[0], device
        self.like = 1
        self._counts: tuple[tuple[int, ...], Tensor] = ((), flat)
        self._rooms: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @staticmethod
    def of(
        stack: Stack | None, layout: Layout, x: Any, y: Tensor, likelihood: Likelihood, prior: Any, weights: tuple[float, float]
    ) -> GpuDensity | None:  # fmt: skip
        """None where the kernel does not know the likelihood, the prior or the form of the data, or the network is too large for it."""
        form = form_of(stack, layout, x, y, likelihood, prior)
        if form is None or os.environ.get("CREDIBLY_NATIVE", "1") == "0":
            return None
        try:
            found = GpuDensity(form, x, y, prior, weights, noise_scales(likelihood, layout, form.targets)[0])
            if form.shared(1) > found.most_shared:
                return None
            found.kernel(1)
        except (CudaError, OSError, AttributeError) as error:
            log.info("without a kernel for small networks: %s", str(error).splitlines()[0][:200])
            return None
        return found

    def plan(self, chains: int) -> tuple[int, int]:
        """Warps of a block and blocks of a chain: as many multiprocessors as there are for it, two warps on each at least."""
        if chains not in self._plans:
            tiles, form = self.padded // 32, self.form
            most = MOST_WARPS if form.sums() <= FEW_SUMS else MOST_WARPS // 2
            while most > 1 and form.shared(most) > self.most_shared:
                most -= 1
            group = min(max(1, self.processors // chains), -(-tiles // 2))
            rounds = -(-tiles // (most * group))
            warps = min(most, -(-tiles // (rounds * group)))
            self._plans[chains] = warps, -(-tiles // (rounds * warps))
        return self._plans[chains]

    def kernel(self, chains: int, drifts: int = 1) -> tuple[Kernel, int]:
        """The kernel for so many chains, compiled when first asked for, and the blocks of a chain."""
        warps, group = self.plan(chains)
        key = (warps, group, drifts)
        if key not in self._kernels:
            with torch.cuda.device(self.device):
                code = compiled(HEAD + self.form.source(warps, group, drifts), self.capability)
                self._kernels[key] = Kernel(code, "trajectories", 32 * team(warps, group), self.form.shared(warps))
        return self._kernels[key], group

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Log likelihood (C,) in float64, and the gradient (C, D) of the whole log density."""
        theta = theta.detach().contiguous()
        gradient, log_lik = torch.empty_like(theta), torch.empty(len(theta), dtype=torch.float64, device=theta.device)
        size = torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)
        self._launch(theta, theta, gradient, log_lik, size, None, [-1] * len(theta), (0.5, 0.5), (1.0,))
        return log_lik, gradient

    def run(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, log_likelihood: Tensor, size: Tensor, inverse_mass: Tensor | None,
        steps: Sequence[int], kicks: Sequence[float], drifts: Sequence[float],
    ) -> None:  # fmt: skip
        """So many steps of an integrator for each chain, in place: theta, momentum, gradient (C, D), log_likelihood, size (C,)."""
        self._launch(theta, momentum, gradient, log_likelihood, size, inverse_mass, steps, kicks, drifts)

    def steps_in_a_call(self, chains: int) -> int:
        """So many that the user's wish to stop is seen soon."""
        return max(1, int(CALL / (3 * chains * self.rows * self.form.stack.dim)))

    def _launch(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, log_likelihood: Tensor, size: Tensor, inverse_mass: Tensor | None,
        steps: Sequence[int], kicks: Sequence[float], drifts: Sequence[float],
    ) -> None:  # fmt: skip
        kernel, group = self.kernel(max(self.like, len(theta)), len(drifts))
        room = self._room(len(theta), group)
        data, places, _kept = self.arguments(
            theta, momentum, gradient, log_likelihood, size, inverse_mass, steps, kicks, drifts, room
        )
        with torch.cuda.device(self.device):
            kernel.launch(len(theta) * group, [data, *places], together=group > 1)

    def arguments(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, log_likelihood: Tensor, size: Tensor, inverse_mass: Tensor | None,
        steps: Sequence[int], kicks: Sequence[float], drifts: Sequence[float], room: tuple[Tensor, ...],
    ) -> tuple[Any, list[ctypes.c_void_p], Any]:  # fmt: skip
        """What the kernel is called with: its data, where its tensors lie, and what has to live until it has been called."""
        wanted = tuple(steps)
        if self._counts[0] != wanted:  # a copy has the host wait for all that the GPU has begun
            self._counts = wanted, torch.tensor(wanted, dtype=torch.int32).to(theta.device)
        data = arguments_struct(len(drifts))(
            *(t.data_ptr() for t in self.kept), self.rows, self.padded, self.form.stack.dim, self.weight,
            (ctypes.c_double * len(kicks))(*kicks), (ctypes.c_double * len(drifts))(*drifts),
        )  # fmt: skip
        given = (theta, momentum, gradient, log_likelihood, size, inverse_mass, self._counts[1], *room)
        assert all(t is None or t.is_contiguous() for t in given)
        return data, [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in given], given

    def _room(self, chains: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """What blocks of a chain tell each other: sums, log likelihoods, and counts of who has come, at zero."""
        key = chains * group
        if key not in self._rooms:
            sums = chains * (group + 1) * len(self.form.slots()[3]) if group > 1 else 1
            self._rooms[key] = (
                torch.empty(sums, dtype=self.form.stack.dtype, device=self.device),
                torch.empty(key, dtype=torch.float64, device=self.device),
                torch.zeros(chains, dtype=torch.int32, device=self.device),
            )
        room = self._rooms[key]
        if group > 1:
            room[2].zero_()
        return room


def form_of(stack: Stack | None, layout: Layout, x: Any, y: Tensor, likelihood: Likelihood, prior: Any) -> Form | None:
    """None where the kernel has no form for it."""
    if stack is None or type(likelihood) not in LIKELIHOODS or not isinstance(prior, BoundPrior) or not prior.is_normal:
        return None
    if not isinstance(x, Tensor) or x.ndim != 2 or y.ndim > 2 or likelihood.axis not in (-1, 1):
        return None
    count = stack.outputs if isinstance(likelihood, Categorical) else (1 if y.ndim == 1 else y.shape[1])
    outputs = 2 * count if isinstance(likelihood, HeteroscedasticGaussian) else count
    if stack.outputs != outputs or count > MOST_TARGETS or stack.layers[-1][4]:
        return None
    _, place, each = noise_scales(likelihood, layout, count)
    form = Form(stack, LIKELIHOODS[type(likelihood)], count, place, bool(each))
    widest = max(max(layer[:2]) for layer in stack.layers)
    sums = form.sums() * (form.bytes // 4)
    return form if widest <= WIDEST and sums <= MOST_SUMS else None
