"""Minibatch steps of ResNet-20-FRN on a GPU: images per second beside hand-written loops, and several chains at once.

    python -m benchmarks.minibatch_gpu                                # all cases: about five minutes on one H200
    python -m benchmarks.minibatch_gpu --batches 400 --chains 1,4 --no-compiled
    python -m benchmarks.minibatch_gpu --json out.json

A step gathers its rows from 50,000 images on the device, evaluates the gradient and updates the weights. The
hand-written loops run channels last, under autocast to bf16 or in float32 with TF32 products, with fused Adam. Their
step is captured as a CUDA graph, of the eager or the compiled module. Ours is what a fit runs. Images
are random numbers: a step takes as long on any. Times alternate within one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import credibly as cr
from benchmarks.timing import interleaved, options, report, table
from credibly.inference.target import to_target
from credibly.inference.training.batches import Batches
from credibly.inference.training.loop import make_step
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.settings import Training

ROWS, RATE, STEPS = 50_000, 1e-4, 100_000
VARIANCE = 0.2


def rows(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(ROWS, 3, 32, 32, generator=generator, device=device)
    return x, torch.randint(0, 10, (ROWS,), generator=generator, device=device)


def problem(data: tuple[Tensor, Tensor], device: str, precision: str | None) -> cr.Problem:
    torch.manual_seed(0)
    net = cr.zoo.resnet20_frn().to(device)
    return cr.Problem(net, data, cr.likelihoods.Categorical(), cr.priors.Normal(VARIANCE**0.5), precision=precision)


# -- hand-written ------------------------------------------------------------------------------------------------------
class Loop:
    """MAP by Adam with the prior as weight decay: one replay of a CUDA graph per step."""

    def __init__(
        self, data: tuple[Tensor, Tensor], device: str, batch: int, precision: str | None, *, compiled: bool
    ) -> None:
        torch.manual_seed(0)
        self.x, self.y = data[0].contiguous(memory_format=torch.channels_last), data[1]
        self.batch, self.precision = batch, precision
        plain = cr.zoo.resnet20_frn().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.net: Any = torch.compile(plain) if compiled else plain
        self.rule = torch.optim.Adam(plain.parameters(), lr=RATE, weight_decay=1 / VARIANCE / ROWS, fused=True)
        self.rows = torch.randperm(ROWS, device=device)[:batch]
        self.order = torch.randperm(ROWS, device=device)
        self.count = 0
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.rule.zero_grad(set_to_none=True)
        for group in self.rule.param_groups:
            group["capturable"] = True
        with torch.cuda.graph(self.graph):
            self._step()

    def _step(self) -> None:
        self.rule.zero_grad(set_to_none=True)
        x, y = self.x[self.rows], self.y[self.rows]
        with torch.autocast("cuda", torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False):
            output = self.net(x)
        nn.functional.cross_entropy(output.float(), y).backward()
        self.rule.step()

    def __call__(self) -> None:
        start = self.count * self.batch % (ROWS - self.batch + 1)
        self.rows.copy_(self.order[start : start + self.batch])
        self.count += 1
        self.graph.replay()


# -- ours --------------------------------------------------------------------------------------------------------------
def training(given: cr.Problem, batch: int, members: int, compile: Any = "auto") -> Callable[[], None]:
    """Return a call that takes one step of MAP, or of an ensemble, as a fit takes it."""
    settings = Training(steps=STEPS, batch_size=batch, lr=RATE, compile=compile)
    theta = given.layout.read(given.layout.module).expand(members, -1).contiguous().clone()
    step = make_step(given, NegativeLogDensity(given, ROWS), settings, STEPS, theta, batch, None)
    batches = Batches(ROWS, batch, seed=0, members=members, device=given.device)
    active, clock = torch.ones(members, device=given.device), iter(range(10**9))

    def call() -> None:
        t = next(clock)
        step.advance_to(theta, batches, t, t + 1, active)

    return call


def sampling(given: cr.Problem, batch: int, chains: int) -> Callable[[], None]:
    """Return a call that takes one step of all chains of SGHMC, as a fit takes it."""
    how = cr.SGHMC(chains=chains, draws=1, warmup=0, thin=STEPS, batch_size=batch, step_size=3e-7**0.5, momentum=0.98)
    sampler = how.sampler(to_target(given), 0)
    sampler.theta.copy_(given.layout.read(given.layout.module).expand(chains, -1))
    controls = torch.tensor(sampler._controls(0), dtype=torch.float64, device=given.device)
    clock = iter(range(10**9))

    def call() -> None:
        with torch.no_grad():
            sampler._advance_one(next(clock), controls)

    return call


def several(call: Callable[[], object], count: int) -> Callable[[], None]:
    """Return `count` calls that wait for the GPU once."""

    def run() -> None:
        for _ in range(count):
            call()
        torch.cuda.synchronize()

    return run


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(repeats=5, seconds=0.3)
    parser.add_argument("--batches", default="80,400,5000")
    parser.add_argument("--chains", default="1,2,4,8")
    parser.add_argument("--precisions", default="bf16,tf32")
    parser.add_argument("--scaled", default="80,400", help="batch sizes of the runs with several chains")
    parser.add_argument("--no-compiled", action="store_true", help="without the loop that torch compiles")
    args = parser.parse_args()
    device, data = "cuda", rows("cuda")
    at_once = 10
    with report("minibatch steps on a GPU", args) as record:
        print("## Images per second\n", flush=True)
        lines: list[list[str]] = []
        for name in args.precisions.split(","):
            precision = "bf16" if name == "bf16" else None
            given = problem(data, device, precision)
            for batch in map(int, args.batches.split(",")):
                sides: dict[str, Callable[[], object]] = {
                    "MAP": training(given, batch, 1),
                    "SGHMC": sampling(given, batch, 1),
                    "loop, graph": Loop(data, device, batch, precision, compiled=False),
                }
                if not args.no_compiled:
                    torch.compiler.reset()
                    sides["loop, compiled and graph"] = Loop(data, device, batch, precision, compiled=True)
                times = interleaved(
                    {k: several(v, at_once) for k, v in sides.items()}, repeats=args.repeats, seconds=args.seconds
                )
                speed = {k: at_once * batch / statistics.median(v) for k, v in times.items()}
                best = max(v for k, v in speed.items() if k.startswith("loop"))
                cells = [f"{v:,.0f}" for v in speed.values()]
                lines.append([name, f"{batch:,}", *cells, *(f"{speed[k] / best:.2f}" for k in ("MAP", "SGHMC"))])
                record.setdefault("speed", []).append({"precision": name, "batch": batch, **speed})
                print(lines[-1], flush=True)
        loops = ["loop, graph"] + ([] if args.no_compiled else ["loop, compiled and graph"])
        print(table(["precision", "batch", "MAP", "SGHMC", *loops, "MAP / best", "SGHMC / best"], lines), flush=True)
        print("\n## Several chains or members: steps of all of them per second, over those of one\n", flush=True)
        counts, lines = list(map(int, args.chains.split(","))), []
        given = problem(data, device, "bf16" if "bf16" in args.precisions else None)
        for batch in map(int, args.scaled.split(",")):
            for what, make in (("SGHMC", sampling), ("MAP", training)):
                calls = {str(k): several(make(given, batch, k), at_once) for k in counts}
                times = interleaved(calls, repeats=args.repeats, seconds=args.seconds)
                each = {k: statistics.median(v) / at_once for k, v in times.items()}
                gain = {k: int(k) * each[str(counts[0])] / v for k, v in each.items()}
                lines.append([what, f"{batch:,}", *(f"{1e3 * each[k]:.2f} ms, {gain[k]:.2f}" for k in each)])
                record.setdefault("scaling", []).append({"what": what, "batch": batch, "seconds": each, "gain": gain})
                print(lines[-1], flush=True)
        print(table(["method", "batch", *(f"{k}" for k in counts)], lines), flush=True)


if __name__ == "__main__":
    main()
