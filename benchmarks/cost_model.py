"""What a leapfrog step of HMC costs on many devices: arithmetic that is shared out, a fixed cost, and one sum over the row places.

    a step = launch + chains of a place x rows of a place x flops a row / rate + the sum of a (chains of a place, D) gradient

The sum is an all-reduce. A ring of p places passes every byte on 2 (p - 1) / p times in 2 (p - 1) hops; a tree takes
2 log2 p hops and passes all bytes on twice. Libraries take the one that is faster, and so does this model. Chains cost no
communication, so `best_mesh` spreads them first, and rows where devices are left over.

The numbers of a `Machine` are measured: `calibrate` finds them from times of steps and of sums. The rate is what the network
gets on the device, which is far below what the maker of the device promises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from credibly.errors import InputError


@dataclass(frozen=True)
class Machine:
    """Devices of one kind and the links between them.

    Attributes:
        rate: flops a second that one device reaches on the network at hand.
        bandwidth: bytes a second of a link. latency: seconds of a hop.
        launch: seconds of a step that stay however few rows there are.
        near_devices: how many devices sit on one host. near_bandwidth: of the links within it; by default those between hosts.
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
                raise InputError(name, f"found {getattr(self, name)!r}", "Pass a positive number")
        for name in ("latency", "launch"):
            if not getattr(self, name) >= 0:
                raise InputError(name, f"found {getattr(self, name)!r}", "Pass a number of seconds from 0 up")


@dataclass(frozen=True)
class Work:
    """The gradient of one chain on all rows.

    Attributes:
        rows: of the data. flops: of a row, forwards and backwards.
        parameters: of the network. width: bytes of one of them.
        at_once: chains of a place that take a step together; None for all. Convolutional networks take them in turn (1).
    """

    rows: int
    flops: float
    parameters: int
    width: int = 4
    at_once: int | None = None


@dataclass(frozen=True)
class Step:
    """Seconds of a leapfrog step, by what they are spent on."""

    compute: float
    launch: float
    communication: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.launch + self.communication


def all_reduce_seconds(machine: Machine, size: float, places: int) -> float:
    """A sum of so many bytes over so many places."""
    if places <= 1:
        return 0.0
    near = places <= machine.near_devices and machine.near_bandwidth is not None
    bandwidth = machine.near_bandwidth if near and machine.near_bandwidth else machine.bandwidth
    ring = 2 * (places - 1) * machine.latency + 2 * (places - 1) / places * size / bandwidth
    tree = 2 * math.ceil(math.log2(places)) * machine.latency + 2 * size / bandwidth
    return min(ring, tree)


def leapfrog_seconds(machine: Machine, work: Work, chains: int = 1, mesh: tuple[int, int] = (1, 1)) -> Step:
    """A leapfrog step of all chains on a mesh of chain places by row places; the place with the most to do counts."""
    mine, rows = math.ceil(chains / mesh[0]), math.ceil(work.rows / mesh[1])
    turns, said = _turns(machine, work, mine, mesh[1])
    return Step(mine * rows * work.flops / machine.rate, turns * machine.launch, said)


def _turns(machine: Machine, work: Work, chains: int, places: int) -> tuple[int, float]:
    """In how many goes a place takes its chains, and the seconds of their sums."""
    together = min(chains, work.at_once or chains)
    turns = math.ceil(chains / together)
    size = together * (work.parameters * work.width + 8)  # a gradient, and a log likelihood in float64
    return turns, turns * all_reduce_seconds(machine, size, places)


def run_seconds(
    machine: Machine, work: Work, chains: int, mesh: tuple[int, int], *, steps: int, iterations: int
) -> float:
    """A whole run: so many iterations of so many leapfrog steps each."""
    return iterations * steps * leapfrog_seconds(machine, work, chains, mesh).seconds


