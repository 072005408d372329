"""`hmc-reference`: how close does every scalable method come to published full-batch HMC predictions?

The network, the data and the reference are options (`--set network=... data=... reference=...`), so any reference in
the same format can be used: an npz with `probs` (M, classes) for the first M test rows, and optionally `probs_earlier`,
another version of them, whose distance from the first is the noise floor. The defaults are the CNN-LSTM on IMDB of
Izmailov et al. (2021): the first 20,000 training rows and the paper's prior variance of 1/40.

Rule: the finding is the paper's order by total variation (HMC, SGHMC, SGLD, ensemble, MFVI, SGD). It is reproduced if
the samplers that were run are closer than the ensemble, the ensemble is closer than Bayes by Backprop, and that is
closer than the single network, each by more than two standard errors of the paired difference over rows. It is not
reproduced if any is farther by as much, and inconclusive otherwise.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from credibly.core.rng import global_stream
from credibly.errors import InputError
from credibly.likelihoods import Categorical
from credibly.methods import METHODS
from credibly.metrics import scores as metrics
from credibly.networks import zoo
from credibly.posterior.base import Posterior
from credibly.priors.elementwise import Normal
from credibly.problem import Problem
from credibly.report.page import Column, Table
from credibly.report.pictures import Picture, picture
from studies.study import Options, Result, Study

Array = npt.NDArray[Any]

ORDER = ("hmc", "sghmc", "sgld", "ensemble", "bbb", "dropout", "map")
RANKED = (("hmc", "sghmc", "sgld"), ("ensemble",), ("bbb",), ("map",))  # closest first, as published
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "cnn_lstm": zoo.cnn_lstm,
    "resnet20_frn": zoo.resnet20_frn,
    "lenet": zoo.lenet,
    "mlp": zoo.mlp,
}
DEFAULTS = {
    "network": "cnn_lstm",
    "data": "imdb_100.npz",
    "reference": "hmc_reference/imdb_cnnlstm.npz",
    "prior_variance": "0.025",
    "train_rows": "20000",
    "test_rows": "0",
    "activation": "silu",
    "methods": "map,dropout,bbb,ensemble,sgld,sghmc,hmc",
    "plan": "batched",
}
# CIFAR-10 as preprocessed for the reference; other images are scaled to [0, 1] and standardised with the training rows.
CIFAR = ((0.49, 0.48, 0.44), 0.2)


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
    chosen = {**DEFAULTS, **{k: v for k, v in options.extra.items() if "." not in k}}
    unknown = set(chosen) - set(DEFAULTS)
    if unknown:
        raise InputError("--set", f"must name one of {', '.join(DEFAULTS)}, got {', '.join(sorted(unknown))}")
    names = [name for name in ORDER if name in chosen["methods"].split(",")]
    x, y, x_test, reference, floor = load(options, chosen)
    net = _network(chosen, x, y)
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


def load(options: Options, chosen: dict[str, str]) -> tuple[Tensor, Tensor, Tensor, Array, Array | None]:
    """Return training rows and labels, test rows, and both versions of their reference probabilities."""
    arrays: dict[str, Array] = {}
    for file in chosen["data"].split(","):
        with np.load(options.file(file), allow_pickle=False) as stored:
            arrays |= {key: stored[key] for key in stored.files}
    x, x_test = (_images(arrays, part) for part in ("train", "test"))
    if "y_train" not in arrays:
        raise InputError("--set", f"{chosen['data']} has no y_train", "Pass files with x_train, y_train and x_test")
    rows = int(chosen["train_rows"]) or len(x)
    with np.load(options.file(chosen["reference"]), allow_pickle=False) as stored:
        probs, earlier = stored["probs"], stored["probs_earlier"] if "probs_earlier" in stored.files else None
    kept = min(len(probs), len(x_test), int(chosen["test_rows"]) or len(probs))
    if options.quick:
        rows, kept = min(rows, 200), min(kept, 200)
    device = torch.device(options.device)
    inputs, targets = _tensors(x[:rows], x_test[:kept])
    labels = torch.from_numpy(arrays["y_train"][:rows].astype(np.int64).reshape(-1))
    other = None if earlier is None else earlier[:kept]
    return inputs.to(device), labels.to(device), targets.to(device), probs[:kept], other


def _images(arrays: dict[str, Array], part: str) -> Array:
    """Return the rows of x_train or x_test, also from d_train or d_test: pixel differences that are summed up."""
    if f"x_{part}" in arrays:
        return arrays[f"x_{part}"]
    if f"d_{part}" not in arrays:
        raise InputError(
            "--set", f"data has neither x_{part} nor d_{part}", "Pass files with x_train, y_train and x_test"
        )
    d = np.cumsum(np.cumsum(arrays[f"d_{part}"], axis=2, dtype=np.uint8), axis=3, dtype=np.uint8)
    green = d[:, 0]
    return np.stack([d[:, 1] + green, green, d[:, 2] + green], axis=-1)


def _tensors(x: Array, x_test: Array) -> tuple[Tensor, Tensor]:
    """Return token ids as int64, or images (N, channels, H, W), standardised by constants or the training rows."""
    if x.ndim == 2 and x.dtype.kind in "ui":
        return torch.from_numpy(x.astype(np.int64)), torch.from_numpy(x_test.astype(np.int64))
    scaled = [torch.from_numpy(v.astype(np.float32)) / (255 if v.dtype == np.uint8 else 1) for v in (x, x_test)]
    if x.ndim == 3:
        scaled = [v.unsqueeze(1) for v in scaled]
    elif x.ndim == 4 and x.shape[-1] in (1, 3):
        scaled = [v.permute(0, 3, 1, 2) for v in scaled]
    if x.ndim == 4 and scaled[0].shape[1:] == (3, 32, 32):
        centre, scale = torch.tensor(CIFAR[0]).reshape(1, 3, 1, 1), CIFAR[1]
        return (scaled[0] - centre) / scale, (scaled[1] - centre) / scale
    mean, std = scaled[0].mean(), scaled[0].std()
    return (scaled[0] - mean) / std, (scaled[1] - mean) / std


def _network(chosen: dict[str, str], x: Tensor, y: Tensor) -> nn.Module:
    if chosen["network"] not in NETWORKS:
        raise InputError("--set network", f"must be one of {', '.join(NETWORKS)}, got {chosen['network']!r}")
    classes = int(y.max()) + 1
    settings: dict[str, Any] = {"activation": chosen["activation"]}
    with global_stream(0, "reference network"):
        if chosen["network"] == "mlp":
            return nn.Sequential(nn.Flatten(), *zoo.mlp(x[0].numel(), 100, classes, chosen["activation"]))
        if chosen["network"] == "cnn_lstm":
            return zoo.cnn_lstm(vocabulary=max(20_000, int(x.max()) + 1), classes=classes, **settings)
        return NETWORKS[chosen["network"]](classes=classes, channels=x.shape[1], **settings)


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
    )
}
