"""Bayes by Backprop on MNIST: 784-400-400-10 with ReLU, scale-mixture prior, no augmentation, and the pruning table.

    python -m benchmarks.mnist_bbb --root DIR                           # the defaults: 300 epochs; meant for a GPU
    python -m benchmarks.mnist_bbb --root DIR --grid --prior mixture normal --json out.json
    python -m benchmarks.mnist_bbb --root DIR --units 1200              # the width of the published pruning table
    python -m benchmarks.mnist_bbb --root DIR --epochs 3 --train-rows 10000 --baseline-epochs 3      # a minute on a CPU

DIR has mnist.npz. If credibly is not installed, run from the root of the repository with PYTHONPATH=src.

The setting is that of Blundell et al. 2015: pixels / 126, batches of 128, two hidden layers. Reported are the test
error of the Bayesian model average over draws of the weights and of the mean weights, with log loss, calibration error
and ELBO, beside the same network trained by SGD (maximum likelihood, and MAP under a Normal prior).

No choice uses the test rows. `--validate` and `--grid` train on the first 50,000 rows and validate on the last 10,000
training rows. `--grid` tries variations of the given settings, picks the one with the lowest validation error, and only
then trains it at full length on --train-rows (by default all 60,000). The test rows are evaluated once per fit, at its
end.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.mnist_fits import BATCH, VALIDATION, Settings, clock, evaluate, fit_baseline, fit_bbb, load, prune
from benchmarks.mnist_search import choose
from benchmarks.timing import machine, table

# Blundell et al. 2015: test error in % by units in each of two hidden layers, 600 epochs; pruning at 1200 units.
PUBLISHED = {
    "SGD": {400: 1.83, 800: 1.84, 1200: 1.88},
    "SGD, dropout": {400: 1.51, 800: 1.33, 1200: 1.36},
    "BBB, Gaussian prior": {400: 1.82, 800: 1.99, 1200: 2.04},
    "BBB, scale mixture": {400: 1.36, 800: 1.34, 1200: 1.32},
}
PUBLISHED_PRUNING = {0.0: 1.24, 0.5: 1.24, 0.75: 1.24, 0.95: 1.29, 0.98: 1.39}
PUBLISHED_NAME = {"mixture": "BBB, scale mixture", "normal": "BBB, Gaussian prior"}


# -- tables ------------------------------------------------------------------------------------------------------------
def error_table(rows: list[dict[str, Any]], units: int) -> str:
    lines = []
    for row in rows:
        published = PUBLISHED.get(row["published_as"], {}).get(units)
        point = row.get("mean_weights", {}).get("error")
        elbo = row.get("elbo")
        lines.append(
            [
                row["name"],
                "" if published is None else f"{published:.2f} %",
                f"{row['error']:.2f} %",
                "" if point is None else f"{point:.2f} %",
                f"{row['nll']:.4f}",
                f"{row['ece']:.4f}",
                "" if elbo is None else f"{elbo:,.0f} ± {row['elbo_standard_error']:,.0f}",
                str(row["epochs"]),
                f"{row['seconds']:.0f}",
            ]
        )
    dropout = PUBLISHED["SGD, dropout"].get(units)
    if dropout is not None:
        lines.append(["SGD, dropout (not run here)", f"{dropout:.2f} %", *[""] * 7])
    header = ["method", "published error", "measured error", "mean weights", "NLL", "ECE", "ELBO (nats)", "epochs", "s"]
    return table(header, lines)


def pruning_table(lines: list[dict[str, Any]], units: int) -> str:
    header = ["", *(f"{100 * line['removed']:g} % removed" for line in lines)]
    rows = [
        ["published error (1200 units)", *(f"{PUBLISHED_PRUNING[line['removed']]:.2f} %" for line in lines)],
        [f"measured error ({units} units)", *(f"{line['error']:.2f} %" for line in lines)],
        ["measured, mean weights", *(f"{line['mean_weights']['error']:.2f} %" for line in lines)],
        ["measured NLL", *(f"{line['nll']:.4f}" for line in lines)],
        ["weights left", *(f"{line['weights_left']:,}" for line in lines)],
    ]
    return table(header, rows)


# -- command line ------------------------------------------------------------------------------------------------------
def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--root", type=Path, required=True, metavar="DIR", help="folder with mnist.npz")
    add("--epochs", type=int, default=300, help="epochs of Bayes by Backprop (default 300; published 600)")
    add("--units", type=int, default=400, help="units in each of the two hidden layers (default 400)")
    add("--prior", choices=("mixture", "normal"), nargs="+", default=["mixture"], help="priors, one fit each")
    add("--pi", type=float, default=0.5, help="weight of the wide component (default 0.5)")
    add("--scale1", type=float, default=1.0, help="std of the wide component (default 1)")
    add("--scale2", type=float, default=math.exp(-6), help="std of the narrow component (default exp(-6))")
    add("--normal-scale", type=float, default=1.0, help="std of --prior normal (default 1)")
    add("--optimiser", choices=("adam", "sgd"), default="adam", help="optimiser of Bayes by Backprop (default adam)")
    add("--momentum", type=float, default=0.9, help="momentum of SGD, or Adam's beta1 (default 0.9)")
    add("--lr", type=float, default=1e-3, help="initial learning rate, for the mean loss per row (default 1e-3)")
    add("--schedule", choices=("cosine", "linear", "constant"), default="cosine", help="learning-rate schedule")
    add("--samples", type=int, default=1, help="draws of the weights per step (default 1)")
    add("--estimator", choices=("auto", "weights", "local", "flipout"), default="auto", help="default auto: local")
    add("--kl-weights", choices=("uniform", "geometric"), default="uniform", help="KL weight over an epoch's batches")
    add(
        "--kl-warmup", type=float, default=0.0, help="fraction of steps over which the KL weight rises to 1 (default 0)"
    )
    add("--init-scale", type=float, default=0.01, help="initial std of every weight (default 0.01)")
    add("--grid", action="store_true", help="first choose among variations by validation error")
    add("--grid-epochs", type=int, default=60, help="epochs per variation (default 60)")
    add("--grid-seconds", type=float, default=240, help="start no new variation after this time (default 240)")
    add("--validate", action="store_true", help="train on the first 50,000 rows and report only the validation rows")
    add("--train-rows", type=int, default=60_000, help="rows to train on (default 60,000; with --validate 50,000)")
    add("--baseline-epochs", type=int, default=60, help="epochs of the SGD baselines; 0 skips them (default 60)")
    add("--baseline-lr", type=float, default=0.05, help="learning rate of the SGD baselines (default 0.05)")
    add("--draws", type=int, default=50, help="draws of the weights to average over (default 50)")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, default=None, help="torch threads (default: torch's own choice)")
    add("--compile", choices=("auto", "yes", "no"), default="auto", help="compile the steps (default auto)")
    add("--progress", action=argparse.BooleanOptionalAction, default=None, help="default: on a terminal")
    add("--json", type=Path, default=None, metavar="PATH", help="also write the results here, after every fit")
    args = parser.parse_args()
    args.compile = {"auto": "auto", "yes": True, "no": False}[args.compile]
    most = 60_000 - (VALIDATION if args.validate else 0)
    if args.validate and args.train_rows == 60_000:
        args.train_rows = most
    if not BATCH <= args.train_rows <= most:
        parser.error(f"--train-rows must be between {BATCH} and {most}, got {args.train_rows}")
    return args


def main() -> None:
    args = parse()
    # If compilation fails, credibly falls back to eager and logs it: on a GPU that is worth knowing.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("credibly").setLevel(logging.INFO)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    here = machine() | {"device": gpu or str(device)}
    print("# mnist_bbb\n\n" + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in here.items()) + "\n", flush=True)
    record: dict[str, Any] = {
        "benchmark": "mnist_bbb",
        "machine": here,
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "rows": [],
        "grid": {},
        "pruning": {},
    }

    def save() -> None:
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(record, indent=2) + "\n")

    first_start = time.perf_counter()
    everything, test = load(args.root, device)
    train = everything.rows(0, args.train_rows)
    held_out = everything.rows(60_000 - VALIDATION, 60_000)
    evaluation, what = (held_out, "validation") if args.validate else (test, "test")

    for prior in args.prior:
        settings = Settings(
            prior=prior,
            pi=args.pi,
            scale1=args.scale1 if prior == "mixture" else args.normal_scale,
            scale2=args.scale2,
            optimiser=args.optimiser,
            momentum=args.momentum,
            lr=args.lr,
            samples=args.samples,
            estimator=args.estimator,
            kl_weights=args.kl_weights,
            kl_warmup=args.kl_warmup,
            init_scale=args.init_scale,
        )
        if args.grid:
            first = train.rows(0, 60_000 - VALIDATION)
            print(f"Grid, {prior} prior, {args.grid_epochs} epochs on the first {len(first.y):,} rows:", flush=True)
            record["grid"][prior] = []
            settings = choose(first, held_out, settings, args, record["grid"][prior])
            save()
        print(f"\n{PUBLISHED_NAME[prior]}, {len(train.y):,} rows, {args.epochs} epochs: {settings}", flush=True)
        start = clock(device)
        posterior = fit_bbb(train, settings, args.epochs, args)
        seconds = clock(device) - start
        history = posterior.record.history
        record["pruning"][prior] = prune(posterior, evaluation, args)
        record["rows"].append(
            {
                "name": PUBLISHED_NAME[prior],
                "published_as": PUBLISHED_NAME[prior],
                "settings": asdict(settings),
                **{key: record["pruning"][prior][0][key] for key in ("error", "nll", "ece", "mean_weights")},
                "elbo": history["elbo"],
                "elbo_standard_error": history["elbo_standard_error"],
                "estimator": history["estimator"],
                "epochs": args.epochs,
                "seconds": seconds,
                "parts": history["parts"],
                "layers": [layer._asdict() for layer in posterior.layers()],
            }
        )
        latest = record["rows"][-1]
        print(f"{what} error {latest['error']:.2f} % in {seconds:.0f} s ({seconds / args.epochs:.2f} s per epoch)\n")
        print(pruning_table(record["pruning"][prior], args.units) + "\n", flush=True)
        save()

    for name, shown in (("MLE", "SGD (maximum likelihood)"), ("MAP", "SGD (MAP, N(0, 1) prior)")):
        if args.baseline_epochs:
            start = clock(device)
            point = fit_baseline(train, name, args)
            seconds = clock(device) - start
            published_as = "SGD" if name == "MLE" else ""
            found = evaluate(point.predict(evaluation.x), evaluation.y)
            about = {"epochs": args.baseline_epochs, "seconds": seconds}
            record["rows"].append({"name": shown, "published_as": published_as, **found, **about})
            save()

    print(f"## Errors on the 10,000 {what} rows, 784-{args.units}-{args.units}-10, {len(train.y):,} training rows\n")
    print(error_table(record["rows"], args.units))
    print(
        f"\nPublished: test errors of Blundell et al. 2015. Measured: seed {args.seed}; Bayes by Backprop averages "
        f"over {args.draws} draws. The standard error of an error rate near 1.4 % on 10,000 rows is 0.12 %.\n"
    )
    record["seconds"] = time.perf_counter() - first_start
    print(f"{record['seconds']:.0f} s in total")
    save()


if __name__ == "__main__":
    main()
