"""The verdict on a fit in plain words: good, use with care, or do not trust, each reason drawn from a number.

A finding that rests on a number that is missing is not made. Nothing here knows how a method works; what it needs to know of
one it reads off the predictions (one draw has no epistemic uncertainty) or off the chains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from credibly.diagnostics.verdict import E_BFMI_LOW, ESS_PER_CHAIN, ESS_TOTAL, RHAT_POOR, RHAT_USABLE
from credibly.metrics import scores as metrics
from credibly.report.counsel import again, compare, noise_of, sample, vary_noise
from credibly.report.page import Step
from credibly.report.row_statistics import (
    confidence_gap,
    density_of_rows,
    error_with_size,
    halves,
    shares_inside,
    standard_error,
    told_apart,
)
from credibly.report.tables import LEVEL, number
from credibly.tables.fit_summary import Facts

FOR, NOTE, CARE, STOP = range(4)  # how much a finding weighs
ORDER = (STOP, CARE, FOR, NOTE)  # what speaks against a fit first, then what speaks for it
MARKS = ("for", "note", "care", "stop")
VERDICTS = ("good", "use with care", "do not trust")
LOWER = (0.5, 0.8)  # levels of intervals that are looked at beside 90%
FEW_HELD_OUT, ENOUGH_HELD_OUT = 30, 100
FEW_ROWS, ENOUGH_ROWS = 30, 100


@dataclass(frozen=True)
class Finding:
    """A sentence about the fit, how much it weighs (FOR, NOTE, CARE or STOP), and what to do about it."""

    weight: int
    words: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """One of VERDICTS, the same in a sentence, and all findings: those against the fit first."""

    verdict: str
    headline: str
    findings: tuple[Finding, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """The sentences of the findings."""
        return tuple(finding.words for finding in self.findings)

    @property
    def steps(self) -> tuple[Step, ...]:
        """What to do next, each thing once."""
        return tuple(dict.fromkeys(step for finding in self.findings for step in finding.steps))


def judge(facts: Facts) -> tuple[str, ...]:
    """The verdict as sentences: its headline, then the reasons."""
    found = assess(facts)
    return (found.headline, *found.reasons)


def assess(facts: Facts) -> Judgement:
    """The verdict on a fit, from the numbers there are."""
    made = [
        _rows_judged_on(facts),
        _baseline(facts),
        _coverage(facts),
        _other_levels(facts),
        _confidence(facts),
        _chains(facts),
        _doubt(facts),
        _size(facts),
        _strange_rows(facts),
        _changing_noise(facts),
        _tails(facts),
        _unsure_is_wrong(facts),
    ]
    findings = sorted((f for f in made if f is not None), key=lambda f: ORDER.index(f.weight))
    heaviest = max((f.weight for f in findings), default=NOTE)
    against = sum(f.weight >= CARE for f in findings)
    if heaviest == STOP:
        headline = "Do not trust: the first of the reasons below is why these predictions are of no use as they are."
        return Judgement(VERDICTS[2], headline, tuple(findings))
    if heaviest == CARE:
        which = "the first reason below says" if against == 1 else f"the first {against} reasons below say"
        return Judgement(
            VERDICTS[1], f"Use with care: {which} where these predictions have their limits.", tuple(findings)
        )
    headline = f"Good: no figure here speaks against these predictions, for rows like those of {facts.table}."
    return Judgement(VERDICTS[0], headline, tuple(findings))


# -- findings


def _rows_judged_on(facts: Facts) -> Finding | None:
    n = len(facts.y)
    if facts.on == "training":
        step = Step(
            "Keep a fifth of the rows back, to see how new rows are predicted.", again(facts, "--holdout", "0.2")
        )
        words = "No rows were held out: every figure is of rows that the model has seen, and new rows will be predicted worse."
        return Finding(CARE, words, (step,))
    if n >= ENOUGH_HELD_OUT:
        return None
    error = 2 * metrics.coverage_standard_error(LEVEL, n)
    words = f"The figures rest on {n} held-out rows: a coverage of 90% can only be known to within {error:.0%}."
    step = Step(
        "Judge it by more rows: hold more of them back, or evaluate the run on a table of its own.",
        again(facts, "--holdout", "0.4"),
    )
    return Finding(CARE if n < FEW_HELD_OUT else NOTE, words, (step,) if n < FEW_HELD_OUT else ())


def _baseline(facts: Facts) -> Finding | None:
    always = "the training mean" if facts.task == "regression" else "the training shares of the classes"
    own, base = facts.figures.get("log_density"), facts.baseline.get("log_density")
    if own is None or base is None or math.isnan(own) or math.isnan(base):
        return None
    if own == -math.inf:
        return Finding(
            STOP, "At least one observed value was given no probability at all (log density minus infinity)."
        )
    error = standard_error(density_of_rows(facts))
    gain, beside = own - base, f"log density {number(own)} against {number(base)} nats a row"
    counsel = (
        Step("Ask whether the columns can tell the target at all; add columns or rows that can."),
        Step("See whether another method does better on the same rows.", compare(facts)),
    )
    if gain <= 0:
        return Finding(STOP, f"No better than always predicting {always}: {beside}.", counsel)
    if gain <= 2 * error:
        words = f"Not clearly better than always predicting {always}: {beside}, a lead within its error of ± {2 * error:.2g}."
        return Finding(CARE, words, counsel)
    return Finding(FOR, f"Better than always predicting {always}: {beside}{_by_how_much(facts)}.")


def _by_how_much(facts: Facts) -> str:
    if facts.task == "regression":
        own, base = facts.figures.get("rmse"), facts.baseline.get("rmse")
        return f"; the typical error is {number(own)} instead of {number(base)}" if own is not None and base else ""
    own, base = facts.figures.get("accuracy"), facts.baseline.get("accuracy")
    return f"; {own:.0%} of the classes are right instead of {base:.0%}" if own is not None and base is not None else ""


def _coverage(facts: Facts) -> Finding | None:
    held = facts.figures.get("coverage")
    if held is None or math.isnan(held):
        return None
    n = len(facts.y)
    error = metrics.coverage_standard_error(LEVEL, n)
    what = "90% intervals hold" if facts.task == "regression" else "90% sets of classes hold"
    low, high = max(LEVEL - 2 * error, 0), min(LEVEL + 2 * error, 1)
    chance = f"with {n} rows, {low:.0%} to {high:.0%} is within chance"
    if held < low:
        much = held < LEVEL - 4 * error and held < 0.8
        words = f"Overconfident: the {what} only {held:.1%} of the values, and {chance}."
        return Finding(STOP if much else CARE, words, (*vary_noise(facts), *sample(facts)))
    if facts.task == "regression" and held > high:
        words = f"Cautious: the {what} {held:.1%} of the values ({chance}), so intervals are wider than they need be."
        return Finding(NOTE, words)
    if facts.task == "classification":
        return Finding(FOR, f"The {what} the right class for {held:.1%} of the rows, as promised or better.")
    return Finding(FOR, f"The {what} {held:.1%} of the values: {chance}.")


def _other_levels(facts: Facts) -> Finding | None:
    """Intervals of lower levels, which may be too narrow where those of 90% are not; at a stricter limit, being several."""
    if facts.task != "regression" or "coverage" not in facts.figures:
        return None
    found = []
    for level, share in zip(LOWER, shares_inside(facts, LOWER)):
        error = metrics.coverage_standard_error(level, len(facts.y))
        if share < level - 2.5 * error:
            found.append(
                f"the {level:.0%} intervals hold {share:.1%} (at least {level - 2.5 * error:.0%} was to be expected)"
            )
    if not found:
        return None
    return Finding(CARE, f"Overconfident at lower levels: {', '.join(found)}.", (*vary_noise(facts), *sample(facts)))


def _confidence(facts: Facts) -> Finding | None:
    found = confidence_gap(facts)
    if found is None:
        return None
    sure, right, error = found
    words = f"it is {sure:.1%} sure on average and right in {right:.1%} of the rows"
    if sure > right + 2 * error:
        much = sure > right + 4 * error and sure - right > 0.05
        return Finding(
            STOP if much else CARE, f"Too sure of itself: {words}, more of a gap than chance gives.", sample(facts)
        )
    if sure < right - 2 * error:
        much = sure < right - 4 * error and right - sure > 0.1
        return Finding(CARE if much else NOTE, f"Less sure than it could be: {words}.")
    return Finding(FOR, f"As sure as it is right: {words}, a gap within chance.")


def _chains(facts: Facts) -> Finding | None:
    found = facts.diagnostics
    if found is None:
        return None
    seen = found.functions or found.weights
    wanted = min(ESS_TOTAL, ESS_PER_CHAIN * found.chains)
    if found.ok:
        words = f"The chains agree (R-hat up to {seen.rhat_most:.3f}, 1 is perfect), and are worth {seen.ess_most:,.0f} independent draws."
        return Finding(FOR, words)
    poor = not seen.moving or bool(found.still) or not seen.rhat_most <= RHAT_POOR
    if not seen.moving or found.still or seen.nonfinite:
        return Finding(STOP, f"The chains failed. {found.verdict}")
    said, steps = [], []
    draws, warmup = int(facts.settings.get("draws") or 0), int(facts.settings.get("warmup") or 0)
    known = draws > 0 and warmup > 0
    if seen.rhat_most > RHAT_USABLE:
        said.append(
            f"chains that started elsewhere predict otherwise (R-hat up to {seen.rhat_most:.2f}, where 1.01 is good)"
        )
        times = 4 if poor else 2
        if known:
            options = ("--set", f"draws={draws * times}", "--set", f"warmup={warmup * times}")
            steps.append(Step(f"Run the chains {times} times as long.", again(facts, *options)))
    elif seen.ess_most < wanted:
        said.append(f"its draws are worth only {seen.ess_most:,.0f} independent ones, where {wanted} are wanted")
        times = math.ceil(wanted / max(seen.ess_most, 1))
        if known:
            steps.append(Step(f"Take {times} times as many draws.", again(facts, "--set", f"draws={draws * times}")))
    if found.divergences:
        said.append(f"{found.divergences:,} of its trajectories diverged")
        if "target_accept" in facts.settings:
            command = again(facts, "--set", "target_accept=0.95")
            steps.append(Step("Take smaller steps, so that no trajectory diverges.", command))
    if found.e_bfmi is not None and min(found.e_bfmi) < E_BFMI_LOW:
        said.append(
            f"the energy of a chain changes too slowly (E-BFMI {min(found.e_bfmi):.2f}, where {E_BFMI_LOW} is wanted)"
        )
        if known and not steps:
            steps.append(Step("Warm up longer.", again(facts, "--set", f"warmup={2 * warmup}")))
    words = f"The posterior is not explored well enough: {'; '.join(said)}." if said else f"The chains: {found.verdict}"
    return Finding(STOP if poor else CARE, words, tuple(steps))


def _doubt(facts: Facts) -> Finding | None:
    if float(facts.predictive.epistemic.max()) > 0:
        return None
    what = "one set of weights" if facts.predictive.draws == 1 else "no disagreement between its draws"
    words = (
        f"{facts.method} has {what}, so it has no epistemic uncertainty: it is as sure far away from the data as among them, "
        "and cannot say which rows are strange to it."
    )
    return Finding(CARE, words, sample(facts))


def _size(facts: Facts) -> Finding | None:
    if facts.rows < ENOUGH_ROWS:
        words = f"{facts.rows} rows are few to learn from: every further row counts."
        return Finding(
            CARE if facts.rows < FEW_ROWS else NOTE, words, (Step("Add rows, if there is any way to have more."),)
        )
    if facts.rows >= facts.parameters:
        return None
    ratio = f"The network has {facts.parameters:,} parameters for {facts.rows:,} rows"
    if facts.method == "mle":
        return Finding(
            CARE, f"{ratio}, and nothing but the rows to hold them: it may have learned rows by heart.", sample(facts)
        )
    return Finding(NOTE, f"{ratio}: where the rows say nothing, predictions follow the prior.")


def _strange_rows(facts: Facts) -> Finding | None:
    found = told_apart(facts)
    if found is None:
        return None
    area, error = found
    if area - 2 * error > 0.5:
        return Finding(FOR, f"It is less sure of strange rows: {_area_words(area)}")
    words = (
        f"Rows with shuffled columns are not told from those of the table (AUROC {area:.2f}, 0.5 is a coin): either the columns "
        "have little to do with one another, or the model does not notice. Do not rely on the ood column to find strange rows."
    )
    return Finding(NOTE, words)


def _area_words(area: float) -> str:
    times = f"{100 * area:.0f} of 100 times"
    return f"of a row with shuffled columns and one of the table, the shuffled one has the higher ood score {times}."


def _changing_noise(facts: Facts) -> Finding | None:
    if facts.task != "regression" or noise_of(facts) == "heteroscedastic" or len(facts.y) < 50:
        return None
    correlation = error_with_size(facts)
    if correlation is None or abs(correlation) < 3 / math.sqrt(len(facts.y) - 1):
        return None
    way = "grow" if correlation > 0 else "shrink"
    words = (
        f"Errors {way} with the predicted value (rank correlation {correlation:.2f}) more than the intervals do: those of large "
        f"predictions are too {'narrow' if correlation > 0 else 'wide'}, those of small ones too "
        f"{'wide' if correlation > 0 else 'narrow'}."
    )
    return Finding(CARE, words, vary_noise(facts))


def _tails(facts: Facts) -> Finding | None:
    if facts.task != "regression" or noise_of(facts) == "student":
        return None
    error = torch.as_tensor(facts.y) - facts.predictive.mean.cpu().double()
    far = int((error.abs() > 4 * facts.predictive.std.cpu().double()).sum())
    if far < max(2, 0.001 * len(facts.y)):  # a normal has 6 in 100,000
        return None
    words = f"{far} of {len(facts.y):,} values lie more than 4 deviations from their prediction, where a normal has next to none."
    return Finding(CARE, words, (Step("Take a noise with heavy tails.", again(facts, "--noise", "student")),))


def _unsure_is_wrong(facts: Facts) -> Finding | None:
    found = halves(facts)
    if found is None:
        return None
    sure, rest, error = found
    if facts.task == "regression":
        shown = f"a typical error of {number(math.sqrt(sure))} in the surer half of the rows, {number(math.sqrt(rest))} in the other"
    else:
        shown = f"{sure:.1%} wrong in the surer half of the rows, {rest:.1%} in the other"
    if rest - sure > 2 * error:
        return Finding(FOR, f"Where it is unsure it errs more: {shown}.")
    if sure - rest > 3 * error:
        return Finding(CARE, f"Where it is sure it errs more, which is the wrong way round: {shown}.", sample(facts))
    return Finding(NOTE, f"How sure it is says little about its error here: {shown}, a difference within chance.")
