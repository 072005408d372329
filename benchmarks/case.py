"""A case of the suite: the work, its bottleneck, and the function that times it against the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.jax_client import JaxSide
from benchmarks.timing import Row


@dataclass
class Setting:
    """How to run a case: the same for all cases of a run, except for `notes` on what a case skipped and why."""

    repeats: int = 5
    seconds: float = 0.3  # duration of one repetition of one implementation
    threads: int | None = None
    jax: str | None = None  # an interpreter with jax, blackjax and numpyro
    root: Path | None = None  # folder with uci/concrete.npz
    quick: bool = False  # minimal work: a smoke test, not for timings
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Record a remark for the reader of the table."""
        self.notes.append(text)
        print(f"  ({text})", flush=True)

    @contextmanager
    def jax_side(self, devices: int = 1) -> Iterator[JaxSide | None]:
        """Run the process with the JAX peers for the duration of a block, or yield None and leave a note."""
        if self.jax is None:
            self.note("no JAX peers: pass an interpreter with --jax, or create one with --make-jax")
            yield None
            return
        side = JaxSide(self.jax, devices=devices, threads=self.threads)
        try:
            yield side
        finally:
            side.close()


@dataclass(frozen=True)
class Case:
    """One or a few rows of the suite's table."""

    name: str
    work: str  # one sentence on what both sides compute
    limits: str  # one sentence on the bottleneck that separates us from the floor
    run: Callable[[Setting], Iterable[Row]]
    minutes: float  # approximate duration on two cores, for the budget
    device: str = "cpu"
    goals: str = ""  # for the list of cases
    peers: tuple[str, ...] = ()
