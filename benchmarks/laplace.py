"""The Laplace approximation against laplace-torch: time of the curvature pass, and agreement of the results.

    python -m benchmarks.laplace                    # about fifteen minutes on two cores: 60,000 rows
    python -m benchmarks.laplace --rows 6000        # a tenth of it
    python -m benchmarks.laplace --case same        # only the agreement
    python -m benchmarks.laplace --json out.json

laplace-torch is not a dependency; without it the comparison is skipped with a message. To install it, in its own
environment:

    pip install --no-deps laplace-torch curvlinops-for-pytorch backpack-for-pytorch asdl asdfghjkl torchmetrics \\
        lightning-utilities packaging opt_einsum linear_operator unfoldNd jaxtyping wadler_lindig einconv

Timed are their `fit`, which is the pass over the data and the eigendecomposition of the factors, and our
`curvature_blocks`, which is the same work. Both get the same network, weights, rows and prior precision. They differ by
convention:

- They treat a bias as a separate block beside the weight's; here it is one more input of the layer, which keeps the
  correlations between the two. Networks without biases have the same Kronecker factors in both.
- Their "full" and "diag" are the same matrices as ours.
- Their noise is `sigma_noise`, ours is the likelihood's scale; their prior precision is 1 / scale^2.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credibly as cr
from benchmarks.timing import Goal, Row, Times, options, report, show, table
from credibly.core.inputs import blank_row, describe
from credibly.curvature import Block, choose_names, curvature_blocks, find_parts

PRIOR_SCALE = 0.5
NOISE = 0.3
BACKENDS = ("CurvlinopsGGN", "BackPackGGN", "AsdlGGN")
BATCH = 512  # minibatch size of theirs
STRUCTURES = {"kron": "kron", "diag": "diag", "full": "full"}  # our name -> theirs


@dataclass(frozen=True)
class Peer:
    """The module and its importable backends."""

    module: Any
    backends: dict[str, Any]


def find_peer() -> Peer | None:
    """Import laplace-torch and its backends if installed, and print which."""
    try:
        module = importlib.import_module("laplace")
        curvature = importlib.import_module("laplace.curvature")
    except ImportError as error:
        print(f"laplace-torch: left out ({error})\n", flush=True)
        return None
    found = {name: getattr(curvature, name) for name in BACKENDS if hasattr(curvature, name)}
    version = importlib.import_module("importlib.metadata").version("laplace-torch")
    print(f"laplace-torch: version {version}, backends {', '.join(found)}\n", flush=True)
    return Peer(module, found)


# -- both sides --------------------------------------------------------------------------------------------------------
def network(*sizes: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a seeded MLP with ReLU."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def ours(net: nn.Module, x: Tensor, y: Tensor, structure: str) -> tuple[cr.Problem, Any]:
    """Return the problem and the call to time."""
    likelihood = cr.likelihoods.Gaussian(NOISE) if y.is_floating_point() else cr.likelihoods.Categorical()
    problem = cr.Problem(net, data=(x, y), likelihood=likelihood, prior=cr.priors.Normal(PRIOR_SCALE))
    row = blank_row(describe(problem.x), problem.device)
    parts = find_parts(problem.layout, choose_names(problem.layout, None, row), row)
    theta = problem.layout.read(net)

    def call() -> list[Block]:
        return curvature_blocks(problem, theta, structure, parts, progress=False)

    return problem, call


def theirs(peer: Peer, backend: str, net: nn.Module, x: Tensor, y: Tensor, structure: str) -> Any:
    """Fit laplace-torch on a copy: its backends leave hooks behind."""
    extra = {"sigma_noise": NOISE} if y.is_floating_point() else {}
    found = peer.module.Laplace(
        copy.deepcopy(net),
        "regression" if y.is_floating_point() else "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        prior_precision=PRIOR_SCALE**-2,
        backend=peer.backends[backend],
        **extra,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.fit(DataLoader(TensorDataset(x, y), batch_size=BATCH))
    return found


# -- agreement ---------------------------------------------------------------------------------------------------------
def same(peer: Peer, record: dict[str, Any]) -> None:
    """Compare moments of the linearised outputs and the log evidence in float64, as relative differences."""
    lines, comparisons = [], []
    new = torch.randn(20, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for task, bias in (("classes", False), ("classes", True), ("regression", False)):
        net = network(8, 12, 3 if task == "classes" else 1, bias=bias, dtype=torch.float64)
        x = torch.randn(200, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        y = x.sum(1, keepdim=True) if task == "regression" else (x[:, :3] ** 2).argmax(1)
        for structure in STRUCTURES:
            problem, _ = ours(net, x, y, structure)
            posterior = cr.Laplace(structure=structure, start="network").fit(problem, progress=False)
            source: Any = posterior.predict(new).source
            mean, root = source.moments(new)
            covariance = root @ root.mT
            other = theirs(peer, "CurvlinopsGGN", net, x, y, STRUCTURES[structure])
            their_mean, their_covariance = other._glm_predictive_distribution(new)
            evidence = float(other.log_marginal_likelihood())
            errors = _error(mean, their_mean), _error(covariance, their_covariance.detach())
            comparisons.append(
                {
                    "task": task,
                    "bias": bias,
                    "structure": structure,
                    "mean": errors[0],
                    "variance": errors[1],
                    "log_evidence": posterior.log_evidence,
                    "their_log_evidence": evidence,
                }
            )
            values = [*(f"{e:.1e}" for e in errors), f"{posterior.log_evidence:.4f}", f"{evidence:.4f}"]
            lines.append([task, "yes" if bias else "no", structure, *values])
    header = ["task", "biases", "structure", "mean error", "variance error", "log evidence", "theirs"]
    print(table(header, lines) + "\n\nError: the largest difference over the largest value.\n", flush=True)
    record["same"] = comparisons


def _error(a: Tensor, b: Tensor) -> float:
    return float((a - b.reshape(a.shape)).abs().max() / b.abs().max())


# -- time --------------------------------------------------------------------------------------------------------------
def timed(peer: Peer, args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Time 784-400-400-10 on rows of the shape of MNIST."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(args.rows, 784, generator=generator)
    y = (x @ torch.randn(784, 10, generator=generator)).argmax(1)
    net = network(784, 400, 400, 10)
    rows = []
    for structure in args.structures.split(","):
        _, call = ours(net, x, y, structure)
        calls: dict[str, Any] = {"credibly": call}
        for backend in peer.backends:
            calls[backend] = lambda backend=backend, s=structure: theirs(peer, backend, net, x, y, s)
        times = _alternate(calls, args.repeats)
        goal = Goal("<=", 1.2) if structure == "kron" else None
        for backend in peer.backends:
            if backend in times:
                what = f"{structure}, {args.rows:,} rows, against {backend}"
                rows.append(Row(what, times["credibly"], times[backend], goal))
    show(rows, record)


def _alternate(calls: dict[str, Any], repeats: int) -> dict[str, Times]:
    """Return the seconds of each call, alternating between them; a backend that fails is left out with a message."""
    times: dict[str, Times] = {name: [] for name in calls}
    for _ in range(repeats):
        for name in list(times):
            start = time.perf_counter()
            try:
                calls[name]()
            except Exception as error:  # a failing peer is reported, not raised
                print(f"{name}: left out ({type(error).__name__}: {str(error)[:100]})", flush=True)
                del times[name]
                continue
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(repeats=3)
    parser.add_argument("--rows", type=int, default=60_000, help="training rows (default 60,000)")
    parser.add_argument("--structures", default="kron", help="kron,diag (default kron)")
    parser.add_argument("--case", choices=("same", "time"), default=None, help="only one of the parts")
    args = parser.parse_args()
    with report("laplace", args) as record:
        peer = find_peer()
        if peer is None:
            return
        if args.case in (None, "same"):
            same(peer, record)
        if args.case in (None, "time"):
            timed(peer, args, record)


if __name__ == "__main__":
    main()
