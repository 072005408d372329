"""Check the memory that a run needs against the memory that is available, before any work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from credibly.errors import InputError


def available(device: torch.device) -> float:
    """Return the bytes that a process may still allocate on a device; infinity if that is unknown."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # torch keeps freed blocks and reuses them.
        return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type != "cpu":
        return float("inf")
    return min(_system(), _container())


def _system() -> float:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def _container() -> float:
    """Return the bytes left in the control group of the process; files in its cache can be dropped."""
    root = Path("/sys/fs/cgroup")
    names = (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    )
    for limit, used, statistics in names:
        try:
            most = (root / limit).read_text().strip()
            if most != "max":
                lines = (line.split() for line in (root / statistics).read_text().splitlines())
                files = sum(float(value) for name, value in lines if name in ("inactive_file", "active_file"))
                return max(0.0, float(most) - float((root / used).read_text()) + files)
        except (OSError, ValueError):
            continue
    return float("inf")


def in_words(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def check_fits(argument: str, what: str, needs: Mapping[str, float], device: torch.device, advice: str) -> None:
    """Raise if the sum of these needs, bytes by name, is more than the device has left.

    Args:
        argument: the parameter to name in the error.
        what: what the memory is for, such as "SGHMC of 11,000,000 parameters".
        needs: bytes by name; lower bounds, so that no run that fits is refused.
        device: where they are allocated.
        advice: the way out.
    """
    total, free = sum(needs.values()), available(device)
    if total <= free:
        return
    parts = ", ".join(f"{name} {in_words(size)}" for name, size in sorted(needs.items(), key=lambda kv: -kv[1]) if size)
    where = "memory" if device.type == "cpu" else f"memory of {device}"
    raise InputError(
        argument, f"{what} needs at least {in_words(total)} of {where} ({parts}), {in_words(free)} are free", advice
    )
