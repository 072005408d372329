"""The fits of `lora-calibration`: every method on one seed, with choices by its validation rows."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from credibly import peft
from credibly.conformal.probabilities import fit_probabilities
from credibly.methods import MLE, SWAG, BayesByBackprop, Laplace, MCDropout
from credibly.metrics import scores as metrics
from credibly.posterior.base import Posterior
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.laplace import LaplacePosterior
from credibly.posterior.model import Model
from credibly.priors.elementwise import Normal
from credibly.problem import Problem
from credibly.storage.record import Record
from studies.lora_text import Batch, Reviews, Size, pretrained, reviews, with_adapter
from studies.study import Options, write_json

METHODS = {
    "plain": "plain LoRA",
    "temperature": "temperature scaling",
    "dropout": "MC-Dropout",
    "ensemble": "ensemble of adapters",
    "last-layer": "last-layer Laplace",
    "laplace": "LoRA-Laplace",
    "bbb": "Bayes by Backprop",
    "swag": "SWAG",
}
# The order of the fits: what needs only the weights of plain LoRA and few passes comes last.
ORDER = ("plain", "temperature", "dropout", "bbb", "swag", "ensemble", "last-layer", "laplace")
STEPS, RATE, BATCH = 500, 1e-3, 32
MEMBERS, DRAWS = 3, 30
# Prior standard deviations, before division by the square root of the fan-in. Laplace and Bayes by Backprop choose one
# on the validation rows; ensemble, dropout and SWAG have a wide one.
SCALES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
BBB_SCALES = (0.03, 0.1)
WIDE = 3.0


@dataclass(frozen=True)
class Setting:
    """One seed: the adapter's network, the reviews, and how long to train."""

    net: nn.Module
    data: Reviews
    seed: int
    device: str
    quick: bool

    @property
    def training(self) -> dict[str, Any]:
        """The training settings common to all methods."""
        steps, batch = (4, 8) if self.quick else (STEPS, BATCH)
        return {"steps": steps, "lr": RATE, "batch_size": batch, "compile": False}

    def problem(self, scale: float, *, dropout: bool = False) -> Problem:
        """Return the problem of the training rows under a prior of the given scale."""
        prior = Normal(scale, fan_in=True)
        return peft.problem(self.net, self.data.train, prior=prior, dropout=dropout, device=self.device)


def cell(options: Options, size: Size, seed: int, folder: Path, names: Collection[str] = ORDER) -> dict[str, Any]:
    """Return the metrics of methods for one seed, and what the validation rows chose.

    Every method is kept in `seed-N.json` as it is done, and the weights of plain LoRA beside it.
    """
    path, weights = folder / f"seed-{seed}.json", folder / f"seed-{seed}.safetensors"
    found: dict[str, Any] = {"chosen": {}, "metrics": {}}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    if all(name in found["metrics"] for name in names):
        return found
    state = pretrained(options, size, folder / "language-model.safetensors")
    data = reviews(options, size, seed)
    setting = Setting(with_adapter(state, size, seed), data, seed, options.device, options.quick)
    if not weights.is_file():
        plain = fitted(MLE(**setting.training), setting.problem(WIDE), setting)
        save_file({"theta": plain.draws[0, 0].cpu().contiguous()}, weights)
    theta = load_file(weights)["theta"]
    for name in ORDER:
        if name in names and name not in found["metrics"]:
            posterior, scaling, choice = posterior_of(name, setting, theta)
            found["metrics"][name] = measured(posterior, data, scaling)
            found["chosen"] |= {} if choice is None else {name: choice}
            write_json(path, found)
    return found


