"""On a CUDA device: the same results as on the CPU, and nothing left behind on the wrong one."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
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
