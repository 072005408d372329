"""The peers: processes with JAX that run a sampler for the time budget and return its predictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.jax_client import JaxSide, PeerError
from benchmarks.samplers.posterior import Posterior
from benchmarks.samplers.settings import library

# Most devices that the processor is divided into; with more chains, each device has several.
MOST_DEVICES = 8
# Kinds that have a process of their own, because their dependencies exclude those of the others.
APART = ("bde_regressor",)


@dataclass
class Peers:
    """The JAX processes of a benchmark, started when first needed and again after a failure.

    Attributes:
        python, wheels: interpreter of the JAX samplers, and a folder with packages that it lacks.
        bde_python, bde_wheels: the same for bde, which needs an old BlackJAX.
        device: "cpu" or "cuda".
        versions: of all peers that were started.
    """

    python: str | None
    wheels: Path | None = None
    bde_python: str | None = None
    bde_wheels: Path | None = None
    device: str = "cpu"
    threads: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    sides: dict[bool, JaxSide] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)

    def run(
        self, name: str, entry: dict[str, Any], posterior: Posterior, seed: int, budget: float
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return predictions of the draws, and durations and counts, of one run. Raise `PeerError` if it fails."""
        chains, kind = len(posterior.start), entry["kind"]
        side = self.side(kind in APART, chains)
        if not side.has(library(name)):
            raise PeerError(f"{library(name)} is not installed there")
        # Once per posterior, also for bde, whose process checks nothing.
        if kind not in APART and posterior.name not in self.checked:
            posterior.check(side)
            self.checked.add(posterior.name)
        case = {**entry, "sizes": posterior.sizes, "chains": chains, "seed": seed, "budget": budget}
        request = kind if kind in ("nutpie_nuts", *APART) else "budgeted"
        try:
            info, arrays = side.fetch(sample=request, **case, **posterior.arrays(), theta=posterior.start)
        except (PeerError, BrokenPipeError) as error:
            if side.process.poll() is not None:
                del self.sides[kind in APART]
            raise PeerError(str(error) or "the process ended") from error
        return arrays, {"warmup_seconds": None, **info, "settings": entry}

    def side(self, apart: bool, chains: int) -> JaxSide:
        """Return the process for bde, or for all others."""
        if apart not in self.sides:
            python = self.bde_python if apart else self.python
            if python is None:
                raise PeerError(f"no interpreter given with --{'bde' if apart else 'jax'}")
            devices = _divisor(chains) if self.device == "cpu" else 1
            wheels = self.bde_wheels if apart else self.wheels
            side = JaxSide(python, devices=devices, threads=self.threads, wheels=wheels, platform=self.device)
            self.sides[apart] = side
            label = "bde: " if apart else ""
            self.versions |= {f"{label}{key}": value for key, value in side.versions.items()}
        return self.sides[apart]

    def close(self) -> None:
        """End the processes."""
        for side in self.sides.values():
            side.close()
        self.sides.clear()


def _divisor(chains: int) -> int:
    """Return the largest number of devices, up to MOST_DEVICES, that all have the same number of chains."""
    return max(n for n in range(1, MOST_DEVICES + 1) if chains % n == 0)
