"""Fits on streams: against hand-written loops, against the same rows in memory, and against the exact posterior."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import credibly as cr
from conftest import mlp, randn
from credibly.inference.training.stream_batches import StreamBatches

GAUSSIAN, PRIOR = cr.likelihoods.Gaussian(0.5), cr.priors.Normal(0.7)
DOUBLE = torch.float64


class Noisy(Dataset):
    """Rows with an augmentation: noise on the inputs."""

    def __init__(self, x, y, noise=0.05):
        self.x, self.y, self.noise = x, y, noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + self.noise * torch.randn(self.x[i].shape, dtype=self.x.dtype), self.y[i]


def rows(n=50, dtype=DOUBLE):
    x = randn(n, 3, dtype=dtype)
    return x, (x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=dtype)).tanh() + 0.1 * randn(n, 1, seed=1, dtype=dtype)


def streamed(batch=16, *, n=50, shuffle=True, noise=0.0, net=None, likelihood=GAUSSIAN, **kwargs):
    data = Noisy(*rows(n), noise) if noise else TensorDataset(*rows(n))
    loader = DataLoader(data, batch_size=batch, shuffle=shuffle, **kwargs)
    return cr.Problem(net or mlp(3, 4, 1).double(), cr.data.Stream(loader), likelihood, PRIOR)


def in_memory(net=None):
    return cr.Problem(net or mlp(3, 4, 1).double(), rows(), GAUSSIAN, PRIOR)


QUICK = {
    "mle": cr.MLE(steps=9),
    "map": cr.MAP(steps=9),
    "ensemble": cr.DeepEnsemble(members=2, steps=9),
    "bbb": cr.BayesByBackprop(steps=9),
    "bbb weights": cr.BayesByBackprop(steps=9, estimator="weights", members=2),
    "ivon": cr.IVON(steps=9, members=2),
    "dropout": cr.MCDropout(steps=9, insert="*", rate=0.1),
    "swag": cr.SWAG(steps=9, iterates=3, rank=2, sgd_lr=1e-2, every=2),
    "sgld": cr.SGLD(chains=2, draws=3, warmup=5, thin=2, step_size=1e-3, init="fresh"),
    "sghmc": cr.SGHMC(chains=2, draws=3, max_steps=40),
    "laplace": cr.Laplace(steps=9),
}


@pytest.mark.parametrize("name", QUICK)
def test_methods_stream_reproducibly_with_a_smaller_last_batch(name):
    """50 rows in batches of 16 end with one of 2 rows."""
    method, x = QUICK[name], rows()[0][:5]
    one, two = (method.fit(streamed(noise=0.05), seed=3).predict(x).mean for _ in range(2))
    other = method.fit(streamed(noise=0.05), seed=4).predict(x).mean
    assert torch.isfinite(one).all()
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_compilation_is_left_out_where_batches_differ_in_size():
    compiled, plain = (cr.MAP(steps=9, compile=c).fit(streamed(), seed=1).draws for c in (True, False))
    assert torch.equal(compiled, plain)


def test_training_is_the_plain_loop_over_the_loader():
    """MAP by SGD on an unshuffled stream, against autograd on N / |B| times each batch, the last with 2 rows."""
    x, y = rows()
    net = mlp(3, 4, 1).double()
    posterior = cr.MAP(epochs=3, optimiser="sgd", momentum=0.0, lr=0.05, schedule="constant").fit(
        streamed(shuffle=False, net=net)
    )
    plain = mlp(3, 4, 1).double()
    plain.load_state_dict(net.state_dict())
    for _ in range(3):
        for start in range(0, 50, 16):
            part = slice(start, start + 16)
            count = len(x[part])
            loss = 50 / count * (0.5 * ((plain(x[part]) - y[part]) / 0.5) ** 2).sum()
            loss = loss + sum(0.5 * ((p / 0.7) ** 2).sum() for p in plain.parameters())
            for p, g in zip(plain.parameters(), torch.autograd.grad(loss, list(plain.parameters())), strict=True):
                p.data -= 0.05 * g / 50
    want = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(posterior.draws.flatten(), want, rtol=1e-10, atol=1e-12)


def test_members_share_the_batches_of_one_pass():
    reads = []

    class Counted(TensorDataset):
        def __getitem__(self, i):
            reads.append(i)
            return super().__getitem__(i)

    loader = DataLoader(Counted(*rows()), batch_size=16, shuffle=True)
    made = cr.Problem(mlp(3, 4, 1).double(), cr.data.Stream(loader), GAUSSIAN, PRIOR)
    reads.clear()
    cr.DeepEnsemble(members=4, epochs=2).fit(made)
    assert len(reads) == 2 * 50


def test_minibatch_estimates_are_unbiased():
    """Every row is equally often in a batch of each size, so the mean over passes of N/|B| g_B is the full gradient."""
    net = mlp(3, 4, 1).double()
    made = streamed(net=net)
    theta = made.layout.read(made.layout.module).unsqueeze(0)
    whole = in_memory(net).log_density_and_grad(theta).gradient
    batches, found = StreamBatches(made, seed=0), []
    for step in range(4 * 400):
        indices = batches.at(step)
        found.append(batches.window.minibatch(theta, indices).gradient[0])
    each = torch.stack(found).reshape(400, 4, -1)
    for position in (0, 3):
        mean, error = each[:, position].mean(0), each[:, position].std(0) / math.sqrt(400)
        assert ((mean - whole[0]).abs() <= 4.5 * error + 1e-9).all()


def test_full_passes_equal_the_rows_in_memory():
    made, held = streamed(), in_memory()
    theta = randn(2, made.dim, dtype=DOUBLE)
    torch.testing.assert_close(made.log_density(theta), held.log_density(theta), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        made.log_density_and_grad(theta).gradient, held.log_density_and_grad(theta).gradient, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_laplace_streams_the_curvature_in_one_pass(structure):
    net = mlp(3, 4, 1).double()
    method = cr.Laplace(start="network", structure=structure, tune="evidence")
    one, two = (method.fit(made) for made in (streamed(net=net), in_memory(net)))
    assert one.log_evidence == pytest.approx(two.log_evidence, rel=1e-10)
    x = rows()[0][:5]
    torch.testing.assert_close(one.predict(x).variance, two.predict(x).variance, rtol=1e-7, atol=1e-10)


def test_laplace_fits_a_learned_noise_by_one_pass():
    learned = cr.likelihoods.Gaussian("learned", scale_prior=cr.priors.Normal(1.0))
    net = mlp(3, 4, 1).double()
    held = cr.Problem(net, rows(), learned, PRIOR)
    method = cr.Laplace(start="network", noise_from="evidence")
    one, two = (method.fit(p).loc for p in (streamed(net=net, likelihood=learned), held))
    torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)


def test_sghmc_on_a_stream_samples_the_exact_posterior():
    """Linear regression, in units of its exact standard deviations: 8 chains of 100 draws.

    The chains share their batches, so the spread of their means says nothing about that noise.
    """
    n = 1024
    x = randn(n, 2, dtype=DOUBLE)
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=DOUBLE) + 0.5 * randn(n, 1, seed=1, dtype=DOUBLE)
    loader = DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True)
    made = cr.Problem(nn.Linear(2, 1).double(), cr.data.Stream(loader), GAUSSIAN, PRIOR)
    posterior = cr.SGHMC(chains=8, draws=100, warmup=200, thin=8, step_size=5e-4, momentum=0.94, init="fresh").fit(made)
    design = torch.cat([x, torch.ones(n, 1, dtype=DOUBLE)], 1)
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(3, dtype=DOUBLE) / 0.49)
    mean = (covariance @ design.T @ y / 0.25).flatten()
    draws, scale = posterior.draws, covariance.diagonal().sqrt()
    assert ((draws.mean((0, 1)) - mean).abs() < 0.2 * scale).all()
    ratio = draws.flatten(0, 1).std(0) / scale
    assert ((ratio > 0.85) & (ratio < 1.15)).all()


def test_a_stopped_chain_resumes_bit_for_bit(tmp_path):
    method = cr.SGHMC(chains=2, draws=40, warmup=30, thin=5, step_size=0.01, init="fresh")
    whole = method.fit(streamed(noise=0.05), seed=1, out=tmp_path / "whole")
    sampler_module = "credibly.inference.sampling.sgmcmc_stream"
    from importlib import import_module

    sampler = import_module(sampler_module).StreamSampler
    advance, calls = sampler.advance, []

    def stopping(self, stop):
        calls.append(self.done)
        return advance(self, (lambda: True) if len(calls) == 12 else stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "advance", stopping)
        with pytest.raises(cr.Interrupted):
            method.fit(streamed(noise=0.05), seed=1, out=tmp_path / "part")
    resumed = cr.resume(tmp_path / "part", streamed(noise=0.05))
    assert torch.equal(whole.draws, resumed.draws)


@pytest.mark.parametrize(
    "method",
    [
        cr.HMC(),
        cr.MAP(validation=0.2),
        cr.MAP(noise_from="held-out"),
        cr.DeepEnsemble(bootstrap=True),
        cr.DeepEnsemble(anchored=True),
        cr.SGHMC(control_variate=True),
        cr.MCDropout(insert="*", rate=(0.1, 0.2)),
    ],
    ids=str,
)
def test_what_needs_rows_in_memory_is_refused_before_work(method, monkeypatch):
    made = streamed()
    monkeypatch.setattr(StreamBatches, "at", lambda *_: pytest.fail("a batch was read"))
    with pytest.raises(cr.InputError, match=r"is a stream of 50 rows.*in_memory\(loader\)"):
        method.fit(made)


@pytest.mark.parametrize("method", [cr.MAP(batch_size=8), cr.SGLD(batch_size=8)], ids=str)
def test_the_batch_size_is_that_of_the_loader(method):
    with pytest.raises(cr.InputError, match="batch_size must be that of the loader, 16, or None, got 8"):
        method.fit(streamed())


def test_swag_averages_need_windows_within_a_pass():
    with pytest.raises(cr.InputError, match="every must be from 10 to a fourth of the 4 batches of a pass"):
        cr.SWAG(steps=5).fit(streamed())
    posterior = cr.SWAG(steps=50, iterates=4, rank=2).fit(streamed(batch=8, n=400))
    assert posterior.record.history["sgd_every"] == 12


def test_the_record_describes_the_stream():
    found = cr.MAP(steps=2).fit(streamed(noise=0.05)).record.history["stream"]
    assert found == {
        "rows": 50,
        "batch": 16,
        "batches": 4,
        "reason": "asked for",
        "shuffled": True,
        "workers": 0,
        "reproducible": True,
    }


def test_saved_fits_of_streams_can_be_loaded(tmp_path):
    made = streamed()
    posterior = cr.MAP(steps=3).fit(made, out=tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 4, 1).double())
    assert torch.equal(loaded.draws, posterior.draws)


def test_steps_on_the_module_are_not_for_variational_inference_on_streams():
    with pytest.raises(cr.InputError, match="accumulate must be 1"):
        cr.BayesByBackprop(steps=3, accumulate=2).fit(streamed())
