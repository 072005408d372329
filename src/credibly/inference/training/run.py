"""One run of the training loop: its state between two steps, and its stage in the journal of a fit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from credibly.errors import Interrupted, StoreError, TrainingError
from credibly.inference.footprint import smaller_run
from credibly.inference.module_leaves import LARGE
from credibly.inference.training.batches import Batches
from credibly.inference.training.callbacks import TrainingState
from credibly.inference.training.data import Data
from credibly.inference.training.journal import Journal, Saved, current_journal
from credibly.inference.training.objectives import Objective
from credibly.inference.training.settings import Training
from credibly.inference.training.steps import Step
from credibly.inference.training.stream_batches import StreamBatches
from credibly.inference.training.trained import Trained
from credibly.problem import Problem


class TrainingRun:
    """The state around the steps: the last finite parameters, the best on held-out rows, and the history."""

    def __init__(
        self,
        theta: Tensor,
        steps: int,
        options: Training,
        step: Step,
        objective: Objective,
        data: Data,
        first: int = 0,
        batch: int = 1,
    ) -> None:
        self.batch, self.steps = batch, steps
        self.theta, self.step, self.options, self.objective, self.data = theta, step, options, objective, data
        self.first = first
        self.active = torch.ones(len(theta), dtype=theta.dtype, device=theta.device)
        self.good: Tensor | None = None
        self.best = theta.clone() if data.stops else theta
        self.best_score = torch.full((len(theta),), -math.inf, dtype=theta.dtype, device=theta.device)
        self.waited = torch.zeros(len(theta), device=theta.device)
        self.validation: dict[str, float] = {}
        self.history: dict[str, Any] = {"step": [], "loss": [], "parts": {name: [] for name in objective.part_names}}
        self.history |= {"validation_step": [], "validation": [], "steps_planned": steps}

    def check(self, done: int, title: str) -> dict[str, float]:
        """Record the loss and return what to show. Raise, with step, member and a hint, if it is not finite."""
        first_bad = float(self.step.first_bad.min())
        lost = ~torch.isfinite(self.theta).all(-1)
        if math.isfinite(first_bad) or bool(lost.any()):
            by_loss = math.isfinite(first_bad)
            member = self.first + (int(self.step.first_bad.argmin()) if by_loss else int(lost.int().argmax()))
            at = int(first_bad) + 1 if by_loss else done
            raise TrainingError(
                f"{title}: the loss of member {member} was not finite at step {at}. Try a smaller learning rate "
                f"(lr={self._rate()} now), clip_norm=1.0, or standardised inputs and targets{self._precision()}",
                step=at,
                member=member,
                posterior=self.good,
            )
        if self.theta.numel() < LARGE:
            self.good = self.theta.clone()
        elif self.theta.device.type != "cpu":
            # For a large network the copy is on the CPU, to leave the memory of its device free.
            self.good = self.theta.cpu()
        parts = self.step.parts.double()
        self.history["step"].append(done)
        self.history["loss"].append(parts.sum(-1).tolist())
        for name, values in zip(self.objective.part_names, parts.unbind(-1)):
            self.history["parts"][name].append(values.tolist())
        means = {name: float(v) for name, v in zip(self.objective.part_names, parts.mean(0))}
        return {"loss": float(parts.sum(-1).mean()), **(means if len(means) > 1 else {}), **self.validation}

    def out_of_memory(self, error: Exception, problem: Problem, done: int, title: str) -> TrainingError:
        """Return the error with what would fit, and with the last parameters that were checked."""
        ways = smaller_run(problem, len(self.theta), self.batch, buffers=4)
        message = f"{title}: out of memory at step {done + 1} ({str(error).splitlines()[0][:120]}). Use {ways}"
        return TrainingError(message, step=done + 1, member=self.first, posterior=self.good)

    def _precision(self) -> str:
        if self.theta.dtype == torch.float16:
            found = "The weights are float16, whose range is too small for squared gradients and for Adam's eps"
            return f'. {found}: pass dtype="bfloat16" or "float32" to Problem, or precision="bf16" with float32 weights'
        problem = getattr(self.objective, "problem", None)
        low = problem.forward.precision if isinstance(problem, Problem) else None
        return "" if low is None else f". The network runs in {low}: precision=None in Problem has the range of float32"

    def _rate(self) -> str:
        lr = self.options.lr
        return f"{lr:g}" if isinstance(lr, (int, float)) else str(dict(lr))

    def state(self, problem: Problem, done: int, title: str) -> TrainingState:
        """Return the state that a callback receives."""
        loss = tuple(float(value) for value in self.step.parts.double().sum(-1))
        return TrainingState(done, self.steps, loss, self.first, title, problem, self.theta)

    def evaluate(self, done: int) -> bool:
        """Score the members on the held-out rows, keep their best, and return whether all of them have stopped."""
        with torch.no_grad():
            score = self.data.score(self.objective, self.theta)
            better = (score > self.best_score) & (self.active > 0)
            self.best = torch.where(better.unsqueeze(1), self.theta, self.best)
            self.best_score = torch.where(better, score, self.best_score)
            self.waited = torch.where(better, 0.0, self.waited + 1)
            self.active.mul_((self.waited < self.options.patience).to(self.active.dtype))
        self.history["validation_step"].append(done)
        self.history["validation"].append([float(v) for v in score])
        self.validation = {"validation": float(self.best_score.mean())}
        return not bool((self.active > 0).any())

    def finish(self, done: int) -> Trained:
        """Return the best parameters on held-out rows if there are any, otherwise the last."""
        self.history["steps"] = done
        # Gradients of all members, in units of full gradients.
        self.history["gradients"] = round(done * len(self.theta) * self.batch / self.data.count, 6)
        return Trained(self.best, self.history)


class Stage:
    """One call of `train` in the journal of a fit: its state between two steps, and its result."""

    def __init__(self, journal: Journal, run: TrainingRun, batches: Batches) -> None:
        self.journal, self.run, self.batches, self.number = journal, run, batches, journal.begin()

    @classmethod
    def begin(cls, run: TrainingRun, batches: Batches) -> Stage | None:
        """Return the new stage, if the fit keeps a journal."""
        journal = current_journal()
        return None if journal is None else cls(journal, run, batches)

    def result(self) -> Trained | None:
        """Return the result of the stage if it had finished before the fit was stopped."""
        saved = self.journal.result(self.number)
        if saved is None:
            return None
        _copy(saved.tensors, {"theta": self.run.theta})
        best = saved.tensors.get("best")
        return Trained(self.run.theta if best is None else best.to(self.run.theta), saved.facts["history"])

    def restore(self) -> int:
        """Restore the state in which the stage was stopped, and return the number of steps done."""
        saved = self.journal.state(self.number)
        if saved is None:
            return 0
        run, facts = self.run, saved.facts
        self.journal.check_backend(facts["backend"], run.step.backend_facts)
        _copy(saved.tensors, self._tensors())
        run.history, run.validation, done = facts["history"], facts["validation"], int(facts["done"])
        run.good = run.theta.clone() if run.theta.numel() < LARGE else None
        if isinstance(self.batches, StreamBatches):
            self.batches.seek(done)
        return done

    def keep(self, done: int, stop: bool) -> None:
        """Write a checkpoint if one is due, and always before a stop."""
        if not stop and not self.journal.due():
            return
        run = self.run
        facts = {"done": done, "history": run.history, "validation": run.validation, "backend": run.step.backend_facts}
        self.journal.checkpoint(self.number, Saved(self._tensors(), facts))
        if stop:
            raise Interrupted(f"stopped after {done} of {run.steps} steps; {self.journal.how_to_resume()}")

    def finish(self, done: Trained) -> Trained:
        """Keep the result for a fit that is stopped in a later stage."""
        tensors = {"theta": self.run.theta}
        if done.theta is not self.run.theta:
            tensors["best"] = done.theta
        self.journal.finish(self.number, Saved(tensors, {"history": done.history}))
        return done

    def _tensors(self) -> dict[str, Tensor]:
        run = self.run
        own = {"theta": run.theta, "active": run.active, "best_score": run.best_score, "waited": run.waited}
        if run.data.stops:
            own["best"] = run.best
        return own | {f"step.{name}": tensor for name, tensor in run.step.tensors.items()}


def _copy(stored: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Copy stored values into tensors, in place. Raise if they belong to another fit."""
    for name, tensor in tensors.items():
        if name not in stored or stored[name].shape != tensor.shape or stored[name].dtype != tensor.dtype:
            raise StoreError(f"the checkpoint has no {name} of shape {tuple(tensor.shape)}: it belongs to another fit")
        with torch.no_grad():
            tensor.copy_(stored[name])
