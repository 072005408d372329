"""The log density of a small network on a GPU: one kernel for full trajectories, as `cpp/density.py` on a CPU."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credibly.backends.cpp.api import Scheme
from credibly.backends.cpp.likelihood import noise_scales
from credibly.backends.cpp.stack import Stack
from credibly.backends.cuda.api import arguments_struct
from credibly.backends.cuda.driver import CudaError, Kernel, compile_kernel
from credibly.backends.cuda.spec import MAX_WARPS, KernelSpec, block_warps, kernel_spec
from credibly.core.inputs import Tensors
from credibly.gaussians.mass import CorrelatedMass, InverseMass
from credibly.likelihoods import Likelihood
from credibly.networks.layout import Layout
from credibly.priors.flat import BoundPrior

log = logging.getLogger("credibly")

PRELUDE = """
#define PAUSE __nanosleep(20)
#define SHARED(name) extern __shared__ __align__(16) unsigned char name[]
template <class T> __device__ inline T load_uncached(const T* from) { return __ldcg(from); }
"""
FEW_SUMS = 56  # gradient sums per lane that leave registers for sixteen warps per block; more leave room for eight
MAX_CALL = 2e11  # multiplications per call, about 0.1 s: Ctrl-C is checked between calls


class CudaDensity:
    """log p = weights[0] * log likelihood + weights[1] * log prior of a stack on all rows, on a GPU.

    A chain has one thread block, or several if there are more multiprocessors than chains and enough rows. The number
    follows from `like`, the number of chains that a single process would run, so results do not depend on how chains
    are sharded.
    """

    def __init__(
        self,
        spec: KernelSpec,
        x: Tensor,
        y: Tensor,
        prior: BoundPrior,
        weights: tuple[float, float],
        scales: list[float],
    ) -> None:
        self.prepare(spec, x, y, prior, weights, scales)
        properties = torch.cuda.get_device_properties(x.device)
        self.multiprocessors = int(properties.multi_processor_count)
        self.max_shared = int(getattr(properties, "shared_memory_per_block_optin", 2**15 + 2**14))
        self.capability = (int(properties.major), int(properties.minor))
        self._kernels: dict[tuple[int, int, int], Kernel] = {}
        self._plans: dict[int, tuple[int, int]] = {}

    def prepare(
        self,
        spec: KernelSpec,
        x: Tensor,
        y: Tensor,
        prior: BoundPrior,
        weights: tuple[float, float],
        scales: list[float],
    ) -> None:
        """Lay out the rows and the prior as the kernel reads them."""
        self.spec, device = spec, x.device
        targets = y.unsqueeze(1) if y.ndim == 1 else y
        padded = -(-len(x) // 32) * 32
        columns = [torch.zeros(v.shape[1], padded, dtype=spec.stack.dtype, device=device) for v in (x, targets)]
        for column, given in zip(columns, (x, targets)):
            column[:, : len(x)] = given.T
        offsets = torch.tensor(spec.slots()[3], device=device, dtype=torch.int32)
        index = offsets.clamp_min(0).long()
        loc, precision = prior.loc.to(device), (weights[1] / prior.std.double() ** 2).to(device)
        slots = [v.expand(spec.stack.dim)[index].to(spec.stack.dtype).contiguous() for v in (loc, precision)]
        scale = torch.tensor(scales, dtype=torch.float64, device=device)
        self.constants = dict(
            zip(("x", "y", "loc", "precision", "scale", "offset"), (*columns, *slots, scale, offsets))
        )
        self.rows, self.padded, self.weight, self.device = len(x), padded, weights[0], device
        self.planned_chains = 1
        self._step_counts: tuple[tuple[int, ...], Tensor] = ((), offsets)
        self._buffers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @staticmethod
    def of(
        stack: Stack | None,
        layout: Layout,
        x: Any,
        y: Tensor,
        likelihood: Likelihood,
        prior: Any,
        weights: tuple[float, float],
    ) -> CudaDensity | None:
        """Return the density, or None if the kernel does not support the problem or cannot be compiled."""
        spec = kernel_spec(stack, layout, x, y, likelihood, prior)
        if spec is None or os.environ.get("CREDIBLY_NATIVE", "1") == "0":
            return None
        try:
            density = CudaDensity(spec, x, y, prior, weights, noise_scales(likelihood, layout, spec.targets)[0])
            if spec.shared(1) > density.max_shared:
                return None
            density.kernel(1)
        except (CudaError, OSError, AttributeError) as error:
            log.info("CUDA kernel for small networks not available: %s", str(error).splitlines()[0][:200])
            return None
        return density

    def plan(self, chains: int) -> tuple[int, int]:
        """Return warps per block and blocks per chain: all multiprocessors, with at least two warps on each."""
        if chains not in self._plans:
            tiles, spec = self.padded // 32, self.spec
            most = MAX_WARPS if spec.sums() <= FEW_SUMS else MAX_WARPS // 2
            while most > 1 and spec.shared(most) > self.max_shared:
                most -= 1
            blocks = min(max(1, self.multiprocessors // chains), -(-tiles // 2))
            rounds = -(-tiles // (most * blocks))
            warps = min(most, -(-tiles // (rounds * blocks)))
            self._plans[chains] = warps, -(-tiles // (rounds * warps))
        return self._plans[chains]

    def kernel(self, chains: int, drifts: int = 1) -> tuple[Kernel, int]:
        """Return the kernel for a number of chains, compiled on first use, and the blocks per chain."""
        warps, blocks = self.plan(chains)
        key = (warps, blocks, drifts)
        if key not in self._kernels:
            with torch.cuda.device(self.device):
                code = compile_kernel(PRELUDE + self.spec.source(warps, blocks, drifts), self.capability)
                threads = 32 * block_warps(warps, blocks)
                self._kernels[key] = Kernel(code, "trajectories", threads, self.spec.shared(warps))
        return self._kernels[key], blocks

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log likelihood (C,) in float64 and the gradient (C, D) of the log density."""
        theta = theta.detach().contiguous()
        gradient, log_lik = torch.empty_like(theta), torch.empty(len(theta), dtype=torch.float64, device=theta.device)
        size = torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)
        self.run((theta, theta, gradient, log_lik), size, None, [-1] * len(theta), ((0.5, 0.5), (1.0,)))
        return log_lik, gradient

    def run(
        self, state: Tensors, size: Tensor, inverse_mass: InverseMass, steps: Sequence[int], scheme: Scheme
    ) -> None:
        """Take `steps[c]` integrator steps of chain c in place.

        `state` is theta, momentum and gradient (C, D), and the log likelihood (C,); step sizes are (C,).
        """
        theta, momentum, gradient, log_likelihood = state
        kicks, drifts = scheme
        arrays = {
            "theta": theta,
            "momentum": momentum,
            "gradient": gradient,
            "log_likelihood": log_likelihood,
            "step_size": size,
            "steps": self._steps_tensor(steps, theta.device),
        }
        assert not isinstance(inverse_mass, CorrelatedMass)
        if inverse_mass is not None:
            arrays["inverse_mass"] = inverse_mass
        self._launch(arrays, kicks, drifts)

    def steps_per_call(self, chains: int) -> int:
        """Return the number of steps per call that keeps Ctrl-C responsive."""
        return max(1, int(MAX_CALL / (3 * chains * self.rows * self.spec.stack.dim)))

    def _launch(self, state: dict[str, Tensor], kicks: Sequence[float], drifts: Sequence[float]) -> None:
        chains = len(state["steps"])
        kernel, blocks = self.kernel(max(self.planned_chains, chains), len(drifts))
        arguments = self.arguments(state, kicks, drifts, blocks)
        with torch.cuda.device(self.device):
            kernel.launch(chains * blocks, arguments, cooperative=blocks > 1)

    def arguments(
        self, state: dict[str, Tensor], kicks: Sequence[float], drifts: Sequence[float], blocks: int
    ) -> ctypes.Structure:
        """Return the parameter of the kernel. It holds addresses: the caller keeps the tensors alive."""
        buffers = self._block_buffers(len(state["steps"]), blocks)
        tensors = {**self.constants, **state, **dict(zip(("partial", "partial_value", "arrivals"), buffers))}
        assert all(t.is_contiguous() for t in tensors.values())
        return arguments_struct(len(drifts))(
            **{name: t.data_ptr() for name, t in tensors.items()},
            rows=self.rows,
            padded=self.padded,
            dim=self.spec.stack.dim,
            weight=self.weight,
            kick=(ctypes.c_double * len(kicks))(*kicks),
            drift=(ctypes.c_double * len(drifts))(*drifts),
        )

    def _steps_tensor(self, steps: Sequence[int], device: torch.device) -> Tensor:
        """Return the step counts on the GPU. A copy makes the host wait for the GPU, so the last one is kept."""
        wanted = tuple(steps)
        if self._step_counts[0] != wanted:
            self._step_counts = wanted, torch.tensor(wanted, dtype=torch.int32).to(device)
        return self._step_counts[1]

    def _block_buffers(self, chains: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the buffers that the blocks of a chain exchange: gradients, log likelihoods, arrival counters (0)."""
        key = chains * blocks
        if key not in self._buffers:
            sums = chains * (blocks + 1) * len(self.spec.slots()[3]) if blocks > 1 else 1
            self._buffers[key] = (
                torch.empty(sums, dtype=self.spec.stack.dtype, device=self.device),
                torch.empty(key, dtype=torch.float64, device=self.device),
                torch.zeros(chains, dtype=torch.int32, device=self.device),
            )
        buffers = self._buffers[key]
        if blocks > 1:
            buffers[2].zero_()
        return buffers
