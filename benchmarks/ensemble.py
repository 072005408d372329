"""Training steps of deep ensembles against plain PyTorch.

    python -m benchmarks.ensemble                 # about three minutes
    python -m benchmarks.ensemble --json out.json

The baseline is the usual training loop for one member: a new permutation every epoch, a gather of the minibatch, the
loss, backward, fused Adam. Ours is what `credibly.inference.training.loop.train` runs, with its `Batches` and step:
every member has its own permutation and minibatch. Both make the same updates, which is checked first. What `train`
does once in 150 to 500 steps (checking the loss) is excluded on both sides.

torch-uncertainty's ensemble is its wrapper around 20 networks that share each minibatch, under one fused Adam.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credibly as cr
from benchmarks import peers
from benchmarks.case import Case, Setting
from benchmarks.floors import Floor, gradient_flops
from benchmarks.timing import Goal, Row, cold_compiler, duration, interleaved, options, report, scaled, show, table
from credibly.inference.method import initial
from credibly.inference.training.batches import Batches
from credibly.inference.training.cpp_steps import CppStep
from credibly.inference.training.loop import make_step
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.settings import Training

LR = 1e-3
NOISE = 0.5  # standard deviation of the Gaussian likelihood
PRIOR = 1.0  # standard deviation of every weight
CHECK_EVERY = 150  # steps between two checks of the loss in a run of the default length
TABLE_STEPS = 100_000  # nominal length of the run; only the table of learning rates has this length


@dataclass(frozen=True)
class Task:
    """A network, its data, and two equivalent losses: a likelihood for ours, a function for the plain loop."""

    name: str
    net: nn.Module
    x: Tensor
    y: Tensor
    batch: int
    likelihood: cr.likelihoods.Likelihood
    loss: Callable[[Tensor, Tensor], Tensor]

    @property
    def per_epoch(self) -> int:
        return len(self.x) // self.batch

    def problem(self) -> cr.Problem:
        return cr.Problem(self.net, (self.x, self.y), self.likelihood, cr.priors.Normal(PRIOR))


def small() -> Task:
    torch.manual_seed(0)
    x = torch.randn(455, 13)
    y = torch.sin(x[:, :1]) + NOISE * torch.randn(455, 1)
    net = nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 1))
    likelihood = cr.likelihoods.Gaussian(NOISE)
    return Task("13-50-1", net, x, y, 32, likelihood, lambda f, y: 0.5 / NOISE**2 * (f - y).square().mean())


def wide() -> Task:
    torch.manual_seed(0)
    x = torch.randn(2000, 784)
    y = torch.randint(10, (2000,))
    net = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    return Task("784-400-400-10", net, x, y, 128, cr.likelihoods.Categorical(), F.cross_entropy)


class Plain:
    """One member in plain PyTorch.

    With prior_in="loss" the Normal prior is a term of the loss, as in ours, so the loss is the negative log density.
    With prior_in="optimiser" it is Adam's weight_decay, which has the same gradient and costs less, but the loss then
    omits it.
    """

    def __init__(self, task: Task, prior_in: str) -> None:
        self.task = task
        self.net = task.problem().layout.module.requires_grad_(True)  # a copy of the task's network
        self.parameters = list(self.net.parameters())
        self.decay = 1 / (PRIOR**2 * len(task.x))
        self.in_loss = prior_in == "loss"
        self.adam = torch.optim.Adam(
            self.parameters, lr=LR, fused=True, weight_decay=0.0 if self.in_loss else self.decay
        )
        self.generator = torch.Generator().manual_seed(0)
        self.order = torch.empty(0)
        self.done = 0

    def __call__(self) -> None:
        batch = self.done % self.task.per_epoch
        if batch == 0:
            self.order = torch.randperm(len(self.task.x), generator=self.generator)
        self.done += 1
        self.step(self.order[batch * self.task.batch : (batch + 1) * self.task.batch])

    def step(self, rows: Tensor) -> None:
        x, y = self.task.x[rows], self.task.y[rows]
        loss = self.task.loss(self.net(x), y)
        if self.in_loss:
            loss = loss + 0.5 * self.decay * sum(p.square().sum() for p in self.parameters)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()


class Ours:
    """M members in the objects of the real training loop, with up to `CHECK_EVERY` steps between loss checks."""

    def __init__(self, task: Task, members: int, *, compiled: bool) -> None:
        problem = task.problem()
        settings = Training(batch_size=task.batch, lr=LR, schedule="constant", compile=compiled, steps=TABLE_STEPS)
        self.theta = initial(problem, "network" if members == 1 else "fresh", members, 0)
        self.batches = Batches(problem.n, task.batch, seed=0, members=members)
        objective = NegativeLogDensity(problem, problem.n)
        self.step = make_step(problem, objective, settings, TABLE_STEPS, self.theta, task.batch, None)
        self.active = torch.ones(members)
        self.done = 0

    def __call__(self) -> None:
        self._advance(1)

    def time_calls(self, steps: int) -> float:
        """Return the seconds per step."""
        gc.collect()
        gc.disable()
        try:
            start = time.perf_counter()
            left = steps
            while left:
                left -= self._advance(min(left, CHECK_EVERY))
            return (time.perf_counter() - start) / steps
        finally:
            gc.enable()

    def _advance(self, most: int) -> int:
        if self.done + most > TABLE_STEPS:
            self.done = 0  # restart the table of learning rates
        before = self.done
        self.done = self.step.advance_to(self.theta, self.batches, before, before + most, self.active)
        return self.done - before

    def compile(self) -> float:
        """Return the seconds of the first call. Exits if the step fell back to eager, which would be mislabelled."""
        start = time.perf_counter()
        self()
        seconds = time.perf_counter() - start
        run = self.step.run
        if not isinstance(self.step, CppStep) and getattr(run, "active", run) is getattr(run, "plain", run):
            raise SystemExit("the step was not compiled (is there a C++ compiler?): nothing to compare")
        return seconds


def check_same_updates(task: Task) -> None:
    """Check that one member of ours and both plain loops reach the same weights after an epoch of equal minibatches."""
    ours = Ours(task, 1, compiled=False)
    plain = [Plain(task, "loss"), Plain(task, "optimiser")]
    for _ in range(task.per_epoch):
        rows = ours.batches.at(ours.done)[0]
        ours()
        for member in plain:
            member.step(rows)
    for member in plain:
        weights = torch.cat([p.detach().flatten() for p in member.parameters])
        # Adam's first updates are lr * sign(gradient): a gradient that is zero up to rounding may go either way.
        difference = (weights - ours.theta[0]).abs().quantile(0.99)
        assert float(difference) < 0.01 * LR, f"{task.name}: the plain loop makes other updates than credibly"


class Wrapped:
    """20 members in torch-uncertainty; a call is one step of all of them on one minibatch."""

    def __init__(self, task: Task, members: int, library: object) -> None:
        self.task, self.members = task, members
        one = task.problem().layout.module.requires_grad_(True)
        nets = [copy.deepcopy(one) for _ in range(members)]
        self.net = library.deep_ensembles(nets, task="regression", probabilistic=False)  # type: ignore[attr-defined]
        self.parameters = list(self.net.parameters())
        self.decay = 1 / (PRIOR**2 * len(task.x))
        self.adam = torch.optim.Adam(self.parameters, lr=LR, fused=True)
        self.batches = Batches(len(task.x), task.batch, seed=0)
        self.done = 0

    def __call__(self) -> None:
        self.adam.zero_grad()
        self.loss(self.batches.at(self.done)).backward()
        self.adam.step()
        self.done += 1

    def loss(self, rows: Tensor) -> Tensor:
        """Return the sum of all members' losses, each a mean over rows plus the prior."""
        y = self.task.y[rows].repeat(self.members, 1)
        fit = self.members * self.task.loss(self.net(self.task.x[rows]), y)
        return fit + 0.5 * self.decay * sum((p.square().sum() for p in self.parameters), torch.zeros(()))


