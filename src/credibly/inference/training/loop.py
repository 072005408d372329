"""The training loop: M parameter vectors as one computation.

It minimises -(1/N) log p_T(w | D), so that a learning rate means the same for any N. The M members share the step and
nothing else: each has its own minibatches, clipping and early stopping.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from credibly.core.interrupts import never, polite_interrupt
from credibly.core.progress import Progress
from credibly.core.threads import threads_for_native
from credibly.distributed.heartbeat import Heartbeat
from credibly.distributed.world import Mesh, World
from credibly.inference.training.batches import Batches
from credibly.inference.training.cpp_steps import cpp_step
from credibly.inference.training.data import Data
from credibly.inference.training.gauss_newton import train_gauss_newton
from credibly.inference.training.in_turn import joined_history, member_data, member_objective
from credibly.inference.training.module_step import ModuleStep, needs_module, takes_module_steps
from credibly.inference.training.objectives import NegativeLogDensity, Objective
from credibly.inference.training.run import Stage, TrainingRun
from credibly.inference.training.settings import GAUSS_NEWTON, Training
from credibly.inference.training.sharded_steps import ShardedStep
from credibly.inference.training.steps import Step
from credibly.inference.training.stream_batches import StreamBatches, StreamStep
from credibly.inference.training.stream_modules import StreamModules
from credibly.inference.training.trained import Trained
from credibly.problem import Problem


def make_step(
    problem: Problem,
    objective: Objective,
    options: Training,
    steps: int,
    theta: Tensor,
    batch: int,
    mesh: Mesh | None,
    batches: Batches | None = None,
) -> Step:
    """Return the step of one process, or of the processes of a mesh that share the rows of its batches."""
    if isinstance(batches, StreamBatches):
        if takes_module_steps(problem, objective, options) and isinstance(objective, NegativeLogDensity):
            return StreamModules(batches, objective, options, steps, theta)
        return StreamStep(batches, objective, options, steps, theta)
    sharded = mesh is not None and mesh.shape[1] > 1
    by_module = takes_module_steps(problem, objective, options, sharded=sharded)
    if mesh is not None and sharded:
        return ShardedStep(problem, objective, options, steps, theta, batch, mesh)
    cpp = None if needs_module(options) else cpp_step(problem, objective, options, steps, theta, batch)
    if cpp is None and by_module and len(theta) == 1 and isinstance(objective, NegativeLogDensity):
        return ModuleStep(problem, objective, options, steps, theta)
    return cpp or Step(problem, objective, options, steps, theta)


def train(
    problem: Problem,
    objective: Objective,
    theta: Tensor,
    options: Training,
    data: Data,
    *,
    seed: int,
    title: str,
    shared_batches: bool = False,
    progress: bool | None = None,
    first: int = 0,
    mesh: Mesh | None = None,
    peers: World | None = None,
    own_step: Callable[[Batches, int], Step] | None = None,
) -> Trained:
    """Minimise an objective from theta (M, P), which is changed in place.

    Args:
        problem, objective: the data, and the loss of M members on them.
        theta: the starting points.
        options, data: how to train, and on which rows.
        seed: seed of the shuffles.
        title: title of the progress bar.
        shared_batches: whether all members see the same minibatches.
        progress: whether to show a progress bar; None shows it on a terminal and in a notebook.
        first: index of the first member, if other processes train other members.
        mesh: processes that share the rows of each minibatch. The result is bit-for-bit identical in all of them, and
            that of one process up to rounding (float64: 1e-9 of the weights after 50 steps of Adam on small networks).
        peers: processes that train the other members. If members stop early, their processes idle until the last one
            is done, so that all histories are those of a single process.
        own_step: function from batches and the number of steps to the step, for methods with a custom step.
    """
    if options.optimiser == GAUSS_NEWTON:
        return train_gauss_newton(
            problem,
            objective,
            theta,
            options,
            data,
            title=title,
            progress=progress,
            first=first,
            mesh=mesh,
            peers=peers,
        )
    together = problem.stream is not None or own_step is not None or len(theta) == 1
    sharded = shared_batches or (peers is not None and peers.size > 1) or (mesh is not None and mesh.shape[1] > 1)
    if not together and takes_module_steps(problem, objective, options, sharded=sharded):
        return _train_in_turn(problem, objective, theta, options, data, seed, title, progress, first)
    steps, batch, per_epoch = options.plan(data.count, problem.stream)
    batches: Batches
    if problem.stream is None:
        members = 0 if shared_batches else len(theta)
        batches = Batches(
            data.rows, batch, seed=seed, members=members, resampled=data.resampled, first=first, device=problem.device
        )
    else:
        batches = StreamBatches(problem, seed=seed)
    if own_step is not None:
        step = own_step(batches, steps)
    else:
        step = make_step(problem, objective, options, steps, theta, batch, mesh, batches)
    run = TrainingRun(theta, steps, options, step, objective, data, first, batch)
    stage = Stage.begin(run, batches)
    if stage is not None and (over := stage.result()) is not None:
        return over
    heartbeat = Heartbeat(peers or World())
    trained = run.finish(_run_steps(run, batches, problem, stage, heartbeat, per_epoch, title, progress))
    return trained if stage is None else stage.finish(trained)


def _train_in_turn(
    problem: Problem,
    objective: Objective,
    theta: Tensor,
    options: Training,
    data: Data,
    seed: int,
    title: str,
    progress: bool | None,
    first: int,
) -> Trained:
    """Train large networks one after another, so that only one optimiser state is in memory."""
    histories = []
    for m in range(len(theta)):
        own, rows = member_objective(objective, m), member_data(data, m)
        name = f"{title}, member {first + m}"
        one = train(
            problem, own, theta[m : m + 1], options, rows, seed=seed, title=name, progress=progress, first=first + m
        )
        theta[m : m + 1] = one.theta
        histories.append(one.history)
    return Trained(theta, joined_history(histories))


def _run_steps(
    run: TrainingRun,
    batches: Batches,
    problem: Problem,
    stage: Stage | None,
    heartbeat: Heartbeat,
    per_epoch: int,
    title: str,
    progress: bool | None,
) -> int:
    """Take the steps of a run, check and score the members at intervals, and return the number of steps taken."""
    steps, options, held_out = run.steps, run.options, run.data.stops
    check_every = max(1, min(steps // 20 or 1, 500))
    evaluate_every = per_epoch * max(1, math.ceil(steps / per_epoch / 200))
    last: int | None = None  # the step at which the last member of any process has stopped, once that is known
    done = 0 if stage is None else stage.restore()
    interrupts = nullcontext(never) if stage is None else polite_interrupt()
    threads = threads_for_native(run.step.backend_facts["name"] == "cpp")
    with interrupts as asked, Progress(title, steps, progress, first=done) as bar, threads:
        while done < steps:
            limit = min(steps, (done // check_every + 1) * check_every)
            if held_out:
                limit = min(limit, (done // evaluate_every + 1) * evaluate_every)
            try:
                done = run.step.advance_to(run.theta, batches, done, limit, run.active)
            except torch.OutOfMemoryError as error:
                raise run.out_of_memory(error, problem, done, title) from None
            heartbeat.tick()
            if done % check_every == 0 or done == steps:
                bar.update(done, final=done == steps, **run.check(done, title))
                if options.callback is not None and options.callback(run.state(problem, done, title)) is True:
                    break
            if held_out and (done % evaluate_every == 0 or done == steps):
                stopped = run.evaluate(done) or done == steps
                if stopped and last is None:
                    heartbeat.wait()
                    last = max(heartbeat.world.gather(done))
                if done == last:
                    break
            if stage is not None and done < steps:
                stage.keep(done, asked())
    heartbeat.wait()
    return done
