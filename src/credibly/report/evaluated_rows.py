"""Phrases that describe the rows behind the metrics of a page."""

from __future__ import annotations

from credibly.tables.fit_summary import FitSummary


def unseen(facts: FitSummary) -> bool:
    """Return whether no evaluated row was used by the fit that predicts it."""
    return facts.on != "training"


def kind_of_rows(facts: FitSummary) -> str:
    """Return the kind of rows in a few words, such as "held-out rows"."""
    return f"rows of {facts.evaluated}" if facts.on == "new" and facts.evaluated else f"{facts.on} rows"


def count_of_rows(facts: FitSummary) -> str:
    """Return how many rows of which kind were evaluated, as part of a sentence."""
    n = len(facts.y)
    if facts.on == "training":
        return f"{n:,} of the training rows"
    if facts.on == "new":
        return f"{n:,} {'row' if n == 1 else 'rows'} of {facts.evaluated or 'another table'}"
    return f"{n:,} {facts.on} {'row' if n == 1 else 'rows'}"


def origin(facts: FitSummary) -> str:
    """Return a sentence on where the predictions behind the metrics come from."""
    n = len(facts.y)
    others = f"to rows with other values of {facts.group}" if facts.group is not None else "to other rows"
    if facts.on == "cross-validated":
        return (
            f"All metrics are cross-validated: each of the {n:,} rows is predicted by a fit {others}. The fit "
            "that predicts new rows has used all of them."
        )
    if facts.on == "training":
        return f"All metrics are on {n:,} rows that the fit has seen. Expect worse on new data."
    if facts.on == "new":
        seen = "the table of the fit, which has seen most of them" if facts.evaluated == facts.table else ""
        seen = seen or f"which the fit has not seen, unless {facts.table} contains them"
        return f"All metrics are on {count_of_rows(facts)}, {seen}."
    which = "" if facts.time is None else f", the latest by {facts.time}"
    if facts.refitted:
        others = "the earlier ones" if facts.time is not None else others.removeprefix("to ")
        others = "the others" if others == "other rows" else others
        return (
            f"All metrics are on {n:,} rows{which}, predicted by a fit to {others}. The fit that predicts new rows has "
            "used all of them."
        )
    kept = "" if facts.group is None else f", together with all rows of the same {facts.group}"
    return f"All metrics are on {n:,} rows{which}{',' if which else ''} that were held out of the fit{kept}."
