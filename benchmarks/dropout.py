"""100 forward passes of MC-Dropout against a loop, a repeated batch, torch-uncertainty and probly; and a training step.

    python -m benchmarks.dropout                      # about two minutes
    python -m benchmarks.dropout --only small         # one of: small, wide

Passes are checked by the mean and variance they converge to, the training step with equal masks. "Masks and passes"
samples new masks and runs the passes on an existing source; `predict(x).mean` is the user's call including set-up.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import credibly as cr
from benchmarks import peers
from benchmarks.case import Case, Setting
from benchmarks.ensemble import NOISE, PRIOR, Task
from benchmarks.floors import Floor, forward_flops
from benchmarks.suite import print_rows
from benchmarks.timing import Goal, Row, interleaved, options, report, show
from benchmarks.vi_steps import Loop, Ours, check_gradient, own_copy, small, wide
from credibly.inference.method import initial
from credibly.inference.training.dropout_objective import DropoutObjective, Dropped
from credibly.posterior.dropout import DropoutPosterior, MaskDraws, draw_masks

RATE = 0.05
PASSES = 100


@dataclass(frozen=True)
class Passes:
    """A network with dropout, inputs, and several ways to compute 100 passes. All return (passes, rows, outputs)."""

    sizes: tuple[int, ...]
    net: nn.Sequential  # in training mode, which affects only its dropout
    x: Tensor
    posterior: DropoutPosterior
    fixed: int  # layers before the first dropout

    @classmethod
    def of(cls, sizes: Sequence[int], rows: int, first: int, likelihood: cr.likelihoods.Likelihood) -> Passes:
        """Build a network with dropout before Linear layer number `first` and all later ones."""
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            layers += [nn.Dropout(RATE)] if i >= first else []
            layers += [nn.Linear(inputs, outputs)] + ([nn.ReLU()] if i < len(sizes) - 2 else [])
        net = nn.Sequential(*layers)
        x = torch.randn(rows, sizes[0])
        y = torch.randint(sizes[-1], (rows,)) if sizes[-1] > 1 else torch.randn(rows, 1)
        posterior = cr.MCDropout.from_trained(net, (x, y), likelihood)
        return cls(tuple(sizes), net.train().requires_grad_(False), x, posterior, 2 * first)

    @property
    def name(self) -> str:
        return "-".join(map(str, self.sizes))

    def looped(self, x: Tensor, passes: int = PASSES) -> Tensor:
        return torch.stack([self.net(x) for _ in range(passes)])

    def repeated(self, x: Tensor, passes: int = PASSES) -> Tensor:
        out: Tensor = self.net(x.repeat(passes, 1))
        return out.reshape(passes, len(x), -1)

    def repeated_head(self, x: Tensor, passes: int = PASSES) -> Tensor:
        """Evaluate the layers before the first dropout once, by hand."""
        out: Tensor = self.net[self.fixed :](self.net[: self.fixed](x).repeat(passes, 1))
        return out.reshape(passes, len(x), -1)

    def implementations(self, setting: Setting) -> dict[str, Callable[[], object]]:
        x, seeds = self.x, iter(range(2**31))
        source = MaskDraws(self.posterior, x, PASSES, 0, per_row=False)

        def ours() -> Tensor:
            source.masks = draw_masks(source.sites, source.shapes, PASSES, next(seeds), self.posterior.theta)
            return source.outputs(x, 0, PASSES)

        calls: dict[str, Callable[[], object]] = {
            "ours": ours,
            "predict": lambda: self.posterior.predict(x, passes=PASSES, seed=next(seeds)).mean,
            "loop": lambda: self.looped(x),
            "repeated batch": lambda: self.repeated(x),
        }
        if self.fixed:
            calls["prefix once by hand, repeated batch"] = lambda: self.repeated_head(x)
        theirs = {"torch-uncertainty": self.torch_uncertainty(), "probly": None if self.fixed else self.probly()}
        for name, call in theirs.items():
            if call is not None:
                calls[name] = call
            elif not (name == "probly" and self.fixed):
                setting.note(f"{name} is not installed")
        return calls

    def torch_uncertainty(self) -> Callable[[], Tensor] | None:
        """Return one pass of its wrapper on the batch repeated 100 times."""
        found = peers.single_files("torch_uncertainty", ["methods/mc_dropout.py"])
        if found is None:
            return None
        wrapped = found[0].mc_dropout(self.net, PASSES, task="regression", probabilistic=False).eval()
        return lambda: wrapped(self.x)

    def probly(self) -> Callable[[], Tensor] | None:
        """Return a loop of passes of its wrapper, which inserts dropout before every linear layer but a first one."""
        found = peers.single_files("probly", ["representation/dropout.py"])
        if found is None:
            return None
        bare = nn.Sequential(nn.Identity(), *(layer for layer in self.net if not isinstance(layer, nn.Dropout)))
        wrapped = found[0].Dropout(copy.deepcopy(bare), RATE)
        wrapped.eval()
        count = sum(isinstance(layer, nn.Dropout) for layer in wrapped.modules())
        if count != sum(isinstance(layer, nn.Dropout) for layer in self.net):
            raise SystemExit("probly inserts dropout elsewhere: nothing to compare")
        return lambda: wrapped.predict_representation(self.x, PASSES, logits=True)

    def check(self) -> str:
        """Exit unless mean and variance agree with the loop's within Monte Carlo error; return a line on how well."""
        x, passes = self.x[:32], 400
        theirs = self.looped(x, passes).double()
        source = MaskDraws(self.posterior, x, passes, 0, per_row=False)
        ours = source.outputs(x, 0, passes).reshape(theirs.shape).double()
        error = ((theirs.var(0) + ours.var(0)) / passes).sqrt()
        z = float(((theirs.mean(0) - ours.mean(0)) / error).square().mean().sqrt())
        ratio = float((ours.var(0) / theirs.var(0)).log().mean().exp())
        # Rows share their masks in ours, so their errors are correlated and the RMS z-score may differ from 1.
        if z > 3 or not 0.8 < ratio < 1.25:
            raise SystemExit(f"{self.name}: our passes have another distribution than the loop's: nothing to compare")
        return (
            f"over {passes} passes the means differ by {z:.2f} standard errors, the variances by a factor {ratio:.3f}"
        )


