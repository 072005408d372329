"""Reading JSON from an untrusted folder: bounded in size, depth and digits, and without blocking."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from credibly.core.files import file_problem

# Bytes of the largest file that is parsed; Python objects can take thirty times as much.
MOST_BYTES = 2**24
# Digits of the largest integer: every count, seed and size has at most 64 bits.
MOST_DIGITS = 20
# Levels of lists and objects within each other, far below what Python's parser and json.dumps can take.
MOST_LEVELS = 64
# A whole string, also one without an end, or a bracket. The possessive repeats never backtrack, so a search takes time
# in proportion to the text.
STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


class FileProblem(Exception):
    """A file that is missing, unreadable or not JSON, with the reason."""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raise `FileProblem` with the reason if there is none."""
    content = read_text(path)
    if _levels(content) > MOST_LEVELS:
        raise FileProblem(f"its lists and objects are nested more than {MOST_LEVELS} levels deep")
    try:
        return json.loads(content, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise FileProblem(str(error).splitlines()[0][:200]) from error


def read_text(path: Path) -> str:
    """Return the text of a small file. Raise `FileProblem` with the reason if there is none."""
    problem = file_problem(path)
    if problem is not None:
        raise FileProblem(problem)
    try:
        size = os.stat(path).st_size
        if size > MOST_BYTES:
            raise FileProblem(f"it has {size:,} bytes, and at most {MOST_BYTES:,} are expected")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileProblem(f"it is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise FileProblem(str(error.strerror or error)) from error


def _levels(text: str) -> int:
    """Return how deeply lists and objects are nested."""
    deepest = level = 0
    for found in STRING_OR_BRACKET.finditer(text):
        first = text[found.start()]
        level += (first in "[{") - (first in "]}")
        deepest = max(deepest, level)
    return deepest


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number has {len(text):,} digits, and at most {MOST_DIGITS} are expected")
    return int(text)
