"""Two processes against one, each with one thread: sharded chains, sharded rows; and the overhead of a single process.

    python -m benchmarks.scale                              # the comparisons; about two minutes on two idle cores
    python -m benchmarks.scale --calibrate --json PATH      # time all-reduces and steps, fit the cost model
    python -m benchmarks.scale --page docs/scale.md         # insert the cost model's predictions into the page; with
                                                            # --calibrate also the timings

The processes of each side run for the whole comparison and wait while the other side works: they are started once, with
`torch.distributed.run` if there are two, and receive the number of iterations over a socket. Both must give the same
results first: bit-for-bit identical for sharded chains, up to rounding for sharded rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import cost_model as cost
from benchmarks.case import Case, Setting
from benchmarks.floors import Floor, gradient_flops
from benchmarks.hmc import chain_count, problem
from benchmarks.scale_workers import Team, serve, started
from benchmarks.suite import print_rows
from benchmarks.timing import Goal, Row, duration, interleaved, options, report, scaled, table
from credibly.distributed.world import World
from credibly.inference.sampling.loop import never, run_loop
from credibly.inference.sampling.recording import Recorder

CASES: dict[str, dict[str, Any]] = {
    "scale-chains": {
        "sizes": [13, 50, 1],
        "rows": 455,
        "chains": 8,
        "steps": 50,
        "mesh": "2x1",
        "goal": 1.8,
        "minutes": 0.7,
        "limits": "contention of two cores for shared caches and memory; chains advance without communication.",
    },
    "scale-rows": {
        "sizes": [784, 400, 400, 10],
        "rows": 20_000,
        "chains": 1,
        "steps": 2,
        "mesh": "1x2",
        "goal": 1.6,
        "minutes": 1.2,
        "limits": "an all-reduce of 1.9 MB per step over the loopback device, and contention of two cores for memory.",
    },
}
SUMS = (2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**24)  # bytes
ROWS = (250, 500, 1_000, 2_000, 4_000)  # rows of the steps that calibrate the model
DEVICES = (1, 8, 64, 512)


def sized(name: str, setting: Setting) -> dict[str, Any]:
    """Return the case, reduced in size for a smoke test."""
    case = {**CASES[name], "compile": not setting.quick}
    if setting.quick:
        case |= {"rows": 60, "sizes": [case["sizes"][0], 5, case["sizes"][-1]], "steps": 3}
    return case


def comparisons(name: str, setting: Setting) -> Iterator[Row]:
    """Compare two processes with one."""
    case = sized(name, setting)
    with Team(case, 1) as one, Team(case, 2) as two:
        compare(case, one.ask("check", 2), two.ask("check", 2))
        times = interleaved({"two": two, "one": one}, repeats=max(2, setting.repeats), seconds=setting.seconds, warm=1)
    each = 1 / (case["steps"] * case["chains"])
    kind = "chains" if case["mesh"] == "2x1" else "rows"
    what = f"{'-'.join(map(str, case['sizes']))} on {case['rows']:,} rows, sharded {kind}: one gradient per chain"
    yield Row(
        what,
        scaled(times["two"], each),
        scaled(times["one"], each),
        Goal(">=", case["goal"]),
        inverse=True,
        peer="one process",
        floor=Floor(gradient_flops(case["sizes"], case["rows"]) / 2),
    )
    if kind == "chains":
        yield overhead(case, setting)


def compare(case: dict[str, Any], one: list[float], two: list[float]) -> None:
    """Exit if the results differ. The sum over rows is in float32, and 1e-5 of a value is 100 roundings."""
    tolerance = 0.0 if case["mesh"] == "2x1" else 1e-5
    same = all(abs(a - b) <= tolerance * (abs(a) + 100) for a, b in zip(one, two, strict=True))
    if not same:
        raise SystemExit(f"two processes give {two[:3]}, one gives {one[:3]}: nothing to compare")


def overhead(case: dict[str, Any], setting: Setting) -> Row:
    """Compare the sampling loop of a distributed run, in one process, with its bare iterations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        process, mesh = started(case, World())
        process.advance(never)
        start = time.perf_counter()
        process.advance(never)
        count = 2 if setting.quick else max(10, round(setting.seconds / (time.perf_counter() - start)))

        def bare() -> None:
            for _ in range(count):
                process.advance(never)

        def loop() -> None:
            process.total = process.done + count
            dtype, device = torch.float32, process.target.device
            recorder = Recorder(
                case["chains"], count, process.target.dim, process.names, mesh, dtype=dtype, device=device
            )
            run_loop(process, recorder, title="HMC", progress=False)

        times = interleaved(
            {"loop": loop, "bare": bare}, repeats=max(2, setting.repeats), seconds=setting.seconds, warm=1
        )
    finally:
        torch.set_num_threads(before)
    what = "one process: the sampling loop over its bare iterations"
    return Row(
        what,
        scaled(times["loop"], 1 / count),
        scaled(times["bare"], 1 / count),
        Goal(">=", 0.97),
        inverse=True,
        peer="bare iterations",
    )


