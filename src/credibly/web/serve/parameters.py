"""The query parameters of a prediction, named as the options of `credibly predict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from credibly.core.checks import check_integer, check_positive, check_probability
from credibly.core.levels import LEVELS, check_levels
from credibly.errors import InputError
from credibly.tables.guarantee import check_promise
from credibly.tables.prediction_columns import check_times

if TYPE_CHECKING:
    from credibly.tables.model import TableModel

# Maximum number of levels and times per request: each adds columns to the response.
MOST = 20
NAMES = {
    "level": "Levels of the intervals or prediction sets, such as 0.8,0.95.",
    "at": "Times at which to return the probability of survival, such as 12,24. Censored times only.",
    "allow_empty": "Let prediction sets of classes be empty (true or false).",
    "draws": "Number of posterior draws to use: fewer are faster and less accurate.",
    "guarantee": "Whether intervals and sets carry the coverage guarantee (true) or are those of the posterior (false),"
    " which is faster.",
    "strict": "true rejects absent and unknown columns and cells that do not fit; false treats them as `credibly"
    " predict` does: as missing, with a note.",
    "risk": "Adds `abstain`: of the rows that are not abstained from, at most this fraction is wrong.",
    "confidence": "Probability that the guarantee of `risk` holds.",
    "tolerance": "Error from which on a predicted number counts as wrong, in units of the target; with `risk`.",
}


@dataclass(frozen=True)
class Parameters:
    """The parameters of a request other than its rows."""

    levels: tuple[float, ...] = LEVELS
    times: tuple[float, ...] = ()
    allow_empty: bool = False
    draws: int | None = None
    guarantee: bool = True
    strict: bool = True
    risk: float | None = None
    confidence: float = 0.95
    tolerance: float | None = None


def parse_parameters(query: Mapping[str, str], model: TableModel, risk: float | None) -> Parameters:
    """Return the parameters of a query string. Raise `InputError` if the model does not support them."""
    for name in query:
        if name not in NAMES:
            raise InputError(name, "is not a parameter", f"The parameters are {', '.join(NAMES)}")
    levels = check_levels("level", _list("level", query["level"])) if "level" in query else LEVELS
    times = check_times("at", _list("at", query["at"])) if "at" in query else ()
    draws = _integer("draws", query["draws"]) if "draws" in query else None
    if draws is not None:
        check_integer("draws", draws)
    found = Parameters(
        levels,
        times,
        _flag("allow_empty", query.get("allow_empty", "false")),
        draws,
        _flag("guarantee", query.get("guarantee", "true")),
        _flag("strict", query.get("strict", "true")),
        _number("risk", query["risk"]) if "risk" in query else risk,
        _number("confidence", query.get("confidence", "0.95")),
        _number("tolerance", query["tolerance"]) if "tolerance" in query else None,
    )
    _check(found, query, model)
    return found


def _check(found: Parameters, query: Mapping[str, str], model: TableModel) -> None:
    known, promised = model.preparation, model.calibration is not None and found.guarantee
    if known.classes is not None and "level" in query and not promised:
        raise InputError("level", "is for prediction sets, which this response has none of", "Leave it out")
    if promised and model.calibration is not None:
        try:
            check_promise("level", max(found.levels), model.calibration.rows)
        except InputError as error:
            if known.classes is not None:
                raise
            # Unlike the command line, a request can do without the guarantee.
            advice = "Pass a lower level, or guarantee=false for intervals of the posterior"
            raise InputError(error.argument, error.found, advice) from None
    if found.allow_empty and (known.classes is None or not promised):
        raise InputError("allow_empty", "is for prediction sets, which this response has none of", "Leave it out")
    if found.times and known.task != "survival":
        raise InputError("at", f"is for censored times, this is {known.task}", "Leave it out")
    if found.risk is not None:
        check_probability("risk", found.risk)
    if found.tolerance is not None:
        check_positive("tolerance", found.tolerance)
    check_probability("confidence", found.confidence)


def _list(name: str, text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if len(found) > MOST or not found:
        raise InputError(name, f"must be a list of 1 to {MOST} numbers, got {len(found)}")
    return found


def _flag(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise InputError(name, f"must be true or false, got {text[:40]!r}")
    return text == "true"


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(name, f"must be a number, got {text[:40]!r}") from None


def _integer(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InputError(name, f"must be a positive integer, got {text[:40]!r}")
    return int(text)
