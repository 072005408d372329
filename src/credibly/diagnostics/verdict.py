"""The figures of many coordinates in one table row, and what they mean in words. `credibly.diagnostics.summary` has the limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

RHAT_GOOD, RHAT_USABLE, RHAT_POOR = 1.01, 1.05, 1.1
ESS_TOTAL, ESS_PER_CHAIN = 400, 100
E_BFMI_LOW = 0.3
ACCEPTANCE_LOW = 0.3
EXEMPT = 0.01  # share of coordinates that may be worse than a limit

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Mixing:
    """How one space has mixed, over the coordinates that change and are finite. Without any, figures are NaN.

    Attributes:
        count: coordinates looked at, evenly spaced among `total`.
        constant: of these, how many have one value in all draws. They are left out of what follows.
        nonfinite: how many have NaN or infinite draws, left out as well.
        rhat_worst, rhat_most, rhat_median: the largest R-hat, what 99 of 100 stay within, the median.
        share_over_1_01, share_over_1_1: share of coordinates with a larger R-hat.
        ess_bulk_min, ess_bulk_median, ess_tail_min, ess_tail_median: effective sample sizes.
        ess_most: what 99 of 100 reach, in bulk and in tail.
        mcse_worst, mcse_median: Monte-Carlo error of the mean, in standard deviations: 1 / sqrt(ESS of the mean).
        rhat: R-hat of those coordinates.
    """

    count: int
    total: int
    constant: int
    nonfinite: int
    rhat_worst: float
    rhat_most: float
    rhat_median: float
    share_over_1_01: float
    share_over_1_1: float
    ess_bulk_min: float
    ess_bulk_median: float
    ess_tail_min: float
    ess_tail_median: float
    ess_most: float
    mcse_worst: float
    mcse_median: float
    rhat: Numbers = field(repr=False, compare=False)

    @property
    def moving(self) -> int:
        """How many coordinates the figures are of."""
        return self.count - self.constant - self.nonfinite


def mixing(
    rhat: Numbers, bulk: Numbers, tail: Numbers, mean: Numbers, *, finite: Numbers, constant: Numbers, total: int
) -> Mixing:
    """The summary of R-hat and three kinds of ESS, all (count,), of `total` coordinates."""
    use = finite & ~constant
    rhat, bulk, tail, error = rhat[use], bulk[use], tail[use], 1 / np.sqrt(mean[use])
    figures: dict[str, Any] = {f.name: math.nan for f in fields(Mixing) if f.type == "float"}
    if use.any():
        figures = {
            "rhat_worst": rhat.max(),
            "rhat_most": np.quantile(rhat, 1 - EXEMPT, method="higher"),
            "rhat_median": np.median(rhat),
            "share_over_1_01": (rhat > RHAT_GOOD).mean(),
            "share_over_1_1": (rhat > RHAT_POOR).mean(),
            "ess_bulk_min": bulk.min(),
            "ess_bulk_median": np.median(bulk),
            "ess_tail_min": tail.min(),
            "ess_tail_median": np.median(tail),
            "ess_most": min(np.quantile(values, EXEMPT, method="lower") for values in (bulk, tail)),
            "mcse_worst": error.max(),
            "mcse_median": np.median(error),
        }
    return Mixing(
        count=len(use),
        total=total,
        constant=int((finite & constant).sum()),
        nonfinite=int((~finite).sum()),
        rhat=rhat,
        **{name: float(value) for name, value in figures.items()},
    )


def judge(
    chains: int,
    weights: Mixing,
    functions: Mixing | None,
    acceptance: tuple[float, ...] | None = None,
    divergences: int | None = None,
    e_bfmi: tuple[float, ...] | None = None,
    still: tuple[int, ...] = (),
    *,
    draws: int | None = None,
    network: bool = True,
) -> tuple[bool, str]:
    """Whether the draws can be used, and what is wrong and what to do, in words.

    Coordinates of a density that is no network's (`network=False`) are the answer themselves; weights only lead to it.
    """
    own = "weights" if network else "coordinates"
    what, seen = ("predictions", functions) if functions is not None else (own, weights)
    for name, space in ((own, weights), (what, seen)):
        if space.nonfinite:
            found = f"Broken: NaN or infinite draws in {space.nonfinite:,} of the {space.count:,} {name} looked at."
            return False, f"{found} Lower the step size, bring the data to unit scale, and run again."
    if len(still) == chains:
        return False, "Not moving: no chain ever left its first draw. Lower the step size until proposals are accepted."
    if still:
        names = f"chain {still[0]}" if len(still) == 1 else f"chains {', '.join(map(str, still))}"
        return False, f"Not mixed: {names} never moved while others did. Lower the step size, or start there elsewhere."
    if not seen.moving:
        return False, f"Nothing to judge: the {what} are the same in every draw. Pass some that depend on the weights."
    faults = _faults(what, seen, chains, divergences, e_bfmi, draws)
    agreed = seen.rhat_most <= RHAT_USABLE
    said = [_headline(what, seen, chains, faults=bool(faults)), *faults]
    if agreed and seen.rhat_worst > RHAT_POOR:
        said.append(
            f"{_share(seen.share_over_1_1)} of the {what} are above 1.1 (worst {seen.rhat_worst:.2f}): read those with care."
        )
    if acceptance is not None and min(acceptance) < ACCEPTANCE_LOW:
        said.append(
            f"Acceptance is {min(acceptance):.0%} where it is lowest: a smaller step size would waste fewer proposals."
        )
    if chains == 1:
        said.append("One chain cannot show modes that it never reached: run four, or at least two.")
    if functions is None and network:
        said.append(
            "This is judged by the weights alone, which have symmetries: chains may disagree about them and still agree about"
            " every prediction. Pass predictions at held-out inputs for the answer that counts."
        )
    elif functions is not None and agreed and weights.rhat_most > RHAT_USABLE:
        said.append(
            f"The weights mix worse ({_reach(weights)}), as is to be expected: hidden units can swap places and signs without"
            " changing a prediction."
        )
    return agreed and not faults, " ".join(said)


def _headline(what: str, seen: Mixing, chains: int, *, faults: bool) -> str:
    who = "the chains" if chains > 1 else "the halves of the chain"
    if seen.rhat_most > RHAT_POOR:
        return (
            f"Not mixed: {who} disagree about the {what} (R-hat above 1.1 for {_share(seen.share_over_1_1)}, worst"
            f" {seen.rhat_worst:.2f}). Run more warm-up and more draws; if they still disagree, they sit in different modes:"
            " lengthen the trajectories or run more chains."
        )
    if seen.rhat_most > RHAT_USABLE:
        return (
            f"Poorly mixed: {who} agree only roughly about the {what} ({_reach(seen)}). Run about"
            f" {max(2, _times(seen, chains))} times as long, with more warm-up."
        )
    if faults:
        return f"Not yet: {who} agree about the {what} ({_reach(seen)}), but something else is wrong."
    if seen.rhat_most > RHAT_GOOD:
        return f"Usable: {who} agree closely about the {what} ({_reach(seen)}). More draws would bring it below 1.01."
    return f"Good: {who} agree about the {what} ({_reach(seen)}; ESS at least {seen.ess_most:,.0f})."


def _faults(
    what: str, seen: Mixing, chains: int, divergences: int | None, e_bfmi: tuple[float, ...] | None, draws: int | None
) -> list[str]:
    """What is over its limit beside R-hat, each with what to do."""
    faults = []
    # Where chains disagree, a low ESS says the same thing again, and more draws of them are no cure.
    if seen.rhat_most <= RHAT_USABLE and _times(seen, chains) > 1:
        faults.append(
            f"There are too few independent draws of the {what}: ESS reaches only {seen.ess_most:,.0f}, {_wanted(chains)} are"
            f" wanted. Run about {_times(seen, chains)} times as many draws."
        )
    if divergences:
        many = f"{divergences:,} trajectories" if divergences > 1 else "1 trajectory"
        faults.append(
            f"{many} diverged, so some region was not explored: lower the step size or raise the target acceptance."
        )
    low = _low_energy(e_bfmi or (), draws)
    if low is not None:
        faults.append(
            f"E-BFMI is {low[0]:.2g} in chain {low[1]}, 0.3 is wanted: the energy changes too slowly from draw to draw. Warm up"
            " longer, or fix scales that are learned beside the weights."
        )
    return faults


def _low_energy(values: tuple[float, ...], draws: int | None) -> tuple[float, int] | None:
    """The lowest E-BFMI and its chain, where that is too low: all chains on average, or one by more than two of its errors.

    Of n draws whose energy is an autoregression, the estimate near 0.3 has a standard error of 1.05 / sqrt(n).
    """
    known = [(value, chain) for chain, value in enumerate(values) if not math.isnan(value)]
    if not known:
        return None
    lowest = min(known)
    allowed = 0.0 if draws is None else 2 * 1.05 / math.sqrt(draws)
    average = sum(value for value, _ in known) / len(known)
    return lowest if lowest[0] < E_BFMI_LOW - allowed or average < E_BFMI_LOW else None


def _wanted(chains: int) -> int:
    return min(ESS_TOTAL, ESS_PER_CHAIN * chains)


def _times(seen: Mixing, chains: int) -> int:
    """How many times as many draws would reach the effective sample size that is wanted."""
    return math.ceil(_wanted(chains) / seen.ess_most)


def _reach(seen: Mixing) -> str:
    return f"R-hat up to {seen.rhat_most:.3f}" + (" for 99 of 100" if seen.moving > 1 / EXEMPT else "")


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
