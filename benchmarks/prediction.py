"""Predictive mean and variance of 100,000 rows with 1,000 draws, against a loop over the draws and NumPyro.

    python -m benchmarks.prediction --jax PYTHON        # about a minute

The loop computes the outputs of all rows for every draw and accumulates them and their squares. NumPyro's `Predictive`
maps over the draws too, keeps all outputs, and reduces them inside one jitted function. Ours is `posterior.predict(x)`
with the mean, the variance and its decomposition. All give the same mean and variance, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.func import functional_call

import credibly as cr
from benchmarks.case import Case, Setting
from benchmarks.floors import Floor, forward_flops
from benchmarks.suite import print_rows
from benchmarks.timing import Goal, Row, interleaved, options, report
from credibly.posterior.model import Model
from credibly.storage.record import Record

SIZES = [13, 50, 1]
DRAWS, ROWS = 1_000, 100_000


def setup(draws: int, rows: int) -> tuple[cr.DrawsPosterior, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, SIZES[0], generator=generator)
    likelihood = cr.likelihoods.Gaussian(scale=0.5)
    problem = cr.Problem(cr.zoo.mlp(13, (50,), 1), (x[:50], x[:50, :1]), likelihood, cr.priors.Normal(1.0))
    theta = 0.3 * torch.randn(1, draws, problem.dim, generator=generator)
    return cr.DrawsPosterior(Model.of(problem), theta, Record(method="benchmark")), x


def loop(posterior: cr.DrawsPosterior, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of the network over the draws."""
    layout = posterior.model.layout
    total, squares = torch.zeros(len(x), 1), torch.zeros(len(x), 1)
    with torch.no_grad():
        for theta in posterior.draws[0]:
            out = functional_call(layout.module, layout.split(theta)[0], (x,))
            total += out
            squares += out.square()
    count = posterior.draws.shape[1]
    mean = total / count
    return mean[:, 0], (squares / count - mean.square())[:, 0]


def comparisons(setting: Setting) -> Iterator[Row]:
    draws, rows = (20, 500) if setting.quick else (DRAWS, ROWS)
    posterior, x = setup(draws, rows)

    def ours() -> tuple[Tensor, Tensor]:
        found = posterior.predict(x)
        return found.mean[:, 0], found.epistemic[:, 0]

    mean, variance = ours()
    for mine, theirs in zip((mean, variance), loop(posterior, x)):
        if not float((mine - theirs).abs().max() / theirs.abs().max()) < 1e-3:
            raise SystemExit("the loop over draws gives other values: nothing to compare")
    implementations: dict[str, Callable[[], object]] = {"ours": ours, "loop": lambda: loop(posterior, x)}
    with setting.jax_side() as side:
        if side is not None and side.has("numpyro"):
            peer = side.build("numpyro_predictive", {"sizes": SIZES, "prior": 1.0}, x=x, theta=posterior.draws[0])
            for key, mine in (("mean", mean), ("variance", variance)):
                if not torch.allclose(torch.tensor(peer.info[key]), mine[:5].float(), rtol=1e-2, atol=1e-3):
                    raise SystemExit(f"NumPyro's Predictive gives another {key}: nothing to compare")
            implementations["numpyro"] = peer
        times = interleaved(implementations, repeats=min(3, setting.repeats), seconds=setting.seconds, warm=1)
    what = f"{draws:,} draws x {rows:,} rows of 13-50-1: mean and variance"
    floor = Floor(draws * forward_flops(SIZES, rows))
    for key, name, goal in (("loop", "loop over draws", 3.0), ("numpyro", "NumPyro Predictive", 1.0)):
        if key in times:
            yield Row(what, times["ours"], times[key], Goal(">=", goal), inverse=True, peer=name, floor=floor)


def cases() -> list[Case]:
    return [
        Case(
            "prediction",
            "Mean and variance of 13-50-1 at 100,000 rows under 1,000 draws.",
            "matrix products at four fifths of the FMA rate, and two thirds as long for 5 billion activations.",
            comparisons,
            1.2,
            goals="3 against the loop, 1 against NumPyro",
            peers=("loop over draws", "NumPyro Predictive"),
        )
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--jax", default=None, metavar="PYTHON", help="an interpreter with jax and numpyro")
    args = parser.parse_args()
    with report("prediction", args) as record:
        found = list(comparisons(Setting(args.repeats, args.seconds, args.threads, args.jax)))
        print_rows(found, record)


if __name__ == "__main__":
    main()
