"""Default NUTS and HMC on posteriordb's posteriors against reference draws, beside BlackJAX's NUTS.

    python -m benchmarks.posteriordb --jax PYTHON --out outcomes.jsonl        # about half an hour on an idle core
    python -m benchmarks.posteriordb --posteriors arK-arK,sblrc-blr --samplers NUTS
    python -m benchmarks.posteriordb --out outcomes.jsonl --page docs/results/posteriordb

Finished runs are kept in --out, and a repeated command runs those that are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks.jax_client import JaxSide
from benchmarks.posteriordb import page
from benchmarks.posteriordb.reference import referenced
from benchmarks.posteriordb.run import Outcome, run_blackjax, run_ours


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.posteriordb", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--posteriors", default=None, help="names, separated by commas (default: all with a reference)")
    add("--samplers", default=None, help=f"of {', '.join(page.SAMPLERS)}, separated by commas (default: all)")
    add("--jax", default=None, help="interpreter with jax and blackjax; without it BlackJAX is left out")
    add("--seed", type=int, default=0, help="seed of all runs (default 0)")
    add("--out", type=Path, default=Path("posteriordb.jsonl"), help="file of finished runs, a line of JSON each")
    add(
        "--page", type=Path, default=None, help="write results.csv and the tables of README.md in this folder, and stop"
    )
    return parser.parse_args(argv)


def read(path: Path) -> list[Outcome]:
    """Return the finished runs."""
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [Outcome(**{**line, "z": tuple(line["z"])}) for line in lines]


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parse(argv)
    if args.page is not None:
        page.write(args.page, read(args.out))
        return 0
    available = referenced()
    posteriors = args.posteriors.split(",") if args.posteriors else available
    samplers = args.samplers.split(",") if args.samplers else list(page.SAMPLERS)
    for name in [p for p in posteriors if p not in available] + [s for s in samplers if s not in page.SAMPLERS]:
        known = f"Posteriors: {', '.join(available)}. Samplers: {', '.join(page.SAMPLERS)}"
        print(f"unknown: {name!r}. {known}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    side = JaxSide(args.jax, threads=1) if args.jax and page.SAMPLERS[2] in samplers else None
    done = {(o.posterior, o.sampler, o.seed) for o in read(args.out)}
    for posterior in posteriors:
        for sampler in samplers:
            peer = sampler == page.SAMPLERS[2]
            if (posterior, sampler, args.seed) in done or (peer and side is None):
                continue
            one = run_blackjax(posterior, args.seed, side) if peer and side else run_ours(posterior, sampler, args.seed)
            with args.out.open("a") as file:
                file.write(json.dumps(one.record()) + "\n")
            z = ", ".join(f"{v:.1f}" for v in one.z)
            print(
                f"{posterior}, D = {one.dim}, {sampler}: {one.verdict}. |z| {z} (limit {one.limit:.1f}), R-hat "
                f"{one.rhat:.3f}, ESS {one.ess:.0f}, {1000 * one.per_gradient:.1f} per 1000 gradients, "
                f"{one.divergent:.1%} divergent {one.failure}",
                flush=True,
            )
    if side is not None:
        side.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
