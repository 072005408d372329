"""A summary of many coordinates' diagnostics, and the verdict. `credibly.diagnostics.summary` lists the limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

RHAT_GOOD, RHAT_USABLE, RHAT_POOR = 1.01, 1.05, 1.1
ESS_TOTAL, ESS_PER_CHAIN = 400, 100
E_BFMI_LOW = 0.3
ACCEPTANCE_LOW = 0.3
# SG-MCMC keeps the heating by gradient noise below 5 %. The limit is twice that, plus the measurement error.
TEMPERATURE_HIGH = 1.15
# Fraction of coordinates that may exceed a limit.
EXEMPT = 0.01
ONE_START = (
    "All chains started at the same point, so their agreement cannot reveal modes that none of them reached: start them"
    ' at different points, such as init="ensemble", "fresh" or "prior".'
)

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Mixing:
    """Mixing of one space, over its finite coordinates that are not constant. Without any, the values are NaN.

    Attributes:
        count: coordinates checked, evenly spaced among `total`.
        constant: how many of these have a single value in all draws; excluded from what follows.
        nonfinite: how many have NaN or infinite draws; excluded as well.
        rhat_worst, rhat_most, rhat_median: the largest R-hat, the value 99 of 100 stay within, the median.
        share_over_1_01, share_over_1_1: fraction of coordinates with a larger R-hat.
        ess_bulk_min, ess_bulk_median, ess_tail_min, ess_tail_median: effective sample sizes.
        ess_most: the ESS that 99 of 100 reach, in bulk and in tail.
        mcse_worst, mcse_median: Monte Carlo standard error of the mean in standard deviations, 1 / sqrt(ESS).
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
        """Number of coordinates that the values are over."""
        return self.count - self.constant - self.nonfinite


def mixing(
    rhat: Numbers, bulk: Numbers, tail: Numbers, mean: Numbers, *, finite: Numbers, constant: Numbers, total: int
) -> Mixing:
    """Summarise R-hat and three kinds of ESS, all (count,), of `total` coordinates."""
    use = finite & ~constant
    rhat, bulk, tail, error = rhat[use], bulk[use], tail[use], 1 / np.sqrt(mean[use])
    values: dict[str, Any] = {f.name: math.nan for f in fields(Mixing) if f.type == "float"}
    if use.any():
        values = {
            "rhat_worst": rhat.max(),
            "rhat_most": np.quantile(rhat, 1 - EXEMPT, method="higher"),
            "rhat_median": np.median(rhat),
            "share_over_1_01": (rhat > RHAT_GOOD).mean(),
            "share_over_1_1": (rhat > RHAT_POOR).mean(),
            "ess_bulk_min": bulk.min(),
            "ess_bulk_median": np.median(bulk),
            "ess_tail_min": tail.min(),
            "ess_tail_median": np.median(tail),
            "ess_most": min(np.quantile(ess, EXEMPT, method="lower") for ess in (bulk, tail)),
            "mcse_worst": error.max(),
            "mcse_median": np.median(error),
        }
    return Mixing(
        count=len(use),
        total=total,
        constant=int((finite & constant).sum()),
        nonfinite=int((~finite).sum()),
        rhat=rhat,
        **{name: float(value) for name, value in values.items()},
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
    quantities: Mapping[str, Mixing] | None = None,
    draws: int | None = None,
    network: bool = True,
    one_start: bool = False,
    temperature: tuple[float, ...] | None = None,
) -> tuple[bool, str]:
    """Return whether the draws can be used, and a verdict: what is wrong and what to do about it.

    The worst of the predictions and the other quantities decides. Weights count only where there are no predictions.
    The coordinates of a density that is not a network's (`network=False`) are of interest themselves.
    """
    own = "weights" if network else "coordinates"
    main = "predictions" if functions is not None else own
    spaces = {main: functions or weights, **(quantities or {})}
    for name, space in {own: weights, **spaces}.items():
        if space.nonfinite:
            found = f"Broken: NaN or infinite draws in {space.nonfinite:,} of the {space.count:,} {name} checked."
            return False, f"{found} Lower the step size, standardise the data, and run again."
    if len(still) == chains:
        return False, "Not moving: no chain ever left its first draw. Lower the step size until proposals are accepted."
    if still:
        names = f"chain {still[0]}" if len(still) == 1 else f"chains {', '.join(map(str, still))}"
        found = f"Not mixed: {names} never moved while others did."
        return False, f"{found} Lower the step size, or start from other points."
    if not spaces[main].moving:
        return False, f"Nothing to judge: the {main} are the same in every draw. Pass some that depend on the weights."
    spaces = {name: space for name, space in spaces.items() if space.moving}
    faults = _faults(spaces, chains, divergences, e_bfmi, draws)
    if temperature is not None and (hottest := sum(temperature) / len(temperature)) > TEMPERATURE_HIGH:
        faults.append(
            f"The chains are too hot: their kinetic temperature is {hottest:.2f} times the posterior's, from steps that"
            " are too large for the noise of minibatch gradients. Lower the step size, or take larger batches."
        )
    agreed = all(space.rhat_most <= RHAT_USABLE for space in spaces.values())
    one_start = one_start and chains > 1
    sentences = [_headline(spaces, chains, faults=bool(faults), one_start=one_start), *faults]
    for name, space in spaces.items():
        if agreed and space.rhat_worst > RHAT_POOR:
            sentences.append(
                f"{_percent(space.share_over_1_1)} of the {name} have R-hat above 1.1 (worst {space.rhat_worst:.2f}):"
                " treat those with care."
            )
    if acceptance is not None and min(acceptance) < ACCEPTANCE_LOW:
        sentences.append(
            f"Acceptance is {min(acceptance):.0%} in the worst chain: a smaller step size would waste fewer proposals."
        )
    if chains == 1:
        sentences.append("One chain cannot show modes that it never reached: run four, or at least two.")
    if one_start:
        sentences.append(ONE_START)
    if functions is None and network:
        basis = "the weights alone" if len(spaces) == 1 else f"the {_listed(spaces)} alone"
        sentences.append(
            f"This verdict is based on {basis}. Weights have symmetries: chains may disagree on them and still agree on"
            " every prediction. Pass predictions at held-out inputs for a verdict on those."
        )
    elif functions is not None and agreed and weights.rhat_most > RHAT_USABLE:
        sentences.append(
            f"The weights mix worse ({_rhat_range(weights)}), as expected: hidden units can be permuted and change"
            " signs without changing a prediction."
        )
    return agreed and not faults, " ".join(sentences)


