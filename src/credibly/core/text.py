"""Make text from untrusted files safe to show on a terminal."""

from __future__ import annotations

import re

# Control characters except line breaks and tabs, and those that change the direction of text.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return text with control characters written out: an escape sequence becomes \x1b[2J and clears nothing."""
    return UNSAFE.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
