"""The prediction server under load: throughput, latency, memory, malformed bodies, a kill in the middle.

    python -m benchmarks.serving                                # all parts: about ten minutes on an idle machine
    python -m benchmarks.serving --parts throughput,latency     # some of them
    python -m benchmarks.serving --requests 2000 --seconds 3    # a smoke test
    python -m benchmarks.serving --run RUN --table TABLE.csv    # your own run

`credibly serve` runs in its own process and gets requests from an asyncio client over the loopback. Throughput
is compared with the same predictions in this process, alternating, with as many torch threads. Loads are bounded in
time and number; no other network is used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.table_files import write_table
from credibly.tables import Config, TableRun, fit_table, prepare
from credibly.tables.files.reading import batches
from credibly.tables.guarantee import guaranteed

BATCH = 1_000
PARTS = ("throughput", "latency", "memory", "malformed", "kill")


# -- the server --------------------------------------------------------------------------------------------------------
class Server:
    """`credibly serve` in its own process."""

    def __init__(self, run: Path, log: Path, port: int = 0) -> None:
        words = [sys.executable, "-m", "credibly", "serve", str(run), "--port", str(port), "--quiet"]
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        self.port = int(line.rstrip("/\n").rsplit(":", 1)[1])

    def memory(self) -> float:
        """Return the memory that the process has written to, in MiB, whether it is resident or swapped out."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return sum(int(size) for size in re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", text)) / 1024

    def cpu(self) -> float:
        """Return the processor time so far, in seconds: unlike wall-clock time, other programs do not affect it."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(60)


@contextmanager
def served(run: Path, log: Path) -> Iterator[Server]:
    server = Server(run, log)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


# -- the client --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


class Connection:
    """A connection that is kept open, with one request at a time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: bytes, kind: str = "application/json", accept: str = "*/*") -> Answer:
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nAccept: {accept}\r\n"
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self.writer.drain()
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
        found = Answer(int(lines[0].split()[1]), await self.reader.readexactly(length))
        if "connection: close" in lines:
            self.close()
        return found

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


async def closed_loop(
    port: int, ask: Callable[[Connection], Awaitable[Answer]], connections: int, count: int, seconds: float
) -> tuple[int, float]:
    """Keep some connections busy. Return the number of requests answered and the time they took."""
    started, left, done = time.perf_counter(), count, 0

    async def work() -> None:
        nonlocal left, done
        connection = Connection(port)
        while left > 0 and time.perf_counter() - started < seconds:
            left -= 1
            answer = await ask(connection)
            assert answer.status == 200, answer
            done += 1
        connection.close()

    await asyncio.gather(*(work() for _ in range(connections)))
    return done, time.perf_counter() - started


async def open_loop(
    port: int, ask: Callable[[Connection], Awaitable[Answer]], rate: float, seconds: float
) -> list[float]:
    """Send requests at random times, without waiting for earlier responses. Return their latencies."""
    free: list[Connection] = []
    found: list[float] = []
    tasks = []
    rng = random.Random(0)

    async def one() -> None:
        started = time.perf_counter()
        connection = free.pop() if free else Connection(port)
        answer = await ask(connection)
        found.append(time.perf_counter() - started)
        assert answer.status == 200, answer
        free.append(connection)

    started = due = time.perf_counter()
    while due - started < seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one()))
        due += rng.expovariate(rate)
    await asyncio.gather(*tasks)
    for connection in free:
        connection.close()
    return found


# -- the parts ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Work:
    """A run, its rows, and the bounds of a load."""

    folder: Path
    rows: list[dict[str, Any]]
    text: bytes
    log: Path
    repeats: int
    requests: int
    seconds: float

    def ask(self, path: str, rows: int) -> Callable[[Connection], Awaitable[Answer]]:
        body = json.dumps(self.rows[:rows]).encode()
        return lambda connection: connection.post(path, body)


