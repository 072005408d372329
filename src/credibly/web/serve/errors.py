"""Errors of a request: a status, and one line with what is wrong and how to fix it."""

from __future__ import annotations

from typing import Any

from credibly.errors import InputError

# Longest message: a request must not decide how long its answer is.
LONGEST = 1_000


class RequestError(Exception):
    """A request that cannot be answered.

    Args:
        status: the HTTP status.
        message: what is wrong.
        argument: the column or parameter it is about, if it is about one.
        advice: what to do about it.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        argument: str | None = None,
        advice: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.argument = argument
        self.advice = advice
        self.headers = headers or {}

    @classmethod
    def of(cls, error: InputError, status: int = 422) -> RequestError:
        """Return the error for an argument that cannot be used."""
        message = str(error).removesuffix(f". {error.advice}") if error.advice else str(error)
        return cls(status, message, argument=error.argument, advice=error.advice)

    def content(self) -> dict[str, Any]:
        """Return the body of the response, with the fields that the command line writes with --json."""
        argument = None if self.argument is None else printable(self.argument)
        message, advice = printable(self.message), printable(self.advice)
        kind = "InputError" if self.status < 500 else "ServerError"
        return {
            "error": {
                "type": kind,
                "status": self.status,
                "argument": argument,
                "message": message,
                "advice": advice,
            }
        }


def printable(text: str) -> str:
    """Return text on one line, of limited length, with control characters and lone surrogates escaped."""
    found = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: LONGEST + 1])
    return found if len(found) <= LONGEST else found[: LONGEST - 3] + "..."
