"""Likelihoods: density, moments, entropy, CDF and sampling agree with one another and with scipy."""

import numpy as np
import pytest
import torch
from scipy import stats

import credibly as cr
from credibly.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticCategorical,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    Poisson,
    StudentT,
)

f64 = torch.float64
LOG_SCALE = {"log_scale": torch.tensor([-0.5, 0.2], dtype=f64)}
OUTPUT = torch.tensor([[[0.4]], [[-1.1]]], dtype=f64)  # two draws, one row, one target

CASES = {
    "gaussian": (Gaussian(0.3), OUTPUT, {}, lambda s: stats.norm([0.4, -1.1][s], 0.3)),
    "gaussian learned": (Gaussian(), OUTPUT, LOG_SCALE, lambda s: stats.norm([0.4, -1.1][s], np.exp([-0.5, 0.2][s]))),
    "student": (StudentT(0.7, df=5.0), OUTPUT, {}, lambda s: stats.t(5.0, [0.4, -1.1][s], 0.7)),
    "hetero": (
        HeteroscedasticGaussian(),
        torch.tensor([[[0.4, -0.6]], [[-1.1, 0.8]]], dtype=f64),
        {},
        lambda s: stats.norm([0.4, -1.1][s], np.exp(0.5 * np.array([-0.6, 0.8])[s])),
    ),
    "hetero student": (
        HeteroscedasticStudentT(df=5.0, floor=0.2),
        torch.tensor([[[0.4, -0.6]], [[-1.1, 0.8]]], dtype=f64),
        {},
        lambda s: stats.t(5.0, [0.4, -1.1][s], np.hypot(0.2, np.exp(0.5 * np.array([-0.6, 0.8])[s]))),
    ),
    "poisson": (Poisson(), OUTPUT + 1, {}, lambda s: stats.poisson(np.exp([1.4, -0.1][s]))),
    "bernoulli": (Bernoulli(), OUTPUT, {}, lambda s: stats.bernoulli(1 / (1 + np.exp(-np.array([0.4, -1.1])[s])))),
}


@pytest.mark.parametrize("name", CASES)
def test_against_scipy(name):
    likelihood, output, extra, reference = CASES[name]
    discrete = likelihood.support != "real"
    values = [0.0, 1.0] if likelihood.support == "binary" else [0.0, 1.0, 4.0] if discrete else [-1.3, 0.2, 2.5]
    mean, variance = likelihood.moments(output, extra)
    entropy = likelihood.entropy(output, extra)
    for s in range(2):
        d = reference(s)
        for value in values:
            y = torch.full((1, 1), value, dtype=f64)
            expected = d.logpmf(value) if discrete else d.logpdf(value)
            assert float(likelihood.log_prob(output, y, extra)[s, 0]) == pytest.approx(expected, rel=1e-9)
            if likelihood.ordered:
                assert float(likelihood.cdf(output, y, extra)[s, 0, 0]) == pytest.approx(d.cdf(value), rel=1e-9)
        assert float(mean[s, 0, 0]) == pytest.approx(d.mean(), rel=1e-9)
        assert float(variance[s, 0, 0]) == pytest.approx(d.var(), rel=1e-9)
        assert float(entropy[s, 0, 0]) == pytest.approx(float(d.entropy()), rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_samples_follow_the_density(name):
    likelihood, output, extra, reference = CASES[name]
    count = 20_000
    wide = output.expand(2, count, output.shape[-1])
    draws = likelihood.sample(wide, extra, torch.Generator().manual_seed(0)).squeeze(-1).numpy()
    for s in range(2):
        d = reference(s)
        if likelihood.support == "real":
            assert stats.kstest(draws[s], d.cdf).pvalue > 1e-3
        else:
            values, seen = np.unique(draws[s], return_counts=True)
            expected = d.pmf(values) * count
            assert (np.abs(seen - expected) < 4.5 * np.sqrt(expected) + 1).all()


@pytest.mark.parametrize("df", [0.5, 1.0, 2.0, 2.5, 4.0, 6.0, 10.0, 30.0, 1000.0])
def test_student_t_cdf(df):
    """Also far out, where 1 - CDF and the polynomial of an even df have no digits left, and at the ends."""
    z = torch.cat([torch.linspace(-40, 40, 161, dtype=f64), torch.tensor([-1e9, -300.0, 1e9, torch.inf, -torch.inf])])
    got = StudentT(1.0, df=df).standard_cdf(z)
    torch.testing.assert_close(got, torch.from_numpy(stats.t(df).cdf(z.numpy())), rtol=1e-9, atol=1e-70)


@pytest.mark.parametrize("rate", [1e-3, 0.5, 29.0, 30.0, 31.0, 400.0])
def test_poisson_entropy_by_both_formulas(rate):
    output = torch.log(torch.tensor([[[rate]]], dtype=f64))
    assert float(Poisson().entropy(output, {})) == pytest.approx(float(stats.poisson(rate).entropy()), rel=2e-6)


def test_categorical_by_hand():
    logits = torch.log(torch.tensor([[[0.2, 0.5, 0.3]]], dtype=f64)) + 1.7
    likelihood = Categorical(classes=3)
    assert float(likelihood.log_prob(logits, torch.tensor([1]), {})) == pytest.approx(np.log(0.5))
    p, v = likelihood.moments(logits, {})
    assert p.flatten().tolist() == pytest.approx([0.2, 0.5, 0.3])
    assert v.flatten().tolist() == pytest.approx([0.16, 0.25, 0.21])
    assert float(likelihood.entropy(logits, {})) == pytest.approx(stats.entropy([0.2, 0.5, 0.3]))
    draws = likelihood.sample(logits.expand(1, 30_000, 3), {}, torch.Generator().manual_seed(0))
    fractions = torch.bincount(draws.flatten()) / 30_000
    assert fractions.tolist() == pytest.approx([0.2, 0.5, 0.3], abs=4 * np.sqrt(0.25 / 30_000))


def test_noisy_logits_average_the_softmax():
    """Against a large independent Monte Carlo average; without noise it is the plain softmax."""
    output = torch.tensor([[[1.0, -0.5, 0.3, 0.4, -1.0, 1.2]]], dtype=f64)
    likelihood = HeteroscedasticCategorical(classes=3, samples=4096)
    noise = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0), dtype=f64)
    expected = torch.softmax(output[..., :3] + torch.exp(0.5 * output[..., 3:]) * noise, -1).mean(0)
    torch.testing.assert_close(
        likelihood.moments(output, {})[0][0, 0], expected.reshape(-1, 3).mean(0), rtol=0, atol=0.01
    )
    noiseless = torch.cat([output[..., :3], torch.full((1, 1, 3), -60.0, dtype=f64)], -1)
    torch.testing.assert_close(likelihood.log_probabilities(noiseless), torch.log_softmax(output[..., :3], -1))
    assert float(likelihood.log_probabilities(output).exp().sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    "likelihood, output, y, squeeze, result",
    [
        (Gaussian(1.0), (5, 1), (5,), True, (5,)),
        (Gaussian(1.0), (5,), (5,), True, (5,)),
        (Gaussian(1.0), (5, 1), (5, 1), False, (5, 1)),
        (Gaussian(1.0), (5, 3), (5, 3), False, (5, 3)),
        (HeteroscedasticGaussian(), (5, 2), (5,), True, (5,)),
        (HeteroscedasticGaussian(), (5, 6), (5, 3), False, (5, 3)),
        (Gaussian(1.0), (5, 4, 4, 2), (5, 4, 4, 2), False, (5, 4, 4, 2)),
        (Gaussian(1.0), (5, 4, 4, 1), (5, 4, 4), True, (5, 4, 4)),
        (Gaussian(1.0, axis=1), (5, 1, 4, 4), (5, 4, 4), True, (5, 4, 4)),
        (Gaussian(1.0, axis=1), (5, 2, 4, 3), (5, 2, 4, 3), False, (5, 2, 4, 3)),
        (HeteroscedasticGaussian(axis=1), (5, 4, 4, 3), (5, 2, 4, 3), False, (5, 2, 4, 3)),
    ],
)
def test_shapes_follow_the_callers_y(likelihood, output, y, squeeze, result):
    out, target = torch.randn(output), torch.randn(y)
    bound = likelihood.bind(out, target)
    assert bound.squeeze is squeeze
    arranged = bound.arrange(torch.stack([out, out + 1]), 1)
    mean, _ = bound.moments(arranged, {})
    assert tuple(bound.restore(mean, 1).shape) == (2, *result)
    log_prob = bound.log_prob(arranged, bound.prepare(target, torch.float32), {})
    elements = result if squeeze else tuple(n for i, n in enumerate(result) if i != (bound.axis % len(result)))
    assert tuple(log_prob.shape) == (2, *elements)
    if isinstance(likelihood, Gaussian) and not squeeze:
        expected = torch.distributions.Normal(out, 1.0).log_prob(target).sum(bound.axis)
        torch.testing.assert_close(log_prob[0], expected)


