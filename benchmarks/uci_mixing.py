"""Do the chains converge? `until="mixed"` on every UCI split: R-hat and ESS of predictions at the test rows.

    python -m benchmarks.uci_mixing --root DIR --sets yacht,energy,boston,concrete,wine --splits 0-19 --out FILE
    python -m benchmarks.uci_mixing --root DIR --method nuts --settings '{"mass": "diagonal"}' --out FILE
    python -m benchmarks.uci_mixing --out FILE --table           # print the results in the file, run nothing

Network, prior scale and noise of a split are those that the UCI study chose on its training rows (--choices). FILE has
a line of JSON per split; splits that it has are skipped, so a run can be stopped and continued. Where R-hat misses
1.05, the analysis of modes says how predictions differ between chains and what that costs in log-likelihood.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import credibly as cr
from benchmarks.timing import table
from credibly.core.durations import to_seconds
from credibly.diagnostics.convergence import measure
from credibly.errors import InputError, SamplingError, TrainingError
from credibly.inference.sampling.run import SamplingMethod
from credibly.posterior.draws import SampledPosterior
from credibly.posterior.model import Model
from credibly.predictive.rescaling import in_units
from credibly.storage.record import Record as FitRecord
from credibly.tables.recipe import Recipe

CHOICES = Path(__file__).resolve().parents[1] / "docs" / "results" / "uci" / "results.csv"
SETS, RHAT = "yacht,energy,boston,concrete,wine", 1.05
# Common names of the files of the sets.
FILES = {"wine": "wine_red"}

Split = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One split: what to sample and how."""

    root: Path
    data: str
    split: int
    method: str
    settings: dict[str, Any]
    budget: float
    prior_scale: float
    noise: str
    noise_floor: float = 0.0
    seed: int = 0
    device: str = "cpu"

    @property
    def key(self) -> tuple[str, int, str, str, float]:
        """The key that identifies this split in the file."""
        return self.data, self.split, self.method, json.dumps(self.settings, sort_keys=True), self.budget


def run_split(job: Job) -> Split:
    """Sample one split until it is mixed or the time is up, and measure its predictions; plain values."""
    known = cr.data.uci(job.root, FILES.get(job.data, job.data), job.split)
    floor = job.noise_floor if job.noise == "heteroscedastic" else 0.0
    hidden = (known.n_hidden or 50,)
    recipe = Recipe(hidden=hidden, prior_scale=job.prior_scale, noise=job.noise, noise_floor=floor)
    problem = recipe.problem(known.x_train.numpy(), known.y_train.numpy()[:, 0], seed=job.seed, device=job.device)
    about = {
        "data": job.data,
        "split": job.split,
        "method": job.method,
        "settings": job.settings,
        "budget": job.budget,
        "prior_scale": job.prior_scale,
        "noise": job.noise,
        "noise_floor": floor,
    }
    kind: Any = cr.METHODS[job.method]
    method = kind(until="mixed", budget=job.budget, **job.settings)
    assert isinstance(method, SamplingMethod)
    began = time.perf_counter()
    try:
        posterior = method.fit(problem, seed=job.seed, progress=False)
    except (SamplingError, TrainingError) as error:
        return {**about, "error": str(error).strip().splitlines()[0]}
    seconds = time.perf_counter() - began
    x, y = known.x_test.to(job.device), (known.y_test[:, 0].double() * known.y_std + known.y_mean).to(job.device)
    history = posterior.record.history
    reached = history.get("until", {})
    return {
        **about,
        "seconds": round(seconds, 2),
        "gradients": float(history["gradients"]) + float(history.get("start_gradients", 0.0)),
        "divergences": int(sum(history.get("divergences", [0]))),
        "met": reached.get("met"),
        "rounds": len(reached.get("rounds", [])),
        **measured(posterior, Model.of(problem), x, y, known.y_mean, known.y_std),
    }