# -- the cost model ----------------------------------------------------------------------------------------------------
def calibration(setting: Setting) -> dict[str, Any]:
    """Time all-reduces by size and steps by rows, with single-threaded processes, and fit a machine to them."""
    case = sized("scale-rows", setting)
    sums = SUMS[:4] if setting.quick else SUMS
    with Team({**case, "rows": 4, "compile": False}, 2) as two:
        two.ask("sum", 2**10)
        reduced = [(size, two.ask("sum", size)) for size in sums]
    steps = []
    for rows in ROWS[:2] if setting.quick else ROWS:
        with Team({**case, "rows": rows, "mesh": "1x1"}, 1) as one:
            one.time_calls(2)
            steps.append((rows, statistics.median(one.time_calls(3) for _ in range(3)) / case["steps"]))
    flops = gradient_flops(case["sizes"], 1)
    machine = cost.calibrate(steps, reduced, flops=flops, places=2)
    work = cost.Work(20_000, flops, problem({**case, "rows": 4}).dim)
    return {"all_reduce": reduced, "steps": steps, "work": vars(work), "model": vars(machine)}


def prediction_table() -> str:
    """Return the predicted cost of the paper's run, ResNet-20-FRN on CIFAR-10, by precision and number of GPUs."""
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
    header = ["precision", "GPUs", "mesh", "arithmetic", "launches", "all-reduce", "per step", "utilisation", "days"]
    return table(header, lines)


def calibration_text(found: dict[str, Any], load: float) -> str:
    """Return measured times beside those of the fitted model, and its prediction for sharded rows."""
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
            f"Two single-threaded processes, load average {load:.1f} before the run.",
            "",
            table(["all-reduce, 2 processes", "measured", "model"], sums),
            "",
            table(["rows per step", "measured", "model"], steps),
            "",
            f"The model: {machine.rate / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.2g} GB/s, "
            f"{duration(machine.latency)} per hop, {duration(machine.launch)} fixed cost per step. "
            f"For {work.rows:,} rows it predicts that two processes are {one / two:.2f} times as fast as one, "
            f"and that sharding pays from {cost.break_even_rows(machine, work, 2):,.0f} rows.",
        ]
    )


def rewrite(page: Path, part: str, text: str) -> None:
    """Replace the text between the markers of a part."""
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
            f"HMC of {'-'.join(map(str, case['sizes']))} on {case['rows']:,} rows, {chain_count(case['chains'])}, "
            f"on a mesh of {case['mesh']} single-threaded processes.",
            case["limits"],
            partial(comparisons, name),
            case["minutes"],
            goals=f"{case['goal']:g}",
            peers=("one process",),
        )
        for name, case in CASES.items()
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--calibrate", action="store_true", help="time all-reduces and steps for the cost model")
    parser.add_argument("--quick", action="store_true", help="minimal work: a smoke test")
    parser.add_argument("--page", type=Path, default=None, help="insert the cost model's predictions into this page")
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
        rows = [row for name in CASES for row in comparisons(name, setting)]
        print_rows(rows, record)


if __name__ == "__main__":
    main()
