"""A run that is stopped at any moment resumes to bit-for-bit the draws of an uninterrupted one."""

import math
import time

import pytest
import torch
from stopped_runs import (
    Crash,
    StoppedRuns,
    begin,
    chees,
    density,
    hmc,
    make,
    manifest_of,
    mclmc,
    mile,
    nuts,
    quick,
    same,
    sg,
    tempering,
    tidy,
)

import credibly as cr
from conftest import mlp
from credibly.inference import backend
from credibly.inference.sampling import recording
from credibly.inference.sampling import run as sampling_run
from credibly.inference.sampling import sgmcmc as sgmcmc_run
from credibly.inference.sampling.hmc import HMCSampler
from credibly.inference.sampling.sgmcmc import SGMCMCSampler
from credibly.likelihoods import Gaussian
from credibly.storage.manifest import load_tensors


def frozen_body(seed=0):
    """A problem with a random last layer; the seed changes its own weights alone."""
    net = mlp(3, 4, 1, seed=seed)
    net[0] = mlp(3, 4, 1, seed=0)[0]
    return make(net=net, random="2.*")


RUNS = {
    "hmc": (hmc(), make),
    "hmc, diagonal mass": (hmc(mass="diagonal", warmup=40), make),
    "hmc, low-rank mass": (hmc(mass="low-rank", warmup=40, refresh=0.5), make),
    "hmc, tuned length": (hmc(trajectory_length="tuned", warmup=60, chains=2, draws=3, max_steps=4), make),
    "hmc, separate step sizes": (hmc(pooled=False), make),
    "hmc, persistent momentum": (hmc(refresh=0.4, jitter=0.3), make),
    "hmc, given step size": (hmc(step_size=0.05, warmup=0, thin=3), make),
    "hmc, float16 draws": (hmc(draw_dtype="float16", mass="prior", integrator="minimum-error"), make),
    "hmc, a learned scale": (hmc(), lambda seed=0: make(seed, likelihood=Gaussian())),
    "hmc, looped": (quick(), lambda seed=0: make(seed, plan="looped")),
    "hmc, one draw": (hmc(draws=1, chains=1), make),
    "hmc, a density": (hmc(), lambda seed=0: density()),
    "hmc, a density in float32": (hmc(), lambda seed=0: density(dtype=torch.float32)),
    "hmc, a frozen body": (hmc(), frozen_body),
    "nuts": (nuts(), make),
    "nuts, diagonal mass, separate step sizes": (nuts(mass="diagonal", pooled=False), make),
    "nuts, blocks": (nuts(mass="block", warmup=30), make),
    "nuts, a density": (nuts(thin=2), lambda seed=0: density()),
    "chees": (chees(), make),
    "chees, diagonal mass, separate step sizes": (chees(mass="diagonal", pooled=False, warmup=40), make),
    "chees, a density": (chees(thin=2), lambda seed=0: density()),
    "mclmc": (mclmc(), make),
    "mclmc, adjusted": (mclmc(adjusted=True, thin=2), make),
    "tempering": (tempering(), make),
    "tempering, a density": (tempering(mass="diagonal", refresh=0.4, thin=2), lambda seed=0: density()),
    "mile": (mile(), make),
    "sgld": (sg(cr.SGLD), make),
    "sgld, polynomial and preconditioned": (sg(cr.SGLD, schedule="polynomial", preconditioner="rmsprop"), make),
    "sghmc": (sg(cr.SGHMC), make),
    "sghmc, preconditioned": (sg(cr.SGHMC, preconditioner="rmsprop"), make),
    "sghmc, cyclical": (sg(cr.SGHMC, schedule="cyclical", cycles=2), make),
    "sghmc, steps found in warm-up": (sg(cr.SGHMC, warmup=None, thin=None, max_steps=90, batch_size=20), make),
    "sgld, control variate": (sg(cr.SGLD, control_variate=True, warmup=None, max_steps=60), make),
    "sghmc, a density": (sg(cr.SGHMC, step_size=0.05, batch_size=None), lambda seed=0: density()),
}


