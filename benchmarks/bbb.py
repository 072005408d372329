"""Training steps of Bayes by Backprop against bayesian-torch, torch-uncertainty, Pyro and a plain MAP step.

    python -m benchmarks.bbb                    # about four minutes, with the peers that are installed
    python -m benchmarks.bbb --only small       # one of: small, wide, cnn

Mean field, one draw of the weights per step, Normal prior, fused Adam for all. The rows come from the same `Batches`;
every peer must first give our gradient of the misfit on the same weights, rows and noise. `benchmarks.estimators`
compares our estimators with one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

import credibly as cr
from benchmarks import vi_peers
from benchmarks.case import Case, Setting
from benchmarks.ensemble import Task
from benchmarks.floors import Floor, gradient_flops
from benchmarks.suite import print_rows
from benchmarks.timing import Goal, Row, interleaved, options, report
from benchmarks.vi_steps import Ours, convolutional, plain_map, small, wide
from credibly.gaussians.families import MeanField
from credibly.inference.method import initial
from credibly.inference.training.reparameterisation import choose_estimator
from credibly.methods.bbb import FreeEnergy

SCALE = 0.03  # initial standard deviation of every weight
TASKS = {"small": small, "wide": wide, "cnn": convolutional}
GOALS = {"small": 6.0, "wide": 2.2, "cnn": 2.0}
LIMITS = {
    "small": "call overhead per step: gathering rows, sampling noise, the compiled function.",
    "wide": "half is matrix products; then random numbers (one thread), softplus, the KL term and Adam on 2 x 478,410 "
    "values.",
    "cnn": "the convolutions and their gradients (five sixths), for which all implementations call the same library.",
}


def free_energy(task: Task, estimator: str, samples: int) -> tuple[FreeEnergy, Tensor]:
    """Return the objective of Bayes by Backprop as built by its `fit`, and the initial phi."""
    problem = task.problem()
    method = cr.BayesByBackprop(estimator=estimator, samples=samples, batch_size=task.batch, init_scale=SCALE)
    noise = choose_estimator(estimator, problem, task.batch, mean_field=True)
    objective = FreeEnergy(problem, MeanField(), problem.n, method, noise, seed=0, per_epoch=task.per_epoch)
    return objective, MeanField().init(initial(problem, "network", 1, 0), SCALE)


def floor_of(size: str, task: Task) -> Floor:
    """Return the floor: FLOPs of one gradient; means, rhos and Adam's moments of both read and written once."""
    traffic = 12.0 * 4 * task.problem().dim
    if size != "cnn":
        sizes = [13, 50, 1] if size == "small" else [784, 400, 400, 10]
        return Floor(gradient_flops(sizes, task.batch), traffic)
    first, second, last = 2 * 24 * 24 * 8 * 25, 2 * 8 * 8 * 16 * 8 * 25, 2 * 256 * 10
    return Floor(task.batch * (2.0 * first + 3.0 * second + 3.0 * last), traffic)


def comparisons(size: str, setting: Setting) -> Iterator[Row]:
    """Compare one network with all installed peers."""
    task = TASKS[size]()
    ours = Ours(task, *free_energy(task, "weights", 1), compiled=not setting.quick)
    if not setting.quick:
        ours.compile()
    implementations: dict[str, Callable[[], object]] = {"ours": ours, "plain MAP step": plain_map(task, "loss")}
    for name, make in vi_peers.MAKERS.items():
        peer = make(task, SCALE)
        if peer is None:
            setting.note(f"{name} is not installed")
            continue
        vi_peers.check(task, peer, free_energy(task, "weights", 1)[0], name)
        implementations[name] = peer.loop
    times = interleaved(implementations, repeats=setting.repeats, seconds=setting.seconds, multiple=task.per_epoch)
    what, floor = f"{task.name}, minibatch {task.batch}: one step", floor_of(size, task)
    for name in times:
        if name != "ours":
            goal = Goal(">=", GOALS[size]) if name in vi_peers.MAKERS else None
            yield Row(what, times["ours"], times[name], goal, inverse=True, peer=name, floor=floor)


def cases() -> list[Case]:
    titles = {
        "small": "13-50-1, minibatch 128",
        "wide": "784-400-400-10, minibatch 128",
        "cnn": "a small CNN, minibatch 64",
    }
    return [
        Case(
            f"bbb-{size}",
            f"A step of Bayes by Backprop, {titles[size]}, one draw of the weights.",
            LIMITS[size],
            partial(comparisons, size),
            0.5,
            goals=f"{GOALS[size]:g}",
            peers=tuple(vi_peers.MAKERS),
        )
        for size in TASKS
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=tuple(TASKS), default=None, help="one of the networks")
    args = parser.parse_args()
    with report("bbb", args) as record:
        setting = Setting(args.repeats, args.seconds, args.threads)
        found = [row for size in TASKS if args.only in (None, size) for row in comparisons(size, setting)]
        print_rows(found, record)


if __name__ == "__main__":
    main()
