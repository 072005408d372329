"""Two processes against one, each with one thread: chains spread, rows spread; and what being one of one costs.

    python -m benchmarks.scale                              # the contests; about two minutes on two cores that do nothing else
    python -m benchmarks.scale --calibrate --json PATH      # times of sums and of steps, and the cost model that follows
    python -m benchmarks.scale --page docs/scale.md         # puts the prediction of the cost model into the page; with
                                                            # --calibrate also those times

The processes of a contestant live through the whole contest and wait while the other works: they are started once, by
`torch.distributed.run` where there are two, and told over a socket how many iterations to do. Before the clock starts both have
to give the same numbers: bit for bit where chains are spread, to rounding where rows are.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import credibly as cr
from benchmarks import cost_model as cost
from benchmarks.case import Case, Setting
from benchmarks.floors import Floor, gradient_flops
from benchmarks.hmc import problem
from benchmarks.suite import alone
from benchmarks.timing import Goal, Row, duration, interleaved, options, report, scaled, table
from credibly.distributed.world import Mesh, World, current
from credibly.inference.sampling.loop import never, run
from credibly.inference.sampling.recording import Recorder
from credibly.inference.target import to_target

PATIENCE = 900  # seconds that anybody waits for another
CASES: dict[str, dict[str, Any]] = {
    "scale-chains": {
        "sizes": [13, 50, 1], "rows": 455, "chains": 8, "steps": 50, "mesh": "2x1", "goal": 1.8, "minutes": 0.7,
        "limits": "nothing is said while chains are advanced: what two cores that share caches and memory leave each other.",
    },
    "scale-rows": {
        "sizes": [784, 400, 400, 10], "rows": 20_000, "chains": 1, "steps": 2, "mesh": "1x2", "goal": 1.6, "minutes": 1.2,
        "limits": "a sum of 1.9 MB a step over the loopback device, and what two cores that share memory leave each other.",
    },
}  # fmt: skip
SUMS = (2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**24)  # bytes
ROWS = (250, 500, 1_000, 2_000, 4_000)  # of steps that are timed for the model
DEVICES = (1, 8, 64, 512)


# -- what a process of a contestant does -----------------------------------------------------------------------------------
def method(case: dict[str, Any], draws: int = 10**6) -> cr.HMC:
    return cr.HMC(
        chains=case["chains"], draws=draws, warmup=0, step_size=1e-4, trajectory_length=1e-4 * case["steps"], init="network",
        compile=case["compile"], mass="identity",
    )  # fmt: skip


def started(case: dict[str, Any], world: World) -> tuple[Any, Mesh]:
    """The sampler with the chains and the rows of this process, and the mesh it is part of."""
    known, how = problem(case), method(case)
    mesh = world.mesh(case["chains"])
    target = to_target(known, mesh)
    process = how.sampler(target, 0, mesh)
    start = 0.1 * torch.randn(case["chains"], target.dim, generator=torch.Generator().manual_seed(1))
    own = mesh.chains(case["chains"])
    process.start(start[own.start : own.stop].clone())
    return process, mesh


def serve(case: dict[str, Any], port: int) -> None:
    """Does what it is told until it is told nothing more; all processes of a team come here."""
    torch.set_num_threads(1)
    world = current()
    process, mesh = started(case, world)
    wire = None
    if world.leader:
        wire = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).makefile("rw")
    while True:
        words = wire.readline() if wire is not None else ""
        told = world.gather(words)[0]
        if not told:
            break
        what, number = json.loads(told)
        answer = {"check": check, "turn": turn, "sum": time_sum}[what](process, mesh, number)
        if wire is not None:
            wire.write(json.dumps(answer) + "\n")
            wire.flush()


def check(process: Any, mesh: Mesh, number: int) -> list[float]:
    """Log likelihoods of all chains after some iterations, and the sum of their coordinates."""
    for _ in range(number):
        process.advance(never)
    chains = process.options.chains
    found = mesh.all_chains(process.state.log_likelihood, chains).tolist()
    return [*found, *mesh.all_chains(process.theta.double().sum(1), chains).tolist()]


def turn(process: Any, mesh: Mesh, number: int) -> float:
    """Seconds of an iteration of all chains, from when all begin to when all are done."""
    mesh.world.barrier()
    began = time.perf_counter()
    for _ in range(number):
        process.advance(never)
    mesh.world.barrier()
    return (time.perf_counter() - began) / number


def time_sum(process: Any, mesh: Mesh, number: int) -> float:
    """Seconds of a sum of so many bytes over all processes, the median of many."""
    values, times = torch.zeros(max(1, number // 4)), []
    until = time.monotonic() + 0.5
    for place in range(1000):
        began = time.perf_counter()
        mesh.world.collective(lambda: dist.all_reduce(values))
        times.append(time.perf_counter() - began)
        if place % 10 == 9 and mesh.world.gather(time.monotonic() > until)[0]:
            break
    return statistics.median(times)


# -- what the parent does --------------------------------------------------------------------------------------------------
class Team:
    """Processes that are one contestant: a call is an iteration, the clock is theirs."""

    def __init__(self, case: dict[str, Any], size: int) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(PATIENCE)
        several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
        words = [sys.executable, *several, "-m", "benchmarks.scale", "--serve", json.dumps(case)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CREDIBLY_")} | {
            "OMP_NUM_THREADS": "1", "CREDIBLY_TIMEOUT": str(PATIENCE), "CREDIBLY_MESH": case["mesh"],
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        self.process = subprocess.Popen([*words, "--port", str(self.listening.getsockname()[1])], env=environment)
        self.wire: Any = None

    def __enter__(self) -> Team:
        self.listening.settimeout(1.0)
        until = time.monotonic() + PATIENCE
        while self.wire is None:
            try:
                self.connection = self.listening.accept()[0]
                self.wire = self.connection.makefile("rw")
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > until:
                    self.__exit__(None, None, None)
                    raise SystemExit("a contestant's processes ended before they began") from None
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.wire is not None:
            self.wire.close()
            self.connection.close()
        self.listening.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun ends its own

    def ask(self, what: str, number: int) -> Any:
        self.wire.write(json.dumps([what, number]) + "\n")
        self.wire.flush()
        answer = self.wire.readline()
        if not answer:
            raise SystemExit("a contestant's processes ended early")
        return json.loads(answer)

    def turn(self, calls: int) -> float:
        return float(self.ask("turn", calls))

    def __call__(self) -> None:
        self.turn(1)


def sized(name: str, setting: Setting) -> dict[str, Any]:
    """A case as it is to be run: small where it is only to be seen that it works."""
    case = {**CASES[name], "compile": not setting.quick}
    if setting.quick:
        case |= {"rows": 60, "sizes": [case["sizes"][0], 5, case["sizes"][-1]], "steps": 3}
    return case


def contest(name: str, setting: Setting) -> Iterator[Row]:
    """Two processes against one."""
    case = sized(name, setting)
    with Team(case, 1) as one, Team(case, 2) as two:
        compare(case, one.ask("check", 2), two.ask("check", 2))
        times = interleaved({"two": two, "one": one}, repeats=max(2, setting.repeats), seconds=setting.seconds, warm=1)
    each = 1 / (case["steps"] * case["chains"])
    kind = "chains" if case["mesh"] == "2x1" else "rows"
    what = f"{'-'.join(map(str, case['sizes']))} on {case['rows']:,} rows, {kind} spread: a gradient and chain"
    yield Row(
        what, scaled(times["two"], each), scaled(times["one"], each), Goal(">=", case["goal"]), inverse=True, peer="one process",
        floor=Floor(gradient_flops(case["sizes"], case["rows"]) / 2),
    )  # fmt: skip
    if kind == "chains":
        yield overhead(case, setting)


def compare(case: dict[str, Any], one: list[float], two: list[float]) -> None:
    """Refuses contestants that give other numbers. The sum over rows is in float32, and 1e-5 of a value is 100 roundings."""
    far = 0.0 if case["mesh"] == "2x1" else 1e-5
    same = all(abs(a - b) <= far * (abs(a) + 100) for a, b in zip(one, two, strict=True))
    if not same:
        raise SystemExit(f"two processes give {two[:3]}, one gives {one[:3]}: nothing to compare")


def overhead(case: dict[str, Any], setting: Setting) -> Row:
    """The loop that any number of processes go through, by one process, over its iterations alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        process, mesh = started(case, World())
        process.advance(never)
        began = time.perf_counter()
        process.advance(never)
        count = 2 if setting.quick else max(10, round(setting.seconds / (time.perf_counter() - began)))

        def bare() -> None:
            for _ in range(count):
                process.advance(never)

        def loop() -> None:
            process.total = process.done + count
            recorder = Recorder(
                case["chains"], count, process.target.dim, process.names, mesh, dtype=torch.float32, device=process.target.device
            )  # fmt: skip
            run(process, recorder, title="HMC", progress=False)

        times = interleaved(
            {"loop": loop, "bare": bare}, repeats=max(2, setting.repeats), seconds=setting.seconds, warm=1
        )
    finally:
        torch.set_num_threads(before)
    what = "one process: the loop of a run over its iterations alone"
    return Row(
        what, scaled(times["loop"], 1 / count), scaled(times["bare"], 1 / count), Goal(">=", 0.97), inverse=True, peer="iterations alone"
    )  # fmt: skip