class TestSameBits(StoppedRuns):
    @pytest.mark.parametrize("name", RUNS)
    def test_a_run_that_stops_after_every_iteration(self, tmp_path, tight, crash, name):
        """Each iteration (or three) runs in a new process: all state has been on disk."""
        method, problem = RUNS[name]
        each = (
            1 if name in ("hmc, diagonal mass", "hmc, low-rank mass", "sghmc, preconditioned", "sghmc, cyclical") else 3
        )
        path = tmp_path / "run"
        known = method.fit(problem(), seed=1)
        begin(method, problem(), path, crash, 1)
        for relay in range(1, 1000):
            crash(each)
            try:
                done = cr.resume(path, problem(seed=relay))
                break
            except Crash:
                assert manifest_of(path)["progress"]["iteration"] > 0
        assert relay > 2
        same(done, known)
        tidy(path)
        assert len(done._draws.files) == math.ceil(method.draws / done._draws.counts[0])
        same(cr.load(path, None if isinstance(problem(), cr.Density) else problem(seed=9).layout.module), known)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("method", [hmc(mass="diagonal"), sg(cr.SGHMC)], ids=["hmc", "sghmc"])
    def test_on_a_gpu_from_the_folder_alone(self, tmp_path, tight, crash, method):
        path, problem = tmp_path / "run", make(device="cuda")
        known = method.fit(problem, seed=1)
        begin(method, problem, path, crash, 1)
        for _ in range(1000):
            crash(5)
            try:
                done = cr.resume(path)
                break
            except Crash:
                assert manifest_of(path)["arithmetic"]["device"] == "cuda:0"
        assert done.draws.is_cuda
        same(done, known)
        same(cr.load(path, problem.layout.module), known)

    @pytest.mark.parametrize("large", [1, 10**9], ids=["chains in turn", "chains together"])
    def test_noise_that_is_generated_as_bits(self, tmp_path, tight, crash, monkeypatch, large):
        monkeypatch.setattr(backend, "MANY", 1)
        monkeypatch.setattr(sgmcmc_run, "LARGE", large)
        method = sg(cr.SGHMC)
        known = method.fit(make(), seed=1)
        for after in (2, 9):
            begin(method, make(), tmp_path / str(after), crash, after)
            same(cr.resume(tmp_path / str(after)), known)

    @pytest.mark.parametrize("start", [False, True], ids=["fixed", "as a start"])
    def test_a_posterior_as_mass_is_in_the_folder(self, tmp_path, tight, crash, start):
        """Also before the first checkpoint, from the folder alone; a finished run does not keep it."""
        q = cr.Laplace(structure="full", steps=50).fit(make(), progress=False)
        given = {"mass": "diagonal", "mass_start": q} if start else {"mass": q}
        for method in (hmc(**given), nuts(**given)):
            known = method.fit(make(), seed=1)
            for after in (0, 5, 25):
                path = tmp_path / f"{type(method).__name__} {after}"
                begin(method, make(), path, crash, after)
                assert (path / "mass.safetensors").exists()
                same(cr.resume(path), known)
                assert not (path / "mass.safetensors").exists()
                tidy(path)

    def test_a_run_has_several_shards_and_a_remainder(self, tmp_path, tight):
        counts = RUNS["hmc"][0].fit(make(), seed=1, out=tmp_path / "run")._draws.counts
        assert counts == [3, 3, 2]

    @pytest.mark.parametrize(
        "method", [hmc(mass="diagonal"), sg(cr.SGHMC, preconditioner="rmsprop")], ids=["hmc", "sghmc"]
    )
    def test_iterations_after_the_last_checkpoint_are_repeated(self, tmp_path, tight, monkeypatch, method):
        """Checkpoints far apart: the process ends with iterations, and whole shards, that no manifest lists."""
        known = method.fit(make(), seed=1)
        monkeypatch.setattr(recording, "EVERY_SECONDS", 1e9)
        kind = HMCSampler if isinstance(method, cr.HMC) else SGMCMCSampler
        advance, steps = kind.advance, [0]

        def counted(self, stop):
            steps[0] += 1
            if steps[0] == limit:
                raise Crash
            return advance(self, stop)

        monkeypatch.setattr(kind, "advance", counted)
        limit = 26 if kind is HMCSampler else 17
        path = tmp_path / "run"
        with pytest.raises(Crash):
            method.fit(make(), seed=1, out=path)
        left = {p.name for p in path.iterdir() if p.suffix == ".safetensors"}
        assert "draws-00000.safetensors" in left - set(manifest_of(path)["files"])
        same(cr.resume(path, make()), known)
        tidy(path)

    def test_starting_points_by_a_fit_are_reproduced(self, tmp_path, tight, monkeypatch):
        """Stopped during the MAP fits; the network passed later has other weights, the starting points are the same."""
        starts = sampling_run.starts

        def interrupted(*args):
            starts(*args)
            raise Crash

        for init in ("map", "ensemble", "network"):
            method, path = quick(init=init, start_steps=15), tmp_path / init
            known = method.fit(make(seed=0), seed=1)
            monkeypatch.setattr(sampling_run, "starts", interrupted)
            with pytest.raises(Crash):
                method.fit(make(seed=0), seed=1, out=path)
            with pytest.raises(Crash):
                cr.resume(path, make(seed=5))
            monkeypatch.setattr(sampling_run, "starts", starts)
            assert "state" not in manifest_of(path)
            with pytest.raises(cr.StoreError, match="has no draws yet"):
                cr.load(path, mlp(3, 4, 1))
            other = make(seed=5)
            weights = other.layout.read(other.layout.module)
            same(cr.resume(path, other), known)
            assert torch.equal(other.layout.read(other.layout.module), weights)  # the caller's network is unchanged
            tidy(path)

    @pytest.mark.parametrize("kind", ["tensor", "posterior"])
    def test_starting_points_that_were_passed_are_stored(self, tmp_path, tight, crash, kind):
        first = cr.DeepEnsemble(members=4, steps=3, compile=False).fit(make(), seed=0)
        method = quick(init=first if kind == "posterior" else first.sample(2, seed=8))
        known = method.fit(make(), seed=1)
        for after in (1, 4):
            path = tmp_path / str(after)
            begin(method, make(), path, crash, after)
            same(cr.resume(path, make(seed=3)), known)
            tidy(path)

    def test_draws_do_not_depend_on_the_size_of_shards(self, tmp_path, monkeypatch, tight, crash):
        """Even if it changes during the run, as between two releases."""
        known = hmc().fit(make(), seed=1)
        begin(hmc(), make(), tmp_path / "run", crash, 25)
        monkeypatch.setattr(recording, "SHARD_BYTES", 2**20)
        done = cr.resume(tmp_path / "run", make())
        same(done, known)
        assert done._draws.counts == [3, 3, 2]

    def test_checkpoints_between_draws_far_apart(self, tmp_path, tight, crash):
        for method in (quick(draws=2, thin=30), sg(cr.SGLD, draws=2, thin=250, warmup=1)):
            path = tmp_path / method.name
            known = method.fit(make(), seed=1)
            begin(method, make(), path, crash, 4)
            assert 0 < manifest_of(path)["progress"]["iteration"] < method.warmup + method.thin
            with pytest.raises(cr.StoreError, match="has no draws yet"):
                cr.load(path)
            same(cr.resume(path), known)

    def test_the_time_of_all_parts_is_summed(self, tmp_path, tight, crash):
        clock = time.monotonic
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: clock() * 1e6)
            begin(quick(), make(), tmp_path / "run", crash, 3)
        before = float(load_tensors(tmp_path / "run" / manifest_of(tmp_path / "run")["state"])["recorder.seconds"])
        assert before > 1000
        began = clock()
        done = cr.resume(tmp_path / "run")
        assert before < done.record.history["seconds"] < before + clock() - began
