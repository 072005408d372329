"""Variational inference against plain torch and its peers: training steps, estimators, passes of MC-Dropout.

    python -m benchmarks.variational                        # about eight minutes
    python -m benchmarks.variational --case prediction      # one of: bbb, prediction, dropout
    python -m benchmarks.variational --only small           # one of the two sizes of network
    python -m benchmarks.variational --json out.json

The peers are bayesian-torch and torch-uncertainty. Neither is a dependency: what is not installed is left out, with a line that
says so. To have them, in an environment of their own:

    pip install --no-deps bayesian-torch torch-uncertainty einops

All training steps, ours and theirs, take the same shuffled rows from the same `Batches`, gather them, draw their noise, and
end with Adam; the gradients are compared on equal noise before the clock starts. Ours run through the objects that
`credibly.methods.training.train` makes. Passes of MC-Dropout are compared by the mean and the variance that they converge to.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import credibly as cr
from benchmarks import ensemble
from benchmarks.ensemble import LR, NOISE, PRIOR, Task
from benchmarks.timing import (
    Goal,
    Row,
    Times,
    cold_compiler,
    duration,
    interleaved,
    options,
    report,
    scaled,
    show,
    table,
)
from credibly.dropout_posterior import DropoutPosterior, MaskDraws, draw_masks
from credibly.families import MeanField, inverse_softplus
from credibly.methods.bbb import FreeEnergy
from credibly.methods.dropout_objective import DropoutObjective, Dropped
from credibly.methods.method import initial
from credibly.methods.objectives import Objective
from credibly.methods.reparameterise import choose_estimator
from credibly.methods.steps import Batches, Step
from credibly.methods.training import Training

BATCH = 128
SCALE = 0.03  # standard deviation of every weight where Bayes by Backprop starts
RATE = 0.05  # of dropout
DRAWS = 8  # draws a step, batched
PASSES = 100  # of MC-Dropout
TABLE_STEPS = 100_000  # length of the run whose steps are timed: only the table of learning rates is as long

# -- the networks and the peers ----------------------------------------------------------------------------------------


def small() -> Task:
    """13-50-1 on 455 rows, Gaussian noise."""
    return replace(ensemble.small(), batch=BATCH)


def wide() -> Task:
    """784-400-400-10 on 2,000 rows whose labels come from a linear rule, so that there is something to fit."""
    task = ensemble.wide()
    rule = torch.randn(784, 10, generator=torch.Generator().manual_seed(1))
    return replace(task, y=(task.x @ rule).argmax(1), batch=BATCH)


def with_dropout(task: Task) -> Task:
    """The same task, with dropout before every layer of the network."""
    layers: list[nn.Module] = []
    for layer in task.net.children():
        layers += [nn.Dropout(RATE), layer] if isinstance(layer, nn.Linear) else [layer]
    return replace(task, net=nn.Sequential(*layers))


@dataclass(frozen=True)
class Peers:
    """The modules of the peers, None for one that is not there."""

    bayesian_torch: Any | None
    torch_uncertainty: Any | None


def find_peers() -> Peers:
    """Imports what can be imported, and prints a line about each."""

    def line(name: str, version: str, reason: str | None) -> None:
        print(f"{name}: " + (f"version {version}" if reason is None else f"left out ({reason})"))

    bayesian = uncertainty = None
    missing: str | None = None
    try:
        bayesian = importlib.import_module("bayesian_torch.models.dnn_to_bnn")
    except ImportError as error:
        missing = str(error)
    line("bayesian-torch", _version("bayesian-torch"), missing)
    missing = None
    try:
        # From its own file: importing the package would ask for lightning and torchvision, which the wrapper does not use.
        spec = importlib.util.find_spec("torch_uncertainty")
        if spec is None or spec.origin is None:
            raise ImportError("No module named 'torch_uncertainty'")
        place = Path(spec.origin).parent / "methods" / "mc_dropout.py"
        own = importlib.util.spec_from_file_location("torch_uncertainty_mc_dropout", place)
        if own is None or own.loader is None or not place.exists():
            raise ImportError(f"no {place.name} in this version")
        uncertainty = importlib.util.module_from_spec(own)
        own.loader.exec_module(uncertainty)
    except ImportError as error:
        uncertainty, missing = None, str(error)
    line("torch-uncertainty", _version("torch-uncertainty"), missing)
    print(flush=True)
    return Peers(bayesian, uncertainty)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# -- training steps ----------------------------------------------------------------------------------------------------


class Ours:
    """An objective through the objects of the real training loop; every call is one step."""

    def __init__(self, task: Task, objective: Objective, theta: Tensor, *, compiled: bool) -> None:
        problem = task.problem()
        settings = Training(batch_size=task.batch, lr=LR, schedule="constant", compile=compiled, steps=TABLE_STEPS)
        self.objective, self.theta = objective, theta
        self.batches = Batches(problem.n, task.batch, seed=0)
        self.step = Step(problem, objective, settings, TABLE_STEPS, theta)
        self.active = torch.ones(1)
        self.done = 0

    def __call__(self) -> None:
        self.step.advance(self.theta, self.batches.at(self.done), self.done % TABLE_STEPS, self.active)
        self.done += 1

    def compile(self) -> float:
        """Seconds of the first call; refuses a step that fell back to eager, which would be timed under a wrong name."""
        start = time.perf_counter()
        self()
        seconds = time.perf_counter() - start
        run = self.step.run
        if getattr(run, "active", run) is getattr(run, "plain", run):
            raise SystemExit("the step was not compiled (is there a C++ compiler?): nothing to compare")
        return seconds


def free_energy(task: Task, estimator: str, samples: int) -> tuple[FreeEnergy, Tensor]:
    """The objective of Bayes by Backprop as its `fit` makes it, and where phi starts."""
    problem = task.problem()
    method = cr.BayesByBackprop(estimator=estimator, samples=samples, batch_size=task.batch, init_scale=SCALE)
    noise = choose_estimator(estimator, problem, task.batch, mean_field=True)
    objective = FreeEnergy(problem, MeanField(), problem.n, method, noise, seed=0, per_epoch=task.per_epoch)
    return objective, MeanField().init(initial(problem, "network", 1, 0), SCALE)


def dropout_objective(task: Task) -> tuple[DropoutObjective, Tensor]:
    """The objective of MC-Dropout as its `fit` makes it, and where the weights start."""
    problem = task.problem()
    network = Dropped(problem, None, None)
    rates = torch.tensor([network.rate_row(None)])
    objective = DropoutObjective(
        problem, network, problem.n, rates, batch=task.batch, seed=0, concrete=False, fixed_scale=False
    )
    return objective, initial(problem, "network", 1, 0)


class Loop:
    """A training loop of plain torch: the rows of a minibatch, the loss and a penalty, backward, Adam; a call is one step."""

    def __init__(
        self, task: Task, net: nn.Module, penalty: Callable[[], Tensor] | None = None, groups: Any = None, *, fused: bool = True
    ) -> None:  # fmt: skip
        self.task, self.net, self.penalty = task, net, penalty
        self.adam = torch.optim.Adam(groups or net.parameters(), lr=LR, fused=fused or None)
        self.batches = Batches(len(task.x), task.batch, seed=0)
        self.done = 0

    def __call__(self) -> None:
        rows = self.batches.at(self.done)
        assert rows is not None
        self.adam.zero_grad()
        self.loss(rows).backward()
        self.adam.step()
        self.done += 1

    def loss(self, rows: Tensor) -> Tensor:
        loss = self.task.loss(self.net(self.task.x[rows]), self.task.y[rows])
        return loss if self.penalty is None else loss + self.penalty()


def own_copy(task: Task) -> nn.Module:
    return task.problem().layout.module.requires_grad_(True)


def plain_map(task: Task, prior_in: str) -> Loop:
    """MAP of the same network. The Normal prior is a term of the loss, or the weight decay of Adam (less work, same moves)."""
    net, decay = own_copy(task), 1 / (PRIOR**2 * len(task.x))
    parameters = list(net.parameters())
    if prior_in == "optimiser":
        return Loop(task, net, groups=[{"params": parameters, "weight_decay": decay}])
    return Loop(task, net, lambda: 0.5 * decay * sum((p.square().sum() for p in parameters), torch.zeros(())))


def plain_dropout(task: Task) -> Loop:
    """Dropout training as one writes it; the weight decay is the one that credibly derives: keep is 1 for the biases."""
    net, decay = own_copy(task).train(), 1 / (PRIOR**2 * len(task.x))
    weights = [p for p in net.parameters() if p.ndim > 1]
    biases = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": weights, "weight_decay": decay / (1 - RATE)},
        {"params": biases, "weight_decay": decay},
    ]
    return Loop(task, net, groups=groups)


def bayesian_torch(task: Task, peer: Any, kind: str, *, fused: bool = True) -> Loop:
    """The network as bayesian-torch converts it, with its own KL divergence.

    That one is a mean over the weights of a tensor where it should be a sum: the same work, another weight of the prior.
    """
    net, n = own_copy(task), len(task.x)
    settings = {
        "prior_mu": 0.0, "prior_sigma": PRIOR, "posterior_mu_init": 0.0, "posterior_rho_init": inverse_softplus(SCALE),
        "type": kind, "moped_enable": False, "moped_delta": 0.5,
    }  # fmt: skip
    peer.dnn_to_bnn(net, settings)
    return Loop(task, net, lambda: peer.get_kl_loss(net) / n, fused=fused)


# -- checks: the same work on both sides -------------------------------------------------------------------------------


def check_bayesian_torch(task: Task, peer: Any, kind: str) -> None:
    """On the same weights, rows and noise, bayesian-torch and ours have the same gradient of the misfit."""
    net = bayesian_torch(task, peer, kind).net
    layers: list[Any] = [layer for layer in net.modules() if hasattr(layer, "mu_weight")]
    rows = torch.arange(task.batch)
    torch.manual_seed(0)
    task.loss(net(task.x[rows]), task.y[rows]).backward()

    # Their layers fill buffers in this order: weights, biases, signs of the inputs, signs of the outputs.
    torch.manual_seed(0)
    drawn: list[Tensor] = []
    flat: list[Tensor] = []
    for layer in layers:
        weight, bias = torch.empty_like(layer.mu_weight).normal_(), torch.empty_like(layer.mu_bias).normal_()
        flat += [weight.flatten(), bias]
        if kind == "Flipout":
            signs = [torch.empty(task.batch, size).uniform_(-1, 1).sign() for size in reversed(weight.shape)]
            drawn += [weight, *signs, bias]
    noise = [torch.cat(flat), *drawn]
    objective, _ = free_energy(task, "flipout" if kind == "Flipout" else "weights", 1)
    phi = torch.cat([join(layers, "mu"), join(layers, "rho")]).unsqueeze(0)
    arguments = (task.problem().x, task.problem().y, rows, tuple(t[None, None] for t in noise), torch.zeros(1))
    ours = objective.evaluate(phi, (), *arguments)[1][0]
    theirs = torch.cat([join(layers, "mu", gradient=True), join(layers, "rho", gradient=True)])
    same(theirs, ours, f"bayesian-torch {kind}")


def join(layers: Sequence[Any], which: str, *, gradient: bool = False) -> Tensor:
    parts = [getattr(layer, f"{which}_{name}") for layer in layers for name in ("weight", "bias")]
    return torch.cat([(p.grad if gradient else p.detach()).flatten() for p in parts])


def check_dropout(task: Task) -> None:
    """On the same weights, rows and masks, the plain loop and ours have the same gradient, decay included."""
    plain = plain_dropout(task)
    uniforms: list[Tensor] = []

    def note(_layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        # 1 is dropped, 0 is kept; a value that was zero before says nothing, and nothing depends on it.
        uniforms.append(((args[0] != 0) & (out == 0)).float())

    handles = [m.register_forward_hook(note) for m in plain.net.modules() if isinstance(m, nn.Dropout)]
    rows = torch.arange(task.batch)
    plain.loss(rows).backward()
    for handle in handles:
        handle.remove()
    decays = {p: group["weight_decay"] for group in plain.adam.param_groups for p in group["params"]}
    theirs = torch.cat([(p.grad + decays[p] * p.detach()).flatten() for p in plain.net.parameters()])
    objective, theta = dropout_objective(task)
    noise = tuple(u.unsqueeze(0) for u in uniforms)
    ours = objective.evaluate(theta, objective.own, task.problem().x, task.problem().y, rows, noise, torch.zeros(0))[1]
    same(theirs, ours[0], "plain dropout")


def check_draws(task: Task, objective: FreeEnergy, phi: Tensor) -> None:
    """The gradient of K batched draws is the mean of K gradients of one."""
    batched, looped = Gradient(task, objective, phi), Gradient(task, objective, phi, loop=True)
    same(looped(), batched(), f"{DRAWS} draws in a loop")


def same(theirs: Tensor, ours: Tensor, what: str) -> None:
    apart = float((theirs - ours).norm() / ours.norm())
    if not apart < 1e-3:
        raise SystemExit(f"{what}: its gradient is {apart:.2g} of its length away from ours: nothing to compare")


# -- gradients: draws in a batch, and the variance of the estimators -----------------------------------------------------


class Gradient:
    """The gradient of the free energy from K draws on one minibatch, noise included: all at once, or one after the other."""

    def __init__(self, task: Task, objective: FreeEnergy, phi: Tensor, *, loop: bool = False) -> None:
        problem = task.problem()
        self.objective, self.phi, self.loop = objective, phi, loop
        self.data = (problem.x, problem.y, torch.arange(task.batch))
        self.figures = torch.ones(1)
        self.done = 0

    def __call__(self) -> Tensor:
        with torch.no_grad():
            noise = self.objective.noise(self.done)
            self.done += 1
            if not self.loop:
                return self.objective.evaluate(self.phi, (), *self.data, noise, self.figures)[1]
            samples = noise[0].shape[1]
            total = torch.zeros_like(self.phi)
            for k in range(samples):
                one = tuple(t[:, k : k + 1] for t in noise)
                total += self.objective.evaluate(self.phi, (), *self.data, one, self.figures)[1]
            return total / samples


def variance(gradient: Gradient, pairs: int) -> tuple[float, float]:
    """The variance of a gradient added up over its coordinates, and the standard error of that, from pairs of draws."""
    values = [float((gradient() - gradient()).double().square().sum()) / 2 for _ in range(pairs)]
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(pairs)


# -- passes of MC-Dropout ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """A network with dropout, inputs, and the ways to 100 passes at them. All give (passes, rows, outputs)."""

    name: str
    net: nn.Sequential  # in training mode, which only its dropout minds
    x: Tensor
    posterior: DropoutPosterior
    fixed: int  # layers before the first dropout

    @classmethod
    def of(cls, sizes: Sequence[int], rows: int, first: int, likelihood: cr.likelihoods.Likelihood) -> Passes:
        """Dropout before Linear layer number `first` and all later ones."""
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for place, (inward, outward) in enumerate(itertools.pairwise(sizes)):
            layers += [nn.Dropout(RATE)] if place >= first else []
            layers += [nn.Linear(inward, outward)] + ([nn.ReLU()] if place < len(sizes) - 2 else [])
        net = nn.Sequential(*layers)
        x = torch.randn(rows, sizes[0])
        y = torch.randint(sizes[-1], (rows,)) if sizes[-1] > 1 else torch.randn(rows, 1)
        posterior = cr.MCDropout.from_trained(net, (x, y), likelihood)
        return cls("-".join(map(str, sizes)), net.train().requires_grad_(False), x, posterior, 2 * first)

    def looped(self, x: Tensor, passes: int = PASSES) -> Tensor:
        return torch.stack([self.net(x) for _ in range(passes)])

    def repeated(self, x: Tensor, passes: int = PASSES) -> Tensor:
        out: Tensor = self.net(x.repeat(passes, 1))
        return out.reshape(passes, len(x), -1)

    def repeated_head(self, x: Tensor, passes: int = PASSES) -> Tensor:
        """What lies before the first dropout once, by hand."""
        out: Tensor = self.net[self.fixed :](self.net[: self.fixed](x).repeat(passes, 1))
        return out.reshape(passes, len(x), -1)

    def contestants(self, peers: Peers) -> dict[str, Callable[[], object]]:
        x, seeds = self.x, iter(range(2**31))
        kept = MaskDraws(self.posterior, x, PASSES, 0, per_row=False)

        def ours() -> Tensor:
            kept.masks = draw_masks(kept.sites, kept.shapes, PASSES, next(seeds), self.posterior.theta)
            return kept.outputs(x, 0, PASSES)

        calls: dict[str, Callable[[], object]] = {
            "ours": ours,
            "predict": lambda: self.posterior.predict(x, passes=PASSES, seed=next(seeds)).mean,
            "loop": lambda: self.looped(x),
            "repeat": lambda: self.repeated(x),
        }
        if self.fixed:
            calls["head"] = lambda: self.repeated_head(x)
        if peers.torch_uncertainty is not None:
            make = peers.torch_uncertainty.mc_dropout
            wrapped = make(self.net, PASSES, task="regression", probabilistic=False).eval()
            calls["peer"] = lambda: wrapped(x)
        return calls

    def check(self) -> str:
        """Mean and variance of many passes agree with the loop's, within what so many passes can tell; says how well."""
        x, passes = self.x[:32], 400
        theirs = self.looped(x, passes).double()
        source = MaskDraws(self.posterior, x, passes, 0, per_row=False)
        ours = source.outputs(x, 0, passes).reshape(theirs.shape).double()
        error = ((theirs.var(0) + ours.var(0)) / passes).sqrt()
        apart = float(((theirs.mean(0) - ours.mean(0)) / error).square().mean().sqrt())
        spread = float((ours.var(0) / theirs.var(0)).log().mean().exp())
        # Rows share their masks in ours, so their errors go together and the rms may be some way from 1.
        if apart > 3 or not 0.8 < spread < 1.25:
            raise SystemExit(f"{self.name}: our passes have another distribution than the loop's: nothing to compare")
        return f"Over {passes} passes the means are {apart:.2f} standard errors apart, our variance {spread:.3f} of the loop's."


