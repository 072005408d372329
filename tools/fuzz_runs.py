"""Mutate saved run folders and load them: each must be rejected with a readable error, or predict as before.

    python tools/fuzz_runs.py --count 2000 --seed 0

| kind of mutation | what must hold |
|---|---|
| accident: flipped bits, cut or swapped files, edited JSON, pipes for files | rejected, or the same predictions |
| forgery: edits of JSON, headers and rows, with all checksums recomputed | rejected, or loaded: no traceback |

A forger who recomputes the checksums can change predictions; no checksum prevents that. No mutation may cause a
traceback, block forever, or use more than a gigabyte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import credibly as cr
from credibly.errors import InputError, StoreError
from credibly.tables import TableRun
from credibly.tables.config import Config
from credibly.tables.prepared import prepare
from credibly.tables.run import fit_table

# Seconds that loading and predicting may take; they take a tenth of one.
PATIENCE = 10
# Rows of a table that takes half a megabyte.
BOMB_ROWS = 30_000_000
X = torch.linspace(-1, 1, 12).reshape(4, 3)


# -- runs --------------------------------------------------------------------------------------------------------------
def make_runs(place: Path) -> list[Path]:
    """Fit two tables and save two posteriors: the folders that mutations start from."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    rows = [f"{a:.4f},{b:.4f},{'uv'[k % 2]},{a - b:.4f}" for k, (a, b) in enumerate(x)]
    common = {"tune": "none", "holdout": 0.25, "hidden": (4,)}
    for name, shift, method, settings in (
        ("one", 0.0, "hmc", {"draws": 8, "warmup": 20, "chains": 2, "thin": 1}),
        ("other", 5000.0, "ensemble", {"members": 3, "steps": 20}),
    ):
        table = place / f"{name}.csv"
        moved = [f"{row.rsplit(',', 1)[0]},{float(row.rsplit(',', 1)[1]) + shift:.4f}" for row in rows]
        table.write_text("a,b,c,y\n" + "\n".join(moved) + "\n")
        config = Config(str(table), "y", method=method, settings=settings, **common)
        fit_table(prepare(config), place / name, progress=False)
    torch.manual_seed(0)
    for name, act in (("saved", torch.nn.SiLU()), ("resaved", torch.nn.Tanh())):
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), act, torch.nn.Linear(4, 1))
        problem = cr.Problem(net, (torch.randn(12, 3), torch.randn(12)), cr.likelihoods.Gaussian(), cr.priors.Normal())
        cr.DeepEnsemble(members=2, steps=5).fit(problem, seed=0).save(place / name)
    return [place / name for name in ("one", "other", "saved", "resaved")]


def answer(folder: Path) -> list[Any]:
    """Return what a user would read from a run: predictions, intervals, and its stored rows and metrics."""
    if not (folder / "table.json").exists():
        predictive = cr.load(folder).predict(X)
        return [predictive.mean.numpy().tobytes(), predictive.interval(0.9)[0].numpy().tobytes()]
    run = TableRun.load(folder)
    rows, on = run.rows()
    inputs = run.model.inputs(rows)[0]
    found = run.model.predict(inputs)
    low, high = found.interval(0.9)
    parts = [np.asarray(found.mean).tobytes(), np.asarray(low).tobytes(), np.asarray(high).tobytes()]
    unseen = np.asarray(run.predict_rows(inputs).mean).tobytes()
    config = {key: value for key, value in vars(run.config).items() if key != "table"}
    figures = json.dumps(run.figures, sort_keys=True)
    return [*parts, unseen, on, rows.to_pydict(), run.sample().to_pydict(), figures, repr(config)]


# -- mutations ---------------------------------------------------------------------------------------------------------
Mutation = Callable[[Path, list[Path], random.Random], None]


def some_file(folder: Path, rng: random.Random, ending: str = "") -> Path:
    """Return one of the files that a run is read from."""
    derived = ("report.html", "results.json")
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name.endswith(ending) and p.name not in derived)
    return rng.choice(files)


def flip(folder: Path, others: list[Path], rng: random.Random) -> None:
    """Flip one bit, or a few."""
    path = some_file(folder, rng)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 8))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(folder: Path, others: list[Path], rng: random.Random) -> None:
    """Make a file shorter, longer or empty, or fill it with zeros."""
    path = some_file(folder, rng)
    content = path.read_bytes()
    path.write_bytes(
        rng.choice((content[: rng.randrange(len(content))], b"", content + b"\0" * 9, bytes(len(content))))
    )


def remove(folder: Path, others: list[Path], rng: random.Random) -> None:
    """Delete a file."""
    some_file(folder, rng).unlink()


