"""Programs for the tests of many processes: `python world_programs.py NAME FOLDER`, also under torchrun."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import credibly as cr
from credibly.distributed.world import current
from credibly.inference.sampling.hmc import HMCSampler

NET = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.SiLU(), torch.nn.Linear(4, 1)).double()
SAMPLERS = {
    "hmc": cr.HMC(chains=4, draws=8, warmup=25, max_steps=8, start_steps=50),
    "odd": cr.HMC(chains=3, draws=4, warmup=25, max_steps=8, init="prior"),
    "each": cr.HMC(chains=3, draws=5, warmup=25, max_steps=8, pooled=False, mass="diagonal", init="prior"),
    "tuned": cr.HMC(chains=4, draws=4, warmup=60, max_steps=8, init="prior", trajectory_length="tuned"),
    "nuts": cr.NUTS(chains=4, draws=5, warmup=25, max_depth=3, init="prior"),
    "chees": cr.ChEES(chains=4, draws=5, warmup=40, max_steps=8, mass="diagonal", init="prior"),
    "low-rank": cr.HMC(chains=4, draws=5, warmup=40, max_steps=8, mass="low-rank", init="prior"),
    "mclmc": cr.MCLMC(chains=4, draws=5, warmup=40, max_steps=4, init="prior"),
    "tempering": cr.ParallelTempering(
        chains=4, draws=5, warmup=25, temperatures=3, max_steps=4, mass="diagonal", init="prior"
    ),
    "mile": cr.MILE(chains=4, draws=5, warmup=40, max_steps=4, start_steps=20),
    "sgld": cr.SGLD(chains=3, draws=5, thin=2, warmup=10, batch_size=8, start_steps=50),
    "variate": cr.SGHMC(chains=4, draws=5, thin=2, max_steps=40, batch_size=8, control_variate=True, init="prior"),
    "sghmc": cr.SGHMC(chains=4, draws=5, thin=2, warmup=10, batch_size=8, preconditioner="rmsprop", start_steps=50),
}
LONG = cr.HMC(chains=4, draws=30, warmup=25, max_steps=8, start_steps=50)
FIXED = cr.HMC(chains=4, draws=4, warmup=0, step_size=0.01, trajectory_length=0.1, init="prior")


def problem(shift=0.0):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(41, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3 + shift
    with torch.no_grad():
        for i, p in enumerate(NET.parameters()):
            p.copy_(torch.linspace(-0.5, 0.6, p.numel()).reshape(p.shape) * (-1) ** i)
    return cr.Problem(NET, (x, y), cr.likelihoods.Gaussian(scale=0.3), cr.priors.Normal(1.0))


def samplers(folder):
    """Run every sampler in memory and in a folder; write the draws in memory for the test."""
    for name, method in SAMPLERS.items():
        inside = method.fit(problem(), seed=3, progress=False)
        beside = method.fit(problem(), seed=3, progress=False, out=folder / name)
        assert torch.equal(inside.draws, beside.draws)
        x, y = problem().x, problem().likelihood.restore(problem().y)
        spread = beside.diagnostics(x, y, spread=True)
        if name == "hmc":
            plain = beside.diagnostics(x, y)
            assert spread.weights == plain.weights
            assert spread.functions is not None
            assert spread.functions.count == plain.functions.count
            assert abs(spread.functions.rhat_worst - plain.functions.rhat_worst) < 1e-9
            assert list(spread.quantities) == ["log likelihood", "log densities"]
            for what, space in plain.quantities.items():
                assert spread.quantities[what].count == space.count
                assert abs(spread.quantities[what].rhat_worst - space.rhat_worst) < 1e-9
        if current().leader:
            save_file({"draws": inside.draws.contiguous(), **inside.statistics}, folder / f"{name}.safetensors")


def rows(folder):
    """Sample with a fixed step; write the draws of every process, which makes the same decisions."""
    fitted = FIXED.fit(problem(), seed=3, progress=False)
    save_file({"draws": fitted.draws.contiguous()}, folder / f"rows-{current().rank}.safetensors")


def long(folder):
    """Run with processes that die as set by DIE=rank:iteration[,rank:iteration], one per start.

    HOST_DIES_AT=iteration is set for the processes of one host, which kill their launcher too.
    """
    deaths = [tuple(map(int, d.split(":"))) for d in os.environ.get("DIE", "").split(",") if d]
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    plain = HMCSampler.advance

    def advance(self, stop):
        if start < len(deaths) and (current().rank, self.done) == deaths[start]:
            os.kill(os.getpid(), signal.SIGKILL)
        if not start and str(self.done) == os.environ.get("HOST_DIES_AT"):
            os.kill(os.getppid(), signal.SIGKILL)  # the launcher first, since a host fails as a whole
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, stop)

    HMCSampler.advance = advance
    LONG.fit(problem(), seed=3, progress=False, out=folder / "long")


def resume(folder):
    """Resume that run with the processes there are."""
    cr.resume(folder / "long", problem(), progress=False)


def brief(folder):
    """Exit right after collective calls."""
    mesh = current().mesh(1)
    for _ in range(20):
        mesh.sum_rows(torch.ones(1000))
        mesh.world.gather([1, 2, 3])


def trouble(folder):
    """Fail in process 1 as set by TROUBLE; every process writes its error."""
    kind, rank = os.environ["TROUBLE"], int(os.environ["RANK"])
    plain = HMCSampler.advance

    def advance(self, stop):
        if rank == 1 and self.done == 3:
            if kind == "hang":
                time.sleep(600)
            raise OSError("the disk of process 1 is on fire")
        return plain(self, stop)

    if kind in ("raise", "hang"):
        HMCSampler.advance = advance
    if kind == "folder":
        own = folder / str(rank)
        own.mkdir()
        os.chdir(own)
    began = time.monotonic()
    try:
        LONG.fit(
            problem(shift=float(kind == "data") * rank),
            seed=3,
            progress=False,
            out="long" if kind == "folder" else None,
        )
    except Exception as error:
        outcome = f"{type(error).__name__}\n{time.monotonic() - began:.1f}\n{error}"
        (folder / f"{kind}-{rank}.txt").write_text(outcome)
        raise


if __name__ == "__main__":
    {"samplers": samplers, "rows": rows, "long": long, "resume": resume, "trouble": trouble, "brief": brief}[
        sys.argv[1]
    ](Path(sys.argv[2]))