def _headline(spaces: Mapping[str, Mixing], chains: int, *, faults: bool, one_start: bool) -> str:
    """Return the grade of the quantity that mixed worst; a good grade covers all of them."""
    who = "the chains" if chains > 1 else "the halves of the chain"
    what, seen = max(spaces.items(), key=lambda item: item[1].rhat_most)
    if seen.rhat_most > RHAT_POOR:
        how = f"R-hat above 1.1 for {_percent(seen.share_over_1_1)}, worst {seen.rhat_worst:.2f}"
        return (
            f"Not mixed: {who} disagree about the {what} ({how if seen.moving > 1 else f'R-hat {seen.rhat_worst:.2f}'})"
            f"{_others(spaces, what)}. Run more warm-up and more draws; if they still disagree, they are in different"
            " modes: lengthen the trajectories or run more chains."
        )
    if seen.rhat_most > RHAT_USABLE:
        return (
            f"Poorly mixed: {who} agree only roughly about the {what} ({_rhat_range(seen)}){_others(spaces, what)}. Run"
            f" about {max(2, _draw_factor(seen, chains))} times as long, with more warm-up."
        )
    every = _listed(spaces)
    if faults:
        return f"Not yet: {who} agree about the {every} ({_rhat_range(seen)}), but another diagnostic fails."
    where = " from one start" if one_start else ""
    if seen.rhat_most > RHAT_GOOD:
        advice = "More draws would bring it below 1.01."
        return f"Usable{where}: {who} agree closely about the {what} ({_rhat_range(seen)}). {advice}"
    fewest = min(space.ess_most for space in spaces.values())
    return f"Good{where}: {who} agree about the {every} ({_rhat_range(seen)}; ESS at least {fewest:,.0f})."


def _others(spaces: Mapping[str, Mixing], what: str) -> str:
    """Return a clause on the quantities that the chains agree about, next to one that they do not."""
    fine = [name for name, space in spaces.items() if name != what and space.rhat_most <= RHAT_USABLE]
    return f", although they agree about the {_listed(fine)}" if fine else ""


def _listed(names: Iterable[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def _faults(
    spaces: Mapping[str, Mixing],
    chains: int,
    divergences: int | None,
    e_bfmi: tuple[float, ...] | None,
    draws: int | None,
) -> list[str]:
    """Return a sentence for everything but R-hat that is beyond its limit, each with a remedy."""
    faults = []
    what, seen = min(spaces.items(), key=lambda item: item[1].ess_most)
    # If chains disagree, a low ESS only repeats that, and more draws are no remedy.
    if all(space.rhat_most <= RHAT_USABLE for space in spaces.values()) and _draw_factor(seen, chains) > 1:
        faults.append(
            f"There are too few effective draws of the {what}: ESS is only {seen.ess_most:,.0f},"
            f" {_needed_ess(chains)} are needed. Run about {_draw_factor(seen, chains)} times as many draws."
        )
    if divergences:
        many = f"{divergences:,} trajectories" if divergences > 1 else "1 trajectory"
        faults.append(
            f"{many} diverged, so some region was not explored: lower the step size or raise the target acceptance."
        )
    low = _low_energy(e_bfmi or (), draws)
    if low is not None:
        faults.append(
            f"E-BFMI is {low[0]:.2g} in chain {low[1]}, below 0.3: the energy changes too slowly between draws. Warm up"
            " longer, or fix scales that are learned with the weights."
        )
    return faults


def _low_energy(values: tuple[float, ...], draws: int | None) -> tuple[float, int] | None:
    """Return the lowest E-BFMI and its chain if the mean over chains, or one chain by two standard errors, is too low.

    For n draws whose energy is autoregressive, the estimate near 0.3 has a standard error of 1.05 / sqrt(n).
    """
    known = [(value, chain) for chain, value in enumerate(values) if not math.isnan(value)]
    if not known:
        return None
    lowest = min(known)
    allowed = 0.0 if draws is None else 2 * 1.05 / math.sqrt(draws)
    average = sum(value for value, _ in known) / len(known)
    return lowest if lowest[0] < E_BFMI_LOW - allowed or average < E_BFMI_LOW else None


def _needed_ess(chains: int) -> int:
    return min(ESS_TOTAL, ESS_PER_CHAIN * chains)


def _draw_factor(seen: Mixing, chains: int) -> int:
    """Return how many times as many draws would reach the effective sample size that is needed."""
    return math.ceil(_needed_ess(chains) / seen.ess_most)


def _rhat_range(seen: Mixing) -> str:
    return f"R-hat up to {seen.rhat_most:.3f}" + (" for 99 of 100" if seen.moving > 1 / EXEMPT else "")


def _percent(fraction: float) -> str:
    return f"{fraction:.0%}" if fraction >= 0.1 else f"{fraction:.1%}"
