"""The benchmark suite: the same work in credibly and in its peers, interleaved in one run.

    python -m benchmarks --list                         # the cases, and which peers are installed
    python -m benchmarks --jax PYTHON                   # all CPU cases, under 15 min; PYTHON has jax, blackjax, numpyro
    python -m benchmarks --make-jax DIR                 # create such an environment in DIR first
    python -m benchmarks --cases hmc,ensemble           # some of them
    python -m benchmarks --device cuda --jax PYTHON     # the GPU cases
    python -m benchmarks --page docs/performance.md     # also insert the table into the page

Writes DIR/results.md and DIR/results.json (--out DIR). Installs nothing unless --make-jax is given.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks import peers, results, suite
from benchmarks.case import Setting
from benchmarks.floors import measure
from benchmarks.timing import machine


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    folder = {"metavar": "DIR", "type": Path}
    add("--list", action="store_true", help="list the cases and the peers, then exit")
    add("--cases", metavar="NAME,...", default=None, help="only these cases; hmc selects all that start with hmc-")
    add("--jax", metavar="PYTHON", default=None, help="an interpreter with jax, blackjax and numpyro")
    add("--make-jax", **folder, default=None, help="create such an environment in DIR and use it")
    add("--root", **folder, default=None, help="folder with uci/concrete.npz; without it diabetes is used")
    add("--budget", type=float, default=15.0, metavar="MINUTES", help="skip cases that would exceed it (default 15)")
    add("--repeats", type=int, default=5, help="repetitions per implementation (default 5)")
    add("--seconds", type=float, default=0.3, help="duration of one repetition (default 0.3)")
    add("--threads", type=int, default=None, help="torch threads and JAX cores (default: their own choice)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu (default) or cuda")
    add("--out", **folder, default=Path("bench-speed"), help="folder for the results (default bench-speed)")
    add(
        "--page", metavar="PATH", type=Path, default=None, help="a page to insert the results into, between its markers"
    )
    add("--quick", action="store_true", help="minimal work: a smoke test, not for timings")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    cases = suite.choose(suite.all_cases(), args.cases, args.device)
    if args.page is not None:
        results.check_page(args.page, args.device)
    python = str(peers.make_jax(args.make_jax)) if args.make_jax is not None else peers.jax_interpreter(args.jax)
    found = [*peers.find(), *peers.find_jax(python)]
    print("Peers:\n" + "\n".join(f"  {one}" for one in found))
    if args.list:
        print("\nCases:")
        for case in cases:
            print(f"  {case.name}: {case.work} Peers: {', '.join(case.peers)}. Goal: {case.goals or 'none'}.")
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no GPU")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    usable = python if all(one.version for one in found if one.name == "jax") else None
    setting = Setting(
        repeats=1 if args.quick else args.repeats,
        seconds=0.01 if args.quick else args.seconds,
        threads=args.threads,
        jax=usable,
        root=args.root,
        quick=args.quick,
        device=args.device,
    )
    about = {
        "machine": machine(args.device),
        "peers": {one.name: one.version for one in found},
        "device": args.device,
        "repeats": setting.repeats,
        "turn_s": setting.seconds,
        "quick": args.quick,
    }
    rates = measure(args.device, seconds=0.02 if args.quick else 0.3)
    print(f"\nRates: {rates}", flush=True)
    outcomes = suite.run_all(cases, setting, args.out / "cases", args.budget)
    text = results.write(args.out, about, outcomes, rates)
    if args.page is not None:
        results.rewrite_page(args.page, args.device, text)
    print(f"\n{text}\n{args.out / 'results.md'}")
    return 1 if any(one["failure"] and not one["failure"].startswith("left out") for one in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
