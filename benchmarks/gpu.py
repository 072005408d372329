"""GPU cases: HMC of small networks against a JAX scan, and the full-batch gradient of ResNet-20-FRN against JAX.

    python -m benchmarks --device cuda --jax PYTHON          # PYTHON has jax for CUDA, blackjax and numpyro

`benchmarks.hmc_gpu` times ours alone, by micro-batch and precision. Here ours and JAX alternate on one GPU, with JAX's
memory preallocation disabled. Gradients are first compared on some images.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import credibly as cr
from benchmarks import hmc, rounding
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
MANY_CHAINS = 16  # with more chains a call has one iteration, which takes long enough

# FLOPs (two per multiply-add) of one forward pass of ResNet-20 per 3 x 32 x 32 image; a gradient costs about three
# passes.
RESNET_FLOPS = 2 * 40.8e6


def many_chains(size: str, setting: Setting) -> Iterator[Row]:
    """Compare HMC with 1 to 512 chains."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    for chains in CHAINS:
        case = {**NETWORKS[size], "name": f"gpu-{size}", "chains": chains, "goal": 1.0}
        case["iterations"] = case["iterations"] if size == "small" or chains <= MANY_CHAINS else 1
        yield from hmc.comparisons(case, setting, device=setting.device)


def resnet(precision: str, setting: Setting) -> Iterator[Row]:
    """Compare one full-batch gradient in micro-batches."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    device, images = setting.device, 64 if setting.quick else IMAGES
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, 3, 32, 32, generator=generator)
    y = torch.randint(10, (images,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the check below then sees the same network in every run
        net = cr.zoo.resnet20_frn().to(device)
    problem = cr.Problem(
        net,
        (x.to(device), y.to(device)),
        cr.likelihoods.Categorical(),
        cr.priors.Normal(0.3),
        device=device,
        precision=None if precision == "tf32" else "bf16",
    )
    target = ProblemTarget(problem)
    target.compile_parts(not setting.quick, 10**6, 1)
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
            case = {"precision": precision, "micro_batch": min(images, 2000), "names": names(problem)}
            implementations["JAX"] = side.build("resnet_gradient", case, x=x, y=y, theta=theta)
        times = interleaved(implementations, repeats=setting.repeats, seconds=setting.seconds)
    what = f"ResNet-20-FRN, {images:,} images, {precision}: one full-batch gradient"
    floor = Floor(3 * images * RESNET_FLOPS)
    peer = times.get("JAX", [])
    yield Row(what, times["ours"], peer, Goal(">=", 1.1), inverse=True, peer="JAX" if peer else "", floor=floor)


def names(problem: cr.Problem) -> list[list[Any]]:
    """Return name and shape of every parameter, in flat-vector order."""
    return [[entry.name, list(entry.shape)] for entry in problem.layout.entries]


def check_resnet(side: JaxSide, problem: cr.Problem, theta: torch.Tensor, precision: str) -> None:
    """Exit unless both gradients on the first images are as close to that of float64 as the precision allows."""
    few = problem.subset(torch.arange(32, device=problem.device))
    case = {"precision": precision, "micro_batch": 32, "names": names(problem)}
    _, found = side.fetch(density="resnet", **case, x=few.x, y=few.y, theta=theta)
    theirs = torch.from_numpy(found["gradient"].astype(np.float64))  # of the likelihood alone, as timed
    ours = (few.log_density_and_grad(theta).gradient + theta / 0.3**2)[0].cpu().double()
    net = problem.layout.write(theta[0]).cpu().double()
    exact, limit = rounding.tolerance(net, (few.x.cpu().double(), few.y.cpu()), precision)
    errors = [rounding.relative_error(gradient, exact) for gradient in (ours, theirs)]
    if max(errors) > limit:
        found_errors = f"{errors[0]:.2g} for ours and {errors[1]:.2g} for JAX, at most {limit:.2g} is rounding"
        raise SystemExit(f"relative error of the gradient against float64: {found_errors}: nothing to compare")


def cases() -> list[Case]:
    small_limits = (
        "shared-memory loads, each as slow as four multiplications; and about forty small operations per iteration "
        "around the CUDA kernel."
    )
    resnet_limits = (
        "loads of a few filters' inputs inside our kernels (one for convolution, normalisation and activation, three "
        "for the gradient); about three times the bandwidth limit in bf16."
    )
    many = [
        Case(
            f"gpu-hmc-{size}",
            f"HMC, {'-'.join(map(str, network['sizes']))}, {', '.join(map(str, CHAINS))} chains.",
            small_limits,
            partial(many_chains, size),
            4.0,
            "cuda",
            "1 each",
            tuple(hmc.ON_GPU.values()),
        )
        for size, network in NETWORKS.items()
    ]
    gradients = [
        Case(
            f"gpu-resnet-{precision}",
            f"A full-batch gradient of ResNet-20-FRN on 50,000 images, {precision}.",
            resnet_limits,
            partial(resnet, precision),
            3.0,
            "cuda",
            "1.1",
            ("JAX",),
        )
        for precision in ("tf32", "bf16")
    ]
    return many + gradients
