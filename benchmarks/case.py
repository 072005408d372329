"""A case of the suite: what is done, what limits it, and the function that times it against the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.jax_client import JaxSide
from benchmarks.timing import Row


@dataclass
class Setting:
    """How a case is run. The same for all cases of a run, but for `notes`, where a case says what it left out and why."""

    repeats: int = 5
    seconds: float = 0.3  # length of one turn of one contestant
    threads: int | None = None
    jax: str | None = None  # an interpreter with jax, blackjax and numpyro
    root: Path | None = None  # folder with uci/concrete.npz
    quick: bool = False  # hardly any work: to see that it works, not for figures
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)

    def note(self, words: str) -> None:
        """Something that the reader of the table should know."""
        self.notes.append(words)
        print(f"  ({words})", flush=True)

    @contextmanager
    def jax_side(self, devices: int = 1) -> Iterator[JaxSide | None]:
        """The process with the JAX peers for the length of a block, or None and a note."""
        if self.jax is None:
            self.note("no JAX peers: name an interpreter by --jax, or make one by --make-jax")
            yield None
            return
        side = JaxSide(self.jax, devices=devices, threads=self.threads)
        try:
            yield side
        finally:
            side.close()


@dataclass(frozen=True)
class Case:
    """One line, or a few, of the table of the suite."""

    name: str
    work: str  # what both sides do, in a sentence
    limits: str  # what keeps us from the floor, in a sentence
    run: Callable[[Setting], Iterable[Row]]
    minutes: float  # about how long it takes on two cores, for the budget
    device: str = "cpu"
    goals: str = ""  # in words, for the list of cases
    peers: tuple[str, ...] = ()
