"""Convergence diagnostics of draws in weight space and in function space, with a verdict.

The function space decides. A network's weights have symmetries (permuted hidden units, flipped pairs of signs), so
chains may never agree on single weights and yet agree on every prediction. But chains may agree on every predicted mean
and disagree about the noise, so variances, log densities of observed rows and learned scales are judged as well, and
the worst of them decides.

A verdict is based on the value that 99 of 100 coordinates stay within (with fewer than 100, on the worst), because the
worst of thousands exceeds any limit by chance. The worst is shown as well.

| diagnostic | limit |
|---|---|
| R-hat | up to 1.01 good, up to 1.05 usable, above 1.05 poorly mixed, above 1.1 not mixed |
| bulk and tail ESS | at least 400, or 100 per chain with fewer than four |
| E-BFMI of every chain | at least 0.3 |
| divergences | none |
| acceptance of every chain | below 0.3 it is mentioned |
| chains that never moved | none |
| chains that need not mix with each other (MILE) | R-hat within chains up to 1.05, see `credibly.diagnostics.local` |
| starting points of the chains | if all are the same, a good or usable verdict is qualified |
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.core.checks import check_integer
from credibly.core.html import fact_table
from credibly.diagnostics.arviz_export import to_arviz
from credibly.diagnostics.convergence import MIN_DRAWS, Measures, e_bfmi, ess, mcse, measure, rhat
from credibly.diagnostics.local import LocalPosteriors, judge_local, local_posteriors
from credibly.diagnostics.verdict import RHAT_USABLE, Mixing, judge, mixing
from credibly.distributed.world import World, shard
from credibly.errors import InputError

__all__ = ["ColumnSource", "Diagnostics", "Mixing", "diagnose", "e_bfmi", "ess", "mcse", "rhat", "to_arviz"]

Array = Tensor | npt.NDArray[Any]

# Number of coordinates checked in either space.
COORDINATES = 2_000
# Number of values in memory at a time: 32 MiB in float64.
READ_VALUES = 2**22


class ColumnSource(Protocol):
    """Draws that are read in chunks of columns."""

    @property
    def shape(self) -> Sequence[int]:
        """Chains, draws and coordinates: (chain, draw, D)."""

    def columns(self, start: int, stop: int) -> Array:
        """Return coordinates start to stop of every draw, (chain, draw, stop - start)."""


@dataclass(frozen=True)
class Diagnostics:
    """Convergence diagnostics of a set of draws.

    Attributes:
        weights, functions: mixing of the weights, and of the predictions if there are any.
        acceptance: mean acceptance per chain (overall, if one number was given).
        divergences: number of divergent trajectories.
        e_bfmi: E-BFMI per chain.
        still: indices of chains that never moved.
        ok: whether the predictions can be used: R-hat good or usable, and nothing else beyond its limit.
        verdict: what is wrong and what to do next.
        quantities: mixing of further functions of the draws, by name, such as variances and log densities.
        one_start: whether all chains are known to have started at the same point.
        local: the parts of predictions within and between chains, if its chains need not mix with each other.
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
    quantities: dict[str, Mixing] = field(default_factory=dict)
    one_start: bool = False
    local: LocalPosteriors | None = None

    @property
    def judged(self) -> dict[str, Mixing]:
        """The quantities that the verdict judges, by name: predictions, or else weights, and further quantities."""
        main = {"weights": self.weights} if self.functions is None else {"predictions": self.functions}
        return main | {name: space for name, space in self.quantities.items() if space.moving}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with None for NaN and infinity."""
        found = asdict(self)
        within = None if self.local is None else found["local"]["within"]
        for space in (found["weights"], found["functions"], within, *found["quantities"].values()):
            if space is not None:
                del space["rhat"]
        return {name: _plain(value) for name, value in found.items()}

    def __str__(self) -> str:
        spaces = [("weights", self.weights)] + ([("functions", self.functions)] if self.functions else [])
        spaces += [(name, space) for name, space in self.quantities.items() if space.moving]
        rows = [["", *(name for name, _ in spaces)]]
        every = any(space.constant for _, space in spaces)
        rows += [[label, *(show(s) for _, s in spaces)] for label, show in _ROWS if every or label != _CONSTANT]
        lines = [f"{self.chains} chain{'s' * (self.chains > 1)} of {self.draws:,} draws"]
        widths = [max(18, len(name) + 2) for name, _ in spaces]
        lines += [f"{row[0]:<22}" + "".join(f"{cell:>{w}}" for cell, w in zip(row[1:], widths)) for row in rows]
        for label, values in (("acceptance", self.acceptance), ("E-BFMI", self.e_bfmi)):
            if values is not None:
                lowest = f"   lowest chain {np.min(values):.3f}" if len(values) > 1 else ""
                lines.append(f"{label:<22}{np.mean(values):>18.3f}{lowest}")
        if self.divergences is not None:
            lines.append(f"{'divergences':<22}{self.divergences:>18,}")
        if self.local is not None:
            lines.append(f"{'between chains':<22}{self.local.between:>18.1%}   most {self.local.between_most:.1%}")
        return "\n".join([*lines, "", *textwrap.wrap(self.verdict, 100)])

    def _repr_html_(self) -> str:
        spaces = {"weights": self.weights} | ({"functions": self.functions} if self.functions else {})
        spaces |= {name: space for name, space in self.quantities.items() if space.moving}
        rows = [[label, *(show(space) for space in spaces.values())] for label, show in _ROWS]
        facts = {"chains": self.chains, "draws": f"{self.draws:,}"}
        for label, values in (("acceptance", self.acceptance), ("E-BFMI", self.e_bfmi)):
            if values is not None:
                facts[label] = f"{np.mean(values):.3f} (lowest chain {np.min(values):.3f})"
        if self.divergences is not None:
            facts["divergences"] = f"{self.divergences:,}"
        if self.local is not None:
            facts["variance between chains"] = f"{self.local.between:.1%} (most {self.local.between_most:.1%})"
        facts["verdict"] = "usable" if self.ok else "not to be trusted"
        return fact_table("Diagnostics", facts, head=["", *spaces], rows=rows, note=self.verdict)


_CONSTANT = "constant"
_ROWS: tuple[tuple[str, Callable[[Mixing], str]], ...] = (
    ("checked", lambda m: f"{m.count:,}" if m.count == m.total else f"{m.count:,} of {m.total:,}"),
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
    quantities: Mapping[str, Array] | None = None,
    coordinates: int = COORDINATES,
    network: bool = True,
    one_start: bool = False,
    temperature: tuple[float, ...] | None = None,
    local: bool = False,
    world: World | None = None,
) -> Diagnostics:
    """Return R-hat, ESS and MCSE of weights and predictions, with a verdict.

    Args:
        draws: weights (chain, draw, D), or an object with that `shape` and `columns(start, stop)`, read in chunks.
        functions: predictions of the same chains at held-out inputs, (chain, draw, ...); possibly of fewer draws.
        energy: the Hamiltonian at each draw, (chain, draw).
        acceptance: acceptance probability, one number or per (chain,) or (chain, draw); NaN counts as a rejection.
        divergences: the number of divergent trajectories, or which ones, (chain, draw).
        quantities: further functions of the draws, (chain, draw, ...) by name, judged like the predictions: log
            densities of observed rows, variances, learned scales.
        coordinates: how many of the D weights, of the predictions and of each quantity to check, evenly spaced.
        network: False for draws from a density that is not a network's, whose coordinates are of interest themselves.
        one_start: whether all chains started at the same point, which the verdict then points out.
        temperature: the kinetic temperature of each chain of a minibatch sampler, 1 if it samples the posterior.
        local: whether chains need not mix with each other. If they disagree, each is assessed separately.
        world: processes that call this together. Each checks some of the coordinates, of all chains, and passes its own
            part of the predictions and quantities. The results are gathered, the draws are not.
    """
    check_integer("coordinates", coordinates)
    chains, count = _chains_and_draws("draws", draws)
    accepted = None if acceptance is None else _acceptance(acceptance, chains)
    diverged = None if divergences is None else _divergences(divergences)
    missing = None if energy is None else _e_bfmi(energy, chains)
    if functions is not None and _chains_and_draws("functions", functions)[0] != chains:
        found = f"must be predictions of the same {chains} chains, got shape {tuple(functions.shape)}"
        raise InputError("functions", found)
    together = world or World()
    for name, values in (quantities or {}).items():
        # A process may have no part of a quantity that has few coordinates.
        if together.size == 1:
            _chains_and_draws("quantities", values)
        if values.shape[0] != chains:
            found = f"{name} must be of the same {chains} chains, got shape {tuple(values.shape)}"
            raise InputError("quantities", found)
    own = shard(min(coordinates, math.prod(draws.shape[2:])), together.rank, together.size)
    weights, still = _mixing("draws", draws, coordinates, together, own)
    each = -(-coordinates // together.size)
    outputs = None if functions is None else _mixing("functions", functions, each, together)[0]
    others = {name: _mixing(name, values, each, together)[0] for name, values in (quantities or {}).items()}
    ok, verdict = judge(
        chains,
        weights,
        outputs,
        accepted,
        diverged,
        missing,
        still,
        quantities=others,
        draws=count,
        network=network,
        one_start=one_start,
        temperature=temperature,
    )
    parts = None
    if local and functions is not None:
        flat = _to_numpy(functions).reshape(*functions.shape[:2], -1)
        flat = flat[..., np.linspace(0, flat.shape[2] - 1, min(flat.shape[2], each)).round().astype(np.int64)]
        if together.size > 1:
            flat = np.concatenate([np.asarray(part) for part in together.gather(flat.tolist())], 2)
        parts = local_posteriors(flat)
        # A stuck or broken chain, or too few draws from chains that agree, is a fault for any method.
        apart = any(space.rhat_most > RHAT_USABLE for space in (outputs, *others.values()) if space is not None)
        if not ok and apart and not still and not weights.nonfinite:
            ok, verdict = judge_local(chains, parts, diverged)
    return Diagnostics(
        chains, count, weights, outputs, accepted, diverged, missing, still, ok, verdict, others, one_start, parts
    )


def _mixing(
    name: str, source: Array | ColumnSource, limit: int, world: World, own: range | None = None
) -> tuple[Mixing, tuple[int, ...]]:
    """Summarise at most `limit` coordinates. Also return the chains in which none of them ever moved.

    With several processes, each handles its `own` coordinates of a shared source, or all coordinates of a local one.
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
        # Neighbours are read together with the columns between them, up to `width` columns.
        for some in np.split(picks, np.flatnonzero(np.diff(picks // width)) + 1) if len(picks) else []:
            chunk = source.columns(int(some[0]), int(some[-1]) + 1)
            expected = (chains, draws, int(some[-1] - some[0]) + 1)
            if tuple(chunk.shape) != expected:
                raise InputError(name, f"columns returned shape {tuple(chunk.shape)}, expected {expected}")
            parts.append(measure(chunk[..., some - some[0]]))
    values = [torch.cat(column).cpu().numpy() for column in zip(*parts)]
    if world.size > 1:
        gathered = world.gather([total, [v.tolist() for v in values]])
        values = [
            np.concatenate([np.asarray(v[i]) for _, v in gathered if v and v[i]]) for i in range(len(Measures._fields))
        ]
        total = total if own is not None else sum(t for t, _ in gathered)
    summary = mixing(*values[:4], finite=values[4], constant=values[5], total=total)
    return summary, tuple(int(i) for i in np.flatnonzero(values[6].all(0)))


def _chains_and_draws(name: str, draws: Any) -> tuple[int, int]:
    """Return the leading sizes of (chain, draw, ...). Raise if there are too few draws."""
    if not isinstance(draws, (Tensor, np.ndarray)) and not (hasattr(draws, "shape") and hasattr(draws, "columns")):
        expected = "a tensor or array (chain, draw, D), or an object with shape and columns"
        raise InputError(name, f"must be {expected}, got a {type(draws).__name__}")
    shape = tuple(draws.shape)
    if len(shape) < 3 or 0 in shape:
        raise InputError(name, f"must have a non-empty shape (chain, draw, D), got {shape}")
    if shape[1] < MIN_DRAWS:
        found = f"must have at least {MIN_DRAWS} draws per chain, got {shape[1]} (shape {shape})"
        raise InputError(name, found, "Point estimates and ensemble members are not chains")
    return shape[0], shape[1]


def _to_numpy(value: Any) -> npt.NDArray[np.float64]:
    return np.asarray(value.detach().cpu().double() if isinstance(value, Tensor) else value, dtype=np.float64)


def _acceptance(acceptance: Array | float, chains: int) -> tuple[float, ...]:
    """Return the mean acceptance per chain, or the single number that was given."""
    values = np.nan_to_num(_to_numpy(acceptance), nan=0.0)
    if values.ndim > 2 or (values.ndim and len(values) != chains) or values.size == 0:
        expected = "must be one number or have shape (chain,) or (chain, draw)"
        raise InputError("acceptance", f"{expected}, got shape {values.shape} for {chains} chains")
    if values.min() < 0 or values.max() > 1 + 1e-6:
        raise InputError("acceptance", f"must be probabilities, got {values.min():.3g} to {values.max():.3g}")
    return tuple(float(v) for v in (values.mean(1) if values.ndim == 2 else values.reshape(-1)))


def _divergences(divergences: Array | int) -> int:
    """Return the number of divergent trajectories."""
    values = _to_numpy(divergences)
    total = float(values.sum())
    if not (values >= 0).all() or total != int(total):
        raise InputError("divergences", f"must be a count or a mask (chain, draw), got a sum of {total}")
    return int(total)


def _e_bfmi(energy: Array, chains: int) -> tuple[float, ...]:
    """Return E-BFMI per chain."""
    values = e_bfmi(_to_numpy(energy))
    if len(values) != chains:
        raise InputError("energy", f"must have as many chains as the draws ({chains}), got {len(values)}")
    return tuple(float(v) for v in values)


def _plain(value: Any) -> Any:
    """Return a JSON value: lists for tuples, None for NaN and infinity."""
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