NETWORKS: dict[str, Callable[[], Passes]] = {
    "small": lambda: Passes.of([13, 50, 1], 51, 0, cr.likelihoods.Gaussian(NOISE)),
    "wide": lambda: Passes.of([784, 400, 400, 10], 256, 0, cr.likelihoods.Categorical()),
    "last": lambda: Passes.of([784, 400, 400, 400, 10], 256, 3, cr.likelihoods.Categorical()),
}
# Goals against the loop and against the repeated batch (torch-uncertainty repeats the batch; probly loops).
GOALS: dict[str, dict[str, float]] = {
    "small": {"loop": 20, "repeated batch": 6, "torch-uncertainty": 6, "probly": 6},
    "wide": {"loop": 1.8, "torch-uncertainty": 1.8, "probly": 1.8},
    "last": {},
}
LIMITS = {
    "small": "argument checks and dispatch take half; then the passes, on one thread, and sampling the masks.",
    "wide": "the matrix products of 100 passes, each with its own weights.",
    "last": "the last layer: everything before the dropout is computed once.",
}


def comparisons(size: str, setting: Setting) -> Iterator[Row]:
    """Compare 100 passes of one network; ours as bare passes and as the user's call."""
    network = NETWORKS[size]()
    with torch.no_grad():
        setting.note(network.check())
        times = interleaved(network.implementations(setting), repeats=setting.repeats, seconds=setting.seconds)
    floor = Floor((PASSES if not network.fixed else 1) * forward_flops(network.sizes, len(network.x)))
    for key, kind in (("ours", "masks and passes"), ("predict", "predict(x).mean")):
        for name in times:
            if name not in ("ours", "predict"):
                goal = GOALS[size].get(name)
                what = f"{network.name}, {len(network.x)} rows, {PASSES} passes: {kind}"
                row = Row(what, times[key], times[name], Goal(">=", goal) if goal else None, inverse=True)
                yield replace(row, peer=name, floor=floor)


