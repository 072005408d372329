"""Noise for large steps: normal numbers made from raw bits, signs unpacked from bits."""

import math

import pytest
import torch
from scipy import stats

from credibly.core.rng import MANY, draw_noise, normal, stream
from credibly.inference.training.reparameterisation import draw_signs

COUNT = 2_000_000


def some(seed: int, shape: tuple[int, ...] = (1, 1, COUNT)) -> torch.Tensor:
    noise = draw_noise(shape, stream(seed, "test"), torch.float32)
    assert noise.dtype == torch.int32  # made from raw bits
    return normal(noise, shape[2:])


def test_numbers_made_from_bits_are_standard_normal():
    z = some(0).double().flatten()
    # A uniform p-value, and moments within 5 standard errors, which chance never exceeds.
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-4
    error = 5 / math.sqrt(COUNT)
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(float((z**power).mean()) - expected) < error * math.sqrt(variance)
    for far in (3.0, 4.0, 4.5):  # both tails, Poisson counts
        for side in (z, -z):
            mean = COUNT * float(stats.norm.sf(far))
            assert abs(int((side > far).sum()) - mean) < 5 * math.sqrt(mean) + 1


def test_the_two_numbers_of_a_pair_and_neighbours_are_independent():
    z = some(1).double().flatten()
    first, second = z.chunk(2)
    error = 5 / math.sqrt(COUNT // 2)
    for a, b in ((first, second), (first[1:], first[:-1]), (second[1:], second[:-1])):
        for f, scale in ((lambda t: t, 1), (lambda t: t.square() - 1, 2), (torch.abs, None)):
            fa, fb = f(a), f(b)
            scale = float(fa.std() * fb.std()) if scale is None else scale
            assert abs(float(((fa - fa.mean()) * (fb - fb.mean())).mean())) < error * scale


def test_a_stream_is_bit_for_bit_reproducible_and_independent_of_others():
    a, b = some(3), some(4)
    assert torch.equal(a, some(3))
    assert abs(float((a * b).mean())) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize("shape", [(1, 1, MANY), (1, 3, MANY + 1), (2, 2, 7, 4001), (40_000, 1, 1)])
def test_shapes_and_odd_counts(shape):
    z = some(5, shape)
    assert z.shape == shape
    assert len(z.unique()) > 0.99 * z.numel()


def test_the_ends_of_the_range_of_bits():
    ends = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 2**30], dtype=torch.int32)
    bits = torch.stack([ends.repeat_interleave(6), ends.repeat(6)]).reshape(1, 1, 2, 36)
    z = normal(bits, (72,))
    assert torch.isfinite(z).all()
    # The largest number comes from the smallest uniform, a quarter of 2^-31.
    assert float(z.abs().max()) == pytest.approx(math.sqrt(2 * 33 * math.log(2)), rel=1e-6)


@pytest.mark.parametrize("count, dtype", [(MANY - 1, torch.float32), (2 * MANY, torch.float64)])
def test_few_numbers_and_float64_come_from_torch(count, dtype):
    noise = draw_noise((1, 1, count), stream(0, "test"), dtype)
    assert torch.equal(noise, torch.randn((1, 1, count), generator=stream(0, "test"), dtype=dtype))
    assert normal(noise, (count,)) is noise


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 33), (1, 1, 100, 999)])
def test_signs(shape):
    signs = draw_signs(shape, stream(0, "signs"), torch.float64)
    assert signs.shape == shape
    assert signs.dtype == torch.float64
    assert set(signs.unique().tolist()) <= {-1.0, 1.0}
    assert torch.equal(signs, draw_signs(shape, stream(0, "signs"), torch.float64))


def test_signs_are_fair_and_independent():
    signs = draw_signs((1, 1, 32 * 50_000), stream(1, "signs"), torch.float32).reshape(50_000, 32)
    error = 5 / math.sqrt(50_000)
    assert float(signs.mean(0).abs().max()) < error  # each bit of a word
    products = signs.T @ signs / 50_000
    assert float((products - torch.eye(32)).abs().max()) < error
    assert abs(float((signs[1:] * signs[:-1]).mean())) < 5 / math.sqrt(signs.numel())
