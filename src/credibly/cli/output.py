"""All terminal output: control characters in text from tables and folders are escaped."""

from __future__ import annotations

import logging

import typer

from credibly.core.text import printable


def echo(text: str, *, err: bool = False) -> None:
    """Print text, on standard error if asked to."""
    typer.echo(printable(text), err=err)


def in_markup(text: str) -> str:
    """Return text for a rich table, with [brackets] escaped, which rich would treat as markup."""
    from rich.markup import escape

    return escape(printable(text))


class PrintableFormatter(logging.Formatter):
    """The format of log lines on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return printable(super().format(record))
