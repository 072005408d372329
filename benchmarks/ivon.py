"""IVON: a step on a large network beside fused AdamW and the authors' package, and the same update as theirs.

    pip install ivon-opt
    python -m benchmarks.ivon                                         # CPU: a transformer of 59 million weights
    python -m benchmarks.ivon --device cuda --batches 8,64            # a GPU; AdamW also as a CUDA graph
    python -m benchmarks.ivon --layers 2 --batches 4 --repeats 3

First the check: on a small network, given the same gradients and the same normal numbers, 20 updates of ours and of
`ivon-opt` agree to rounding. Then times: a step is gather, forward and backward pass, and update, of a transformer
encoder on 64 tokens. AdamW is torch's fused optimiser with the prior as weight decay; `ivon-opt` is used as its README
shows. Without the package, its rows are left out. Sides alternate within one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import credibly as cr
from benchmarks.timing import Goal, interleaved, options, report, table
from credibly.inference.kernels.ivon import deviation, update_gaussian
from credibly.inference.training.batches import Batches
from credibly.inference.training.expected_loss import ExpectedLoss
from credibly.inference.training.ivon_step import IVONModuleStep
from credibly.inference.training.settings import Training

ROWS, TOKENS, WORDS, WIDTH, CLASSES = 1024, 64, 2000, 640, 10
STEPS, RATE, HESSIAN, BETAS = 20_000, 0.01, 1.0, (0.9, 0.9999)
GOAL = Goal("<=", 1.15)


class Transformer(nn.Module):
    """An encoder and the mean over its positions."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 10, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(self.embedding(tokens) + self.position).mean(1))
        return output


def network(layers: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(layers).to(device)


def rows(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (ROWS, TOKENS), generator=generator)
    return tokens.to(device), torch.randint(0, CLASSES, (ROWS,), generator=generator).to(device)


def check() -> float:
    """Return the largest difference between our means and those of ivon-opt after 20 updates, or nan without it."""
    try:
        from ivon import IVON  # type: ignore[import-not-found]
    except ImportError:
        return float("nan")
    generator = torch.Generator().manual_seed(1)
    x, n, decay, beta2 = torch.randn(50, 4, generator=generator), 50.0, 0.02, 0.99
    y = x.sum(1, keepdim=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    mean = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    curvature, momentum = torch.full_like(mean, 0.5), torch.zeros_like(mean)
    theirs = IVON(net.parameters(), lr=0.05, ess=n, hess_init=0.5, beta2=beta2, weight_decay=decay, rescale_lr=False)
    for t in range(20):
        torch.manual_seed(t)
        with theirs.sampled_params(train=True):
            theirs.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            drawn = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
        slope = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
        theirs.step()
        torch.manual_seed(t)
        own = mean + torch.randn(len(mean)) * deviation(curvature, decay, n)
        assert torch.allclose(own, drawn, atol=1e-5)
        found = slope * (own - mean) * n * (curvature + decay)
        update_gaussian(
            mean, curvature, momentum, slope, found, decay, 0.0, (0.9, beta2), 0.05, 1 / (1 - 0.9 ** (t + 1))
        )
    return float((mean - nn.utils.parameters_to_vector(net.parameters()).detach()).abs().max())


# -- the sides ---------------------------------------------------------------------------------------------------------
def ours(layers: int, device: str, batch: int) -> Callable[[], object]:
    """Return a call that takes one step as a fit takes it."""
    given = cr.Problem(network(layers, device), rows(device), cr.likelihoods.Categorical(), cr.priors.Normal(1.0))
    settings = Training(steps=STEPS, batch_size=batch, lr=RATE, schedule="constant")
    objective = ExpectedLoss(given, given.n, members=1, samples=1, betas=BETAS, clip=None, seed=0)
    mean = given.layout.read(given.layout.module).unsqueeze(0)
    theta = torch.cat([mean, torch.full_like(mean, HESSIAN)], -1)
    step = IVONModuleStep(given, objective, settings, STEPS, theta, graph=True)
    batches = Batches(given.n, batch, seed=0, members=1, device=given.device)
    active, clock = torch.ones(1, device=device), iter(range(10**9))

    def call() -> None:
        t = next(clock)
        step.advance_to(theta, batches, t, (t // 500 + 1) * 500, active)

    return call


class Plain:
    """A loop with a torch optimiser: fused AdamW, or IVON of its authors."""

    def __init__(self, layers: int, device: str, batch: int, kind: str) -> None:
        self.net, (self.x, self.y), self.batch, self.kind = network(layers, device), rows(device), batch, kind
        if kind == "ivon-opt":
            from ivon import IVON

            self.rule: Any = IVON(self.net.parameters(), lr=RATE, ess=ROWS, weight_decay=1 / ROWS)
        else:
            self.rule = torch.optim.AdamW(self.net.parameters(), lr=1e-4, weight_decay=1 / ROWS, fused=True)
        self.rows = torch.arange(batch, device=device)
        self.graph: Any = None
        if kind == "AdamW, graph":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream().wait_stream(side)
            self.rule.param_groups[0]["capturable"] = True
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()

    def _loss(self) -> None:
        self.rule.zero_grad()
        nn.functional.cross_entropy(self.net(self.x[self.rows]), self.y[self.rows]).backward()

    def _step(self) -> None:
        if self.kind == "ivon-opt":
            with self.rule.sampled_params(train=True):
                self._loss()
        else:
            self._loss()
        self.rule.step()

    def __call__(self) -> None:
        self.rows.copy_(torch.randperm(ROWS, device=self.rows.device)[: self.batch])
        self._step() if self.graph is None else self.graph.replay()


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(repeats=5, seconds=1.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batches", default="8")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    with report("IVON", args) as record:
        gap = check()
        found = "ivon-opt is not installed" if gap != gap else f"largest difference of the means: {gap:.1e}"
        print(f"20 updates beside ivon-opt: {found}\n", flush=True)
        weights = sum(p.numel() for p in network(args.layers, "cpu").parameters())
        print(f"Transformer of {weights:,} weights, {args.device}\n", flush=True)
        kinds = ["AdamW", *(["AdamW, graph"] if on_gpu else []), *(["ivon-opt"] if gap == gap else [])]
        lines = []
        for batch in map(int, args.batches.split(",")):
            sides: dict[str, Callable[[], object]] = {"IVON": ours(args.layers, args.device, batch)}
            sides |= {kind: Plain(args.layers, args.device, batch, kind) for kind in kinds}
            if on_gpu:
                sides = {k: _waited(v) for k, v in sides.items()}
            times = interleaved(sides, repeats=args.repeats, seconds=args.seconds, warm=2)
            each = {k: statistics.median(v) / (10 if on_gpu else 1) for k, v in times.items()}
            best = min(v for k, v in each.items() if k.startswith("AdamW"))
            ratio = each["IVON"] / best
            cells = [f"{1e3 * v:.2f} ms" for v in each.values()]
            lines.append([str(batch), *cells, f"{ratio:.2f}", str(GOAL), "met" if GOAL.met(ratio) else "MISSED"])
            record.setdefault("steps", []).append({"batch": batch, "weights": weights, **each, "ratio": ratio})
            print(lines[-1], flush=True)
        print(table(["batch", "IVON", *kinds, "IVON / AdamW", "goal", "verdict"], lines), flush=True)


def _waited(call: Callable[[], object]) -> Callable[[], object]:
    """Return ten calls that wait for the GPU once."""

    def ten() -> None:
        for _ in range(10):
            call()
        torch.cuda.synchronize()

    return ten


if __name__ == "__main__":
    main()
