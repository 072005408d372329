"""The processes that share a run: their ranks, the mesh of chains by rows they form, and their collective calls.

`torchrun` starts the processes and describes them in the environment; `current()` joins them on its first call. In a
single process every operation here is the identity, so the same code serves one process and many. Processes exchange
numbers and JSON only: nothing received is ever executed.

A process that fails posts a failure notice to the shared store and closes its connections, so that its peers stop at
once and report whose error it was. One that hangs is named after a time limit (`CREDIBLY_TIMEOUT`, in seconds).
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

from credibly.distributed.rendezvous import rendezvous_store
from credibly.errors import InputError, PeerError

T = TypeVar("T")
# Seconds that a process waits for its peers.
TIMEOUT = 600.0
# The key of the first failure notice in the store.
FAILURE_KEY = "credibly/failure"
# Seconds between two posts of a process's number of collective calls: each costs as much as a small all-reduce.
POST_EVERY = 1.0
# Seconds that threads have to finish at shutdown.
SHUTDOWN_PAUSE = 0.1
# Seconds that a process that lost its peers waits for their failure notice.
NOTICE_WAIT = 5.0


@dataclass
class World:
    """All processes of a run.

    Attributes:
        rank: the index of this process, from 0.
        size: the number of processes.
        restarts: how often they have been restarted after a failure.
        timeout: seconds that a process waits for its peers.
        store: the store that holds failure notices; None in a single process.
        collective_calls: the number of collective calls so far.
        in_collective: whether this process is inside a collective call that has not returned.
    """

    rank: int = 0
    size: int = 1
    restarts: int = 0
    timeout: float = TIMEOUT
    store: Any = None
    collective_calls: int = 0
    in_collective: bool = False
    _posted_at: float = field(default=-math.inf, repr=False)
    _meshes: dict[tuple[int, int], Mesh] = field(default_factory=dict, repr=False)

    @property
    def leader(self) -> bool:
        """Whether this process writes what all of them share, and prints."""
        return self.rank == 0

    # -- the mesh ------------------------------------------------------------------------------------------------------
    def mesh(self, chains: int) -> Mesh:
        """Return the mesh for `chains` chains: `CREDIBLY_MESH`, such as 4x2, or else as many chain ranks as possible.

        Remaining processes go to the rows. Those with the same chains shard the data if the method can, and otherwise
        repeat the same work.
        """
        wanted = os.environ.get("CREDIBLY_MESH", "").strip()
        if wanted and self.size > 1:
            shape = parse_mesh(wanted, self.size)
            if shape[0] > chains:
                raise InputError(
                    "CREDIBLY_MESH", f"must have at most one chain rank per chain ({chains}), got {wanted!r}"
                )
        else:
            ranks = max(d for d in range(1, self.size + 1) if self.size % d == 0 and d <= max(1, chains))
            shape = (ranks, self.size // ranks)
        return self._mesh_of(shape)

    def all_rows(self) -> Mesh:
        """Return the mesh for methods without chains to distribute: every process has a shard of the rows."""
        return self._mesh_of((1, self.size))

    def _mesh_of(self, shape: tuple[int, int]) -> Mesh:
        if shape not in self._meshes:
            self._meshes[shape] = _make_mesh(self, shape)
        return self._meshes[shape]

    # -- collective calls ----------------------------------------------------------------------------------------------
    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all processes, by rank."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.collective(lambda: dist.all_gather(lengths, torch.tensor([len(text)])))
        most = max(int(n) for n in lengths)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: len(text)] = text
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        self.collective(lambda: dist.all_gather(parts, padded))
        return [json.loads(bytes(p[: int(n)].tolist())) for p, n in zip(parts, lengths)]

    def from_leader(self, tensor: Tensor) -> None:
        """Overwrite a tensor with the leader's values."""
        if self.size > 1 and tensor.numel():
            sent = tensor.detach().contiguous().clone().reshape(-1).view(torch.uint8)  # bytes, so any dtype works
            self.collective(lambda: dist.broadcast(sent, 0))
            with torch.no_grad():
                tensor.copy_(sent.view(tensor.dtype).reshape(tensor.shape))

    def barrier(self) -> None:
        """Wait for all processes."""
        self.gather(None)

    def agree(self, what: str, value: Any, advice: str) -> None:
        """Raise if the processes have different values of something."""
        gathered = self.gather(value)
        other = next((r for r, v in enumerate(gathered) if v != gathered[0]), None)
        if other is not None:
            raise InputError(what, f"process 0 has {gathered[0]!r}, process {other} has {gathered[other]!r}", advice)

    def collective(self, call: Callable[[], T]) -> T:
        """Make a collective call. If it fails, raise a `PeerError` that names the process at fault."""
        if self.size == 1:
            return call()
        self.collective_calls += 1
        now = time.monotonic()
        if now - self._posted_at > POST_EVERY:
            self._post_count()
            self._posted_at = now
        self.in_collective = True
        try:
            value = call()
        except (RuntimeError, ValueError) as error:
            self.in_collective = False
            raise self._peer_error(error) from None
        self.in_collective = False
        return value

    # -- failure -------------------------------------------------------------------------------------------------------
    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Stop all processes at once if this one raises inside the block; the others report its message."""
        if self.size == 1:
            yield
            return
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            self._post_failure(error)
            raise

    def _post_failure(self, error: BaseException) -> None:
        notice = json.dumps({"rank": self.rank, "kind": type(error).__name__, "message": str(error)[:2000]})
        try:
            self.store.compare_set(FAILURE_KEY, "", notice)
            dist.destroy_process_group()  # closes the connections, so that peers stop waiting for this process
        except Exception:  # the store may be gone with its host; the error itself is what counts
            return

    def _post_count(self) -> None:
        self.store.set(f"credibly/at/{self.rank}", str(self.collective_calls))

    def _peer_error(self, error: Exception) -> PeerError:
        until = time.monotonic() + NOTICE_WAIT
        try:
            self._post_count()  # every process that lost its peers does so, which identifies those that are behind
            while time.monotonic() < until:
                if self.store.check([FAILURE_KEY]):
                    notice = json.loads(self.store.get(FAILURE_KEY))
                    cause = f"{notice['kind']}: {notice['message']}"
                    return PeerError(f"process {notice['rank']} of {self.size} failed, so this one stops: {cause}")
                time.sleep(0.1)
            counts = [int(self.store.get(f"credibly/at/{r}")) for r in range(self.size)]
            behind = [str(r) for r, count in enumerate(counts) if count < self.collective_calls]
        except Exception:  # the host of the store is gone
            behind = []
        who = f"process {', '.join(behind)}" if behind else "a process"
        return PeerError(
            f"{who} of {self.size} did not answer: it was killed or hangs (waited for up to {self.timeout:g} s, "
            f"see CREDIBLY_TIMEOUT; {str(error).splitlines()[0][:200]})"
        )


@dataclass(frozen=True)
class Mesh:
    """Processes as a rectangle: chains are sharded along one axis, rows of the data along the other."""

    world: World
    shape: tuple[int, int] = (1, 1)
    chain_rank: int = 0
    row_rank: int = 0
    chain_group: Any = None
    row_group: Any = None

    @property
    def writes(self) -> bool:
        """Whether this process writes the draws of its chains: one of the processes with the same chains does."""
        return self.row_rank == 0

    def chains(self, count: int) -> range:
        """Return the chains of this process."""
        return shard(count, self.chain_rank, self.shape[0])

    def rows(self, count: int) -> range:
        """Return the rows of this process."""
        return shard(count, self.row_rank, self.shape[1])

    def sum_rows(self, tensor: Tensor) -> Tensor:
        """Sum in place over the processes that hold the same chains; the results are bit-for-bit identical."""
        if self.shape[1] > 1:
            self.world.collective(lambda: dist.all_reduce(tensor, group=self.row_group))
        return tensor

    def all_chains(self, mine: Tensor, count: int, axis: int = 0) -> Tensor:
        """Return the tensors of all chains, concatenated in order along the chain axis."""
        if self.shape[0] == 1:
            return mine
        lengths = [len(shard(count, rank, self.shape[0])) for rank in range(self.shape[0])]
        own = mine.movedim(axis, 0).contiguous()
        padded = own.new_zeros((max(lengths), *own.shape[1:]))
        padded[: len(own)] = own
        plain = padded.to(torch.uint8) if padded.dtype == torch.bool else padded
        parts = [torch.empty_like(plain) for _ in lengths]
        self.world.collective(lambda: dist.all_gather(parts, plain, group=self.chain_group))
        joined = torch.cat([part[:n] for part, n in zip(parts, lengths)]).to(mine.dtype)
        return joined.movedim(0, axis)


def shard(count: int, rank: int, size: int) -> range:
    """Return the indices of `count` items that go to a rank: contiguous shards whose sizes differ by at most one."""
    least, more = divmod(count, size)
    first = rank * least + min(rank, more)
    return range(first, first + least + (rank < more))


def parse_mesh(text: str, size: int) -> tuple[int, int]:
    """Return the numbers of chain ranks and row ranks in text such as 4x2, whose product is `size`."""
    found = re.fullmatch(r"([1-9]\d*)\s*[xX]\s*([1-9]\d*)", text)
    if found is None:
        raise InputError("CREDIBLY_MESH", f"must be chains by rows, such as 4x2, got {text!r}")
    shape = int(found[1]), int(found[2])
    if math.prod(shape) != size:
        raise InputError("CREDIBLY_MESH", f"must multiply to {size}, the number of processes, got {text!r}")
    return shape


def _make_mesh(world: World, shape: tuple[int, int]) -> Mesh:
    if world.size == 1:
        return Mesh(world)
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cuda" if _on_gpu() else "cpu"
    grid = world.collective(lambda: init_device_mesh(kind, shape, mesh_dim_names=("chains", "rows")))
    chain_rank, row_rank = divmod(world.rank, shape[1])
    return Mesh(world, shape, chain_rank, row_rank, grid.get_group("chains"), grid.get_group("rows"))


# -- joining -----------------------------------------------------------------------------------------------------------
_joined: World | None = None
_alone = 0


def current() -> World:
    """Return the processes that this one was started with, or a world of one."""
    global _joined
    if _alone:
        return World()
    if _joined is None:
        _joined = _join()
    return _joined


@contextmanager
def alone() -> Iterator[None]:
    """Make `current()` return a world of one inside the block, for work without the other processes."""
    global _alone
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


def expected() -> int:
    """Return how many processes were started, without joining them."""
    return int(os.environ.get("WORLD_SIZE", "1")) if os.environ.get("RANK", "").isdigit() else 1


def _join() -> World:
    ready = dist.is_available() and dist.is_initialized()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not ready and expected() == 1:
        return World(restarts=restarts)  # perhaps the only process left after a loss
    timeout = os.environ.get("CREDIBLY_TIMEOUT", "").strip() or str(TIMEOUT)
    try:
        seconds = float(timeout)
    except ValueError:
        raise InputError("CREDIBLY_TIMEOUT", f"must be a number of seconds, got {timeout!r}") from None
    if not ready:
        if _on_gpu():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        store, rank, size = rendezvous_store(seconds)
        backend = "cpu:gloo,cuda:nccl" if _on_gpu() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
        atexit.register(_leave)
    store = dist.distributed_c10d._get_default_store()
    world = World(dist.get_rank(), dist.get_world_size(), restarts, seconds, store)
    world.store.set(f"credibly/at/{world.rank}", "0")
    return world


def _leave() -> None:
    """Let the threads of torch.distributed release their tensors while the interpreter still runs; later, that aborts.

    A thread that has finished an all-reduce drops its tensors a moment after handing over the result, for which it
    needs the interpreter. A program that ended right then would count as failed.
    """
    if _joined is None or _joined.in_collective:  # interrupted in a collective call, which peers may never complete
        return
    time.sleep(SHUTDOWN_PAUSE)
    if dist.is_initialized():
        dist.destroy_process_group()


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() > 0 and "CREDIBLY_CPU" not in os.environ
