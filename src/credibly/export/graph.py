"""The Bayesian model average as one module that `torch.export` can trace, with the draws as its buffers."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from credibly.errors import InputError
from credibly.export.networks import StackedNetwork
from credibly.export.summary import summarise
from credibly.likelihoods import Likelihood

Program = torch.export.ExportedProgram


class DrawsGraph(nn.Module):
    """Outputs (S, rows, ..., K) of a network under all of its draws.

    The network is traced once for one draw. Plain stacks of layers are then evaluated for all draws at once, and other
    networks in a loop inside the graph (`scan`), so the graph does not grow with the number of draws.
    """

    def __init__(self, network: StackedNetwork, example: Sequence[Tensor]) -> None:
        super().__init__()
        self.count, self.batched, self.likelihood = network.draws, network.batched, network.likelihood
        self.varied, self.extra_names = list(network.varied), list(network.extra)
        for number, value in enumerate(network.varied.values()):
            self.register_buffer(f"draws{number}", value)
        for number, value in enumerate(network.extra.values()):
            self.register_buffer(f"extra{number}", value)
        first = [value[0].clone() for value in network.varied.values()]
        rows = {0: torch.export.Dim.DYNAMIC}
        shapes = ([None] * len(first), [rows] * len(example))
        traced = trace(network.body, (first, list(example)), shapes)
        with quiet():
            self.body = traced.run_decompositions().module(check_guards=False)
        # Constants that the trace found are plain attributes, which a loop in a graph cannot use.
        for part in self.body.modules():
            for name in [name for name, value in vars(part).items() if isinstance(value, Tensor)]:
                value = vars(part).pop(name)
                part.register_buffer(name, value)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """Return the outputs under all draws."""
        varied = [getattr(self, f"draws{number}") for number in range(len(self.varied))]
        if self.batched:
            found: Tensor = vmap(self.body, in_dims=(0, None))(varied, inputs)
            return found
        from torch._higher_order_ops.scan import scan

        def step(carried: Tensor, one: list[Tensor]) -> tuple[Tensor, Tensor]:
            return carried + 0, self.body(one, inputs)

        outputs: Tensor = scan(step, torch.zeros(1), varied)[1]
        return outputs

    def extra(self) -> dict[str, Tensor]:
        """Return the likelihood's own parameters in all draws."""
        return {name: getattr(self, f"extra{number}") for number, name in enumerate(self.extra_names)}


class PredictiveGraph(nn.Module):
    """The outputs of `credibly.export.summary` at inputs."""

    def __init__(self, draws: DrawsGraph, likelihood: Likelihood, levels: Sequence[float]) -> None:
        super().__init__()
        self.draws, self.likelihood, self.levels = draws, likelihood, tuple(levels)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of `output_names`."""
        return summarise(self.likelihood, self.draws(list(inputs)), self.draws.extra(), self.levels)


def trace(module: nn.Module, args: tuple[Any, ...], shapes: Any) -> Program:
    """Return a module traced at example arguments. Raise with the reason if it cannot be."""
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
    except InputError:
        raise
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")[:300]
        raise InputError(
            "posterior",
            f"torch.export cannot trace its network or likelihood ({type(error).__name__}: {reason})",
            "Remove what depends on values or on the number of rows from the network's forward, or serve the run with"
            " credibly itself",
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings that torch's exporters raise about their own code."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, before):
                logger.setLevel(level)
