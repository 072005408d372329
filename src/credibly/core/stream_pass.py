"""One pass over a loader whose shuffle and augmentations come from a seed, whatever generators they use."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from credibly.core.rng import stream_seed


class Pass:
    """The raw batches of one pass over a loader, from the random stream named by (seed, purpose, index).

    Args:
        loader: the loader to read.
        seed, purpose, index: name of the random stream of the shuffle and the augmentations.
        going: the iterator of an earlier pass to continue, for a stream without end.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: int, purpose: str, index: int, going: Iterator[Any] | None = None
    ) -> None:
        self.loader, own = loader, stream_seed(seed, f"stream {purpose}", index)
        self.states = _states_of(own)
        for owner in (self.loader, sampler_of(self.loader)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(own)
        for named in (sampler_of(self.loader), self.loader.dataset):
            set_epoch = getattr(named, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(index)
        with self._own_randomness():
            self.items: Iterator[Any] = iter(self.loader) if going is None else going

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._own_randomness():
            return next(self.items)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Set the process's random states to those of this pass, and restore them after."""
        before = _states()
        _set_states(self.states)
        try:
            yield
        finally:
            self.states = _states()
            _set_states(before)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of row indices: the loader's, or that of its batch sampler."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def _states_of(seed: int) -> tuple[Any, Any, Any]:
    legacy = np.random.RandomState(seed % 2**32)
    return torch.Generator().manual_seed(seed).get_state(), legacy.get_state(), random.Random(seed).getstate()
