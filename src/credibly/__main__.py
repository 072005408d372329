"""Entry point of `python -m credibly` and `torchrun -m credibly`."""

from credibly.cli import main

main()
