"""Results on a CUDA device match those on the CPU, and tensors stay on their device."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.inference.kernels.hmc import LEAPFROG
from credibly.inference.sampling.trajectory import Trajectory
from credibly.inference.target import ProblemTarget
from credibly.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticCategorical,
    HeteroscedasticGaussian,
    Poisson,
    StudentT,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
X, Y = randn(60, 3, dtype=torch.float64), randn(60, 3, dtype=torch.float64).sum(1)
CASES = {
    "gaussian": (Gaussian(), 1, Y),
    "two targets": (Gaussian((0.1, 0.3)), 2, torch.stack([Y, -Y], 1)),
    "student": (StudentT(df=5.0), 1, Y),
    "hetero": (HeteroscedasticGaussian(), 2, Y),
    "classes": (Categorical(), 3, torch.arange(60) % 3),
    "noisy classes": (HeteroscedasticCategorical(samples=8), 6, torch.arange(60) % 3),
    "counts": (Poisson(), 1, torch.arange(60) % 5),
}


@pytest.mark.parametrize("name", CASES)
def test_cuda_equals_cpu(name, tmp_path):
    likelihood, outputs, y = CASES[name]
    posteriors = []
    for device in ("cpu", "cuda"):
        net = mlp(3, 6, outputs, dtype=torch.float64)
        problem = cr.Problem(
            net, data=(X, y), likelihood=likelihood, prior=cr.priors.Normal(0.8, fan_in=True), device=device
        )
        posteriors.append(cr.DeepEnsemble(members=3, steps=80, batch_size=16, clip_norm=5.0).fit(problem, seed=0))
    cpu, cuda = posteriors
    assert cuda.draws.device.type == "cuda"
    torch.testing.assert_close(cuda.draws.cpu(), cpu.draws, rtol=1e-6, atol=1e-7)
    p, q = cpu.predict(X), cuda.predict(X)
    for field in ("mean", "variance", "aleatoric", "epistemic"):
        assert getattr(q, field).device.type == "cuda"
        torch.testing.assert_close(getattr(q, field).cpu(), getattr(p, field), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(q.log_prob(y).cpu(), p.log_prob(y), rtol=1e-5, atol=1e-6)
    assert q.sample(4).shape == p.sample(4).shape
    if likelihood.ordered:
        torch.testing.assert_close(q.interval(0.9)[0].cpu(), p.interval(0.9)[0], rtol=1e-5, atol=1e-6)
    cuda.save(tmp_path / "run")
    back = cr.load(tmp_path / "run", mlp(3, 6, outputs, dtype=torch.float64).cuda())
    assert torch.equal(back.predict(X).mean, q.mean)
    there = cr.load(tmp_path / "run", mlp(3, 6, outputs, dtype=torch.float64))
    torch.testing.assert_close(there.predict(X).mean, q.mean.cpu(), rtol=1e-6, atol=1e-7)


def test_anchored_and_bootstrap_on_cuda():
    problem = cr.Problem(
        mlp(3, 6, 1, dtype=torch.float64),
        data=(X, Y),
        likelihood=Gaussian(0.2),
        prior=cr.priors.Normal(),
        device="cuda",
    )
    for options in ({"anchored": True}, {"bootstrap": True}, {"validation": 0.2}):
        draws = cr.DeepEnsemble(members=2, steps=40, batch_size=16, **options).fit(problem, seed=0).draws
        assert bool(torch.isfinite(draws).all())


def test_dropout_chosen_by_folds_on_cuda():
    problem = cr.Problem(
        mlp(3, 6, 1, dtype=torch.float64), data=(X, Y), likelihood=Gaussian(), prior=cr.priors.Normal(), device="cuda"
    )
    method = cr.MCDropout(insert="*", rate=[0.1, {"0": 0.0, "*": 0.3}], tau="held-out", folds=3, steps=60)
    posterior = method.fit(problem, seed=0)
    table = posterior.record.history["grid"]
    best = max(table, key=lambda row: row["held_out_log_density"])
    assert posterior.record.history["tau"] == best["tau"]
    assert len({row["held_out_log_density"] for row in table}) == 2
    assert bool(torch.isfinite(posterior.predict(X).mean).all())


@pytest.mark.slow
def test_compiled_on_cuda_equals_eager():
    problem = cr.Problem(
        mlp(3, 6, 1, dtype=torch.float64), data=(X, Y), likelihood=Gaussian(), prior=cr.priors.Normal(), device="cuda"
    )
    runs = [
        cr.DeepEnsemble(members=3, steps=60, batch_size=16, compile=c).fit(problem, seed=0).draws for c in (True, False)
    ]
    torch.testing.assert_close(*runs, rtol=1e-7, atol=1e-8)


def test_convolutions_on_cuda():
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 3, 1))
    x = randn(6, 1, 5, 5)
    problem = cr.Problem(
        net, data=(x, (x[:, 0] > 0).long()), likelihood=Categorical(axis=1), prior=cr.priors.Normal(), device="cuda"
    )
    p = cr.DeepEnsemble(members=2, steps=20).fit(problem, seed=0).predict(x)
    assert p.mean.shape == (6, 3, 5, 5)
    assert p.epistemic.shape == (6, 5, 5)


def test_a_cuda_tensor_for_a_cpu_network_is_refused():
    with pytest.raises(cr.InputError, match="x: is on cuda:0, the network on cpu"):
        cr.Problem(
            mlp(3, 6, 1, dtype=torch.float64), data=(X.cuda(), Y), likelihood=Gaussian(), prior=cr.priors.Normal()
        )


KERNELS = {
    "one block": (Gaussian(), 1, 60, (6,), torch.float64),
    "many blocks": (Gaussian(0.3), 1, 3000, (50, 50), torch.float32),
    "classes": (Categorical(), 3, 700, (20,), torch.float64),
    "hetero": (HeteroscedasticGaussian(), 2, 500, (33,), torch.float32),
}


@pytest.mark.parametrize("chains", [1, 3, 200])
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_for_small_networks_matches_torch(name, chains):
    likelihood, outputs, rows, hidden, dtype = KERNELS[name]
    x = randn(rows, 4, dtype=dtype)
    y = torch.arange(rows) % 3 if name == "classes" else x.sum(1)
    net = cr.zoo.mlp(4, hidden, outputs).to(dtype)
    problem = cr.Problem(net, data=(x, y), likelihood=likelihood, prior=cr.priors.Normal(0.8), device="cuda")
    plain, fast = ProblemTarget(problem), ProblemTarget(problem)
    assert fast.select_backend("auto").fused
    theta = 0.3 * randn(chains, problem.dim, dtype=dtype).cuda()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    expected, found = plain.likelihood_and_grad(theta), fast.likelihood_and_grad(theta)
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance * float(expected[1].abs().max()))
    momentum, size = (
        randn(chains, problem.dim, dtype=dtype, seed=1).cuda(),
        torch.full((chains,), 1e-4, dtype=dtype).cuda(),
    )
    paths = [Trajectory(target, LEAPFROG, chains, 0) for target in (plain, fast)]
    for path in paths:
        path.run_each((theta, momentum, expected[1]), size, None, [7] * chains)
    for attribute in ("theta", "momentum", "log_likelihood"):
        a, b = (getattr(path, attribute) for path in paths)
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance * float(a.abs().max()))


def test_hmc_with_the_kernel_is_reproducible_and_finds_the_posterior():
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(-1, 1)
    y = 1.5 * x[:, 0] - 0.5
    problem = cr.Problem(
        nn.Sequential(nn.Linear(1, 1)).double(),
        data=(x, y),
        likelihood=Gaussian(0.5),
        prior=cr.priors.Normal(1.0),
        device="cuda",
    )
    runs = [cr.HMC(chains=64, draws=200, warmup=100).fit(problem, seed=0) for _ in range(2)]
    assert runs[0].record.history["native"]
    assert torch.equal(runs[0].draws, runs[1].draws)
    design = torch.cat([x, torch.ones_like(x)], 1)
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(2, dtype=torch.float64))
    mean = covariance @ design.T @ y / 0.25
    draws = runs[0].draws.cpu().flatten(0, 1)
    # 64 chains of 200 draws: the standard error of a mean is below one standard deviation / sqrt(64 * 200 / 10).
    assert float(((draws.mean(0) - mean).abs() / covariance.diagonal().sqrt()).max()) < 4 / (64 * 20) ** 0.5
    torch.testing.assert_close(draws.T.cov(), covariance, rtol=0.12, atol=0.12 * float(covariance.abs().max()))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_kernels_of_residual_units_match_the_plain_layers(precision, monkeypatch):
    pytest.importorskip("triton")
    net = cr.zoo.resnet20_frn()
    x, y = randn(13, 3, 32, 32), torch.arange(13) % 10  # odd: some programs take two images
    options = {"likelihood": Categorical(), "prior": cr.priors.Normal(0.3), "device": "cuda"}
    problem = cr.Problem(net, data=(x, y), precision=precision, micro_batch=8, **options)
    exact = cr.Problem(net, data=(x.double(), y), dtype=torch.float64, **options)
    theta = problem.layout.read(problem.layout.module).unsqueeze(0)
    target, wanted = ProblemTarget(problem), ProblemTarget(exact).likelihood_and_grad(theta.double())[1]
    assert problem.fused
    assert not exact.fused
    assert not target.compile_parts(True, 10**6, 1)

    def error():
        return float((target.likelihood_and_grad(theta)[1] - wanted).norm() / wanted.norm())

    found = error()
    monkeypatch.setattr("credibly.networks.fused_unit.HAS_TRITON", False)
    plain = error()
    assert plain != found  # two different paths
    assert found < 1.5 * plain  # both errors are those of the precision


def test_unsupported_residual_units_stay_plain():
    pytest.importorskip("triton")
    x, y = randn(4, 3, 32, 32), torch.arange(4)
    for net, data in (
        (cr.zoo.resnet20_frn(activation="relu"), x),
        (cr.zoo.resnet20_frn(width=32), x),
        (cr.zoo.resnet20_frn(), x[..., :20, :20]),
    ):
        problem = cr.Problem(net, data=(data, y), likelihood=Categorical(), prior=cr.priors.Normal(0.3), device="cuda")
        assert not problem.fused
        theta = problem.layout.read(problem.layout.module).unsqueeze(0)
        assert bool(torch.isfinite(ProblemTarget(problem).likelihood_and_grad(theta)[1]).all())