def posterior_of(name: str, setting: Setting, theta: Tensor) -> tuple[Posterior, Any, float | None]:
    """Return the posterior of a method, a map of its probabilities, and what the validation rows chose.

    `theta` are the weights of plain LoRA, (D,).
    """
    if name == "bbb":
        longer = setting.training | {"steps": 2 * setting.training["steps"]}
        posterior, scale = chosen(BayesByBackprop(**longer, init_scale=0.003), BBB_SCALES, setting)
        return posterior, None, scale
    if name in ("last-layer", "laplace"):
        last = name == "last-layer"
        method = Laplace(start=theta, structure="full" if last else "kron", random="last layer" if last else None)
        posterior, scale = best_scale(fitted(method, setting.problem(1.0), setting), setting)
        return posterior, None, scale
    problem = setting.problem(WIDE, dropout=name == "dropout")
    if name == "dropout":
        return fitted(MCDropout(**setting.training), problem, setting), None, None
    if name == "swag":
        return fitted(SWAG(**setting.training, init=theta.unsqueeze(0)), problem, setting), None, None
    if name == "ensemble":
        others = [
            fitted(MLE(**setting.training, init="fresh"), problem, replace(setting, seed=1000 * (setting.seed + 1) + m))
            for m in range(1, MEMBERS)
        ]
        theta = torch.stack([theta, *(other.draws[0, 0].cpu() for other in others)])
    draws = theta.to(problem.device).reshape(-1, 1, problem.dim)
    plain = DrawsPosterior(Model.of(problem), draws, Record(method="ensemble" if name == "ensemble" else "mle"))
    if name != "temperature":
        return plain, None, None
    x, y = setting.data.validation
    scaling = fit_probabilities("temperature", probabilities(plain, x), y)
    return plain, scaling, scaling.temperature


def fitted(method: Any, problem: Problem, setting: Setting) -> Any:
    """Fit without a progress line."""
    return method.fit(problem, seed=setting.seed, progress=False)


def chosen(method: Any, scales: tuple[float, ...], setting: Setting) -> tuple[Posterior, float]:
    """Fit under each prior scale. Return the posterior that predicts the validation rows best, and its scale."""
    x, y = setting.data.validation
    best: tuple[float, Posterior, float] | None = None
    for scale in scales:
        posterior = fitted(method, setting.problem(scale), setting)
        score = float(metrics.negative_log_likelihood(probabilities(posterior, x), y))
        if best is None or score < best[0]:
            best = score, posterior, scale
    assert best is not None
    return best[1], best[2]


def best_scale(fit: LaplacePosterior, setting: Setting) -> tuple[Posterior, float]:
    """Return a Laplace posterior, fitted at a prior scale of 1, at the scale that predicts the validation rows best."""
    x, y = setting.data.validation
    found = {}
    for scale in SCALES:
        blocks = [block.scaled(scale**-2, 1.0) for block in fit.precision_blocks]
        about = {"log_likelihood": fit.log_likelihood, "log_prior": fit.log_prior}
        posterior = LaplacePosterior(fit.model, fit.loc, blocks, fit.names, fit.record, **about)
        found[scale] = float(metrics.negative_log_likelihood(probabilities(posterior, x), y)), posterior
    best = min(found, key=lambda scale: found[scale][0])
    return found[best][1], best


def probabilities(posterior: Posterior, x: Batch) -> Tensor:
    """Return the class probabilities (N, 2) of the model average, on the CPU."""
    names = {"dropout": "passes", "gaussian": "draws"}
    options: dict[str, Any] = {names[posterior.kind]: DRAWS} if posterior.kind in names else {}
    return posterior.predict(x, **options).probabilities.cpu()


def measured(posterior: Posterior, data: Reviews, scaling: Any = None) -> dict[str, float]:
    """Return the metrics on the test reviews, and the AUROC of the entropy against each kind of other text."""
    x, y = data.test
    mapped = (lambda p: p) if scaling is None else scaling
    p = mapped(probabilities(posterior, x))
    found = {
        "accuracy": float(metrics.accuracy(p, y)),
        "nll": float(metrics.negative_log_likelihood(p, y)),
        "ece": float(metrics.ece(p, y)),
    }
    own = torch.special.entr(p.double()).sum(-1)
    for name, far in data.far.items():
        other = torch.special.entr(mapped(probabilities(posterior, far)).double()).sum(-1)
        found[name] = float(metrics.auroc(own, other))
    return found