def check_wrapped(task: Task, wrapped: Wrapped) -> None:
    """Exit unless every wrapped member has our gradient on the same weights and rows."""
    rows = torch.arange(task.batch)
    wrapped.loss(rows).backward()
    found = torch.cat([p.grad.flatten() for p in wrapped.parameters]).reshape(wrapped.members, -1)
    wrapped.adam.zero_grad()
    problem = task.problem()
    theta = problem.layout.read(problem.layout.module).unsqueeze(0)
    ours = -problem.minibatch(theta, rows).gradient / problem.n
    error = float((found - ours).norm(dim=1).max() / ours.norm())
    if not error < 1e-3:
        raise SystemExit(f"torch-uncertainty has another gradient (relative error {error:.2g}): nothing to compare")


def comparisons(setting: Setting, members: int = 20) -> Iterator[Row]:
    """Run the suite's case: 20 members of the small network."""
    task = small()
    check_same_updates(task)
    ours = Ours(task, members, compiled=True)
    ours.compile()
    implementations: dict[str, Callable[[], object]] = {
        "ours": ours,
        "plain": Plain(task, "loss"),
        "lean": Plain(task, "optimiser"),
    }
    found = peers.single_files("torch_uncertainty", ["methods/deep_ensembles.py"])
    if found is None:
        setting.note("torch-uncertainty is not installed")
    else:
        implementations["wrapped"] = Wrapped(task, members, found[0])
        check_wrapped(task, implementations["wrapped"])  # type: ignore[arg-type]
    times = interleaved(implementations, repeats=setting.repeats, seconds=setting.seconds, multiple=task.per_epoch)
    what = f"{task.name}, minibatch {task.batch}, {members} members: one step of all"
    dim = task.problem().dim
    # Weights, moments: 3 read, 3 written.
    floor = Floor(members * gradient_flops([13, 50, 1], task.batch), members * dim * 4 * 7)
    for key, name, factor in (
        ("plain", "PyTorch loop", members),
        ("lean", "PyTorch loop, prior by weight_decay", members),
        ("wrapped", "torch-uncertainty", 1),
    ):
        if key in times:
            goal = None if key == "lean" else Goal(">=", 40)
            yield Row(what, times["ours"], scaled(times[key], factor), goal, inverse=True, peer=name, floor=floor)