# -- the cost model --------------------------------------------------------------------------------------------------------
def calibration(setting: Setting) -> dict[str, Any]:
    """Times of sums against bytes and of steps against rows, on two processes of one thread, and the machine they make."""
    case = sized("scale-rows", setting)
    sums = SUMS[:4] if setting.quick else SUMS
    with Team({**case, "rows": 4, "compile": False}, 2) as two:
        two.ask("sum", 2**10)
        reduced = [(size, two.ask("sum", size)) for size in sums]
    steps = []
    for rows in ROWS[:2] if setting.quick else ROWS:
        with Team({**case, "rows": rows, "mesh": "1x1"}, 1) as one:
            one.turn(2)
            steps.append((rows, statistics.median(one.turn(3) for _ in range(3)) / case["steps"]))
    flops = gradient_flops(case["sizes"], 1)
    machine = cost.calibrate(steps, reduced, flops=flops, places=2)
    work = cost.Work(20_000, flops, problem({**case, "rows": 4}).dim)
    return {"all_reduce": reduced, "steps": steps, "work": vars(work), "model": vars(machine)}


def prediction_table() -> str:
    """ResNet-20-FRN on CIFAR-10 by the model: the run of the paper, by precision and number of GPUs."""
    work, paper, lines = cost.RESNET20, cost.PAPER, []
    for precision in ("tf32", "bf16"):
        machine = cost.h200(precision)
        one = cost.leapfrog_seconds(machine, work, paper["chains"]).seconds
        for devices in DEVICES:
            mesh = cost.best_mesh(machine, work, paper["chains"], devices, idle=paper["chains"] - 1)
            step = cost.leapfrog_seconds(machine, work, paper["chains"], mesh)
            days = step.seconds * paper["steps"] * paper["iterations"] / 86_400
            times = [duration(t) if t else "" for t in (step.compute, step.launch, step.communication, step.seconds)]
            used = f"{one / (devices * step.seconds):.0%}"
            lines.append([precision, str(devices), f"{mesh[0]}x{mesh[1]}", *times, used, f"{days:,.1f}"])
    header = ["precision", "GPUs", "mesh", "arithmetic", "launches", "sum", "a step", "use of a GPU", "days"]
    return table(header, lines)


