"""`covariate-shift`: is the HMC model average less robust to corrupted inputs than plain training?

Networks are trained on clean MNIST images and tested on corrupted ones: noise, blur, contrast, rotation and shift at
five severities, applied to the 28 x 28 pixels before downsampling. All methods use the same network and prior.

Rule, fixed before any run: the drop of a method is its accuracy on clean test images minus its mean accuracy over
corruptions and severities. The finding (BNNs are not robust to covariate shift) is reproduced if the drop of HMC is
significantly larger than that of MAP and than that of the ensemble, not reproduced if it is significantly smaller than
one of them, and inconclusive otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from credibly.core.rng import stream
from credibly.methods import MAP, DeepEnsemble
from credibly.report.page import Column, Table, Value
from studies.hmc_parts import (
    MNIST,
    SOURCE,
    Cells,
    Estimate,
    Tally,
    clear,
    clearly_below,
    curves,
    difference,
    dots,
    hmc,
    image_task,
    mnist,
    one_thread,
    shrunk,
    signed,
    size_note,
    summary,
    verdict,
)
from studies.study import Options, Result, Study, mean_error, plus_minus

SEVERITIES = (1, 2, 3, 4, 5)
METHODS = ("HMC", "ensemble", "MAP")
# Mean accuracy in per cent on CIFAR-10 and over CIFAR-10-C.
PUBLISHED = {"HMC": (89.64, 70.91), "ensemble": (88.49, 76.99), "MAP": (83.44, 71.04)}


# -- corruptions of images (N, 28, 28) in [0, 1], severity 1 to 5 ------------------------------------------------------
def noise(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise of standard deviation 0.1 to 0.5 to every pixel, clamped to [0, 1]."""
    return (images + 0.1 * severity * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def blur(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Apply a Gaussian blur of standard deviation 0.6 to 3 pixels."""
    at = torch.arange(-9.0, 10.0)
    weights = torch.exp(-0.5 * (at / (0.6 * severity)) ** 2)
    weights = weights / weights.sum()
    x = images.unsqueeze(1)
    x = F.conv2d(F.pad(x, (9, 9, 0, 0)), weights.view(1, 1, 1, -1))
    return F.conv2d(F.pad(x, (0, 0, 9, 9)), weights.view(1, 1, -1, 1))[:, 0]


def contrast(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Reduce the contrast around the mean of the image by a factor of 0.75 to 0.15."""
    mean = images.mean((1, 2), keepdim=True)
    return mean + (0.9 - 0.15 * severity) * (images - mean)


def rotation(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Rotate by 12 to 60 degrees in either direction."""
    angle = math.radians(12 * severity) * _signs(len(images), generator)
    zero = torch.zeros_like(angle)
    rows = [torch.stack([angle.cos(), -angle.sin(), zero], 1), torch.stack([angle.sin(), angle.cos(), zero], 1)]
    return _moved(images, torch.stack(rows, 1))


def shift(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Shift by 1 to 5 pixels along both axes, each in either direction."""
    by = 2 * severity / images.shape[-1]
    across, down = (by * _signs(len(images), generator) for _ in range(2))
    one, zero = torch.ones_like(across), torch.zeros_like(across)
    return _moved(images, torch.stack([torch.stack([one, zero, across], 1), torch.stack([zero, one, down], 1)], 1))


def _signs(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1.0


def _moved(images: Tensor, matrices: Tensor) -> Tensor:
    x = images.unsqueeze(1)
    grid = F.affine_grid(matrices, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)[:, 0]


CORRUPTIONS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "noise": noise,
    "blur": blur,
    "contrast": contrast,
    "rotation": rotation,
    "shift": shift,
}


# -- the study ---------------------------------------------------------------------------------------------------------
def run(options: Options) -> Result:
    """Evaluate three methods on clean and corrupted test images."""
    quick = options.quick
    side, hidden, rows, test = (7, 8, 100, 100) if quick else (14, 20, 500, 1000)
    tasks = [image_task(options, i, rows, side=side, hidden=hidden, test=test) for i in range(1 if quick else 3)]
    clean = torch.from_numpy(mnist(options, "test")[0][:test]).float() / 255
    tally, mixing, done = Tally(), [], 0
    steps: dict[str, Any] = {"steps": 60 if quick else 1500, "compile": False}
    size: dict[str, Any] = (
        {"chains": 2, "warmup": 20, "draws": 6, "max_steps": 10} if quick else {"chains": 4, "warmup": 40, "draws": 40}
    )
    members = 2 if quick else 10
    plain = {"ensemble": DeepEnsemble(members=members, **steps), "MAP": MAP(**steps)}
    with one_thread():
        for task in tasks:
            problem = task.problem()
            for name in METHODS:
                options.report(f"subset {task.repeat}: {name}", done, len(tasks) * len(METHODS))
                if name == "HMC":
                    posterior: Any = hmc(problem, task.seed, compile=False, **size)
                    found = posterior.diagnostics(task.x_test[:200]).functions
                    mixing.append(math.nan if found is None else found.rhat_most)
                else:
                    posterior = plain[name].fit(problem, seed=task.seed, progress=False)
                tally.add("clean", name, task.judge(posterior.predict(task.x_test)))
                for kind, corrupt in CORRUPTIONS.items():
                    for severity in SEVERITIES:
                        generator = stream(options.seed, f"corruption {kind}", severity)
                        x = task.pixels(shrunk(corrupt(clean, severity, generator), side))
                        tally.add(f"{kind} {severity}", name, task.judge(posterior.predict(x)))
                done += 1
    notes = (
        size_note(tasks),
        f"HMC: {size['chains']} chains, {size['warmup']} warm-up iterations and {size['draws']} draws each, randomly "
        f"initialised; the 99 % quantile of R-hat over predictions is {max(mixing):.2f} in the worst repeat. MAP and "
        f"ensemble ({members} members): {steps['steps']:,} Adam steps, the same prior.",
        "All methods and repeats see the same corrupted test images. Published: ResNet-20-FRN on CIFAR-10-C, 16 "
        "corruptions.",
    )
    return result_of(tally.groups, notes)


def losses(
    groups: Mapping[str, Cells], measure: str = "accuracy", kinds: tuple[str, ...] = tuple(CORRUPTIONS)
) -> Cells:
    """Return each method's drop from clean to corrupted images, and its mean on corrupted ones, by repeat."""
    names = [g for g in groups if g.split()[0] in kinds]
    found = {}
    for m in groups["clean"]:
        at = groups["clean"][m][measure]
        means = [sum(groups[g][m][measure][i] for g in names) / len(names) for i in range(len(at))]
        found[m] = {"loss": [a - b for a, b in zip(at, means, strict=True)], "corrupted": means}
    return found


def judge(lost: Cells) -> bool | None:
    """Return whether HMC drops more than both, by the rule above."""
    more = [difference(lost, "HMC", m, "loss") for m in ("MAP", "ensemble")]
    if any(map(clearly_below, more)):
        return False
    return True if all(map(clear, more)) else None


def result_of(groups: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """Return the result computed from the values of all repeats."""
    lost, nats = losses(groups), losses(groups, "log_density")
    reproduced = judge(lost)
    by_kind = {kind: losses(groups, kinds=(kind,)) for kind in CORRUPTIONS}
    worse = [
        k
        for k, c in by_kind.items()
        if clear(difference(c, "HMC", "MAP", "loss")) and clear(difference(c, "HMC", "ensemble", "loss"))
    ]
    better = [
        k
        for k, c in by_kind.items()
        if any(clearly_below(difference(c, "HMC", m, "loss")) for m in ("MAP", "ensemble"))
    ]
    text = (
        verdict(
            reproduced, "the HMC model average is less robust to covariate shift than plain training and ensembles"
        ),
        "From clean to corrupted images accuracy drops by "
        + ", ".join(f"{plus_minus(*summary(lost, m, 'loss'))} ({m})" for m in METHODS)
        + f"; HMC's drop minus MAP's is {signed(difference(lost, 'HMC', 'MAP', 'loss'))}, minus the ensemble's "
        f"{signed(difference(lost, 'HMC', 'ensemble', 'loss'))}.",
        f"By corruption, HMC drops significantly more than both on {', '.join(worse) or 'none'}, and significantly "
        f"less than one of them on {', '.join(better) or 'none'}. In log density the drops are "
        + ", ".join(f"{plus_minus(*summary(nats, m, 'loss'))} ({m})" for m in METHODS)
        + ".",
        "Published (CIFAR-10 to CIFAR-10-C, accuracy in per cent): HMC 89.6 to 70.9, ensemble 88.5 to 77.0, SGD 83.4 "
        "to 71.0.",
    )
    rows: list[tuple[Value, ...]] = [
        ("clean", *(plus_minus(*summary(groups["clean"], m, "accuracy")) for m in METHODS), "", "")
    ]
    for kind, c in by_kind.items():
        rows.append(
            (
                kind,
                *(plus_minus(*summary(c, m, "corrupted")) for m in METHODS),
                *(signed(difference(c, "HMC", m, "loss")) for m in ("ensemble", "MAP")),
            )
        )
    rows.append(
        (
            "all corruptions",
            *(plus_minus(*summary(lost, m, "corrupted")) for m in METHODS),
            *(signed(difference(lost, "HMC", m, "loss")) for m in ("ensemble", "MAP")),
        )
    )
    falls = {m: (clean - corrupted) / 100 for m, (clean, corrupted) in PUBLISHED.items()}
    for place, name in ((0, "published, CIFAR-10"), (1, "published, CIFAR-10-C")):
        extra = [f"+{falls['HMC'] - falls[m]:.3f}" if place else "" for m in ("ensemble", "MAP")]
        rows.append((name, *(f"{PUBLISHED[m][place] / 100:.3f}" for m in METHODS), *extra))
    columns = (
        Column("test images"),
        *(Column(f"accuracy, {m}") for m in METHODS),
        Column("HMC's drop minus the ensemble's"),
        Column("HMC's drop minus MAP's"),
    )
    by_severity = {m: [_at(groups, m, s) for s in (0, *SEVERITIES)] for m in METHODS}
    falls_by = {f"minus {m}": [difference(c, "HMC", m, "loss") for c in by_kind.values()] for m in ("ensemble", "MAP")}
    pictures = (
        curves(
            "shift-severity",
            [0.0, *map(float, SEVERITIES)],
            by_severity,
            xlabel="severity (0 is clean)",
            ylabel="accuracy",
            log=False,
            title="Accuracy by severity",
            alt="Accuracy of HMC, the ensemble and MAP against the severity of corruption",
            caption="Mean over the five corruptions.",
        ),
        dots(
            "shift-kinds",
            list(by_kind),
            falls_by,
            xlabel="HMC's drop in accuracy minus the other's",
            zero=True,
            title="By corruption",
            alt="HMC's drop in accuracy minus that of the ensemble and of MAP, by corruption",
            caption="To the right of the line HMC loses more.",
        ),
    )
    numbers = {"groups": groups, "losses": lost, "published": PUBLISHED}
    return Result(text, reproduced, Table(columns, tuple(rows)), pictures, numbers, notes)


def _at(groups: Mapping[str, Cells], method: str, severity: int) -> Estimate:
    """Return the accuracy at a severity over corruptions and repeats; 0 is clean."""
    if severity == 0:
        return summary(groups["clean"], method, "accuracy")
    found = [groups[f"{kind} {severity}"][method]["accuracy"] for kind in CORRUPTIONS]
    return mean_error([sum(values) / len(values) for values in zip(*found, strict=True)])


STUDIES = {
    "covariate-shift": Study(
        "covariate-shift",
        "Does averaging over the posterior help under covariate shift?",
        "Finding 5: Bayesian neural networks are not robust to covariate shift; HMC loses more accuracy than plain "
        f"training ({SOURCE}).",
        run,
        (MNIST,),
    )
}