# -- the cases ---------------------------------------------------------------------------------------------------------


def bbb(task: Task, peers: Peers, args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Steps of Bayes by Backprop, K draws in a batch, and the variance of the estimators."""
    is_small = task.x.shape[1] == 13
    estimators = [("weights", 1), ("weights", DRAWS), ("local", 1), ("flipout", 1)]
    contestants: dict[str, Callable[[], object]] = {
        "plain": plain_map(task, "loss"),
        "lean": plain_map(task, "optimiser"),
    }
    if peers.bayesian_torch is not None:
        for kind in ("Reparameterization", "Flipout"):
            check_bayesian_torch(task, peers.bayesian_torch, kind)
            contestants[kind] = bayesian_torch(task, peers.bayesian_torch, kind)
        contestants["unfused"] = bayesian_torch(task, peers.bayesian_torch, "Reparameterization", fused=False)
    for estimator, samples in estimators:
        step = Ours(task, *free_energy(task, estimator, samples), compiled=True)
        note_compile(record, task, f"Bayes by Backprop, {name_of(estimator, samples)}", step.compile())
        contestants[name_of(estimator, samples)] = step
    for estimator, samples in estimators:
        contestants[f"eager {name_of(estimator, samples)}"] = Ours(
            task, *free_energy(task, estimator, samples), compiled=False
        )
    if is_small:
        objective, phi = free_energy(task, "weights", DRAWS)
        check_draws(task, objective, phi)
        contestants["batched"] = Gradient(task, objective, phi)
        contestants["looped"] = Gradient(task, objective, phi, loop=True)
    times = interleaved(contestants, repeats=args.repeats, seconds=args.seconds, multiple=task.per_epoch)
    weights, local, flipout = (times[name_of(e, 1)] for e in ("weights", "local", "flipout"))

    print(f"## Bayes by Backprop, {task.name}, {len(task.x)} rows, minibatch {task.batch}: one step, one draw\n")
    goal = Goal(">=", 6 if is_small else 2.2)
    rows = []
    if peers.bayesian_torch is not None:
        rows = [
            Row("bayesian-torch / weights", weights, times["Reparameterization"], goal, inverse=True),
            Row("bayesian-torch, its Adam not fused / weights", weights, times["unfused"], goal, inverse=True),
            Row("bayesian-torch / local", local, times["Reparameterization"], inverse=True),
            Row("bayesian-torch flipout / flipout", flipout, times["Flipout"], inverse=True),
            Row("bayesian-torch / eager weights", times["eager weights"], times["Reparameterization"], inverse=True),
            Row("bayesian-torch flipout / eager flipout", times["eager flipout"], times["Flipout"], inverse=True),
        ]
    for key, name in (("plain", "plain MAP"), ("lean", "plain MAP (weight_decay)")):
        rows += [
            Row(f"weights / {name}", weights, times[key], Goal("<", 1.0) if is_small else Goal("<=", 2.2)),
            Row(f"local / {name}", local, times[key]),
            Row(f"flipout / {name}", flipout, times[key]),
            Row(f"eager weights / {name}", times["eager weights"], times[key]),
        ]
    show(rows, record, f"bbb {task.name}")

    if is_small:
        print(f"## Bayes by Backprop, {task.name}: {DRAWS} draws in a batch against {DRAWS} in a loop\n")
        third, many = Goal("<=", 0.333), name_of("weights", DRAWS)
        one = f"{DRAWS} steps of one draw"
        rows = [
            Row(f"step, compiled / {one}", times[many], scaled(weights, DRAWS), third),
            Row(f"step, eager / {one}", times[f"eager {many}"], scaled(times["eager weights"], DRAWS), third),
            Row(f"gradient, eager / {DRAWS} gradients of one draw", times["batched"], times["looped"], third),
        ]
        show(rows, record, f"draws {task.name}")
    estimators_table(task, estimators, times, args, record)


def estimators_table(
    task: Task, estimators: Sequence[tuple[str, int]], times: dict[str, Times], args: argparse.Namespace, record: dict[str, Any]
) -> None:  # fmt: skip
    """The variance of the gradient after a short fit, next to the time of a step."""
    fit = cr.BayesByBackprop(estimator="local", batch_size=task.batch, init_scale=SCALE, steps=args.fit, compile=False)
    phi = fit.fit(task.problem(), progress=False).phi
    lines, found = [], []
    for estimator, samples in estimators:
        name = name_of(estimator, samples)
        value, error = variance(Gradient(task, free_energy(task, estimator, samples)[0], phi), args.pairs)
        found.append((name, value, error, statistics.median(times[name]), statistics.median(times[f"eager {name}"])))
    _, first, _, step, eager = found[0]
    for name, value, error, own, slow in found:
        relative, costs = value / first, (own / step, slow / eager)
        lines.append(
            [
                name, f"{value:.3g} +- {error:.1g}", f"{relative:.3g}",
                f"{duration(own)} ({costs[0]:.2f})", f"{relative * costs[0]:.3g}",
                f"{duration(slow)} ({costs[1]:.2f})", f"{relative * costs[1]:.3g}",
            ]
        )  # fmt: skip
    print(
        f"## Estimators, {task.name}: variance of the gradient from the noise alone, on one minibatch of {task.batch}, "
        f"{args.fit} steps into a fit, {2 * args.pairs} draws\n\n"
        "Relative to one draw of the weights; variance x time is the time to the same accuracy, less is better.\n"
    )
    header = ["estimator", "variance", "relative", "compiled step", "variance x time", "eager step", "variance x time"]
    print(table(header, lines) + "\n", flush=True)
    record.setdefault("estimators", []).extend(
        {
            "network": task.name, "estimator": name, "variance": value, "standard_error": error, "step_s": own,
            "eager_step_s": slow, "relative_variance": value / first, "efficiency": value / first * own / step,
        }
        for name, value, error, own, slow in found
    )  # fmt: skip


def name_of(estimator: str, samples: int) -> str:
    return estimator if samples == 1 else f"{estimator}, {samples} draws"


def prediction(args: argparse.Namespace, peers: Peers, record: dict[str, Any]) -> None:
    """100 passes of MC-Dropout."""
    # Each network with its goals against the loop and against the repeated batch.
    networks: list[tuple[Passes, Goal | None, Goal | None]] = []
    if args.only != "wide":
        passes = Passes.of([13, 50, 1], 51, 0, cr.likelihoods.Gaussian(NOISE))
        networks.append((passes, Goal(">=", 20), Goal(">=", 6)))
    if args.only != "small":
        networks.append((Passes.of([784, 400, 400, 10], 256, 0, cr.likelihoods.Categorical()), Goal(">=", 1.8), None))
        networks.append((Passes.of([784, 400, 400, 400, 10], 256, 3, cr.likelihoods.Categorical()), None, None))
    for network, against_loop, against_repeat in networks:
        where = "before the last layer" if network.fixed else "before every layer"
        title = f"MC-Dropout, {network.name}, {len(network.x)} rows: {PASSES} passes, dropout {RATE} {where}"
        with torch.no_grad():
            print(f"## {title}\n\n{network.check()}\n")
            times = interleaved(network.contestants(peers), repeats=args.repeats, seconds=args.seconds)
        baselines = [("loop", "loop", against_loop), ("repeat", "repeated batch", against_repeat)]
        baselines += [("peer", "torch-uncertainty", against_repeat)] if "peer" in times else []
        baselines += [("head", "prefix once by hand, repeated batch", None)] if "head" in times else []
        rows = [
            Row(f"{name} / {kind}", times[ours], times[key], goal, inverse=True)
            for ours, kind in (("ours", "masks and passes"), ("predict", "predict(x).mean"))
            for key, name, goal in baselines
        ]
        show(rows, record, f"passes {network.name}")


def dropout(task: Task, args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Steps of MC-Dropout."""
    task = with_dropout(task)
    check_dropout(task)
    step = Ours(task, *dropout_objective(task), compiled=True)
    note_compile(record, task, "MC-Dropout", step.compile())
    contestants: dict[str, Callable[[], object]] = {
        "plain": plain_dropout(task),
        "compiled": step,
        "eager": Ours(task, *dropout_objective(task), compiled=False),
    }
    times = interleaved(contestants, repeats=args.repeats, seconds=args.seconds, multiple=task.per_epoch)
    print(f"## MC-Dropout, {task.name}, {len(task.x)} rows, minibatch {task.batch}: one training step\n")
    rows = [Row(f"{kind} / plain dropout", times[kind], times["plain"]) for kind in ("compiled", "eager")]
    show(rows, record, f"dropout {task.name}")


def note_compile(record: dict[str, Any], task: Task, what: str, seconds: float) -> None:
    record.setdefault("compile", []).append({"network": task.name, "what": what, "first_call_s": seconds})


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--case", choices=("bbb", "prediction", "dropout"), default=None, help="one of the cases")
    parser.add_argument("--only", choices=("small", "wide"), default=None, help="one of the two sizes of network")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of gradients behind a variance (default 100)")
    parser.add_argument("--fit", type=int, default=300, help="steps before the variance is looked at (default 300)")
    args = parser.parse_args()
    with report("variational", args) as record, cold_compiler() as loading:
        peers = find_peers()
        record["peers"] = {name: module is not None for name, module in vars(peers).items()}
        tasks = [make() for size, make in (("small", small), ("wide", wide)) if args.only in (None, size)]
        if args.case in (None, "bbb"):
            for task in tasks:
                bbb(task, peers, args, record)
        if args.case in (None, "prediction"):
            prediction(args, peers, record)
        if args.case in (None, "dropout"):
            for task in tasks:
                dropout(task, args, record)
        if "compile" in record:
            print(
                f"Time to compile, paid once, no cache on disk; loading the compiler took {duration(loading)} more:\n"
            )
            lines = [[c["network"], c["what"], duration(c["first_call_s"])] for c in record["compile"]]
            print(table(["network", "step", "first call"], lines))
            record["compiler_loading_s"] = loading


if __name__ == "__main__":
    main()
