"""Networks of 11 and 85 million weights: a step of credibly, and the memory of a fit, beside plain training loops.

    python -m benchmarks.large_networks                                # CPU, 2 threads: some minutes
    python -m benchmarks.large_networks --device cuda --flat           # and steps on the flat vector, as CUDA graphs
    python -m benchmarks.large_networks --batches 8 --methods map --repeats 3
    python -m benchmarks.large_networks --networks transformer-large --device cuda    # 85 million weights
    python -m benchmarks.large_networks --json out.json

ResNet-18 (GroupNorm) on images of 3 x 32 x 32 and a transformer encoder on 32 tokens, batches of 8 and 64. The plain
loops are what a user would write with torch: Adam with its defaults and the prior as weight decay; two networks one
after another for an ensemble of two; SGD with momentum that keeps mean, second moment and 20 deviations for SWAG; SGHMC
over the list of parameters. Times alternate, so that a slow phase of the machine affects both sides. Memory is the peak
of a fresh process above what it holds before the network is built (on a GPU: the peak of allocated memory), for a fit
of a few steps and for a loop of the same number.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import credibly as cr
from benchmarks.prediction_memory import peak, reset_peak, resident
from benchmarks.timing import Goal, Row, interleaved, options, report, show, table
from credibly.inference.target import to_target
from credibly.inference.training.batches import Batches
from credibly.inference.training.iterates import make_iterates
from credibly.inference.training.loop import make_step
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.settings import Training
from credibly.inference.training.steps import Step

METHODS = ("map", "ensemble", "swag", "sghmc")
NETWORKS = ("resnet18", "transformer")
# Width, heads and layers of the encoders; the larger one has 85 million weights and is run by name.
ENCODERS = {"transformer": (384, 6, 6), "transformer-large": (768, 12, 12)}
ROWS, RATE, RANK, MEMBERS = 256, 1e-4, 20, 2
TIME, MEMORY = Goal("<=", 1.15), Goal("<=", 1.3)
# Steps of the fits whose memory is measured, and between two snapshots of SWAG in the timed steps.
FEW, EVERY = 6, 10


class Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(16, outputs), nn.GroupNorm(16, outputs)])
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(h)) + self.shortcut(x))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(16, 64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, outputs, stride), Block(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """An encoder and the mean over its positions."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(1000, width), nn.Parameter(0.02 * torch.randn(32, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(self.embedding(tokens) + self.position).mean(1))
        return output


