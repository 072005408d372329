"""The `credibly` command group: with --json, every error is one JSON object on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from credibly.cli.error_handling import FAILED, INVALID, STOPPED, json_errors, report_error


class CommandGroup(TyperGroup):
    """A group whose commands report all failures as JSON if --json is given, including those before they start."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.help = _unwrapped(self.help)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.help = _unwrapped(command.help)
        return command

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run the command given by the arguments and exit."""
        words = list(sys.argv[1:] if args is None else args)
        if not _asks_for_json(words) or not options.get("standalone_mode", True):
            return super().main(args, *rest, **options)
        with json_errors() as state:
            try:
                code = super().main(words, *rest, **options | {"standalone_mode": False})
            except typer.Abort:
                report_error("stopped", STOPPED, kind="Interrupted")
                code = STOPPED
            except Exception as error:
                if not hasattr(error, "format_message"):
                    # A defect: the traceback follows on standard error.
                    report_error(f"{type(error).__name__}: {error}", FAILED, kind=type(error).__name__)
                    raise
                code = _report_usage(error)
            code = code if isinstance(code, int) else 0
            if code and not state.written:
                kind, message = ("Interrupted", "stopped") if code == STOPPED else ("Exit", f"exit code {code}")
                report_error(message, code, kind=kind)
        sys.exit(code)


def _unwrapped(text: str | None) -> str | None:
    """Return help with a line per paragraph: the terminal wraps them at its width, instead of at that of the source."""
    return text and "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _asks_for_json(words: list[str]) -> bool:
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


def _report_usage(error: Any) -> int:
    """Report an option or argument that is unknown, missing or of the wrong type."""
    param, context = getattr(error, "param", None), getattr(error, "ctx", None)
    argument = getattr(error, "option_name", None)
    if param is not None:
        argument = max(param.opts, key=len) if param.param_type_name == "option" else param.metavar or param.name
    command = "credibly" if context is None else context.command_path
    code = int(getattr(error, "exit_code", INVALID))
    message = error.format_message().strip().removesuffix(".")
    report_error(message, code, kind="UsageError", argument=argument, advice=f"See {command} --help")
    return code
