"""The processes that share a run: who this one is among them, how they form a mesh of chains by rows, what they tell each other.

`torchrun` starts the processes and says so in the environment; `current()` joins them when it is first asked. Alone, every
operation here is the identity, so the code of one process and of many is the same. What processes tell each other is numbers
and JSON: nothing that is received is ever executed.

A process that fails leaves word of its error in the store that they met by and closes its connections, so that the others stop
at once and say whose error it was. One that hangs is named after a time limit (`CREDIBLY_TIMEOUT`, in seconds).
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from credibly.distributed.rendezvous import meeting_store
from credibly.errors import InputError, PeerError

T = TypeVar("T")
TIMEOUT = 600.0  # seconds that a process waits for the others
WORD = "credibly/failure"  # where the first error is left
SIGN = 1.0  # seconds between two notes of how often a process has met the others: each costs as much as a small sum
LEAVE = 0.1  # seconds that threads are given at the end
LISTEN = 5.0  # seconds in which a process that lost its peers looks for their word


@dataclass
class World:
    """All processes of a run.

    Attributes:
        rank: the number of this one, from 0. size: how many there are.
        restarts: how often they have been started again after a failure.
        store: where word of failures is left; None alone.
    """

    rank: int = 0
    size: int = 1
    restarts: int = 0
    timeout: float = TIMEOUT
    store: Any = None
    met: int = 0
    waits: bool = False  # in a call of all processes that has not come back
    _told: float = field(default=-math.inf, repr=False)
    _meshes: dict[tuple[int, int], Mesh] = field(default_factory=dict, repr=False)

    @property
    def leader(self) -> bool:
        """Whether this process writes what all of them share, and speaks."""
        return self.rank == 0

    # -- the mesh --------------------------------------------------------------------------------------------------------
    def mesh(self, chains: int) -> Mesh:
        """The mesh for so many chains: `CREDIBLY_MESH` such as 4x2, or as many chain places as there are chains for.

        What is left over goes to the rows: processes that hold the same chains share out the data, where a method can do so,
        and do the same work elsewhere.
        """
        said = os.environ.get("CREDIBLY_MESH", "").strip()
        if said and self.size > 1:
            shape = parse_mesh(said, self.size)
            if shape[0] > chains:
                raise InputError("CREDIBLY_MESH", f"found {said!r} for {chains} chains", "Give each place a chain")
        else:
            places = max(d for d in range(1, self.size + 1) if self.size % d == 0 and d <= max(1, chains))
            shape = (places, self.size // places)
        if shape not in self._meshes:
            self._meshes[shape] = _make_mesh(self, shape)
        return self._meshes[shape]

    def all_rows(self) -> Mesh:
        """The mesh of methods that have no chains to spread: every process has its share of the rows."""
        shape = (1, self.size)
        if shape not in self._meshes:
            self._meshes[shape] = _make_mesh(self, shape)
        return self._meshes[shape]

    # -- what they tell each other -------------------------------------------------------------------------------------------
    def gather(self, value: Any) -> list[Any]:
        """A JSON value of every process, in their order."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.meet(lambda: dist.all_gather(lengths, torch.tensor([len(text)])))
        most = max(int(n) for n in lengths)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: len(text)] = text
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        self.meet(lambda: dist.all_gather(parts, padded))
        return [json.loads(bytes(p[: int(n)].tolist())) for p, n in zip(parts, lengths)]

    def from_leader(self, tensor: Tensor) -> None:
        """Puts the values that the leader has into a tensor that all have."""
        if self.size > 1 and tensor.numel():
            sent = tensor.detach().contiguous().clone().reshape(-1).view(torch.uint8)  # bytes: any dtype goes
            self.meet(lambda: dist.broadcast(sent, 0))
            with torch.no_grad():
                tensor.copy_(sent.view(tensor.dtype).reshape(tensor.shape))

    def barrier(self) -> None:
        """Waits for all."""
        self.gather(None)

    def agree(self, what: str, value: Any, advice: str) -> None:
        """Refuses to go on where the processes have different values of something."""
        told = self.gather(value)
        other = next((r for r, v in enumerate(told) if v != told[0]), None)
        if other is not None:
            raise InputError(what, f"process 0 has {told[0]!r}, process {other} has {told[other]!r}", advice)

    def meet(self, call: Callable[[], T]) -> T:
        """A call in which all processes take part; where that fails, whose error it was."""
        if self.size == 1:
            return call()
        self.met += 1
        now = time.monotonic()
        if now - self._told > SIGN:
            self._tell()
            self._told = now
        self.waits = True
        try:
            value = call()
        except (RuntimeError, ValueError) as error:
            self.waits = False
            raise self._lost(error) from None
        self.waits = False
        return value

    # -- failure ---------------------------------------------------------------------------------------------------------
    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that all processes do: an error of this one ends it for the others at once, with its message."""
        if self.size == 1:
            yield
            return
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            self._leave_word(error)
            raise

    def _leave_word(self, error: BaseException) -> None:
        said = json.dumps({"rank": self.rank, "kind": type(error).__name__, "message": str(error)[:2000]})
        try:
            self.store.compare_set(WORD, "", said)
            dist.destroy_process_group()  # closes the connections, so that those who wait for this process stop waiting
        except Exception:  # the store may be gone with its host; the error itself is what counts
            return

    def _tell(self) -> None:
        self.store.set(f"credibly/at/{self.rank}", str(self.met))

    def _lost(self, error: Exception) -> PeerError:
        until = time.monotonic() + LISTEN
        try:
            self._tell()  # whoever else has lost it does the same, so that those who are behind can be told
            while time.monotonic() < until:
                if self.store.check([WORD]):
                    word = json.loads(self.store.get(WORD))
                    return PeerError(
                        f"process {word['rank']} of {self.size} failed, so this one stops: {word['kind']}: {word['message']}"
                    )
                time.sleep(0.1)
            places = [int(self.store.get(f"credibly/at/{r}")) for r in range(self.size)]
            behind = [str(r) for r, met in enumerate(places) if met < self.met]
        except Exception:  # the host of the store is gone
            behind = []
        who = f"process {', '.join(behind)}" if behind else "a process"
        return PeerError(
            f"{who} of {self.size} did not answer: it was killed, or hangs (waited for up to {self.timeout:g} s, "
            f"CREDIBLY_TIMEOUT sets that; {str(error).splitlines()[0][:200]})"
        )


@dataclass(frozen=True)
class Mesh:
    """Processes as a rectangle: chains are spread along one side, rows of the data along the other."""

    world: World
    shape: tuple[int, int] = (1, 1)
    chain_place: int = 0
    row_place: int = 0
    chain_group: Any = None
    row_group: Any = None

    @property
    def writes(self) -> bool:
        """Whether this process writes the draws of its chains: one of those that hold them does."""
        return self.row_place == 0

    def chains(self, count: int) -> range:
        """The chains of this process."""
        return share(count, self.chain_place, self.shape[0])

    def rows(self, count: int) -> range:
        """The rows of this process."""
        return share(count, self.row_place, self.shape[1])

    def sum_rows(self, tensor: Tensor) -> Tensor:
        """The sum over the processes that hold the same chains, in place; all of them get the same bits."""
        if self.shape[1] > 1:
            self.world.meet(lambda: dist.all_reduce(tensor, group=self.row_group))
        return tensor

    def all_chains(self, mine: Tensor, count: int, axis: int = 0) -> Tensor:
        """The tensors of all chains, joined in their order along the axis that holds them."""
        if self.shape[0] == 1:
            return mine
        lengths = [len(share(count, place, self.shape[0])) for place in range(self.shape[0])]
        own = mine.movedim(axis, 0).contiguous()
        padded = own.new_zeros((max(lengths), *own.shape[1:]))
        padded[: len(own)] = own
        plain = padded.to(torch.uint8) if padded.dtype == torch.bool else padded
        parts = [torch.empty_like(plain) for _ in lengths]
        self.world.meet(lambda: dist.all_gather(parts, plain, group=self.chain_group))
        joined = torch.cat([part[:n] for part, n in zip(parts, lengths)]).to(mine.dtype)
        return joined.movedim(0, axis)


def share(count: int, place: int, places: int) -> range:
    """Which of so many things go to a place: shares that differ by at most one, in order."""
    least, more = divmod(count, places)
    first = place * least + min(place, more)
    return range(first, first + least + (place < more))


def parse_mesh(said: str, size: int) -> tuple[int, int]:
    """Chain places and row places from text such as 4x2; their product is the number of processes."""
    found = re.fullmatch(r"([1-9]\d*)\s*[xX]\s*([1-9]\d*)", said)
    if found is None:
        raise InputError("CREDIBLY_MESH", f"found {said!r}", "Pass chains by rows, such as 4x2")
    shape = int(found[1]), int(found[2])
    if math.prod(shape) != size:
        raise InputError(
            "CREDIBLY_MESH", f"{said} asks for {math.prod(shape)} processes where there are {size}",
            "Choose sides whose product is the number of processes",
        )  # fmt: skip
    return shape


def _make_mesh(world: World, shape: tuple[int, int]) -> Mesh:
    if world.size == 1:
        return Mesh(world)
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cuda" if _on_gpu() else "cpu"
    grid = world.meet(lambda: init_device_mesh(kind, shape, mesh_dim_names=("chains", "rows")))
    chain_place, row_place = divmod(world.rank, shape[1])
    return Mesh(world, shape, chain_place, row_place, grid.get_group("chains"), grid.get_group("rows"))


# -- joining -------------------------------------------------------------------------------------------------------------
_joined: World | None = None
_alone = 0


def current() -> World:
    """The processes that this one was started with; itself alone where there are no others."""
    global _joined
    if _alone:
        return World()
    if _joined is None:
        _joined = _join()
    return _joined


@contextmanager
def alone() -> Iterator[None]:
    """Work that this process does by itself while others do something else."""
    global _alone
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


def expected() -> int:
    """How many processes were started, without joining them."""
    return int(os.environ.get("WORLD_SIZE", "1")) if os.environ.get("RANK", "").isdigit() else 1


def _join() -> World:
    ready = dist.is_available() and dist.is_initialized()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not ready and expected() == 1:
        return World(restarts=restarts)  # one of several may be all that is left after a loss
    timeout = os.environ.get("CREDIBLY_TIMEOUT", "").strip() or str(TIMEOUT)
    try:
        seconds = float(timeout)
    except ValueError:
        raise InputError("CREDIBLY_TIMEOUT", f"found {timeout!r}", "Pass a number of seconds") from None
    if not ready:
        if _on_gpu():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        store, rank, size = meeting_store(seconds)
        backend = "cpu:gloo,cuda:nccl" if _on_gpu() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
        atexit.register(_leave)
    world = World(
        dist.get_rank(), dist.get_world_size(), restarts, seconds, dist.distributed_c10d._get_default_store()
    )  # fmt: skip
    world.store.set(f"credibly/at/{world.rank}", "0")
    return world


def _leave() -> None:
    """Lets the threads of torch.distributed put down what they hold while Python still runs: later that aborts the process.

    A thread that has carried a sum out drops its tensors a moment after the sum is handed over, for which it needs the
    interpreter; a program that ends right then would be taken for one that failed.
    """
    if _joined is None or _joined.waits:  # broken off in a call: the others may never answer it
        return
    time.sleep(LEAVE)
    if dist.is_initialized():
        dist.destroy_process_group()


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() > 0 and "CREDIBLY_CPU" not in os.environ
