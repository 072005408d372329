"""Entry point of `credibly`, `python -m credibly` and `torchrun -m credibly`."""


def main() -> None:
    """Run the command line. Ctrl-C is handled before the first import that takes time."""
    # The built-in module: `signal` itself takes a few milliseconds to load.
    import _signal  # type: ignore[import-not-found]
    import os
    from typing import Any

    def end(number: int, frame: Any) -> None:
        os.write(2, b"credibly: stopped\n")
        os._exit(130)

    ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if ours:
        _signal.signal(_signal.SIGINT, end)
    from credibly.core import interrupts

    if ours:
        _signal.signal(_signal.SIGINT, interrupts.handle)
    from credibly.cli import main as run

    run()


if __name__ == "__main__":
    main()