def measured(posterior: SampledPosterior, model: Model, x: Tensor, y: Tensor, mean: Any, std: Any) -> Split:
    """Return mixing and accuracy at the test rows, and how the chains differ; `mean` and `std` are the target's."""
    draws = posterior.draws
    assert isinstance(draws, Tensor)
    chains, count = draws.shape[:2]
    functions = posterior.predict(x).functions().reshape(chains, count, len(x)).double()
    mixing = measure(functions)
    rhat, bulk = torch.nan_to_num(mixing.rhat, nan=math.inf, posinf=math.inf), torch.nan_to_num(mixing.bulk, nan=0.0)
    predictive = in_units(posterior.predict(x), mean, std)
    alone = [
        float(
            in_units(cr.DrawsPosterior(model, one, FitRecord(method="chain")).predict(x), mean, std).log_prob(y).mean()
        )
        for one in draws.split(1)
    ]
    between = functions.mean(1).std(0) * float(std) if chains > 1 else torch.zeros(len(x))
    relative = (between.cpu() / predictive.variance.double().sqrt().cpu().reshape(-1)).flatten()
    own = posterior.statistics.get("log_likelihood")
    together = float(predictive.log_prob(y).mean())
    return {
        "chains": chains,
        "draws": count,
        "rhat_worst": _plain(rhat.max()),
        "rhat_median": _plain(rhat.median()),
        "ess_worst": float(bulk.min()),
        "ess_median": float(bulk.median()),
        "log_likelihood": together,
        "rmse": float((predictive.mean.reshape(-1) - y).square().mean().sqrt()),
        "chain_log_likelihoods": [round(value, 4) for value in alone],
        "chain_training_log_likelihoods": None if own is None else [round(v, 2) for v in own.mean(1).tolist()],
        "between_worst": float(relative.max()),
        "between_median": float(relative.median()),
    }


def table_of(splits: list[Split]) -> str:
    """Return a Markdown table, one line per set: how many splits are mixed, and their metrics."""
    lines = []
    for name in dict.fromkeys(one["data"] for one in splits):
        here = [one for one in splits if one["data"] == name and "error" not in one]
        if not here:
            continue
        worst = [one["rhat_worst"] if one["rhat_worst"] is not None else math.inf for one in here]
        lines.append(
            [
                name,
                f"{sum(value <= RHAT for value in worst)} of {len(here)}",
                f"{_middle(worst):.3f} ({max(worst):.3f})",
                f"{_middle([one['rhat_median'] or math.inf for one in here]):.3f}",
                f"{min(one['ess_worst'] for one in here):.0f}",
                f"{_mean(here, 'log_likelihood'):.3f}",
                f"{_mean(here, 'rmse'):.3g}",
                f"{_mean(here, 'seconds'):.0f}",
                f"{_mean(here, 'gradients'):.2g}",
                str(sum(one["divergences"] for one in here)),
            ]
        )
    header = ["set", f"R-hat <= {RHAT}", "worst row: median (largest)", "median row", "least ESS", "log-likelihood"]
    return table([*header, "RMSE", "seconds", "gradients", "divergences"], lines)


def modes_of(splits: list[Split]) -> str:
    """Return what separates the chains of the splits that missed the goal, one line each."""
    missed = [s for s in splits if "error" not in s and not (s["rhat_worst"] is not None and s["rhat_worst"] <= RHAT)]
    if not missed:
        return ""
    lines = []
    for one in sorted(missed, key=lambda s: (s["data"], s["split"])):
        alone = one["chain_log_likelihoods"]
        lines.append(
            [
                f"{one['data']} {one['split']}",
                "infinite" if one["rhat_worst"] is None else f"{one['rhat_worst']:.3f}",
                f"{one['between_worst']:.3f}",
                f"{one['between_median']:.3f}",
                f"{one['log_likelihood']:.3f}",
                f"{sum(alone) / len(alone):.3f}",
                f"{min(alone):.3f} to {max(alone):.3f}",
            ]
        )
    header = ["split", "R-hat, worst row", "between chains, worst row", "median row", "log-likelihood of all chains"]
    text = (
        f"Splits above R-hat {RHAT}: the standard deviation between the chains' mean predictions over the predictive "
        "standard deviation, and the test log-likelihood of all chains together beside that of each chain alone."
    )
    return f"{text}\n\n{table([*header, 'one chain, mean', 'one chain, range'], lines)}"


def read(path: Path) -> list[Split]:
    """Return the splits of a file. Lines that a stopped run left incomplete are dropped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def append(path: Path, split: Split) -> None:
    """Add a split to a file: the whole file is written under another name and renamed into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.dumps(one) for one in read(path)]
    partial = path.with_name(f".{path.name}.part")
    partial.write_text("\n".join([*kept, json.dumps(split)]) + "\n", encoding="utf-8")
    os.replace(partial, path)


def earlier(path: Path | None = None) -> dict[tuple[str, int], float]:
    """Return the R-hat of the worst test row by set and split that the UCI study found with HMC."""
    return {
        (row["data"].removesuffix("_red"), int(row["split"])): float(row["rhat"])
        for row in _study(path or CHOICES)
        if row["rhat"]
    }


