"""Whether chains can be trusted: the figures of `credibly.diagnostics.convergence` in weight space and in function space, in words.

The function space decides. Weights of a network have symmetries (hidden units swap places, pairs of signs flip), so chains
may never agree about single weights and yet agree about every prediction.

A verdict looks at what 99 of 100 coordinates stay within (with fewer than 100, at the worst), because the worst of thousands is
over any limit by chance; the worst is shown beside it.

| figure | limit |
|---|---|
| R-hat | up to 1.01 good, up to 1.05 usable, above 1.05 poorly mixed, above 1.1 not mixed |
| bulk and tail ESS | at least 400, or 100 a chain where there are fewer than four |
| E-BFMI of every chain | at least 0.3 |
| divergences | none |
| acceptance of every chain | below 0.3 it is remarked on |
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.diagnostics.arviz_export import to_arviz
from credibly.diagnostics.convergence import MIN_DRAWS, Measures, e_bfmi, ess, mcse, measure, rhat
from credibly.diagnostics.verdict import Mixing, judge, mixing
from credibly.distributed.world import World, shard
from credibly.errors import InputError

__all__ = ["ColumnSource", "Diagnostics", "Mixing", "diagnose", "e_bfmi", "ess", "mcse", "rhat", "to_arviz"]

Array = Tensor | npt.NDArray[Any]

COORDINATES = 2_000  # looked at in either space
READ_VALUES = 2**22  # draws held at a time: 32 MiB in float64


class ColumnSource(Protocol):
    """Draws that are read in pieces: `shape` is (chain, draw, D)."""

    @property
    def shape(self) -> Sequence[int]:
        """(chain, draw, D)."""

    def columns(self, start: int, stop: int) -> Array:
        """Coordinates start to stop of every draw, (chain, draw, stop - start)."""


@dataclass(frozen=True)
class Diagnostics:
    """What the draws say about themselves.

    Attributes:
        weights, functions: how the weights, and the predictions where they were given, have mixed.
        acceptance: mean acceptance of each chain (of all, if one number was given).
        divergences: how many trajectories diverged.
        e_bfmi: of each chain.
        still: chains that never moved, by number.
        ok: whether the predictions can be used: usable or good, and nothing else over its limit.
        verdict: what is wrong and what to do next.
    """

    chains: int
    draws: int
    weights: Mixing
    functions: Mixing | None
    acceptance: tuple[float, ...] | None
    divergences: int | None
    e_bfmi: tuple[float, ...] | None
    still: tuple[int, ...]
    ok: bool
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what is NaN or infinite becomes None."""
        found = asdict(self)
        for space in ("weights", "functions"):
            if found[space] is not None:
                del found[space]["rhat"]
        return {name: _plain(value) for name, value in found.items()}

    def __str__(self) -> str:
        spaces = [("weights", self.weights)] + ([("functions", self.functions)] if self.functions else [])
        rows = [["", *(name for name, _ in spaces)]]
        every = any(space.constant for _, space in spaces)
        rows += [[label, *(show(s) for _, s in spaces)] for label, show in _ROWS if every or label != _CONSTANT]
        lines = [f"{self.chains} chain{'s' * (self.chains > 1)} of {self.draws:,} draws"]
        lines += [f"{row[0]:<22}" + "".join(f"{cell:>18}" for cell in row[1:]) for row in rows]
        for label, values in (("acceptance", self.acceptance), ("E-BFMI", self.e_bfmi)):
            if values is not None:
                lowest = f"   lowest chain {np.min(values):.3f}" if len(values) > 1 else ""
                lines.append(f"{label:<22}{np.mean(values):>18.3f}{lowest}")
        if self.divergences is not None:
            lines.append(f"{'divergences':<22}{self.divergences:>18,}")
        return "\n".join([*lines, "", *textwrap.wrap(self.verdict, 100)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


_CONSTANT = "never change"
_ROWS: tuple[tuple[str, Callable[[Mixing], str]], ...] = (
    ("looked at", lambda m: f"{m.count:,}" if m.count == m.total else f"{m.count:,} of {m.total:,}"),
    (_CONSTANT, lambda m: f"{m.constant:,}"),
    ("R-hat, worst", lambda m: f"{m.rhat_worst:.3f}"),
    ("  99 of 100 within", lambda m: f"{m.rhat_most:.3f}"),
    ("  median", lambda m: f"{m.rhat_median:.3f}"),
    ("  over 1.01", lambda m: f"{m.share_over_1_01:.1%}"),
    ("  over 1.1", lambda m: f"{m.share_over_1_1:.1%}"),
    ("bulk ESS, lowest", lambda m: f"{m.ess_bulk_min:,.0f}"),
    ("  median", lambda m: f"{m.ess_bulk_median:,.0f}"),
    ("tail ESS, lowest", lambda m: f"{m.ess_tail_min:,.0f}"),
    ("  median", lambda m: f"{m.ess_tail_median:,.0f}"),
    ("MCSE / sd, worst", lambda m: f"{m.mcse_worst:.3f}"),
    ("  median", lambda m: f"{m.mcse_median:.3f}"),
)


def diagnose(
    draws: Array | ColumnSource,
    functions: Array | None = None,
    energy: Array | None = None,
    acceptance: Array | float | None = None,
    divergences: Array | int | None = None,
    *,
    coordinates: int = COORDINATES,
    network: bool = True,
    world: World | None = None,
) -> Diagnostics:
    """R-hat, ESS and MCSE of weights and predictions, with a verdict in words.

    Args:
        draws: weights (chain, draw, D), or an object with that `shape` and `columns(start, stop)`, which is read in pieces.
        functions: predictions of the same chains at held-out inputs, (chain, draw, ...). They may be of fewer draws.
        energy: the Hamiltonian at each draw, (chain, draw).
        acceptance: probability of acceptance, one number or by (chain,) or (chain, draw); NaN counts as a rejection.
        divergences: how many trajectories diverged, or which, (chain, draw).
        coordinates: how many of the D weights are looked at, evenly spaced; as many of the predictions.
        network: False for draws of a density that is not a network's, whose coordinates count themselves.
        world: processes that call this together. Each looks at some of the coordinates, of all chains, and `functions` are its
            own share of the predictions; what they find is gathered, the draws are not.
    """
    if isinstance(coordinates, bool) or not isinstance(coordinates, int) or coordinates < 1:
        raise InputError("coordinates", f"found {coordinates!r}", "Pass a whole number from 1 up")
    chains, count = _chains_and_draws("draws", draws)
    accepted = None if acceptance is None else _by_chain(acceptance, chains)
    diverged = None if divergences is None else _count(divergences)
    missing = None if energy is None else _energy(energy, chains)
    if functions is not None and _chains_and_draws("functions", functions)[0] != chains:
        found = f"has shape {tuple(functions.shape)}, the draws {chains} chains"
        raise InputError("functions", found, "Pass the predictions of the same chains, (chain, draw, ...)")
    together = world or World()
    own = shard(min(coordinates, math.prod(draws.shape[2:])), together.rank, together.size)
    weights, still = _mixing("draws", draws, coordinates, together, own)
    each = -(-coordinates // together.size)
    outputs = None if functions is None else _mixing("functions", functions, each, together)[0]
    ok, verdict = judge(chains, weights, outputs, accepted, diverged, missing, still, draws=count, network=network)
    return Diagnostics(chains, count, weights, outputs, accepted, diverged, missing, still, ok, verdict)


def _mixing(
    name: str, source: Array | ColumnSource, limit: int, world: World, own: range | None = None
) -> tuple[Mixing, tuple[int, ...]]:
    """The summary of at most `limit` coordinates, and the chains in which none of them ever moved.

    Of several processes each measures its `own` coordinates of a source that all of them have, or all of its own source.
    """
    chains, draws = source.shape[:2]
    total = math.prod(source.shape[2:])
    picks = np.linspace(0, total - 1, min(total, limit)).round().astype(np.int64)
    picks = picks if own is None else picks[own.start : own.stop]
    width = max(1, READ_VALUES // (chains * draws))
    parts = []
    if isinstance(source, (Tensor, np.ndarray)):
        flat = source.reshape(chains, draws, -1)
        for some in np.split(picks, range(width, len(picks), width)) if len(picks) else []:
            parts.append(measure(flat[..., some]))
    else:
        # Neighbours are read together, with what lies between them, as long as that is bounded.
        for some in np.split(picks, np.flatnonzero(np.diff(picks // width)) + 1) if len(picks) else []:
            piece = source.columns(int(some[0]), int(some[-1]) + 1)
            expected = (chains, draws, int(some[-1] - some[0]) + 1)
            if tuple(piece.shape) != expected:
                raise InputError(name, f"columns gave {tuple(piece.shape)}", f"It has to give {expected}")
            parts.append(measure(piece[..., some - some[0]]))
    values = [torch.cat(column).cpu().numpy() for column in zip(*parts)]
    if world.size > 1:
        told = world.gather([total, [v.tolist() for v in values]])
        values = [
            np.concatenate([np.asarray(v[i]) for _, v in told if v and v[i]]) for i in range(len(Measures._fields))
        ]
        total = total if own is not None else sum(t for t, _ in told)
    summary = mixing(*values[:4], finite=values[4], constant=values[5], total=total)
    return summary, tuple(int(i) for i in np.flatnonzero(values[6].all(0)))


def _chains_and_draws(name: str, draws: Any) -> tuple[int, int]:
    """The leading sizes of (chain, draw, ...), or InputError."""
    if not isinstance(draws, (Tensor, np.ndarray)) and not (hasattr(draws, "shape") and hasattr(draws, "columns")):
        found = f"is a {type(draws).__name__}"
        raise InputError(name, found, "Pass a tensor or an array (chain, draw, D), or an object with shape and columns")
    shape = tuple(draws.shape)
    if len(shape) < 3 or 0 in shape:
        raise InputError(name, f"has shape {shape}", "Pass (chain, draw, D) with nothing empty")
    if shape[1] < MIN_DRAWS:
        advice = f"Diagnostics need {MIN_DRAWS} draws a chain or more; point estimates and members of an ensemble are no chains"
        raise InputError(name, f"has {shape[1]} draws a chain (shape {shape})", advice)
    return shape[0], shape[1]


def _numbers(value: Any) -> npt.NDArray[np.float64]:
    return np.asarray(value.detach().cpu().double() if isinstance(value, Tensor) else value, dtype=np.float64)


def _by_chain(acceptance: Array | float, chains: int) -> tuple[float, ...]:
    values = np.nan_to_num(_numbers(acceptance), nan=0.0)
    if values.ndim > 2 or (values.ndim and len(values) != chains) or values.size == 0:
        found = f"has shape {values.shape}, the draws {chains} chains"
        raise InputError("acceptance", found, "Pass one number, or (chain,), or (chain, draw)")
    if values.min() < 0 or values.max() > 1 + 1e-6:
        raise InputError("acceptance", f"values from {values.min():.3g} to {values.max():.3g}", "Pass probabilities")
    return tuple(float(v) for v in (values.mean(1) if values.ndim == 2 else values.reshape(-1)))


def _count(divergences: Array | int) -> int:
    values = _numbers(divergences)
    total = float(values.sum())
    if not (values >= 0).all() or total != int(total):
        raise InputError(
            "divergences", f"adds up to {total}", "Pass how many there were, or which draws, (chain, draw)"
        )
    return int(total)


def _energy(energy: Array, chains: int) -> tuple[float, ...]:
    values = e_bfmi(_numbers(energy))
    if len(values) != chains:
        raise InputError("energy", f"has {len(values)} chains, the draws {chains}", "Pass the energies of these draws")
    return tuple(float(v) for v in values)


def _plain(value: Any) -> Any:
    """With lists for tuples and None for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