def calibration_text(found: dict[str, Any], load: float) -> str:
    """The measured times beside those of the model that was made of them, and what it says of sharing rows."""
    machine, work = cost.Machine(**found["model"]), cost.Work(**found["work"])
    sums = [
        [f"{size / 1024:,.0f} KiB", duration(seconds), duration(cost.all_reduce_seconds(machine, size, 2))]
        for size, seconds in found["all_reduce"]
    ]
    steps = [
        [f"{rows:,}", duration(seconds), duration(rows * work.flops / machine.rate + machine.launch)]
        for rows, seconds in found["steps"]
    ]
    one, two = (cost.leapfrog_seconds(machine, work, mesh=(1, places)).seconds for places in (1, 2))
    return "\n".join(
        [
            f"Two processes of one thread, load average {load:.1f} before the run.",
            "",
            table(["sum over 2 processes", "measured", "model"], sums),
            "",
            table(["rows of a step", "measured", "model"], steps),
            "",
            f"The model: {machine.rate / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.2g} GB/s, {duration(machine.latency)} a hop, "
            f"{duration(machine.launch)} a step whatever its rows. For {work.rows:,} rows it says that two processes are "
            f"{one / two:.2f} times as fast as one, and that sharing pays from {cost.break_even_rows(machine, work, 2):,.0f} rows on.",
        ]
    )


def rewrite(page: Path, part: str, text: str) -> None:
    """Puts a text between its marks."""
    whole = page.read_text()
    begin, end = (f"<!-- {word} {part}: benchmarks/scale.py writes here -->" for word in ("begin", "end"))
    if whole.count(begin) != 1 or whole.count(end) != 1:
        raise SystemExit(f"--page: {page} needs one line {begin} and one {end}")
    head, rest = whole.split(begin)
    page.write_text(f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")


def cases() -> list[Case]:
    return [
        Case(
            name,
            f"HMC of {'-'.join(map(str, case['sizes']))} on {case['rows']:,} rows, {case['chains']} chain{'s' * (case['chains'] > 1)}, "
            f"on a mesh of {case['mesh']} processes of one thread.",
            case["limits"],
            partial(contest, name),
            case["minutes"],
            goals=f"{case['goal']:g}",
            peers=("one process",),
        )
        for name, case in CASES.items()
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--calibrate", action="store_true", help="time sums and steps for the cost model instead")
    parser.add_argument("--quick", action="store_true", help="hardly any work: to see that it works")
    parser.add_argument("--page", type=Path, default=None, help="put the prediction of the cost model into this page")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(json.loads(args.serve), args.port)
        return
    if args.page is not None:
        rewrite(args.page, "prediction", prediction_table())
        if not args.calibrate:
            return
    setting = Setting(args.repeats, args.seconds, args.threads, quick=args.quick)
    with report("scale", args) as record:
        if args.calibrate:
            found = calibration(setting)
            record |= found
            text = calibration_text(found, record["machine"]["load_before"] or 0.0)
            print(text)
            if args.page is not None:
                rewrite(args.page, "measured", text)
            return
        rows = [row for name in CASES for row in contest(name, setting)]
        record["rows"] = [row.record() for row in rows]
        alone(rows)


if __name__ == "__main__":
    main()