def throughput(work: Work) -> Iterator[str]:
    """Measure rows per second at batches of 1,000 against the same predictions in this process."""
    model = TableRun.load(work.folder).model
    known = model.preparation
    block, _ = next(batches(work.folder.parent / "new.csv", known.names, known.numeric_names, BATCH))
    inputs = model.inputs(block)[0]
    x = torch.from_numpy(np.ascontiguousarray(known.scaling(inputs), np.float32))

    def bare() -> None:
        found = model.posterior.predict(x)
        found.mean, found.std, found.aleatoric, found.epistemic, found.interval(0.9)

    def full() -> None:
        model.predict_columns(inputs, [], promise=partial(guaranteed, model))

    csv = {"kind": "text/csv", "accept": "text/csv"}
    cases: list[tuple[str, Callable[[], None], Callable[[Connection], Awaitable[Answer]]]] = [
        ("JSON, no guarantee / posterior.predict", bare, work.ask("/predict?guarantee=false", BATCH)),
        (
            "CSV, no guarantee / posterior.predict",
            bare,
            lambda c: c.post("/predict?guarantee=false", work.text, **csv),
        ),
        ("JSON, guarantee / the same columns in process", full, work.ask("/predict", BATCH)),
    ]
    yield (
        "| throughput at 1,000 rows | connections | in process, rows/s | server, rows/s | ratio (lowest to highest) |"
        " ratio by processor time |"
    )
    yield "|---|---|---|---|---|---|"
    with served(work.folder, work.log) as server:
        for name, call, ask in cases:
            for connections in (1, 3):
                asyncio.run(closed_loop(server.port, ask, connections, 4, 60))
                call()
                pairs, costs = [], []
                for _ in range(work.repeats):
                    started, calls, before = time.perf_counter(), 0, time.process_time()
                    while time.perf_counter() - started < work.seconds / 5:
                        call()
                        calls += 1
                    own = calls * BATCH / (time.perf_counter() - started)
                    cost, before = (time.process_time() - before) / calls, server.cpu()
                    done, seconds = asyncio.run(closed_loop(server.port, ask, connections, 10_000, work.seconds / 5))
                    pairs.append((own, done * BATCH / seconds))
                    costs.append(cost / ((server.cpu() - before) / done))
                ratios = sorted(b / a for a, b in pairs)
                first, second = (statistics.median(part) for part in zip(*pairs))
                yield (
                    f"| {name} | {connections} | {first:,.0f} | {second:,.0f} |"
                    f" {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
                    f" {statistics.median(costs):.2f} |"
                )


def latency(work: Work) -> Iterator[str]:
    """Measure the latency of single rows at half the saturating load."""
    yield "| single rows | saturating, requests/s | at half of it: median, ms | p99, ms | p99 / median | requests |"
    yield "|---|---|---|---|---|---|"
    with served(work.folder, work.log) as server:
        for name, path in (("no guarantee", "/predict?guarantee=false"), ("guarantee", "/predict")):
            ask = work.ask(path, 1)
            asyncio.run(closed_loop(server.port, ask, 16, 50, 30))
            done, seconds = asyncio.run(closed_loop(server.port, ask, 16, 100_000, work.seconds))
            rate = done / seconds
            found = asyncio.run(open_loop(server.port, ask, rate / 2, 2 * work.seconds))
            median, high = (1e3 * float(np.quantile(found, q)) for q in (0.5, 0.99))
            yield f"| {name} | {rate:,.0f} | {median:.1f} | {high:.1f} | {high / median:.2f} | {len(found):,} |"


def memory(work: Work) -> Iterator[str]:
    """Measure memory over many requests."""
    ask = work.ask("/predict?guarantee=false", 1)
    yield "| requests answered | anonymous memory with swap, MiB |"
    yield "|---|---|"
    with served(work.folder, work.log) as server:
        total = 0
        for part in (0.02, 0.08, 0.2, 0.2, 0.25, 0.25):
            total += asyncio.run(closed_loop(server.port, ask, 32, round(part * work.requests), 3_000))[0]
            yield f"| {total:,} | {server.memory():.1f} |"