def swap(folder: Path, others: list[Path], rng: random.Random) -> None:
    """Exchange two files."""
    path, other = some_file(folder, rng), some_file(folder, rng)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def foreign(folder: Path, others: list[Path], rng: random.Random) -> None:
    """Replace a part of the run by that of another run."""
    candidates = []
    for other in others:
        for path in sorted(other.rglob("*")):
            mine = folder / path.relative_to(other)
            if other.name != folder.name and mine.exists() and path.name not in ("report.html", "results.json"):
                candidates.append((path, mine))
    path, mine = rng.choice(candidates)
    if path.is_dir():
        shutil.rmtree(mine)
        shutil.copytree(path, mine)
    else:
        shutil.copyfile(path, mine)


def replace(folder: Path, others: list[Path], rng: random.Random) -> None:
    """Replace a file by a folder, a pipe or a link."""
    path = some_file(folder, rng)
    path.unlink()
    kind = rng.randrange(5)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to("/dev/zero")
    elif kind == 3:
        path.symlink_to(path.name)
    else:
        path.symlink_to("nowhere")


def edit(folder: Path, others: list[Path], rng: random.Random) -> None:
    """Edit a JSON file."""
    path = some_file(folder, rng, ".json")
    path.write_text(edited(path.read_text(), rng))


def forge(folder: Path, others: list[Path], rng: random.Random) -> None:
    """Edit a JSON file and recompute the checksums."""
    path = some_file(folder, rng, ".json")
    path.write_text(edited(path.read_text(), rng))
    seal(folder)


def forge_header(folder: Path, others: list[Path], rng: random.Random) -> None:
    """Claim other shapes, dtypes or offsets for the tensors of a file."""
    path = some_file(folder, rng, ".safetensors")
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    what = rng.randrange(6)
    if what == 0:
        content = struct.pack("<Q", rng.choice((2**63, 2**40, 2**20, 0))) + content[8:]
        path.write_bytes(content)
        return seal(folder)
    if names:
        entry = header[rng.choice(names)]
        if what == 1:
            entry["shape"] = [rng.choice((0, 1, 2**31, 2**62)) for _ in entry["shape"]]
        elif what == 2:
            entry["shape"] = entry["shape"][::-1]
        elif what == 3:
            entry["dtype"] = rng.choice(("F64", "F32", "I32", "U8", "BOOL", "F8_E4M3"))
        elif what == 4:
            entry["data_offsets"] = [0, rng.choice((2**62, 8, 0))]
        else:
            header[f"x{rng.random()}"] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return seal(folder)


def forge_rows(folder: Path, others: list[Path], rng: random.Random) -> None:
    """Store a table of other rows: few, none, of other types, or thirty million in half a megabyte."""
    import pyarrow as pa
    from pyarrow import parquet

    path = next(iter(sorted(folder.glob("*.parquet"))), None) if rng.random() < 0.5 else None
    path = path or folder / "training_sample.parquet"
    if not path.exists():
        return forge(folder, others, rng)
    table = parquet.read_table(path)
    what = rng.randrange(5)
    if what == 0:
        same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(BOMB_ROWS, np.int8)), pa.array(["0"]))
        table = pa.table(dict.fromkeys(table.column_names, same))
    elif what == 1:
        table = table.slice(0, rng.randrange(table.num_rows))
    elif what == 2:
        table = table.drop_columns([rng.choice(table.column_names)])
    elif what == 3:
        name = rng.choice(table.column_names)
        odd = pa.array(["x" * rng.randrange(9)] * table.num_rows)
        table = table.set_column(table.column_names.index(name), name, odd)
    else:
        table = table.rename_columns([f"{name}\x1b[2J" for name in table.column_names])
    parquet.write_table(table, path)
    return seal(folder)


def edited(text: str, rng: random.Random) -> str:
    """Return JSON text with one thing changed."""
    what = rng.randrange(10)
    if what == 0:
        return "[" * rng.choice((100, 10_000, 200_000)) + text
    if what == 1:
        return text.replace("nn.SiLU", "nn.ReLU").replace("nn.Tanh", "nn.SiLU") if "nn." in text else text[::-1]
    try:
        values = json.loads(text)
    except ValueError:
        return text[:-1]
    place, key = rng.choice(list(_places(values)))
    new = [
        -1, 0, 2**31, 10**12, 10**19, 1.5, float("nan"), float("inf"), None, True, "", "torch.float16", "../../passwd",
        [], {}, [[]], ["x"] * 3, {"kind": "os.system"}, "\x1b[2J", "x" * 10_000, "LARGE", "DEEP",
    ]  # fmt: skip
    old = place[key]
    if what == 2 and isinstance(place, dict):
        del place[key]
    elif what == 3 and isinstance(place, list):
        place.insert(rng.randrange(len(place) + 1), rng.choice(place))
    elif what < 7 and isinstance(old, (int, float)) and not isinstance(old, bool):
        place[key] = rng.choice((old + 1, -old, old * 1000, 10**9, 2**53, 0, old + 1e-9))
    else:
        place[key] = rng.choice(new)
    text = json.dumps(values)
    text = text.replace('"LARGE"', "9" * rng.choice((30, 4300, 5000)))
    return text.replace('"DEEP"', "[" * 500 + "]" * 500)


