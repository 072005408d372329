"""`hmc-reference`: how close does every scalable method come to published full-batch HMC predictions?

The network, the data and the reference are options (`--set network=... data=... reference=...`), so any reference in
the same format can be used: an npz with `probs` (M, classes) for the first M test rows, and optionally `probs_earlier`,
another version of them, whose distance from the first is the noise floor. The defaults are the CNN-LSTM on IMDB of
Izmailov et al. (2021), with ReLU and the paper's prior variance of 1/40. The paper trained on the first 20,000 reviews,
this reference on all 25,000, as `benchmarks.reference_rows` shows.

Rule: the finding is the paper's order by total variation (HMC, SGHMC, SGLD, ensemble, MFVI, SGD). It is reproduced if
the samplers that were run are closer than the ensemble, the ensemble is closer than Bayes by Backprop, and that is
closer than the single network, each by more than two standard errors of the paired difference over rows. It is not
reproduced if any is farther by as much, and inconclusive otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from credibly.core.checks import check_choice
from credibly.core.rng import global_stream
from credibly.errors import InputError
from credibly.likelihoods import Categorical
from credibly.methods import METHODS
from credibly.metrics import scores as metrics
from credibly.posterior.base import Posterior
from credibly.priors.elementwise import Normal
from credibly.problem import Problem
from credibly.report.page import Column, Table
from credibly.report.pictures import Picture, picture
from studies.reference_budget import chains_to_budget, mixture_to_budget
from studies.reference_data import load, network
from studies.study import Options, Result, Study

Array = npt.NDArray[Any]

ORDER = ("hmc", "sghmc", "sgld", "ensemble", "bbb", "dropout", "map")
RANKED = (("hmc", "sghmc", "sgld"), ("ensemble",), ("bbb",), ("map",))  # closest first, as published
DEFAULTS = {
    "network": "cnn_lstm",
    "data": "imdb_100.npz",
    "reference": "hmc_reference/imdb_cnnlstm.npz",
    "prior_variance": "0.025",
    "train_rows": "0",
    "test_rows": "0",
    "activation": "relu",
    "methods": "map,dropout,bbb,ensemble,sgld,sghmc,hmc",
    "plan": "batched",
    "precision": "full",
    "method": "sghmc",
    "batch_size": "400",
}
# Methods that run to a budget.
BUDGETED = ("sghmc", "ivon")


# Activation and prior variance that the references of other networks were made with, the precision of gradients, and
# for budgets the method and rows per step of a chain that keep a GPU busy.
BY_NETWORK = {
    "cnn_lstm": {"batch_size": "1600"},
    "resnet20_frn": {"activation": "silu", "prior_variance": "0.2", "precision": "bf16"},
    "lenet": {"prior_variance": "0.01"},
}


def settings_for(method: str, quick: bool) -> dict[str, Any]:
    """Return the settings of a method for a network of half a gigaflop: minutes on a GPU."""
    training: dict[str, Any] = {"epochs": 1 if quick else 20, "lr": 1e-3, "compile": False}
    chains: dict[str, Any] = {"chains": 2 if quick else 8, "compile": False, "init": "ensemble"}
    # Step sizes as published: 1e-5 and 3e-7 are half of our SGLD step size and the square of our SGHMC step size. The
    # momentum of SGHMC is 0.98, published 0.9: directions dominated by the prior then decorrelate in 1,700 steps, not
    # 9,000, and a batch five times as large keeps the gradient noise from heating the chains more than before.
    short = {"warmup": 20, "draws": 5, "thin": 4}
    sgld = chains | (
        short if quick else {"warmup": 8000, "draws": 100, "thin": 250, "batch_size": 80, "step_size": 2e-5}
    )
    sghmc = chains | (
        short
        if quick
        else {"chains": 4, "warmup": 8000, "draws": 154, "thin": 250, "batch_size": 400}
        | {"step_size": 3e-7**0.5, "momentum": 0.98}
    )
    hmc: dict[str, Any] = {
        "chains": 2 if quick else 3,
        "warmup": 20,
        "draws": 3 if quick else 15,
        "max_steps": 5 if quick else 40,
    }
    known: dict[str, dict[str, Any]] = {
        "map": training,
        "dropout": training | {"rate": 0.1},
        "bbb": training | {"epochs": 1 if quick else 60, "init_scale": 0.01},
        "ensemble": training | {"members": 2 if quick else 10},
        "sgld": sgld,
        "sghmc": sghmc,
        "hmc": hmc | {"compile": False, "init": "ensemble"},
    }
    return dict(known[method])


def run(options: Options) -> Result:
    """Fit each method and measure its distance from the reference."""
    given = {k: v for k, v in options.extra.items() if "." not in k}
    chosen = {**DEFAULTS, **BY_NETWORK.get(given.get("network", DEFAULTS["network"]), {}), **given}
    unknown = set(chosen) - set(DEFAULTS)
    if unknown:
        raise InputError("--set", f"must name one of {', '.join(DEFAULTS)}, got {', '.join(sorted(unknown))}")
    names = [name for name in ORDER if name in chosen["methods"].split(",")]
    x, y, x_test, reference, floor = load(options, chosen)
    net = network(chosen, x, y)
    if options.budget is not None:
        return _to_budget(options, chosen, net, (x, y), x_test, reference, floor)
    found: dict[str, Array] = {}
    seconds: dict[str, float] = {}
    ensemble: Posterior | None = None
    # The ensemble is fitted first: the samplers start from it.
    for done, name in enumerate(sorted(names, key=lambda n: n != "ensemble")):
        options.report(name, done, len(names))
        started = time.perf_counter()
        with global_stream(options.seed, "reference network"):
            problem = Problem(
                net.to(options.device),
                data=(x, y),
                likelihood=Categorical(),
                plan=_plan(chosen["plan"], name),
                prior=Normal(math.sqrt(float(chosen["prior_variance"]))),
            )
        settings = settings_for(name, options.quick) | _own(options, name)
        if name == "dropout" and "insert" not in settings:
            settings["insert"] = _last_linear(net)
        if settings.get("init") == "ensemble" and ensemble is not None:
            chains = settings["chains"]
            settings["init"] = ensemble.sample(chains, seed=options.seed)
        posterior = METHODS[name](**settings).fit(problem, seed=options.seed, progress=False)
        ensemble = posterior if name == "ensemble" else ensemble
        found[name] = _probabilities(posterior, x_test)
        seconds[name] = round(time.perf_counter() - started, 1)
    return _result({n: found[n] for n in names}, seconds, reference, floor, chosen, len(x))


def _to_budget(
    options: Options,
    chosen: dict[str, str],
    net: nn.Module,
    data: tuple[Tensor, Tensor],
    x_test: Tensor,
    reference: Array,
    floor: Array | None,
) -> Result:
    """Run SGHMC for the given time, and measure the distances of one network, an ensemble and the chains."""
    assert options.budget is not None
    with global_stream(options.seed, "reference network"):
        problem = Problem(
            net.to(options.device),
            data=data,
            likelihood=Categorical(),
            prior=Normal(math.sqrt(float(chosen["prior_variance"]))),
            precision=None if chosen["precision"] == "full" else chosen["precision"],
        )
    name = chosen["method"]
    check_choice("--set method", name, BUDGETED)
    common: dict[str, Any] = {
        "budget": options.budget,
        "seed": options.seed,
        "file": options.state,
        "report": options.show or (lambda line: None),
    }
    settings: dict[str, Any] = {"batch_size": 40 if options.quick else int(chosen["batch_size"])}
    count, started = 2 if options.quick else 8, time.perf_counter()
    if name == "ivon":
        settings |= {"members": count} | _own(options, name)
        state = mixture_to_budget(problem, x_test, reference, settings=settings, **common)
        probabilities = state.probabilities(list(range(len(state.ends))))
        others = ("one member's mean", "one member")
        note = f"{len(state.ends)} members in {state.seconds:,.0f} s, {state.steps:,} steps each."
    else:
        # Steps of large networks are replayed as CUDA graphs unless compile=False.
        training = settings_for("ensemble", options.quick) | {"compile": "auto"} | _own(options, "ensemble")
        training.pop("members", None)
        # As many epochs as the time for training allows.
        training["epochs"] = max(training["epochs"], 1 if options.quick else 60)
        settings |= {"chains": count, "compile": False} | _own(options, name)
        state = chains_to_budget(problem, x_test, reference, settings=settings, training=training, **common)
        probabilities = state.probabilities()
        others = ("map", "ensemble")
        draws = f"{state.draws * len(state.kept)} draws of each of {len(state.theta)} chains"
        note = f"{draws} in {state.seconds:,.0f} s, {state.steps:,} steps per chain with warm-up."
    one, several = (part.float().numpy() for part in state.first)
    found = {name: probabilities, others[1]: several, others[0]: one}
    seconds = dict.fromkeys(found, round(time.perf_counter() - started, 1))
    result = _result(found, seconds, reference, floor, chosen, len(data[0]))
    return dataclasses.replace(result, notes=(note, *result.notes))


def _plan(plan: str, method: str) -> Any:
    return "auto" if method == "bbb" else plan


def _own(options: Options, method: str) -> dict[str, Any]:
    """Return the settings given as METHOD.NAME=VALUE."""
    found: dict[str, Any] = {}
    for key, value in options.extra.items():
        name, dot, setting = key.partition(".")
        if dot and name == method:
            number = float(value) if value.replace(".", "", 1).replace("e-", "", 1).isdigit() else None
            found[setting] = value if number is None else int(number) if value.isdigit() else number
    return found


def _last_linear(net: nn.Module) -> str:
    names: list[str] = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    return names[-1]


def _probabilities(posterior: Posterior, x: Tensor) -> Array:
    """Return the class probabilities, computed in chunks of rows."""
    parts = [posterior.predict(x[i : i + 2500]).probabilities.float().cpu().numpy() for i in range(0, len(x), 2500)]
    return np.concatenate(parts)


def _result(
    found: dict[str, Array],
    seconds: dict[str, float],
    reference: Array,
    floor: Array | None,
    chosen: dict[str, str],
    rows: int,
) -> Result:
    distances = {name: _distance(probs, reference) for name, probs in found.items()}
    numbers: dict[str, Any] = {
        name: {
            "agreement": float(metrics.agreement(torch.from_numpy(p), torch.from_numpy(reference))),
            "total_variation": float(distances[name].mean()),
            "total_variation_error": _error(distances[name]),
            "seconds": seconds[name],
        }
        for name, p in found.items()
    }
    if floor is not None:
        far = _distance(floor, reference)
        same = float(metrics.agreement(torch.from_numpy(floor), torch.from_numpy(reference)))
        numbers["reference, earlier"] = {
            "agreement": same,
            "total_variation": float(far.mean()),
            "total_variation_error": _error(far),
            "seconds": 0.0,
        }
    reproduced, sentences = judge(distances)
    best = max(found, key=lambda name: numbers[name]["agreement"])
    top = numbers[best]
    sentences = (
        *sentences,
        f"The best is {best}: it agrees with the reference on {top['agreement']:.1%} of {len(reference):,} rows, with "
        f"a total variation of {top['total_variation']:.3f} ± {top['total_variation_error']:.3f}"
        + (
            f" (two versions of the reference: {numbers['reference, earlier']['agreement']:.1%} and "
            f"{numbers['reference, earlier']['total_variation']:.3f})."
            if floor is not None
            else "."
        ),
    )
    columns = (
        Column("Method"),
        Column("Agreement", "high", 4, "fraction of rows with the reference's class"),
        Column("Total variation", "low", 4, "mean over rows"),
        Column("± standard error", None, 4),
        Column("Seconds", None, 0),
    )
    table = Table(columns, tuple((name, *row.values()) for name, row in numbers.items()))
    notes = (
        f"Network {chosen['network']}, {rows:,} training rows, prior variance {chosen['prior_variance']}, reference "
        f"{chosen['reference']}.",
        "The published runs are far longer: 10,000 epochs for SGLD, 24,000 leapfrog steps per HMC draw.",
    )
    return Result(sentences, reproduced, table, (_picture(numbers),), numbers, notes)


def judge(distances: dict[str, Array]) -> tuple[bool | None, tuple[str, ...]]:
    """Return whether the published order is reproduced, by paired differences over rows, and the conclusions."""
    groups = [[name for name in group if name in distances] for group in RANKED]
    pairs = [(a, b) for first, second in itertools.pairwise([g for g in groups if g]) for a in first for b in second]
    verdicts, sentences = [], []
    for near, far in pairs:
        gap = distances[far] - distances[near]
        mean, error = float(gap.mean()), _error(gap)
        verdicts.append(True if mean > 2 * error else False if mean < -2 * error else None)
        word = {True: "closer than", False: "farther than", None: "statistically indistinguishable from"}[verdicts[-1]]
        sentences.append(f"{near} is {word} {far}: a difference of {mean:.4f} ± {error:.4f} in total variation.")
    reproduced = (
        None if not verdicts or (None in verdicts and False not in verdicts) else all(v is True for v in verdicts)
    )
    head = {
        True: "Reproduced: the published order by total variation.",
        False: "Not reproduced: the published order by total variation.",
        None: "Inconclusive: the published order by total variation.",
    }
    return reproduced, (head[reproduced], *sentences)


def _distance(p: Array, q: Array) -> Array:
    found: Array = 0.5 * np.abs(p.astype(np.float64) - q.astype(np.float64)).sum(-1)
    return found


def _error(values: Array) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def _picture(numbers: dict[str, Any]) -> Picture:
    def paint(ax: Any) -> None:
        for place, (name, row) in enumerate(numbers.items()):
            ax.errorbar(
                row["total_variation"],
                row["agreement"],
                xerr=row["total_variation_error"],
                fmt="o",
                label=name,
                color=f"C{place}",
            )
        ax.set(xlabel="total variation from the reference", ylabel="agreement with the reference")
        ax.legend()

    values = "; ".join(
        f"{name} {row['agreement']:.3f} and {row['total_variation']:.3f}" for name, row in numbers.items()
    )

    return picture(
        "hmc-reference",
        paint,
        title="Distance from published HMC",
        alt=f"Agreement and total variation: {values}.",
        caption="Up and to the left is closer to HMC.",
        size=(5.0, 4.0),
    )


STUDIES = {
    "hmc-reference": Study(
        "hmc-reference",
        "How close do methods come to a public HMC reference?",
        "Izmailov et al. (2021) compared scalable methods with full-batch HMC by agreement and total variation. From "
        "closest to furthest: HMC, SGHMC, SGLD, deep ensembles, mean-field variational inference, SGD.",
        run,
        budgeted=True,
    )
}
