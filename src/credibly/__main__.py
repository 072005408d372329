"""`python -m credibly`, which is also how `torchrun -m credibly` starts the command line."""

from credibly.cli import main

main()
