"""Bayes by Backprop on MNIST: settings chosen on the validation rows, one group after another."""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import credibly as cr
from benchmarks.mnist_fits import Images, Settings, clock, fit_bbb, measure

# Coordinate-wise search from the best settings so far: the optimiser, then the initialisation, then the prior. The
# scales and mixture weights are those of the published grid. "sgd" at 0.128 is a rate of 1e-3 on the sum over a batch
# of 128.
SEARCH: tuple[tuple[dict[str, Any], ...], ...] = (
    (
        {"optimiser": "adam", "lr": 1e-3, "kl_weights": "uniform"},
        {"optimiser": "adam", "lr": 3e-4, "kl_weights": "uniform"},
        {"optimiser": "adam", "lr": 1e-3, "kl_weights": "geometric"},
        {"optimiser": "sgd", "momentum": 0.0, "lr": 0.128, "kl_weights": "uniform"},
    ),
    ({"init_scale": 0.005}, {"init_scale": 0.02}, {"init_scale": 0.05}),
    ({"scale2": math.exp(-7)}, {"scale2": math.exp(-8)}),
    ({"scale1": math.exp(-1)}, {"scale1": math.exp(-2)}),
    ({"pi": 0.25}, {"pi": 0.75}),
    ({"kl_warmup": 0.5},),
)
SEARCH_NORMAL = (*SEARCH[:2], tuple({"scale1": math.exp(-k)} for k in (0, 1, 2, 3)), SEARCH[5])


def choose(
    train: Images, held_out: Images, base: Settings, args: argparse.Namespace, tried: list[dict[str, Any]]
) -> Settings:
    """Return the settings with the lowest validation error (ties: lower log loss); append every trial to `tried`."""
    first_start = time.perf_counter()

    def attempt(settings: Settings) -> None:
        if any(one["settings"] == asdict(settings) for one in tried):
            return
        if tried and time.perf_counter() - first_start > args.grid_seconds:
            print(f"  {settings}: skipped, --grid-seconds used up", flush=True)
            return
        start = clock(train.x.device)
        try:
            posterior = fit_bbb(train, settings, args.grid_epochs, args)
        except cr.TrainingError as error:
            print(f"  {settings}: {error}", flush=True)
            return
        found = measure(posterior, held_out, args)
        found["seconds"] = clock(train.x.device) - start
        found["elbo"] = posterior.record.history["elbo"]
        tried.append({"settings": asdict(settings), **found})
        at_mean = found["mean_weights"]["error"]
        print(
            f"  {settings}: validation error {found['error']:.2f} % (mean weights {at_mean:.2f} %), "
            f"NLL {found['nll']:.4f}, ELBO {found['elbo']:,.0f}, {found['seconds']:.0f} s",
            flush=True,
        )

    def best() -> Settings:
        if not tried:
            sys.exit("training diverged with the given settings")
        return Settings(**min(tried, key=lambda one: (one["error"], one["nll"]))["settings"])

    attempt(base)
    for group in SEARCH if base.prior == "mixture" else SEARCH_NORMAL:
        so_far = best()
        for change in group:
            attempt(replace(so_far, **change))
    return best()