def network(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    return (resnet18() if name == "resnet18" else Transformer(*ENCODERS[name])).to(device)


def rows(name: str, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(ROWS, 3, 32, 32, generator=generator)
        if name == "resnet18"
        else torch.randint(0, 1000, (ROWS, 32), generator=generator)
    )
    return x.to(device), torch.randint(0, 10, (ROWS,), generator=generator).to(device)


def problem(name: str, device: str, net: nn.Module | None = None) -> cr.Problem:
    net = net or network(name, device)
    return cr.Problem(net, rows(name, device), cr.likelihoods.Categorical(), cr.priors.Normal(1.0))


# -- plain loops -------------------------------------------------------------------------------------------------------
class Loop:
    """The loop that a user would write: one step per call."""

    def __init__(self, name: str, device: str, batch: int, method: str) -> None:
        self.x, self.y = rows(name, device)
        self.batch, self.method = batch, method
        self.net = network(name, device).train()
        self.parameters = list(self.net.parameters())
        decay = 1 / ROWS  # of a standard normal prior, for the mean loss
        if method in ("map", "ensemble"):
            self.rule: Any = torch.optim.Adam(self.parameters, lr=RATE, weight_decay=decay)
        elif method == "swag":
            self.rule = torch.optim.SGD(self.parameters, lr=RATE, momentum=0.9, weight_decay=decay)
        else:
            self.velocity = [torch.zeros_like(p) for p in self.parameters]
        self.columns: list[Tensor] = []
        self.mean = self.squares = torch.zeros(0)
        self.count = 0

    def __call__(self) -> None:
        at = torch.randperm(ROWS, device=self.x.device)[: self.batch]
        self.net.zero_grad()
        loss = nn.functional.cross_entropy(self.net(self.x[at]), self.y[at])
        loss.backward()
        if self.method == "sghmc":
            self._langevin()
        else:
            self.rule.step()
        self.count += 1
        if self.method == "swag" and self.count % EVERY == 0:
            self.collect()

    @torch.no_grad()
    def _langevin(self) -> None:
        step, friction = 1e-4, 0.1
        noise = math.sqrt(2 * friction) * step
        for p, v in zip(self.parameters, self.velocity):
            assert p.grad is not None
            gradient = p.grad.add(p, alpha=1 / ROWS)
            v.mul_(1 - friction).add_(gradient, alpha=-step * ROWS).add_(torch.randn_like(v), alpha=noise)
            p.add_(v)

    @torch.no_grad()
    def collect(self) -> None:
        flat = torch.cat([p.reshape(-1) for p in self.parameters])
        n = self.count // EVERY if self.count >= EVERY else self.count
        if not len(self.mean):
            self.mean, self.squares = torch.zeros_like(flat), torch.zeros_like(flat)
        self.mean.mul_((n - 1) / n).add_(flat, alpha=1 / n)
        self.squares.mul_((n - 1) / n).addcmul_(flat, flat, value=1 / n)
        self.columns = [*self.columns[1 - RANK :], flat - self.mean]


# -- ours --------------------------------------------------------------------------------------------------------------
def our_step(name: str, device: str, batch: int, method: str, *, flat: bool = False) -> Callable[[], object]:
    """Return a call that takes one step of the method as a fit takes it; `flat`, on the flat vector, uncompiled."""
    given = problem(name, device)
    if method == "sghmc":
        settings = cr.SGHMC(chains=1, draws=1, warmup=0, thin=10**6, batch_size=batch, step_size=1e-4, momentum=0.9)
        sampler = settings.sampler(to_target(given), 0)
        sampler.start(given.layout.read(given.layout.module).unsqueeze(0))
        controls = torch.tensor(sampler._controls(0), dtype=torch.float64, device=device)
        clock = iter(range(10**9))

        def langevin() -> None:
            with torch.no_grad():
                sampler._advance_one(next(clock), controls)

        return langevin
    steps = 100_000
    rule = "sgd" if method == "swag" else "adam"
    how: Any = False if flat else "auto"
    setting = Training(steps=steps, batch_size=batch, lr=RATE, schedule="constant", optimiser=rule, compile=how)
    members = []
    for _ in range(MEMBERS if method == "ensemble" else 1):
        theta = given.layout.read(given.layout.module).unsqueeze(0).clone()
        objective = NegativeLogDensity(given, given.n)
        make = Step(given, objective, setting, steps, theta) if flat else None
        step = make or make_step(given, objective, setting, steps, theta, batch, None)
        members.append((theta, step, Batches(given.n, batch, seed=0, members=1, device=given.device)))
    active, clock = torch.ones(1, device=device), iter(range(10**9))
    iterates = make_iterates(RANK, given.dim, given.device, given.layout.dtype)

    def call() -> None:
        t = next(clock)
        for theta, step, batches in members:
            # Parts of the loss are recorded 20 times per fit, at least every 500 steps.
            step.advance_to(theta, batches, t, (t // 500 + 1) * 500, active)
        if method == "swag" and (t + 1) % EVERY == 0:
            iterates.add(members[0][0][0])

    return call


def our_fit(name: str, device: str, batch: int, method: str) -> object:
    given = problem(name, device)
    common: dict[str, Any] = {"batch_size": batch, "lr": RATE}
    if method == "map":
        return cr.MAP(steps=FEW, **common).fit(given, progress=False)
    if method == "ensemble":
        return cr.DeepEnsemble(members=MEMBERS, steps=FEW, **common).fit(given, progress=False)
    if method == "swag":
        recorded: dict[str, Any] = {"rank": RANK, "iterates": RANK, "every": 1, "sgd_lr": RATE, "init": "network"}
        return cr.SWAG(steps=FEW, **recorded, **common).fit(given, progress=False)
    chains: dict[str, Any] = {"chains": 1, "draws": 2, "warmup": 2, "thin": 2, "step_size": 1e-5, "init": "network"}
    return cr.SGHMC(batch_size=batch, **chains).fit(given, progress=False)


def plain_fit(name: str, device: str, batch: int, method: str) -> object:
    """Return the results of the plain loops: networks, moments or draws."""
    results: list[Any] = []
    for _ in range(MEMBERS if method == "ensemble" else 1):
        loop = Loop(name, device, batch, method)
        for step in range(RANK if method == "swag" else FEW):
            loop()
            if method == "swag":
                loop.count = step + 1
                loop.collect()
            if method == "sghmc" and step >= FEW - 2:
                results.append(copy.deepcopy(loop.net.state_dict()))
        results.append((loop.net, loop.columns, loop.mean, loop.squares))
    return results


def child(name: str, device: str, batch: int, method: str, side: str, threads: int | None) -> int:
    """Run in the fresh process: return the peak of memory above what was held before."""
    if threads is not None:
        torch.set_num_threads(threads)
    # torch's own buffers and threads, and those of its convolutions.
    warm = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 900, 10)).to(device)
    warm(torch.randn(2, 3, 32, 32, device=device)).sum().backward()
    before, fit = resident(), our_fit if side == "ours" else plain_fit
    reset_peak()
    kept = fit(name, device, batch, method)
    assert kept is not None
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak() - before


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(repeats=5, seconds=0.5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--batches", default="8,64")
    parser.add_argument("--flat", action="store_true", help="also time training steps on the flat vector")
    parser.add_argument("--no-memory", action="store_true", help="time alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, batch, method, side = args.child.split("/")
        print(json.dumps(child(name, args.device, int(batch), method, side, args.threads)))
        return
    names = [name for name in ("resnet18", *ENCODERS) if name in args.networks.split(",")]
    methods = [method for method in METHODS if method in args.methods.split(",")]
    sizes = [(name, int(batch)) for name in names for batch in args.batches.split(",")]
    synchronise = torch.cuda.synchronize if args.device == "cuda" else None
    with report("large networks", args) as record:
        print(f"## A step beside a plain loop, {args.device}\n", flush=True)
        for name, batch in sizes:
            found = []
            for method in methods:
                sides: dict[str, Callable[[], object]] = {
                    "ours": our_step(name, args.device, batch, method),
                    "plain": both(name, args.device, batch, method),
                }
                if args.flat and method != "sghmc":
                    sides["flat"] = our_step(name, args.device, batch, method, flat=True)
                if synchronise is not None:
                    sides = {k: _waited(call, synchronise) for k, call in sides.items()}
                times = interleaved(sides, repeats=args.repeats, seconds=args.seconds, warm=2)
                found.append(Row(f"{name}, batch {batch}: {method}", times["ours"], times["plain"], TIME))
                if "flat" in times:
                    found.append(Row(f"{name}, batch {batch}: {method}, flat vector", times["flat"], times["plain"]))
            show(found, record)
        if args.no_memory:
            return
        print("\n## Peak memory of a fit beside a plain loop\n", flush=True)
        lines, record["memory"] = [], []
        for name, batch in sizes:
            for method in methods:
                used = {side: _memory(args, f"{name}/{batch}/{method}/{side}") for side in ("ours", "plain")}
                ratio = used["ours"] / used["plain"]
                verdict = "met" if MEMORY.met(ratio) else "MISSED"
                sizes_in_mb = [f"{used[side] / 1e6:,.0f} MB" for side in ("ours", "plain")]
                lines.append([f"{name}, batch {batch}: {method}", *sizes_in_mb, f"{ratio:.2f}", str(MEMORY), verdict])
                record["memory"].append({"what": lines[-1][0], **used, "ratio": ratio})
        print(table(["what", "credibly", "plain loop", "ratio", "goal", "verdict"], lines) + "\n", flush=True)


def both(name: str, device: str, batch: int, method: str) -> Callable[[], object]:
    """Return a plain step, of each member for an ensemble."""
    loops = [Loop(name, device, batch, method) for _ in range(MEMBERS if method == "ensemble" else 1)]

    def call() -> None:
        for loop in loops:
            loop()

    return call


def _waited(call: Callable[[], object], synchronise: Callable[[], object]) -> Callable[[], object]:
    """Return ten calls that wait for the GPU once."""

    def ten() -> None:
        for _ in range(10):
            call()
        synchronise()

    return ten


def _memory(args: argparse.Namespace, case: str) -> int:
    command = [sys.executable, "-m", "benchmarks.large_networks", "--device", args.device, "--child", case]
    command += ["--threads", str(args.threads)] if args.threads else []
    return int(
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
    )


if __name__ == "__main__":
    main()