def cases() -> list[Case]:
    return [
        Case(
            "ensemble-20",
            "A training step of 20 members of 13-50-1, minibatch 32, Adam, with shuffling.",
            "sums over the 32 rows of a minibatch for every weight, and shuffling; matrix products are a small part.",
            comparisons,
            0.4,
            goals="40",
            peers=("PyTorch loop", "torch-uncertainty"),
        )
    ]


def count(members: int) -> str:
    return "1 member" if members == 1 else f"{members} members"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=("small", "wide"), default=None, help="one of the networks")
    args = parser.parse_args()
    with report("ensemble", args) as record, cold_compiler() as loading:
        compiles: list[tuple[str, int, float]] = []

        def time_task(task: Task, compiled: tuple[int, ...], eager: tuple[int, ...]) -> dict[str, list[float]]:
            check_same_updates(task)
            implementations: dict[str, Callable[[], object]] = {
                "plain": Plain(task, "loss"),
                "lean": Plain(task, "optimiser"),
            }
            for members in compiled:
                ours = Ours(task, members, compiled=True)
                compiles.append((task.name, members, ours.compile()))
                implementations[f"compiled {members}"] = ours
            implementations |= {f"eager {members}": Ours(task, members, compiled=False) for members in eager}
            return interleaved(implementations, repeats=args.repeats, seconds=args.seconds, multiple=task.per_epoch)

        if args.only != "wide":
            task = small()
            times = time_task(task, compiled=(1, 20, 100), eager=(1, 20))
            print(f"## {task.name}, {len(task.x)} rows, minibatch {task.batch}: one step\n")
            rows = []
            for key, name in (("plain", "plain"), ("lean", "plain (weight_decay)")):
                plain = times[key]
                rows += [
                    Row(f"1 member / 1 {name}", times["compiled 1"], plain),
                    Row(f"20 members / 1 {name}", times["compiled 20"], plain, Goal("<", 1.0)),
                    Row(f"100 members / 1 {name}", times["compiled 100"], plain, Goal("<=", 1.2)),
                ]
                loop = scaled(plain, 20)
                rows.append(
                    Row(f"loop over 20 {name} / 20 members", times["compiled 20"], loop, Goal(">=", 40), inverse=True)
                )
            rows += [Row(f"eager: {count(m)} / 1 plain", times[f"eager {m}"], times["plain"]) for m in (1, 20)]
            show(rows, record)

        if args.only != "small":
            task = wide()
            times = time_task(task, compiled=(1, 8), eager=(1, 8))
            print(f"## {task.name}, {len(task.x)} rows, minibatch {task.batch}: one step of one member\n")
            rows = []
            for key, name in (("plain", "plain"), ("lean", "plain (weight_decay)")):
                for m in (1, 8):
                    each = scaled(times[f"compiled {m}"], 1 / m)
                    rows.append(Row(f"compiled: {count(m)}, each / 1 {name}", each, times[key], Goal("<=", 1.0)))
            for m in (1, 8):
                each = scaled(times[f"eager {m}"], 1 / m)
                rows.append(Row(f"eager: {count(m)}, each / 1 plain", each, times["plain"]))
            show(rows, record)

        print(f"Time to compile, paid once, cold cache; loading the compiler took {duration(loading)} more:\n")
        print(table(["network", "members", "first call"], [[n, str(m), duration(s)] for n, m, s in compiles]))
        record["compiler_loading_s"] = loading
        record["compile"] = [{"network": n, "members": m, "first_call_s": s} for n, m, s in compiles]


if __name__ == "__main__":
    main()
