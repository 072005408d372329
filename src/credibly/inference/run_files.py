"""Files of a run folder that its problem is rebuilt from: data, fixed tensors and the initial network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from credibly.core.inputs import tensors_of
from credibly.inference.density import Density
from credibly.networks.layout import Layout
from credibly.problem import Problem
from credibly.storage.manifest import load_tensors

# Maximum bytes of data that a run folder stores, so that it can be resumed without the program that started it.
KEPT_DATA = 2**28


def problem_files(problem: Problem | Density) -> dict[str, dict[str, Tensor]]:
    """Return the first files of a run folder, by name; data beyond `KEPT_DATA` are left out."""
    files: dict[str, dict[str, Tensor]] = {"fixed.safetensors": {}}
    if isinstance(problem, Density):
        return files
    layout = problem.layout
    files["fixed.safetensors"] = {f"fixed/{k}": v for k, v in layout.fixed().items()}
    files["initial.safetensors"] = {"network": layout.read(layout.module)}
    own = problem.sample
    data = {**{f"x/{i}": t for i, (_, t) in enumerate(tensors_of(own.x))}, "y": own.y}
    if problem.sample_weight is not None:
        data["sample_weight"] = problem.sample_weight
    if problem.stream is None and sum(t.numel() * t.element_size() for t in data.values()) <= KEPT_DATA:
        files["data.safetensors"] = data
    return files


@contextmanager
def initial_network(problem: Problem | Density, folder: Path) -> Iterator[None]:
    """Load the weights that a run began with into the network: some starting points depend on them."""
    if isinstance(problem, Density):
        yield
        return
    layout = problem.layout
    before, stored = layout.read(layout.module), load_tensors(folder / "initial.safetensors")["network"]
    _set_network(layout, stored)
    try:
        yield
    finally:
        _set_network(layout, before)


def _set_network(layout: Layout, values: Tensor) -> None:
    parameters = dict(layout.module.named_parameters())
    with torch.no_grad():
        for entry in layout.entries:
            if entry.name not in layout.extra:
                parameters[entry.name].copy_(values[entry.start : entry.stop].reshape(entry.shape))