def malformed(work: Work) -> Iterator[str]:
    """Send 500 malformed bodies: expect a 4xx with a plain message for each, and none of their content in the log."""
    rng = random.Random(0)
    mark = "never-in-the-log"
    good = json.dumps(work.rows[:2]).encode()
    name = next(iter(work.rows[0]))

    def body(number: int) -> tuple[bytes, str]:
        kind = ("application/json", "text/csv", "text/plain")[number % 9 // 4]
        makers: list[Callable[[], bytes]] = [
            lambda: good[: rng.randrange(1, len(good) - 1)],
            lambda: rng.randbytes(rng.randrange(1, 400)) + b"\x00",
            lambda: json.dumps([{name: mark}]).encode(),
            lambda: json.dumps([work.rows[0] | {mark: 1}]).encode(),
            lambda: json.dumps([work.rows[0] | {name: [mark]}]).encode(),
            lambda: b"[" * rng.randrange(1_000, 90_000) + mark.encode(),
            lambda: good.replace(b"[", b"[" + b"9" * 6_000 + b",", 1),
            lambda: b'[{"%s": NaN}]' % name.encode(),
            lambda: b"" if number % 2 else b"\r\n",
            lambda: f"{name},{mark}\n1,2\n".encode(),
        ]
        return makers[number % len(makers)](), kind

    async def run(port: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        connection = Connection(port)
        for number in range(500):
            sent, kind = body(number)
            answer = await connection.post("/predict", sent, kind)
            error = json.loads(answer.body)["error"]
            plain = bool(error["message"]) and error["message"].isprintable() and "Traceback" not in error["message"]
            key = f"{answer.status}" + ("" if plain else " without a plain message")
            counts[key] = counts.get(key, 0) + 1
        connection.close()
        return counts

    with served(work.folder, work.log) as server:
        counts = asyncio.run(run(server.port))
        after = asyncio.run(closed_loop(server.port, work.ask("/predict", 1), 1, 1, 30))[0]
    log = work.log.read_text()
    listed = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    traces, leaks = log.count("Traceback"), log.count(mark)
    yield f"500 malformed bodies: {listed}; tracebacks in the log: {traces}, parts of bodies in it: {leaks};"
    yield f"requests answered afterwards: {after} of 1."


def kill(work: Work) -> Iterator[str]:
    """Send SIGKILL under load and restart on the same port: every request succeeds at the latest on a retry."""
    count = max(50, min(400, work.requests // 100))
    wanted: dict[int, bytes] = {}

    async def load(server: Server, killed: bool) -> tuple[dict[int, bytes], int]:
        found: dict[int, bytes] = {}
        waiting, failures, current = list(range(count)), 0, [server]

        async def one(connection: Connection) -> None:
            nonlocal failures
            while waiting:
                number = waiting.pop(0)
                body = json.dumps([work.rows[number % len(work.rows)]]).encode()
                try:
                    answer = await connection.post("/predict?guarantee=false", body)
                    assert answer.status == 200, answer
                    found[number] = answer.body
                except (OSError, asyncio.IncompleteReadError):
                    failures += 1
                    connection.close()
                    waiting.append(number)
                    await asyncio.sleep(0.2)

        async def interrupt() -> None:
            while len(found) < count // 2:
                await asyncio.sleep(0.001)
            current[0].stop(signal.SIGKILL)
            current.append(await asyncio.to_thread(Server, work.folder, work.log, server.port))

        extra = [interrupt()] if killed else []
        await asyncio.gather(*(one(Connection(server.port)) for _ in range(4)), *extra)
        current[-1].stop()
        return found, failures

    wanted, _ = asyncio.run(load(Server(work.folder, work.log), False))
    found, failures = asyncio.run(load(Server(work.folder, work.log), True))
    means = [[json.loads(part[n])["predictions"][0]["mean"] for n in range(count)] for part in (wanted, found)]
    same = bool(np.allclose(*means, rtol=1e-4, atol=1e-5))
    yield (
        f"SIGKILL after {count // 2} of {count} requests, restart on the same port: {len(found)} answered, {failures}"
        f" attempts failed and were repeated, answers the same as without the kill: {same}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--run", type=Path, help="run folder (default: fitted to a table of 1,000 rows by 10 columns)")
    parser.add_argument("--table", type=Path, help="CSV file with rows for --run")
    parser.add_argument("--method", default="hmc")
    parser.add_argument("--requests", type=int, default=100_000, help="of the part memory")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each load")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of measurements of throughput")
    given = parser.parse_args()
    chosen = given.parts.split(",")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        table, folder = place / "new.csv", place / "run"
        if given.run is None:
            write_table(place / "table.csv", 1_000)
            config = Config(str(place / "table.csv"), "y", tune="none", method=given.method)
            fit_table(prepare(config), folder, progress=False)
            write_table(table, BATCH, 1)
        else:
            folder.symlink_to(given.run.resolve())
            table.write_bytes(given.table.read_bytes())
        known = TableRun.load(folder).model.preparation
        block, _ = next(batches(table, known.names, known.numeric_names, BATCH))
        rows = block.to_pylist()
        work = Work(
            folder, rows, table.read_bytes(), place / "log", given.repeats, given.requests, given.seconds
        )  # fmt: skip
        load = os.getloadavg()
        print(f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads, load average {load[0]:.1f}")
        parts = {"throughput": throughput, "latency": latency, "memory": memory, "malformed": malformed, "kill": kill}
        for name in chosen:
            print(f"\n{name} (load average {os.getloadavg()[0]:.1f}):", flush=True)
            for line in parts[name](work):
                print(line, flush=True)


if __name__ == "__main__":
    main()
