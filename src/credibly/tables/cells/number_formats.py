"""Numbers as people write them: 2,960.0 and 1.234,50, with currency, per cent, parentheses and thin spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Mask = npt.NDArray[np.bool_]

# Plain numbers, with a point and with a comma as the decimal mark.
NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:inf|infinity))$"
_WITH_COMMA = NUMBER.replace(r"\.", ",")

_CODES = "USD|EUR|GBP|CHF|JPY|CNY|INR|CAD|AUD|NZD|SEK|NOK|DKK|PLN|CZK|BRL|MXN|ZAR|KRW"
_UNIT = rf"(?:(?:US|CA|AU|NZ|HK|[ACR])?[$€£¥₹₩₽₺₪฿]|(?:{_CODES})\b)"
_SPACES = "[\u00a0\u2007\u2009\u202f]"


def fits(column: Any, decimal: str) -> Mask:
    """Return which texts are numbers under a decimal mark, "." or ",". False where a cell is null."""
    bare, negative = _bare(column)
    grouped = pc.match_substring_regex(bare, _grouped(decimal))
    # Parentheses mean a negative number, so a sign inside them is a contradiction.
    signed = pc.and_(negative, pc.match_substring_regex(bare, "^[+-]"))
    return _mask(pc.or_(pc.and_not(grouped, signed), is_plain(column, decimal)))


def is_plain(column: Any, decimal: str = ".") -> Any:
    """Return which texts are numbers that need no interpretation, as an Arrow array of booleans."""
    return pc.match_substring_regex(column, NUMBER if decimal == "." else _WITH_COMMA)


def decimal_mark(column: Any, default: str) -> str:
    """Return the decimal mark under which more texts of a column are numbers; the default if both fit equally."""
    # Cells that are plain numbers under both marks are no evidence for either.
    column = column.filter(pc.invert(pc.match_substring_regex(column, r"^[+-]?\d+$")))
    point, comma = fits(column, ".").sum(), fits(column, ",").sum()
    return default if point == comma else "." if point > comma else ","


def parse(column: Any, decimal: str) -> tuple[npt.NDArray[np.float64], Mask]:
    """Return stripped texts as float64, NaN where they are not numbers, and which of them are."""
    plain = _mask(is_plain(column, decimal))
    values = np.full(len(column), np.nan)
    values[plain] = _cast(column.filter(pa.array(plain)), decimal)
    rest = np.flatnonzero(~plain & np.asarray(column.is_valid()))
    if not len(rest):
        return values, plain
    cells = column.take(pa.array(rest))
    good = fits(cells, decimal)
    bare, negative = _bare(cells.filter(pa.array(good)))
    bare = pc.replace_substring_regex(bare, "[ '’,]" if decimal == "." else "[ '’.]", "")
    values[rest[good]] = _cast(bare, decimal) * np.where(_mask(negative), -1.0, 1.0)
    # A number such as 1.5 is clear even if commas are expected; 1.234 is not, and was read as 1234 above.
    other = ~good & _mask(is_plain(cells))
    values[rest[other]] = _cast(cells.filter(pa.array(other)), ".")
    plain[rest[good | other]] = True
    return values, plain


def describe_format(column: Any, decimal: str) -> str:
    """Return a remark on how the numbers of a column are written; empty if all of them are plain."""
    unusual = column.filter(pc.invert(is_plain(column, decimal)))
    unusual = unusual.filter(pa.array(fits(unusual, decimal)))
    if not len(unusual):
        return ""
    cell = unusual[0].as_py()
    percent = _mask(pc.match_substring(unusual, "%")).sum()
    note = f"read as numbers: {cell} is {parse(unusual.slice(0, 1), decimal)[0][0]:.10g}"
    return note + ("; some cells have a % sign and some have none" if 0 < percent < len(column) else "")


def _grouped(decimal: str) -> str:
    """Return the pattern of numbers with groups of three digits (also 12,34,567), the same separator throughout."""
    mark = rf"\{decimal}"
    separators = ("," if decimal == "." else r"\.", " ", "'", "’")
    groups = [rf"\d{{1,3}}({separator}\d{{3}})+" for separator in separators]
    indian = [r"\d{1,2}(,\d{2})+,\d{3}"] if decimal == "." else []
    whole = "|".join([r"\d+", *groups, *indian])
    return rf"^[+-]?(({whole})({mark}\d*)?|{mark}\d+)$"


def _bare(column: Any) -> tuple[Any, Any]:
    """Return texts without currency, per cent and parentheses, and which were in parentheses."""
    text = pc.replace_substring_regex(pc.utf8_trim_whitespace(column), _SPACES, " ")
    text = _without_units(pc.replace_substring(text, "\u2212", "-"))
    negative = pc.match_substring_regex(text, r"^\(.*\)$")
    return _without_units(pc.replace_substring_regex(text, r"^\(\s*(.*?)\s*\)$", r"\1")), negative


def _without_units(text: Any) -> Any:
    text = pc.replace_substring_regex(text, rf"^([+-]?)\s*{_UNIT}\s*", r"\1")
    return pc.replace_substring_regex(text, rf"\s*(?:{_UNIT}|%)$", "")


def _cast(column: Any, decimal: str) -> npt.NDArray[np.float64]:
    column = column if decimal == "." else pc.replace_substring(column, decimal, ".")
    values: npt.NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return values


def _mask(found: Any) -> Mask:
    made: Mask = np.asarray(pc.fill_null(found, False))
    return made
