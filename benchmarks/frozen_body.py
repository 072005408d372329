"""A Bayesian last layer of ResNet-18, from images to posterior and predictions, against features computed by hand.

    python -m benchmarks.frozen_body                  # about five minutes
    python -m benchmarks.frozen_body --rows 256 --only hmc,map

By hand, the network without its last layer is run once over the images in plain PyTorch, and the same method fits a
Linear layer to the features. Ours is `Problem(net, images, random="fc.*")`, including the cost of finding the cut.
Both give the same posterior, which is checked. A last row compares a full gradient with and without the cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import credibly as cr
from benchmarks.timing import Goal, Row, interleaved, options, report, show

CLASSES = 10
METHODS: dict[str, cr.Method] = {
    "map": cr.MAP(steps=1000, init="network"),
    "ensemble": cr.DeepEnsemble(members=5, steps=1000, init="network", bootstrap=True),
    "bbb": cr.BayesByBackprop(steps=1000),
    "laplace": cr.Laplace(start="network"),
    "swag": cr.SWAG(steps=1000, init="network"),
    "dropout": cr.MCDropout(insert="fc", steps=1000),
    "hmc": cr.HMC(chains=4, warmup=40, draws=50, max_steps=20, init="network"),
    "sgld": cr.SGLD(chains=4, warmup=200, draws=100, thin=5, init="network"),
    "sghmc": cr.SGHMC(chains=4, warmup=200, draws=100, thin=5, init="network"),
}


def resnet() -> Any:
    """Return an untrained ResNet-18 in evaluation mode. Its operators for boxes are not needed."""
    try:
        from torchvision.models import resnet18
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        resnet.library = library  # type: ignore[attr-defined]
        from torchvision.models import resnet18
    torch.manual_seed(0)
    return resnet18(num_classes=CLASSES).eval()


class Task:
    """Images, and the two ways to a posterior of the last layer."""

    def __init__(self, rows: int, side: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.net = resnet()
        self.x = torch.randn(rows, 3, side, side, generator=generator)
        self.new = torch.randn(rows, 3, side, side, generator=generator)
        self.y = torch.randint(CLASSES, (rows,), generator=generator)
        self.parts = (cr.likelihoods.Categorical(), cr.priors.Normal())
        self.body = copy.deepcopy(self.net)
        self.body.fc = nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([self.body(some) for some in x.split(64)])

    def problem(self) -> cr.Problem:
        return cr.Problem(self.net, (self.x, self.y), *self.parts, random="fc.*")

    def ours(self, method: cr.Method) -> Any:
        return method.fit(self.problem(), seed=0, progress=False)

    def by_hand(self, method: cr.Method, features: Any = None) -> Any:
        head = nn.Sequential()
        head.add_module("fc", copy.deepcopy(self.net.fc))
        features = self.features(self.x) if features is None else features
        problem = cr.Problem(head, (features, self.y), *self.parts)
        return method.fit(problem, seed=0, progress=False)


def rows_of(task: Task, name: str, repeats: int) -> list[Row]:
    method = METHODS[name]
    mine, theirs = task.ours(method), task.by_hand(method)
    # Features by hand round differently (fixed BatchNorm, channels last), and samplers amplify that: use equal ones.
    features = task.problem().reduced().x
    again = task.by_hand(method, features).predict(features).mean
    gap = float((mine.predict(task.x).mean - again).abs().max())
    if gap > 1e-4:
        raise RuntimeError(f"{name}: predictions differ by {gap:.3g} from a Linear layer on the same features")
    fits: dict[str, Callable[[], object]] = {
        "ours": lambda: task.ours(method), "by hand": lambda: task.by_hand(method)
    }  # fmt: skip
    predictions: dict[str, Callable[[], object]] = {
        "ours": lambda: mine.predict(task.new).mean,
        "by hand": lambda: theirs.predict(task.features(task.new)).mean,
    }
    rows = []
    for what, calls in (("fit", fits), ("predict", predictions)):
        times = interleaved(calls, repeats=repeats, seconds=0.0, warm=0)
        rows.append(Row(f"{name}, {what}", times["ours"], times["by hand"], Goal("<=", 1.2)))
    return rows


def gradient(task: Task, repeats: int) -> Row:
    whole = task.problem()
    part = whole.reduced()
    theta = whole.layout.read(task.net).unsqueeze(0)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: part.log_density_and_grad(theta), "whole": lambda: whole.log_density_and_grad(theta)
    }  # fmt: skip
    times = interleaved(calls, repeats=repeats, seconds=0.0, warm=1)
    return Row("a full gradient, cut against whole", times["ours"], times["whole"], Goal(">=", 50), inverse=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="images (default 1,024)")
    parser.add_argument("--side", type=int, default=64, help="pixels per side (default 64)")
    parser.add_argument("--only", default=",".join(METHODS), help="methods, separated by commas")
    args = parser.parse_args()
    with report("frozen_body", args) as record:
        task = Task(args.rows, args.side)
        for name in args.only.split(","):
            show(rows_of(task, name, args.repeats), record)
        show([gradient(task, args.repeats)], record)


if __name__ == "__main__":
    main()
