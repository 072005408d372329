"""When the chains of an HMC study count as mixed.

R-hat is rank-normalised and split, computed for the predictions at up to 500 test rows (means of tables, class
probabilities of images); the largest value counts. A setting has mixed if this worst R-hat, averaged over repeats, is
at most 1.05. Warm-up and draws of a study were fixed by R-hat alone, on a split and a subset that no study uses, before
its metrics were computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from credibly.posterior.draws import DrawsPosterior
from studies.hmc_parts import Cells, Task, summary

MIXED = 1.05
ROWS = 500
FIXED_FIRST = (
    f"Chains count as mixed if R-hat of the worst test row is at most {MIXED}, mean over repeats. Warm-up and draws "
    "were fixed by R-hat on a split and a subset that no study uses, before any metric was computed."
)


def worst_rhat(task: Task, posterior: DrawsPosterior) -> dict[str, float]:
    """Return the largest R-hat over predictions at the test rows."""
    found = posterior.diagnostics(task.x_test[:ROWS]).functions
    assert found is not None
    return {"worst_rhat": found.rhat_worst}


def has_mixed(cells: Cells, setting: str) -> bool:
    """Return whether the chains of a setting have mixed."""
    return summary(cells, setting, "worst_rhat")[0] <= MIXED


def mixing_sentences(groups: Mapping[str, Cells]) -> list[str]:
    """Return a sentence on the settings that have a worst R-hat: that all have mixed, or which have not."""
    measured = {g: {s: row for s, row in cells.items() if "worst_rhat" in row} for g, cells in groups.items()}
    missed = {g: [s for s in cells if not has_mixed(cells, s)] for g, cells in measured.items()}
    # A study with a single measured setting does not name it.
    text = "; ".join(f"{g} at {', '.join(s)}" if len(measured[g]) > 1 else g for g, s in missed.items() if s)
    if text:
        return [
            f"Chains have not mixed (R-hat of the worst test row above {MIXED}, mean over repeats) in {text}: there "
            "the metrics describe the chains as run."
        ]
    worst = (f"{g} {max(max(row['worst_rhat']) for row in cells.values()):.3f}" for g, cells in measured.items())
    return [f"All chains have mixed: R-hat of the worst test row, in the worst run: {', '.join(worst)}."]