def cases() -> list[Case]:
    titles = {"small": "13-50-1 on 51 rows", "wide": "784-400-400-10 on 256 rows"}
    return [
        Case(
            f"dropout-{size}",
            f"{PASSES} forward passes of MC-Dropout, {titles[size]}.",
            LIMITS[size],
            partial(comparisons, size),
            0.3 if size == "small" else 0.7,
            goals="6 (PyTorch loop: 20)" if size == "small" else "1.8",
            peers=("torch-uncertainty", "probly", "loop", "repeated batch"),
        )
        for size in titles
    ]


# -- training steps ----------------------------------------------------------------------------------------------------


def with_dropout(task: Task) -> Task:
    """Return the task with dropout before every linear layer of the network."""
    layers: list[nn.Module] = []
    for layer in task.net.children():
        layers += [nn.Dropout(RATE), layer] if isinstance(layer, nn.Linear) else [layer]
    return replace(task, net=nn.Sequential(*layers))


def dropout_objective(task: Task) -> tuple[DropoutObjective, Tensor]:
    """Return the objective of MC-Dropout as built by its `fit`, and the initial weights."""
    problem = task.problem()
    network = Dropped(problem, None, None)
    rates = torch.tensor([network.rate_row(None)])
    objective = DropoutObjective(
        problem, network, problem.n, rates, batch=task.batch, seed=0, concrete=False, fixed_scale=False
    )
    return objective, initial(problem, "network", 1, 0)


def plain_dropout(task: Task) -> Loop:
    """Return plain dropout training with the weight decay that credibly derives, where biases have keep rate 1."""
    net, decay = own_copy(task).train(), 1 / (PRIOR**2 * len(task.x))
    weights = [p for p in net.parameters() if p.ndim > 1]
    biases = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": weights, "weight_decay": decay / (1 - RATE)},
        {"params": biases, "weight_decay": decay},
    ]
    return Loop(task, net, groups=groups)


def check_step(task: Task) -> None:
    """Exit unless the plain loop has our gradient, decay included, on the same weights, rows and masks."""
    plain = plain_dropout(task)
    uniforms: list[Tensor] = []

    def record_mask(_layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        # 1 is dropped, 0 is kept; the mask of an input that is already zero is unknown and has no effect.
        uniforms.append(((args[0] != 0) & (out == 0)).float())

    handles = [m.register_forward_hook(record_mask) for m in plain.net.modules() if isinstance(m, nn.Dropout)]
    rows = torch.arange(task.batch)
    plain.loss(rows).backward()
    for handle in handles:
        handle.remove()
    decays = {p: group["weight_decay"] for group in plain.adam.param_groups for p in group["params"]}
    theirs = torch.cat([(p.grad + decays[p] * p.detach()).flatten() for p in plain.net.parameters()])
    objective, theta = dropout_objective(task)
    noise = tuple(u.unsqueeze(0) for u in uniforms)
    ours = objective.evaluate(theta, objective.own, task.problem().x, task.problem().y, rows, noise, torch.zeros(0))[1]
    check_gradient(theirs, ours[0], "plain dropout")


def training(task: Task, setting: Setting) -> list[Row]:
    """Compare steps of MC-Dropout with plain PyTorch; no goal."""
    task = with_dropout(task)
    check_step(task)
    step = Ours(task, *dropout_objective(task), compiled=True)
    step.compile()
    implementations: dict[str, Callable[[], object]] = {
        "plain": plain_dropout(task),
        "compiled": step,
        "eager": Ours(task, *dropout_objective(task), compiled=False),
    }
    times = interleaved(implementations, repeats=setting.repeats, seconds=setting.seconds, multiple=task.per_epoch)
    return [Row(f"{kind} / plain dropout, {task.name}", times[kind], times["plain"]) for kind in ("compiled", "eager")]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=("small", "wide"), default=None, help="one of the networks")
    args = parser.parse_args()
    with report("dropout", args) as record:
        setting = Setting(args.repeats, args.seconds, args.threads)
        chosen = [size for size in NETWORKS if args.only is None or (size == "small") == (args.only == "small")]
        found = [row for size in chosen for row in comparisons(size, setting)]
        print_rows(found, record)
        print("\nOne training step, minibatch 128\n")
        for name, make in (("small", small), ("wide", wide)):
            if args.only in (None, name):
                show(training(make(), setting), record, "training")


if __name__ == "__main__":
    main()