def meshes(devices: int, chains: int) -> list[tuple[int, int]]:
    """Every mesh of so many devices in which each chain place has a chain."""
    return [(p, devices // p) for p in range(1, min(devices, chains) + 1) if devices % p == 0]


def best_mesh(machine: Machine, work: Work, chains: int, devices: int, *, idle: int = 0) -> tuple[int, int]:
    """The mesh whose step is shortest; of equal ones that with more chain places, since those say less to each other.

    Args:
        idle: how many of the devices may be left without work, as two of 512 in a mesh of 3x170.
    """
    for name, value in (("chains", chains), ("devices", devices)):
        if value < 1:
            raise InputError(name, f"found {value}", "Pass a whole number from 1 up")
    among = [mesh for used in range(max(1, devices - idle), devices + 1) for mesh in meshes(used, chains)]
    return min(among, key=lambda mesh: (leapfrog_seconds(machine, work, chains, mesh).seconds, -mesh[0]))


def break_even_rows(machine: Machine, work: Work, places: int, *, chains: int = 1, gain: float = 1.0) -> float:
    """From how many rows on it pays to share them among so many places: a step is then `gain` times as fast as on one.

    With gain = 1 that is where a step is no slower; with gain = places / 2 where half of every device is used. Infinite where
    no number of rows is enough.

    Args:
        chains: of one chain place.
    """
    if not 1 <= gain < places:
        return math.inf
    turns, said = _turns(machine, work, chains, places)
    lost = (gain - 1) * turns * machine.launch + gain * said
    return lost / (chains * work.flops / machine.rate * (1 - gain / places))


def most_places(machine: Machine, work: Work, *, chains: int = 1, efficiency: float = 0.5, limit: int = 4096) -> int:
    """The largest power of two of row places at which a step still uses this share of every device; 1 where none does."""
    alone, found, places = leapfrog_seconds(machine, work, chains).seconds, 1, 2
    while places <= limit:
        if alone / (places * leapfrog_seconds(machine, work, chains, (1, places)).seconds) >= efficiency:
            found = places
        places *= 2
    return found


def calibrate(
    steps: Sequence[tuple[float, float]], sums: Sequence[tuple[float, float]], *, flops: float, places: int
) -> Machine:
    """A machine from measured times.

    Args:
        steps: (rows, seconds) of a step on one device, for at least two numbers of rows.
        sums: (bytes, seconds) of an all-reduce over `places`, for at least two sizes.
        flops: of a row.
    """
    launch, per_row = _line(steps)
    fixed, per_byte = _line(sums)
    for name, slope in (("steps", per_row), ("sums", per_byte)):
        if not slope > 0:
            raise InputError(name, "do not grow with their size", "Measure larger ones, on a machine that is at rest")
    hops, share = 2 * (places - 1), 2 * (places - 1) / places
    return Machine(flops / per_row, share / per_byte, fixed / hops, launch)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept, at least 0, and slope of the line whose relative errors are least in squares."""
    if len({x for x, _ in points}) < 2:
        raise InputError("points", f"found {len(points)} times of one size", "Measure at least two sizes")
    weights = [1 / t**2 for _, t in points]
    s = sum(weights)
    sx = sum(w * x for w, (x, _) in zip(weights, points))
    st = sum(w * t for w, (_, t) in zip(weights, points))
    sxx = sum(w * x * x for w, (x, _) in zip(weights, points))
    sxt = sum(w * x * t for w, (x, t) in zip(weights, points))
    slope = (s * sxt - sx * st) / (s * sxx - sx * sx)
    intercept = (st - slope * sx) / s
    return (intercept, slope) if intercept >= 0 else (0.0, sxt / sxx)


# The run that this library was founded on, and a machine of today for it.
PAPER = {"steps": 70_248, "iterations": 50 + 240, "chains": 3, "devices": 512}  # burn-in and samples of each chain
# ResNet-20 on 32 x 32 x 3: 40.6 million multiply-adds forwards, of which a gradient takes three times.
RESNET20 = Work(rows=40_960, flops=3 * 2 * 40.6e6, parameters=274_042, at_once=1)
_MEASURED = {"tf32": 0.318, "bf16": 0.158}  # seconds of a full-batch gradient of 50,000 images on one H200


def h200(precision: str = "tf32") -> Machine:
    """Hosts of eight H200 GPUs for `RESNET20`. The rate is measured; the rest is assumed, as no such hosts were at hand.

    Assumed: 2 ms of kernel launches a step (some 400 kernels at 5 us), 10 us a hop, 200 GB/s an all-reduce sees within a
    host (NVLink) and 40 GB/s between hosts (400 Gb/s InfiniBand a GPU).
    """
    rate = 50_000 * RESNET20.flops / _MEASURED[precision]
    return Machine(rate, 40e9, 10e-6, 2e-3, near_devices=8, near_bandwidth=200e9)
