"""Samplers on a CUDA device: graphs do not change results, the posterior is right, runs can be resumed."""

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.core import cuda_graphs as replaying
from credibly.inference.kernels.hmc import LEAPFROG
from credibly.inference.sampling.trajectory import UNROLLED, Trajectory
from credibly.inference.target import ProblemTarget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
X = randn(60, 3, dtype=torch.float64)
Y = X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3


def linear(device="cuda"):
    return cr.Problem(
        torch.nn.Linear(3, 1).double(), (X, Y), cr.likelihoods.Gaussian(scale=0.5), cr.priors.Normal(1.0), device=device
    )


def network(device="cuda", **options):
    net = mlp(3, 8, 1, dtype=torch.float64)
    return cr.Problem(net, (X, Y), cr.likelihoods.Gaussian(scale=0.5), cr.priors.Normal(1.0), device=device, **options)


@pytest.mark.parametrize("steps", [1, UNROLLED + 3])
def test_a_captured_trajectory_equals_plain_steps(steps):
    target = ProblemTarget(network())
    assert not target.select_backend(False).fused
    theta = randn(4, target.dim, dtype=torch.float64).cuda() * 0.3
    momentum, size = torch.ones_like(theta), torch.tensor([0.01, 0.02, 0.0, 0.03], dtype=torch.float64).cuda()
    gradient = target.likelihood_and_grad(theta)[1]
    found = []
    for graphed in (True, False):
        path = Trajectory(target, LEAPFROG, 4, 0)
        path.graphed = graphed
        path.run((theta, momentum, gradient), size, None, steps)
        assert bool(path.graphs) == graphed
        found.append([path.theta.clone(), path.momentum.clone(), path.gradient.clone(), path.log_likelihood.clone()])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[0][0][2], theta[2])  # a step of size zero does not move


def test_hmc_finds_the_exact_posterior_of_a_linear_model():
    posterior = cr.HMC(chains=64, draws=300, warmup=150, jitter=0.5, compile=False).fit(linear(), seed=0)
    assert posterior.draws.device.type == "cuda"
    assert posterior.record.history["cuda_graph"]
    design = torch.cat([X, torch.ones(60, 1, dtype=torch.float64)], 1)
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(4, dtype=torch.float64))
    mean = covariance @ (design.T @ Y) / 0.25
    draws = posterior.draws.reshape(-1, 4).cpu()
    error = (
        covariance.diagonal() / (0.25 * len(draws))
    ).sqrt()  # assumes an effective sample size of a quarter of the draws
    assert bool(((draws.mean(0) - mean).abs() < 4 * error).all())
    torch.testing.assert_close(torch.cov(draws.T), covariance, rtol=0.1, atol=0.02 * float(covariance.diagonal().max()))


@pytest.mark.parametrize(
    "method",
    [cr.HMC(chains=3, draws=30, warmup=30, compile=False), cr.SGHMC(chains=3, draws=30, warmup=60, compile=False)],
)
def test_a_resumed_run_gives_the_same_draws(method, tmp_path, monkeypatch):
    from credibly.inference.sampling import loop as sampling

    whole = method.fit(network(), seed=1)
    calls = iter(range(10**6))
    monkeypatch.setattr(sampling, "polite_interrupt", lambda: _stop_after(calls, 25))
    with pytest.raises(cr.Interrupted):
        method.fit(network(), seed=1, out=tmp_path / "run")
    monkeypatch.undo()
    resumed = cr.resume(tmp_path / "run", network())
    torch.testing.assert_close(resumed.draws, whole.draws, rtol=0, atol=0)


class _stop_after:
    def __init__(self, calls, count):
        self.calls, self.count = calls, count

    def __enter__(self):
        return lambda: next(self.calls) >= self.count

    def __exit__(self, *_):
        return False


def test_low_precision_forward_keeps_energies_and_parameters_in_full():
    problem = network()
    assert problem.forward.precision is None
    data, likelihood, prior = (X.float(), Y.float()), cr.likelihoods.Gaussian(scale=0.5), cr.priors.Normal(1.0)
    low, full = (cr.Problem(mlp(3, 8, 1), data, likelihood, prior, device="cuda", precision=p) for p in ("bf16", None))
    theta = low.layout.read(low.layout.module).unsqueeze(0)
    a, b = ProblemTarget(low).likelihood_and_grad(theta), ProblemTarget(full).likelihood_and_grad(theta)
    assert a[0].dtype == torch.float64
    assert a[1].dtype == torch.float32
    torch.testing.assert_close(a[1], b[1], rtol=0.1, atol=0.05 * float(b[1].abs().max()))
    assert not torch.equal(a[1], b[1])


def test_images_in_micro_batches_match_one_batch():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.SiLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 3)
    ).double()
    x, y = randn(40, 1, 8, 8, dtype=torch.float64), torch.arange(40) % 3
    whole, parts = (
        ProblemTarget(
            cr.Problem(net, (x, y), cr.likelihoods.Categorical(), cr.priors.Normal(1.0), device="cuda", micro_batch=m)
        )
        for m in (None, 10)
    )
    theta = randn(1, whole.dim, dtype=torch.float64).cuda() * 0.1
    assert whole.problem.x.is_contiguous(memory_format=torch.channels_last)
    assert not parts.whole(1)
    for a, b in zip(whole.likelihood_and_grad(theta), parts.likelihood_and_grad(theta)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["SGLD", "SGHMC", "DeepEnsemble", "MCDropout", "BayesByBackprop"])
def test_a_captured_step_equals_an_eager_one(method, monkeypatch):
    settings = {"chains": 3, "draws": 4, "thin": 5, "warmup": 10, "batch_size": 16, "step_size": 1e-3}
    if not method.startswith("SG"):
        settings = {"steps": 40, "batch_size": 16, "compile": False} | (
            {"insert": "0"} if method == "MCDropout" else {}
        )
    fit = getattr(cr, method)(**settings)
    captured = fit.fit(network(), seed=3)
    monkeypatch.setattr(replaying, "capture", lambda *args, **kwargs: None)
    plain = fit.fit(network(), seed=3)
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(captured.tensors()[name], tensor, rtol=1e-4, atol=1e-5)
    if method.startswith("SG"):
        assert captured.record.history["cuda_graph"]
        assert not plain.record.history["cuda_graph"]
