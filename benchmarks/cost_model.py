"""Cost model of an HMC leapfrog step on many devices: sharded arithmetic, a fixed cost, an all-reduce over row shards.

    seconds per step = launch + (chains per device x rows per device x FLOPs per row) / rate
                       + all-reduce of a (chains per device, D) gradient over the row shards

A ring all-reduce over p devices sends every byte 2 (p - 1) / p times in 2 (p - 1) hops; a tree takes 2 log2 p hops and
sends all bytes twice. Libraries pick the faster one, and so does this model. Chains need no communication, so
`best_mesh` shards them first, and rows where devices are left over.

The parameters of a `Machine` are measured: `calibrate` fits them to times of steps and of sums. The rate is what the
network achieves on the device, which is far below its peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from credibly.errors import InputError


@dataclass(frozen=True)
class Machine:
    """Identical devices and the links between them.

    Attributes:
        rate: FLOP/s that one device achieves on the network at hand.
        bandwidth: bytes per second of a link.
        latency: seconds per hop.
        launch: fixed seconds per step, whatever the number of rows.
        near_devices: devices per host.
        near_bandwidth: bytes per second of the links within a host; by default the same as between hosts.
    """

    rate: float
    bandwidth: float
    latency: float
    launch: float
    near_devices: int = 1
    near_bandwidth: float | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "bandwidth"):
            if not getattr(self, name) > 0:
                raise InputError(name, f"must be a positive number, got {getattr(self, name)!r}")
        for name in ("latency", "launch"):
            if not getattr(self, name) >= 0:
                raise InputError(name, f"must be a non-negative number of seconds, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Work:
    """The gradient of one chain on all rows.

    Attributes:
        rows: rows of the data.
        flops: FLOPs per row, forward and backward.
        parameters: parameters of the network.
        width: bytes per parameter.
        at_once: chains per device that are evaluated together; None for all. Convolutional networks take one at a time.
    """

    rows: int
    flops: float
    parameters: int
    width: int = 4
    at_once: int | None = None


@dataclass(frozen=True)
class Step:
    """Seconds of a leapfrog step by component."""

    compute: float
    launch: float
    communication: float

    @property
    def seconds(self) -> float:
        """The total."""
        return self.compute + self.launch + self.communication


def all_reduce_seconds(machine: Machine, size: float, places: int) -> float:
    """Return the seconds of an all-reduce of `size` bytes over `places` devices."""
    if places <= 1:
        return 0.0
    near = places <= machine.near_devices and machine.near_bandwidth is not None
    bandwidth = machine.near_bandwidth if near and machine.near_bandwidth else machine.bandwidth
    ring = 2 * (places - 1) * machine.latency + 2 * (places - 1) / places * size / bandwidth
    tree = 2 * math.ceil(math.log2(places)) * machine.latency + 2 * size / bandwidth
    return min(ring, tree)


def leapfrog_seconds(machine: Machine, work: Work, chains: int = 1, mesh: tuple[int, int] = (1, 1)) -> Step:
    """Return the cost of a leapfrog step of all chains on a (chain, row) mesh; the device with the most work counts."""
    mine, rows = math.ceil(chains / mesh[0]), math.ceil(work.rows / mesh[1])
    batches, communication = _communication(machine, work, mine, mesh[1])
    return Step(mine * rows * work.flops / machine.rate, batches * machine.launch, communication)


def _communication(machine: Machine, work: Work, chains: int, places: int) -> tuple[int, float]:
    """Return the number of batches in which a device evaluates its chains, and the seconds of their all-reduces."""
    together = min(chains, work.at_once or chains)
    batches = math.ceil(chains / together)
    size = together * (work.parameters * work.width + 8)  # a gradient, and a log likelihood in float64
    return batches, batches * all_reduce_seconds(machine, size, places)


def run_seconds(
    machine: Machine, work: Work, chains: int, mesh: tuple[int, int], *, steps: int, iterations: int
) -> float:
    """Return the seconds of a whole run of `iterations` with `steps` leapfrog steps each."""
    return iterations * steps * leapfrog_seconds(machine, work, chains, mesh).seconds


def meshes(devices: int, chains: int) -> list[tuple[int, int]]:
    """Return every mesh of the devices in which each chain shard has a chain."""
    return [(p, devices // p) for p in range(1, min(devices, chains) + 1) if devices % p == 0]


def best_mesh(machine: Machine, work: Work, chains: int, devices: int, *, idle: int = 0) -> tuple[int, int]:
    """Return the mesh with the shortest step; ties go to more chain shards, which communicate less.

    Args:
        machine: the devices.
        work: the gradient of one chain.
        chains: number of chains.
        devices: number of devices.
        idle: number of devices that may stay idle, as two of 512 in a mesh of 3x170.
    """
    for name, value in (("chains", chains), ("devices", devices)):
        if value < 1:
            raise InputError(name, f"must be a positive integer, got {value}")
    candidates = [mesh for used in range(max(1, devices - idle), devices + 1) for mesh in meshes(used, chains)]
    return min(candidates, key=lambda mesh: (leapfrog_seconds(machine, work, chains, mesh).seconds, -mesh[0]))


def break_even_rows(machine: Machine, work: Work, places: int, *, chains: int = 1, gain: float = 1.0) -> float:
    """Return the number of rows from which sharding them over `places` devices makes a step `gain` times as fast.

    With gain = 1 that is where a step is no slower; with gain = places / 2 where half of every device is used. Infinite
    if no number of rows is enough.

    Args:
        machine: the devices.
        work: the gradient of one chain.
        places: number of row shards.
        chains: chains per chain shard.
        gain: the speed-up over one device.
    """
    if not 1 <= gain < places:
        return math.inf
    batches, communication = _communication(machine, work, chains, places)
    lost = (gain - 1) * batches * machine.launch + gain * communication
    return lost / (chains * work.flops / machine.rate * (1 - gain / places))


def most_places(machine: Machine, work: Work, *, chains: int = 1, efficiency: float = 0.5, limit: int = 4096) -> int:
    """Return the largest power of two of row shards with at least this parallel efficiency; 1 if there is none."""
    alone, found, places = leapfrog_seconds(machine, work, chains).seconds, 1, 2
    while places <= limit:
        if alone / (places * leapfrog_seconds(machine, work, chains, (1, places)).seconds) >= efficiency:
            found = places
        places *= 2
    return found


def calibrate(
    steps: Sequence[tuple[float, float]], sums: Sequence[tuple[float, float]], *, flops: float, places: int
) -> Machine:
    """Fit a machine to measured times.

    Args:
        steps: (rows, seconds) of a step on one device, for at least two numbers of rows.
        sums: (bytes, seconds) of an all-reduce, for at least two sizes.
        flops: FLOPs per row.
        places: devices of the all-reduce.
    """
    launch, per_row = _line(steps)
    fixed, per_byte = _line(sums)
    for name, slope in (("steps", per_row), ("sums", per_byte)):
        if not slope > 0:
            raise InputError(name, "must take longer for larger sizes", "Measure larger sizes, on an idle machine")
    hops, sent = 2 * (places - 1), 2 * (places - 1) / places
    return Machine(flops / per_row, sent / per_byte, fixed / hops, launch)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the intercept, at least 0, and the slope of a least-squares line in relative errors."""
    if len({x for x, _ in points}) < 2:
        raise InputError("points", f"must have at least two sizes, got {len(points)} times of one size")
    weights = [1 / t**2 for _, t in points]
    s = sum(weights)
    sx = sum(w * x for w, (x, _) in zip(weights, points))
    st = sum(w * t for w, (_, t) in zip(weights, points))
    sxx = sum(w * x * x for w, (x, _) in zip(weights, points))
    sxt = sum(w * x * t for w, (x, t) in zip(weights, points))
    slope = (s * sxt - sx * st) / (s * sxx - sx * sx)
    intercept = (st - slope * sx) / s
    return (intercept, slope) if intercept >= 0 else (0.0, sxt / sxx)


# The run of the paper that this library started from, and current hardware for it.
PAPER = {"steps": 70_248, "iterations": 50 + 240, "chains": 3, "devices": 512}  # burn-in and samples per chain
# ResNet-20 on 32 x 32 x 3: 40.6 million multiply-adds in the forward pass; a gradient takes three times that.
RESNET20 = Work(rows=40_960, flops=3 * 2 * 40.6e6, parameters=274_042, at_once=1)
_MEASURED = {"tf32": 0.318, "bf16": 0.158}  # seconds of a full-batch gradient of 50,000 images on one H200


def h200(precision: str = "tf32") -> Machine:
    """Return hosts of eight H200 GPUs for `RESNET20`. The rate is measured; the rest is assumed, without such hosts.

    Assumed: 2 ms of kernel launches per step (about 400 kernels at 5 us), 10 us per hop, an all-reduce bandwidth of 200
    GB/s within a host (NVLink) and 40 GB/s between hosts (400 Gb/s InfiniBand per GPU).
    """
    rate = 50_000 * RESNET20.flops / _MEASURED[precision]
    return Machine(rate, 40e9, 10e-6, 2e-3, near_devices=8, near_bandwidth=200e9)
