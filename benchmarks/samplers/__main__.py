"""Effective samples of predictions per second: our samplers beside BlackJAX, NumPyro, nutpie and bde.

    python -m benchmarks.samplers --root DIR --jax PYTHON --out results.json
    python -m benchmarks.samplers --page docs/results/samplers --results results.json

All sample the same posterior (inputs-50-1 with SiLU, learned noise, a Normal prior, float32) from the same starting
points for the same time, from the first warm-up step on; compilation is listed apart. bde has a density of its own:
only its log-likelihood and seconds are comparable. Runs that --out has already are skipped. The samplers and their
settings are in `benchmarks/samplers/settings.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.samplers import page, settings
from benchmarks.samplers.peers import Peers
from benchmarks.samplers.runs import Plan, merge, read, run_all
from benchmarks.timing import machine


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    found = argparse.ArgumentParser(
        "python -m benchmarks.samplers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--root", type=Path, metavar="DIR", help="folder with uci/<set>.npz")
    found.add_argument("--jax", metavar="PYTHON", help="an interpreter with jax and the peers; without it, ours alone")
    found.add_argument("--wheels", type=Path, metavar="DIR", help="folder of packages that --jax lacks (pip --target)")
    found.add_argument("--bde", metavar="PYTHON", help="an interpreter with sklearn-contrib-bde (default: --jax)")
    found.add_argument("--bde-wheels", type=Path, metavar="DIR", help="folder of packages that --bde lacks")
    found.add_argument("--sets", default="concrete,yacht,energy", help="UCI sets (default: %(default)s)")
    found.add_argument("--ours", help=f"among {', '.join(settings.OURS)} (default: all that exist)")
    found.add_argument("--peers", help=f'among {", ".join(settings.PEERS)}; "" for none (default: all)')
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    found.add_argument("--chains", type=int, default=None, help="default: 4 on a CPU, 512 on a GPU")
    found.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="per run (default 60)")
    found.add_argument("--repeats", type=int, default=3, help="repetitions, each with a seed of its own (default 3)")
    found.add_argument("--init", choices=("fresh", "prior", "ensemble"), default="fresh", help="starting points of all")
    found.add_argument("--threads", type=int, default=None, help="torch threads, and cores of the JAX process")
    found.add_argument("--out", type=Path, default=None, metavar="FILE", help="results.json; finished runs stay in it")
    found.add_argument("--quick", action="store_true", help="minimal lengths: a smoke test, not for timings")
    found.add_argument("--page", type=Path, metavar="DIR", help="write the results page there and run nothing")
    found.add_argument("--results", type=Path, nargs="+", default=[], metavar="FILE", help="stored runs for --page")
    found.add_argument("--mixing", type=Path, metavar="FILE", help="results of benchmarks.uci_mixing for --page")
    found.add_argument("--before", type=Path, metavar="CSV", help="results of the UCI study for --page, with R-hats")
    return found


def names(text: str | None) -> list[str] | None:
    """Return the names in a list with commas, None for None."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, or write its page."""
    options = parser()
    args = options.parse_args(arguments)
    if args.page is not None:
        page.write_page(merge(args.results), args.page, mixing=args.mixing, before=args.before)
        return
    if args.root is None:
        options.error("--root is required: the folder with uci/concrete.npz")
    if args.budget <= 0 or args.repeats < 1 or (args.chains is not None and args.chains < 1):
        options.error("--budget, --repeats and --chains must be positive")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    plan = Plan(
        root=args.root,
        sets=tuple(names(args.sets) or ()),
        ours=settings.ours(names(args.ours), args.quick),
        peers=settings.peers(names(args.peers), args.device, args.quick) if args.jax or args.bde else {},
        device=args.device,
        chains=args.chains or (4 if args.device == "cpu" else 512),
        budget=args.budget,
        repeats=args.repeats,
        init=args.init,
        out=args.out,
    )
    record = read(args.out)
    record["machine"] |= {args.device: machine(args.device)}
    print(f"# samplers\n\n{record['machine'][args.device]}\n", flush=True)
    peers = Peers(args.jax, args.wheels, args.bde or args.jax, args.bde_wheels, args.device, args.threads)
    try:
        run_all(plan, record, peers)
    finally:
        peers.close()
    print()
    print(page.summary(record))


if __name__ == "__main__":
    main()