@pytest.mark.parametrize(
    "likelihood, output, y, message",
    [
        (Gaussian(), (5, 2), (5,), r"net: its output has shape \(rows, 2\), y has shape \(rows\)"),
        (Gaussian(), (5, 1), (5, 3), "needs 1 output per target"),
        (HeteroscedasticGaussian(), (5, 1), (5,), "HeteroscedasticGaussian needs 2 per target"),
        (Gaussian((0.1, 0.2, 0.3)), (5, 2), (5, 2), "scale: has 3 values for 2 targets"),
    ],
)
def test_output_widths_that_do_not_fit(likelihood, output, y, message):
    with pytest.raises(cr.InputError, match=message):
        likelihood.bind(torch.randn(output), torch.randn(y))


def test_targets_outside_the_support():
    with pytest.raises(cr.InputError, match="y: has labels from 0 to 3.*labels are 0 to 2"):
        Categorical(classes=3).prepare(torch.tensor([0, 3]), torch.float32)
    with pytest.raises(cr.InputError, match=r"not integers, such as 0\.5"):
        Categorical(classes=3).prepare(torch.tensor([0.5, 1.0]), torch.float32)
    with pytest.raises(cr.InputError, match="values other than 0 and 1, such as 2"):
        Bernoulli(squeeze=True).prepare(torch.tensor([0.0, 2.0]), torch.float32)
    with pytest.raises(cr.InputError, match="not counts, such as -1"):
        Poisson(squeeze=True).prepare(torch.tensor([3.0, -1.0]), torch.float32)
    with pytest.raises(cr.InputError, match="net: its output has shape.*use Bernoulli"):
        Categorical().bind(torch.randn(5, 1), torch.zeros(5))
    with pytest.raises(cr.InputError, match=r"Pass one integer label per row \(y.argmax\(-1\) converts one-hot rows\)"):
        Categorical().bind(torch.randn(5, 3), torch.zeros(5, 3))
    with pytest.raises(cr.InputError, match="scale must be a positive number, got -1"):
        Gaussian(-1.0)
    with pytest.raises(
        cr.InputError, match="scale must be a positive number, one per target, or \"learned\", got 'auto'"
    ):
        Gaussian("auto")