def _places(values: Any) -> Any:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        yield values, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def seal(folder: Path) -> None:
    """Recompute all checksums, as a forger would, as far as the files can still be parsed."""
    for path in sorted(folder.rglob("manifest.json")):
        with suppress_invalid():
            manifest = json.loads(path.read_text())
            for name, entry in manifest["files"].items():
                content = (path.parent / name).read_bytes()
                entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            path.write_text(json.dumps({**manifest, "checksum": _checksum(manifest)}))
    path = folder / "table.json"
    with suppress_invalid():
        facts = json.loads(path.read_text())
        for values in (facts.get("preparation"), facts):
            if isinstance(values, dict) and "checksum" in values:
                files = values.get("files", {})
                for name in files:
                    files[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
                values["checksum"] = _checksum(values)
        path.write_text(json.dumps(facts))


def suppress_invalid() -> suppress:
    """Ignore errors of files that are no longer valid, which then stay as they are."""
    return suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _checksum(values: dict[str, Any]) -> str:
    fields = {key: value for key, value in values.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


ACCIDENTS: list[Mutation] = [flip, flip, cut, remove, swap, foreign, replace, edit, edit]
FORGERIES: list[Mutation] = [forge, forge, forge_header, forge_rows]


# -- the attack --------------------------------------------------------------------------------------------------------
@dataclass
class Outcome:
    """How many mutations of each kind ended how, and examples of those that went wrong."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    peak: float = 0.0

    def add(self, kind: str, how: str, example: str) -> None:
        """Count a mutation."""
        self.counts[kind, how] += 1
        if how in ("traceback", "waiting", "silently wrong"):
            self.wrong.append(f"{kind}: {how}: {example}")


class Waiting(BaseException):
    """Raised when loading takes too long."""


def attack(place: Path, count: int, seed: int, first: int = 0) -> Outcome:
    """Mutate runs `count` times and return the outcomes."""
    runs = make_runs(place)
    known = {run.name: answer(run) for run in runs}
    outcome, work = Outcome(), place / "work"

    def too_long(*_: Any) -> None:
        raise Waiting

    before = signal.signal(signal.SIGALRM, too_long)
    logging.disable(logging.WARNING)
    try:
        for number in range(first, first + count):
            rng = random.Random(f"{seed} {number}")
            mutate = rng.choice(ACCIDENTS if rng.random() < 0.7 else FORGERIES)
            source = rng.choice(runs)
            # Under the same name: a run knows no other.
            folder = work / source.name
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(source, folder)
            mutate(folder, runs, rng)
            began = time.perf_counter()
            try:
                signal.alarm(PATIENCE)
                try:
                    how, example = outcome_of(folder, known[source.name], mutate in FORGERIES)
                finally:
                    signal.alarm(0)
            except Waiting:
                how, example = "waiting", f"{PATIENCE} s"
            outcome.slowest = max(outcome.slowest, time.perf_counter() - began)
            outcome.add(mutate.__name__, how, f"number {number} of {source.name}: {example}")
    finally:
        signal.signal(signal.SIGALRM, before)
        logging.disable(logging.NOTSET)
    outcome.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return outcome


def outcome_of(folder: Path, known: list[Any], forged: bool) -> tuple[str, str]:
    """Return the outcome of loading a mutated run, with the message of its error."""
    try:
        if answer(folder) == known:
            return "the same", ""
        return ("loaded" if forged else "silently wrong"), ""
    except (StoreError, InputError) as error:
        return "refused", str(error)
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:150]}"


def main() -> int:
    """Run the attack and print a table; the exit code is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation, to repeat one")
    parser.add_argument("--memory", type=float, default=8.0, help="gigabytes of address space beyond which it fails")
    given = parser.parse_args()
    most = int(given.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with tempfile.TemporaryDirectory(prefix="fuzz-runs-") as folder:
        found = attack(Path(folder), given.count, given.seed, given.first)
    endings = ("refused", "the same", "loaded", "silently wrong", "traceback", "waiting")
    print(f"{'mutation':14s}" + "".join(f"{ending:>16s}" for ending in endings))
    for kind in [*dict.fromkeys(m.__name__ for m in (*ACCIDENTS, *FORGERIES)), "all"]:
        row = [sum(n for (k, h), n in found.counts.items() if h == ending and kind in (k, "all")) for ending in endings]
        print(f"{kind:14s}" + "".join(f"{number:16,d}" for number in row))
    print(f"peak memory {found.peak:.2f} GB, slowest {found.slowest:.1f} s")
    print("\n".join(found.wrong[:40]))
    return 1 if found.wrong or found.peak > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
