"""The verdict on sampling: whether the chains of a sampler have mixed, apart from how good the predictions are.

Rows that the fit has not seen test the predictions themselves. Where they do, chains that fall a little short of the
recommended number of draws do not count against them; chains that disagree do, since another run would predict
differently; chains that never moved, or whose draws are not finite, make them unusable.
"""

from __future__ import annotations

import math

from credibly.diagnostics.verdict import (
    E_BFMI_LOW,
    ESS_PER_CHAIN,
    ESS_TOTAL,
    ONE_START,
    RHAT_GOOD,
    RHAT_POOR,
    RHAT_USABLE,
)
from credibly.report.evaluated_rows import unseen
from credibly.report.finding import FAIL, NOTE, PASS, WARN, Finding
from credibly.report.page import Recommendation
from credibly.report.recommendations import refit_command
from credibly.tables.fit_summary import FitSummary

MIXED, USABLE, SHORT, NOT_MIXED, FAILED = GRADES = ("good", "usable", "not enough draws", "not mixed", "failed")
# Effective draws from which the Monte Carlo error, 1/sqrt(ESS) posterior standard deviations, is small beside the
# predictive standard deviation.
ENOUGH_DRAWS = 100
# Fraction of divergent trajectories from which they are more than a remark.
MANY_DIVERGENCES = 0.01


def sampling(facts: FitSummary) -> tuple[str, Finding] | None:
    """Return the grade of the chains, one of GRADES, and the finding behind it; None unless the method is a sampler."""
    found = facts.diagnostics
    if found is None:
        return None
    main, *others = found.judged.values()
    if not found.ok and (not main.moving or found.still or any(space.nonfinite for space in (main, *others))):
        return FAILED, Finding(FAIL, f"The chains failed. {found.verdict}")
    space = max(found.judged.values(), key=lambda one: one.rhat_most)
    fewest = min(one.ess_most for one in found.judged.values())
    if found.ok:
        agree = f"The chains agree (R-hat up to {space.rhat_most:.3f}; 1 is perfect)"
        text = f"{agree} and give {fewest:,.0f} effective draws."
        return MIXED, Finding(NOTE, f"{text} {ONE_START}") if found.one_start else Finding(PASS, text)
    problems, advice = _problems(facts)
    how = "as well as recommended" if space.rhat_most <= RHAT_USABLE else "well enough"
    text = f"The posterior is not explored {how}: {'; '.join(problems)}."
    if not problems:
        text = f"The chains: {found.verdict}"
    disagree = not space.rhat_most <= RHAT_USABLE
    grade = NOT_MIXED if not space.rhat_most <= RHAT_POOR else USABLE
    if grade != NOT_MIXED and (disagree or fewest < _wanted(facts)):
        grade = SHORT
    if grade == NOT_MIXED:
        return grade, Finding(WARN if unseen(facts) else FAIL, text, advice)
    divergences = (found.divergences or 0) / max(found.chains * found.draws, 1)
    short = disagree or fewest < ENOUGH_DRAWS or divergences > MANY_DIVERGENCES
    return grade, Finding(WARN if short or not unseen(facts) else NOTE, text, advice)


def _wanted(facts: FitSummary) -> int:
    found = facts.diagnostics
    assert found is not None
    return min(ESS_TOTAL, ESS_PER_CHAIN * found.chains)


def _problems(facts: FitSummary) -> tuple[list[str], tuple[Recommendation, ...]]:
    """Return the problems of the chains, a clause each, and advice on them."""
    found = facts.diagnostics
    assert found is not None
    main = next(iter(found.judged.values()))
    what, space = max(found.judged.items(), key=lambda item: item[1].rhat_most)
    fewest, wanted = min(one.ess_most for one in found.judged.values()), _wanted(facts)
    problems, advice = [], []
    draws, warmup = int(facts.settings.get("draws") or 0), int(facts.settings.get("warmup") or 0)
    known = draws > 0 and warmup > 0
    if space.rhat_most > RHAT_USABLE:
        about = "" if space is main else f" about the {what}"
        problems.append(f"chains disagree{about} (R-hat up to {space.rhat_most:.2f}; {RHAT_GOOD} or less is good)")
        times = 4 if not space.rhat_most <= RHAT_POOR else 2
        if known:
            options = ("--set", f"draws={draws * times}", "--set", f"warmup={warmup * times}")
            advice.append(Recommendation(f"Run the chains {times} times as long.", refit_command(facts, *options)))
    elif fewest < wanted:
        problems.append(f"{fewest:,.0f} effective draws ({wanted} recommended)")
        times = math.ceil(wanted / max(fewest, 1))
        if known:
            command = refit_command(facts, "--set", f"draws={draws * times}")
            advice.append(Recommendation(f"Use {times} times as many draws.", command))
    if found.divergences:
        problems.append(f"{found.divergences:,} divergent trajector{'y' if found.divergences == 1 else 'ies'}")
        if "target_accept" in facts.settings:
            command = refit_command(facts, "--set", "target_accept=0.95")
            advice.append(Recommendation("Use smaller steps to avoid divergences.", command))
    if found.e_bfmi is not None and min(found.e_bfmi) < E_BFMI_LOW:
        problems.append(f"energy mixes slowly (E-BFMI {min(found.e_bfmi):.2f}; {E_BFMI_LOW} or more is good)")
        if known and not advice:
            advice.append(Recommendation("Warm up longer.", refit_command(facts, "--set", f"warmup={2 * warmup}")))
    return problems, tuple(advice)
