"""The worker processes of `benchmarks.scale`, and the parent's handle on them: requests and responses over a socket."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import credibly as cr
from benchmarks.hmc import problem
from credibly.distributed.world import Mesh, World, current
from credibly.inference.sampling.loop import never
from credibly.inference.target import to_target

TIMEOUT = 900  # seconds to wait for another process


# -- the worker processes ----------------------------------------------------------------------------------------------
def method(case: dict[str, Any], draws: int = 10**6) -> cr.HMC:
    return cr.HMC(
        chains=case["chains"],
        draws=draws,
        warmup=0,
        step_size=1e-4,
        trajectory_length=1e-4 * case["steps"],
        init="network",
        compile=case["compile"],
        mass="identity",
    )


def started(case: dict[str, Any], world: World) -> tuple[Any, Mesh]:
    """Return the sampler with the chains and rows of this process, and its mesh."""
    mesh = world.mesh(case["chains"])
    target = to_target(problem(case), mesh)
    process = method(case).sampler(target, 0, mesh)
    start = 0.1 * torch.randn(case["chains"], target.dim, generator=torch.Generator().manual_seed(1))
    own = mesh.chains(case["chains"])
    process.start(start[own.start : own.stop].clone())
    return process, mesh


def serve(case: dict[str, Any], port: int) -> None:
    """Serve requests until the connection closes; all processes of a team run this."""
    torch.set_num_threads(1)
    world = current()
    process, mesh = started(case, world)
    stream = None
    if world.leader:
        stream = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT).makefile("rw")
    while True:
        line = stream.readline() if stream is not None else ""
        request = world.gather(line)[0]
        if not request:
            break
        what, number = json.loads(request)
        response = {"check": check, "time": time_iterations, "sum": time_sum}[what](process, mesh, number)
        if stream is not None:
            stream.write(json.dumps(response) + "\n")
            stream.flush()


def check(process: Any, mesh: Mesh, number: int) -> list[float]:
    """Return the log likelihoods of all chains after some iterations, and the sum of their coordinates."""
    for _ in range(number):
        process.advance(never)
    chains = process.plan.chains
    found = mesh.all_chains(process.state.log_likelihood, chains).tolist()
    return [*found, *mesh.all_chains(process.theta.double().sum(1), chains).tolist()]


def time_iterations(process: Any, mesh: Mesh, number: int) -> float:
    """Return the seconds per iteration of all chains, from the first process to start to the last to finish."""
    mesh.world.barrier()
    start = time.perf_counter()
    for _ in range(number):
        process.advance(never)
    mesh.world.barrier()
    return (time.perf_counter() - start) / number


def time_sum(process: Any, mesh: Mesh, number: int) -> float:
    """Return the median seconds of an all-reduce of `number` bytes over all processes."""
    values, times = torch.zeros(max(1, number // 4)), []
    until = time.monotonic() + 0.5
    for i in range(1000):
        start = time.perf_counter()
        mesh.world.meet(lambda: dist.all_reduce(values))
        times.append(time.perf_counter() - start)
        if i % 10 == 9 and mesh.world.gather(time.monotonic() > until)[0]:
            break
    return statistics.median(times)


# -- the parent process ------------------------------------------------------------------------------------------------
class Team:
    """The worker processes of one implementation: a call is one iteration, timed in the workers."""

    def __init__(self, case: dict[str, Any], size: int) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(TIMEOUT)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
        command = [sys.executable, *launcher, "-m", "benchmarks.scale", "--serve", json.dumps(case)]
        root = str(Path(__file__).resolve().parents[1])
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CREDIBLY_")} | {
            "OMP_NUM_THREADS": "1",
            "CREDIBLY_TIMEOUT": str(TIMEOUT),
            "CREDIBLY_MESH": case["mesh"],
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        }
        self.process = subprocess.Popen([*command, "--port", str(self.server.getsockname()[1])], env=environment)
        self.stream: Any = None

    def __enter__(self) -> Team:
        self.server.settimeout(1.0)
        until = time.monotonic() + TIMEOUT
        while self.stream is None:
            try:
                self.connection = self.server.accept()[0]
                self.stream = self.connection.makefile("rw")
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > until:
                    self.__exit__(None, None, None)
                    raise SystemExit("the worker processes exited before they connected") from None
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.stream is not None:
            self.stream.close()
            self.connection.close()
        self.server.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun ends its own workers

    def ask(self, what: str, number: int) -> Any:
        self.stream.write(json.dumps([what, number]) + "\n")
        self.stream.flush()
        response = self.stream.readline()
        if not response:
            raise SystemExit("the worker processes exited early")
        return json.loads(response)

    def time_calls(self, calls: int) -> float:
        return float(self.ask("time", calls))

    def __call__(self) -> None:
        self.time_calls(1)
