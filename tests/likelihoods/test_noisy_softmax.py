"""Noisy logits: the averaged softmax against brute force, its symmetry, and its use in torch.func and a compiler."""

import math

import pytest
import torch

from credibly.likelihoods import HeteroscedasticCategorical
from credibly.likelihoods.noisy_softmax import noisy_log_softmax

f64 = torch.float64


def probabilities(logits, noise, **settings):
    likelihood = HeteroscedasticCategorical(classes=logits.shape[-1], **settings)
    return likelihood.log_probabilities(torch.cat([logits, 2 * noise.log()], -1)).exp()


def brute_force(logits, noise, samples=1_000_000):
    """The average over independent noise, and the largest standard error of it."""
    generator = torch.Generator().manual_seed(0)
    total, square = torch.zeros_like(logits), torch.zeros_like(logits)
    for _ in range(50):
        e = torch.randn(samples // 50, 1, logits.shape[-1], generator=generator, dtype=torch.float32)
        p = torch.softmax(logits.float() + noise.float() * e, -1)
        total, square = total + p.sum(0, dtype=f64), square + p.square().sum(0, dtype=f64)
    mean = total / samples
    return mean, float(((square / samples - mean.square()).clamp_min(0) / samples).sqrt().max())


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_probabilities_against_brute_force(classes):
    """Random logits with equal noise of 1 and 4, and with noise from 0.1 to 5 that differs between classes."""
    levels = torch.tensor([1.0, 4.0], dtype=f64)[:, None].expand(-1, classes)
    generator = torch.Generator().manual_seed(classes)
    logits = 2 * torch.randn(2, classes, generator=generator, dtype=f64).repeat(2, 1)
    noise = torch.cat([levels, 0.1 * 50 ** torch.rand(2, classes, generator=generator, dtype=f64)])
    expected, error = brute_force(logits, noise)
    assert error < 5e-4
    torch.testing.assert_close(probabilities(logits, noise), expected, rtol=0, atol=4 * error + 0.003)
    torch.testing.assert_close(probabilities(logits, noise, samples=400), expected, rtol=0, atol=4 * error + 0.001)


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
@pytest.mark.parametrize("samples", [1, 256, 1024])
def test_equal_logits_give_equal_probabilities(classes, samples):
    noise = torch.tensor([0.01, 0.3, 1.0, 3.0, 30.0])[:, None].expand(-1, classes)
    found = probabilities(torch.full((5, classes), 1.7), noise, samples=samples)
    torch.testing.assert_close(found, torch.full((5, classes), 1 / classes))


def test_two_classes_against_the_logistic_normal_integral():
    """With K = 2 only the difference counts: E sigmoid(d + sqrt(s1^2 + s2^2) e), here by a fine trapezoidal rule."""
    difference = torch.linspace(-6, 6, 25, dtype=f64)
    e = torch.linspace(-9, 9, 20_001, dtype=f64)[:, None]
    weight = torch.softmax(-0.5 * e.square(), 0)
    logits = torch.stack([difference, torch.zeros_like(difference)], -1)
    for s1, s2, bound in ((0.5, 0.8, 2e-4), (3.0, 0.1, 2e-3), (3.0, 3.0, 2e-3), (5.0, 0.5, 6e-3)):
        expected = (weight * torch.sigmoid(difference + math.hypot(s1, s2) * e)).sum(0)
        found = probabilities(logits, torch.tensor([s1, s2], dtype=f64).expand_as(logits))
        assert float((found[:, 0] - expected).abs().max()) < bound


def test_classes_are_exchangeable_and_rows_independent():
    generator = torch.Generator().manual_seed(0)
    logits, noise = (torch.randn(3, 40, 5, generator=generator, dtype=f64) for _ in range(2))
    noise = noise.exp()
    found = probabilities(logits, noise)
    order = torch.randperm(5, generator=generator)
    torch.testing.assert_close(probabilities(logits[..., order], noise[..., order]), found[..., order])
    rows = torch.randperm(40, generator=generator)[:7]  # a minibatch
    torch.testing.assert_close(probabilities(logits[:, rows], noise[:, rows]), found[:, rows])
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 40, dtype=f64))


def test_blocks_give_the_same_as_the_whole(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits, noise = (torch.randn(2, 30, 3, generator=generator, dtype=f64) for _ in range(2))
    whole = probabilities(logits, noise.exp())
    monkeypatch.setattr("credibly.likelihoods.noisy_softmax.BLOCK_VALUES", {"cpu": 16**2 * 3 * 7})
    torch.testing.assert_close(probabilities(logits, noise.exp()), whole)


def test_extreme_outputs_stay_finite():
    """Misclassified rows far out, vanishing noise and huge noise, in float32, with their gradients."""
    logits = torch.tensor([[0.0, 150.0, -40.0], [300.0, -300.0, 0.0], [1.0, 2.0, 3.0]]).repeat(4, 1, 1)
    noise = torch.tensor([1e-6, 1.0, 40.0, 1e3])[:, None, None].expand_as(logits)
    logits, log_noise = logits.requires_grad_(), noise.log().requires_grad_()
    found = noisy_log_softmax(logits, log_noise.exp(), 16)
    found.sum().backward()
    assert bool(found.isfinite().all() & logits.grad.isfinite().all() & log_noise.grad.isfinite().all())
    torch.testing.assert_close(found[0], torch.log_softmax(logits[0], -1))


def test_gradients_vmap_and_a_compiler_agree():
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(4, 5, 6, generator=generator, dtype=f64)
    likelihood = HeteroscedasticCategorical(classes=3)
    assert torch.autograd.gradcheck(likelihood.log_probabilities, (output[0, :2].clone().requires_grad_(),))
    whole = likelihood.log_probabilities(output)
    torch.testing.assert_close(torch.func.vmap(likelihood.log_probabilities)(output), whole)
    compiled = torch.compile(likelihood.log_probabilities, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(output), whole)
    hessian = torch.func.hessian(lambda o: likelihood.log_probabilities(o)[0, 0])(output[0])
    assert bool(hessian.isfinite().all())