def chosen(path: Path) -> dict[tuple[str, int], tuple[float, str]]:
    """Return prior scale and noise by set and split that the UCI study chose for HMC."""
    return {
        (row["data"].removesuffix("_red"), int(row["split"])): (float(row["prior_scale"]), row["noise"])
        for row in _study(path)
        if row["prior_scale"]
    }


def _study(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["method"] == "hmc"]


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Return the splits to run, with the choices of the study where it has them."""
    choices = chosen(args.choices) if args.choices is not None else {}
    budget, found = to_seconds("--budget", args.budget), []
    for name in (one.strip() for one in args.sets.split(",") if one.strip()):
        there = cr.data.uci_splits(args.root, FILES.get(name, name))
        for split in splits_in(args.splits):
            if split >= there:
                continue
            scale, noise = choices.get((name, split), (1.0, "learned"))
            parts = (args.method, args.settings, budget, scale, noise, args.noise_floor)
            found.append(Job(args.root, name, split, *parts, device=args.device))
    return found


def splits_in(text: str) -> list[int]:
    """Return the numbers of "0-3,7": 0, 1, 2, 3, 7."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def run_all(jobs: list[Job], path: Path, workers: int, threads: int) -> None:
    """Run the splits missing from the file, `workers` at a time, and append each when it ends."""
    had = {(s["data"], s["split"], s["method"], json.dumps(s["settings"], sort_keys=True), s["budget"])
           for s in read(path) if "error" not in s}  # fmt: skip
    todo = [job for job in jobs if job.key not in had]
    if workers == 1:
        torch.set_num_threads(threads)
        for job in todo:
            _finish(path, run_split(job))
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        for future in as_completed([pool.submit(run_split, job) for job in todo]):
            _finish(path, future.result())


def _finish(path: Path, split: Split) -> None:
    append(path, split)
    result = split.get("error") or (
        f"R-hat {split['rhat_worst'] or math.inf:.3f} worst, {split['rhat_median'] or math.inf:.3f} median, "
        f"ESS {split['ess_worst']:.0f}, log-likelihood {split['log_likelihood']:.3f}, {split['seconds']:.0f} s"
    )
    print(f"{split['data']} {split['split']}: {result}", flush=True)


def _plain(value: Tensor) -> float | None:
    return float(value) if math.isfinite(float(value)) else None


def _mean(splits: list[Split], name: str) -> float:
    return float(sum(one[name] for one in splits) / len(splits))


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    found = argparse.ArgumentParser(
        "python -m benchmarks.uci_mixing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--root", type=Path, metavar="DIR", help="folder with uci/<set>.npz")
    found.add_argument("--sets", default=SETS, help="UCI sets (default: %(default)s)")
    found.add_argument("--splits", default="0-19", help='such as "0-4,7" (default: %(default)s)')
    found.add_argument("--budget", default="10min", help="per split, in seconds or as 10min (default: %(default)s)")
    found.add_argument("--method", default="hmc", choices=sorted(cr.METHODS), help="a sampler (default: %(default)s)")
    found.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="settings of the method")
    found.add_argument("--choices", type=Path, default=CHOICES, metavar="CSV", help="results of the UCI study")
    found.add_argument(
        "--noise-floor",
        type=float,
        default=0.03,
        help="least noise of heteroscedastic rows, in units of the standardised target (default 0.03; study: none)",
    )
    found.add_argument("--device", default="cpu")
    found.add_argument("--jobs", type=int, default=1, help="splits at a time (default 1)")
    found.add_argument("--threads", type=int, default=None, help="threads of each (default: cores over --jobs)")
    found.add_argument("--out", type=Path, required=True, metavar="FILE", help="a line of JSON per split")
    found.add_argument("--table", action="store_true", help="print the results in the file, and run nothing")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the splits that the file does not have yet, and print the table."""
    options = parser()
    args = options.parse_args(arguments)
    if not args.table:
        if args.root is None:
            options.error("--root is required: the folder with uci/yacht.npz")
        if args.jobs < 1:
            options.error(f"--jobs must be a positive integer, got {args.jobs}")
        try:
            jobs = jobs_of(args)
        except InputError as error:
            options.error(str(error))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        run_all(jobs, args.out, args.jobs, args.threads or max(1, cores // args.jobs))
    splits = read(args.out)
    print("\n" + table_of(splits))
    print("\n" + modes_of(splits))


if __name__ == "__main__":
    main()
