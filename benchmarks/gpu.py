"""The cases on a GPU: HMC of small networks against a JAX scan, and the full-batch gradient of ResNet-20-FRN against JAX.

    python -m benchmarks --device cuda --jax PYTHON          # PYTHON: an interpreter with jax for CUDA, blackjax and numpyro

The measuring of ours alone, by micro-batch and precision, is in `benchmarks.hmc_gpu`. Here ours and JAX take turns on one GPU:
JAX is told not to take all its memory. Gradients are compared on some images first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import credibly as cr
from benchmarks import hmc
from benchmarks.case import Case, Setting
from benchmarks.floors import Floor
from benchmarks.jax_client import JaxSide
from benchmarks.timing import Goal, Row, interleaved
from credibly.inference.target import ProblemTarget

IMAGES = 50_000
CHAINS = (1, 16, 128, 512)
NETWORKS: dict[str, dict[str, Any]] = {
    "small": {"sizes": [13, 50, 1], "rows": 455, "steps": 64, "iterations": 5},
    "medium": {"sizes": [8, 50, 50, 1], "rows": 7000, "steps": 64, "iterations": 5},
}
AT_LENGTH = 16  # chains up to which a call has so many iterations; with more, one takes long enough

# Multiplications and additions of one pass of ResNet-20 on an image of 3 x 32 x 32, twice; a gradient has about three passes.
RESNET_FLOPS = 2 * 40.8e6


def many_chains(size: str, setting: Setting) -> Iterator[Row]:
    """HMC with 1 to 512 chains."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    for chains in CHAINS:
        case = {**NETWORKS[size], "name": f"gpu-{size}", "chains": chains, "goal": 1.0}
        case["iterations"] = case["iterations"] if size == "small" or chains <= AT_LENGTH else 1
        yield from hmc.comparisons(case, setting, device=setting.device)


def resnet(precision: str, setting: Setting) -> Iterator[Row]:
    """One full-batch gradient in micro-batches."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    device, images = setting.device, 64 if setting.quick else IMAGES
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, 3, 32, 32, generator=generator)
    y = torch.randint(10, (images,), generator=generator)
    net = cr.zoo.resnet20_frn().to(device)
    problem = cr.Problem(
        net, (x.to(device), y.to(device)), cr.likelihoods.Categorical(), cr.priors.Normal(0.3), device=device,
        precision=None if precision == "tf32" else "bf16",
    )  # fmt: skip
    target = ProblemTarget(problem)
    target.compile_pieces(not setting.quick, 10**6, 1)
    theta = problem.layout.read(net).unsqueeze(0)

    def ours() -> torch.Tensor:
        with torch.no_grad():
            gradient = target.likelihood_and_grad(theta)[1]
        if device == "cuda":
            torch.cuda.synchronize()
        return gradient

    implementations: dict[str, Callable[[], object]] = {"ours": ours}
    with setting.jax_side() as side:
        if side is not None:
            check_resnet(side, problem, theta, precision)
            words = {"precision": precision, "micro_batch": min(images, 2000), "names": names(problem)}
            implementations["JAX"] = side.build("resnet_gradient", words, x=x, y=y, theta=theta)
        times = interleaved(implementations, repeats=setting.repeats, seconds=setting.seconds)
    what = f"ResNet-20-FRN, {images:,} images, {precision}: a full-batch gradient"
    floor = Floor(3 * images * RESNET_FLOPS)
    peer = times.get("JAX", [])
    yield Row(what, times["ours"], peer, Goal(">=", 1.1), inverse=True, peer="JAX" if peer else "", floor=floor)


def names(problem: cr.Problem) -> list[list[Any]]:
    """Name and shape of every parameter, in the order of the flat vector."""
    return [[entry.name, list(entry.shape)] for entry in problem.layout.entries]


def check_resnet(side: JaxSide, problem: cr.Problem, theta: torch.Tensor, precision: str) -> None:
    """On the first images both gradients are near that of float64, ours about as near as JAX's."""
    few = problem.subset(torch.arange(32, device=problem.device))
    words = {"precision": precision, "micro_batch": 32, "names": names(problem)}
    _, found = side.fetch(density="resnet", **words, x=few.x, y=few.y, theta=theta)
    theirs = torch.from_numpy(found["gradient"].astype(np.float64))  # of the likelihood alone, as it is timed
    ours = (few.log_density_and_grad(theta).gradient + theta / 0.3**2)[0].cpu().double()
    net = cr.zoo.resnet20_frn().double()
    data = (few.x.cpu().double(), few.y.cpu())
    plain = cr.Problem(net, data, cr.likelihoods.Categorical(), cr.priors.Normal(0.3), device="cpu")
    exact_at = theta.cpu().double()
    exact = (plain.log_density_and_grad(exact_at).gradient + exact_at / 0.3**2)[0]
    apart = [float((g - exact).norm() / exact.norm()) for g in (ours, theirs)]
    if max(apart) > {"tf32": 3e-2, "bf16": 0.1}[precision] or apart[0] > 2 * apart[1]:
        raise SystemExit(
            f"from float64 our gradient is {apart[0]:.2g} away and JAX's {apart[1]:.2g}: nothing to compare"
        )


def cases() -> list[Case]:
    small_limits = (
        "loads from a multiprocessor's own memory, each as long as four multiplications; and some forty small operations of an iteration "
        "around the kernel."
    )
    resnet_limits = (
        "loads of a few filters' inputs inside our kernels: one for convolution, normalisation and activation, three for the gradient; "
        "about three times what the bytes need in bf16."
    )
    many = [
        Case(
            f"gpu-hmc-{size}", f"HMC, {'-'.join(map(str, own['sizes']))}, {', '.join(map(str, CHAINS))} chains.", small_limits,
            partial(many_chains, size), 4.0, "cuda", "1 each", tuple(hmc.ON_GPU.values()),
        )
        for size, own in NETWORKS.items()
    ]  # fmt: skip
    gradients = [
        Case(
            f"gpu-resnet-{precision}", f"A full-batch gradient of ResNet-20-FRN on 50,000 images, {precision}.", resnet_limits,
            partial(resnet, precision), 3.0, "cuda", "1.1", ("JAX",),
        )
        for precision in ("tf32", "bf16")
    ]  # fmt: skip
    return many + gradients
