"""Minibatch steps of wide networks in C++ match the PyTorch path with the same noise, for any number of threads."""

import itertools
import math

import pytest
import torch
from torch import nn

import credibly as cr
from credibly.backends.cpp import wide
from credibly.backends.cpp.library import library
from credibly.core import rng
from credibly.core.rng import CHUNK, stream_keys, stream_words
from credibly.inference import backend
from credibly.inference.target import to_target

compiled = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
BOTH = pytest.mark.parametrize("method", [cr.SGHMC, cr.SGLD])


@pytest.fixture
def any_size(monkeypatch):
    """Treat networks of any size as large."""
    monkeypatch.setattr(backend, "MANY", 1)


def problem(widths=(5, 40, 23, 4), rows=150, activation=nn.SiLU, kind="categorical", dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(3)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), activation()]
    net = nn.Sequential(*layers[:-1]).to(dtype)
    x = torch.randn(rows, widths[0], generator=generator).to(dtype)
    real = torch.randn(rows, widths[-1], generator=generator).to(dtype)
    y, likelihood = {
        "gaussian": (real, cr.likelihoods.Gaussian(**({"scale": 0.8} | options))),
        "heteroscedastic": (real[:, : widths[-1] // 2], cr.likelihoods.HeteroscedasticGaussian()),
        "categorical": (real.argmax(-1), cr.likelihoods.Categorical()),
        "bernoulli": ((real > 0.3).to(dtype), cr.likelihoods.Bernoulli()),
    }[kind]
    return cr.Problem(net, (x, y), likelihood, cr.priors.Normal(0.3, loc=0.1), temperature=0.7)


SETTINGS = {"chains": 3, "draws": 3, "thin": 3, "warmup": 4, "batch_size": 20}
SIZES = {cr.SGHMC: 2e-3, cr.SGLD: 1e-5}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fit(method, given, **options):
    start = 0.15 * randn(SETTINGS["chains"], given.dim).to(given.x)
    settings = {**SETTINGS, "init": start, "step_size": SIZES[method], **options}
    return method(**settings).fit(given, seed=1, progress=False)


def assert_matches_pytorch(method, given, **options):
    """Thirteen steps in float32 on weights below one: a rounding error of 6e-8 per step, and as much from gradients."""
    fast, plain = fit(method, given, **options), fit(method, given, compile=False, **options)
    assert fast.record.history["native"]
    assert not plain.record.history["native"]
    torch.testing.assert_close(fast.draws, plain.draws, rtol=0, atol=2e-6)
    value = "log_likelihood"
    torch.testing.assert_close(fast.statistics[value], plain.statistics[value], rtol=2e-5, atol=0)


class TestNoise:
    def test_words_are_those_of_splitmix(self):
        """The reference implementation's output for this seed, with the second key zero."""
        expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
        assert stream_words((1234567, 0), 4).tolist() == expected

    def test_a_number_depends_on_its_index_and_the_keys_alone(self):
        keys = stream_keys(1, "noise", 2, 3)
        long, short = torch.empty(50 * CHUNK), torch.empty(3 * CHUNK)
        for out in (long, short):
            rng.fill_normal(out, keys)
        assert torch.equal(long[: 3 * CHUNK], short)
        assert len({stream_keys(1, "noise", 2, 3), stream_keys(1, "noise", 3, 2), stream_keys(2, "noise", 2, 3)}) == 3

    @compiled
    def test_cpp_numbers_match(self):
        """In float32 an angle of pi has a rounding error of 1e-7, times a radius of up to 6.6."""
        plain, fast = torch.empty(4000 * CHUNK), torch.empty(4000 * CHUNK)
        rng.fill_normal(plain, keys := stream_keys(0, "noise", 1))
        wide.fill_normal(fast, keys)
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=2e-6)

    def test_numbers_are_normal_and_independent(self):
        """Moments, correlations and the empirical distribution, each within 4.5 standard errors."""
        count = 2**17
        first, second = torch.empty(count), torch.empty(count)
        rng.fill_normal(first, stream_keys(5, "noise", 0, 7))
        rng.fill_normal(second, stream_keys(5, "noise", 0, 8))
        a, b = first.double(), second.double()
        root = math.sqrt(count)
        for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs(float((a**power).mean()) - mean) < 4.5 * math.sqrt(variance) / root
        assert abs(float((a * b).mean())) < 4.5 / root
        for lag in (1, 2, 8, 16, 17, 32, 1024):  # numbers 16 apart form a Box-Muller pair
            assert abs(float((a[lag:] * a[:-lag]).mean())) < 4.5 / math.sqrt(count - lag)
            assert abs(float(((a[lag:] ** 2 - 1) * (a[:-lag] ** 2 - 1)).mean())) < 4.5 * 2 / math.sqrt(count - lag)
        steps = torch.arange(1, count + 1, dtype=torch.float64) / count
        distance = (torch.special.ndtr(a.sort().values) - steps).abs().max()
        assert float(distance) * root < 2.3  # Kolmogorov-Smirnov: p = 5e-5


@compiled
class TestSteps:
    @BOTH
    @pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity])
    @pytest.mark.parametrize("kind", ["gaussian", "heteroscedastic", "categorical", "bernoulli"])
    def test_matches_pytorch(self, method, kind, activation, any_size):
        assert_matches_pytorch(method, problem(kind=kind, activation=activation))

    @pytest.mark.parametrize("batch", [1, 15, 16, 49, 128, 129, 150])
    def test_for_batch_sizes_around_the_tile_size(self, batch, any_size):
        assert_matches_pytorch(cr.SGHMC, problem(), batch_size=batch)

    @pytest.mark.parametrize("widths", [(1, 2), (3, 7, 1), (17, 31, 2), (64, 16, 65, 3), (49, 33, 32, 5)], ids=str)
    def test_for_unit_counts_that_fill_no_block(self, widths, any_size):
        assert_matches_pytorch(cr.SGLD, problem(widths=widths, kind="gaussian"))

    @pytest.mark.parametrize(
        "options",
        [{"scale": "learned"}, {"scale": "learned", "per_target": True}, {"scale": (0.7, 2.0, 0.5, 1.0)}],
        ids=str,
    )
    def test_with_other_noise_scales(self, options, any_size):
        assert_matches_pytorch(cr.SGHMC, problem(kind="gaussian", **options))

    @BOTH
    @pytest.mark.parametrize("preconditioner", [None, "prior"])
    def test_without_biases_and_with_different_priors(self, method, preconditioner, any_size):
        """Priors that change within a chunk and between chunks."""
        net = nn.Sequential(nn.Linear(3, 60, bias=False), nn.Tanh(), nn.Sequential(nn.Linear(60, 1), nn.Identity()))
        x = torch.linspace(-1, 2, 60).reshape(20, 3)
        priors = {"0.*": cr.priors.Normal(0.5, loc=-0.3), "*": cr.priors.Normal(2.0, fan_in=True)}
        given = cr.Problem(net, (x, x[:, :1] ** 2), cr.likelihoods.Gaussian(0.5), priors)
        assert_matches_pytorch(method, given, preconditioner=preconditioner)

    @BOTH
    @pytest.mark.parametrize("schedule", ["polynomial", "cyclical"])
    def test_with_step_size_schedules(self, method, schedule, any_size):
        assert_matches_pytorch(method, problem(), schedule=schedule, cycles=3)

    @pytest.mark.parametrize("widths", [(100, 300, 10), (40, 60, 4)], ids=["many", "some"])
    def test_a_network_that_is_large_enough(self, widths):
        given = problem(widths=widths)
        assert given.dim > (backend.MANY if widths[1] > 256 else backend.SOME)
        assert_matches_pytorch(cr.SGHMC, given)
        assert "large" not in fit(cr.SGHMC, given).record.history["plan"]


@compiled
class TestReproducibility:
    @BOTH
    @pytest.mark.parametrize("threshold", [0, 2**60], ids=["threads share a chain", "one thread per chain"])
    def test_independent_of_threads_and_other_chains(self, method, threshold, any_size, monkeypatch):
        """A chain is bit-for-bit identical alone and beside others, for any number of threads."""
        monkeypatch.setattr(wide, "MIN_THREADED_CHAIN", threshold)
        given, before = problem(widths=(5, 90, 70, 4), rows=300), torch.get_num_threads()
        first = [0.3 * randn(4, given.dim, seed=seed) for seed in range(3)]

        def after(chains):
            options = method(**{**SETTINGS, "chains": chains, "batch_size": 130, "step_size": SIZES[method]})
            run = options.sampler(to_target(given), 1)
            for tensor, start in zip((run.theta, run.momentum, run.gradient), first):
                tensor.copy_(start[:chains, : tensor.shape[1]])
            assert run.backend.fused
            run.advance(lambda: False)
            return run.theta, run.momentum, run.gradient, run.value

        results = []
        try:
            for threads, chains in itertools.product((1, 2, 3, 7), (4, 1)):
                torch.set_num_threads(threads)
                results.append(after(chains))
        finally:
            torch.set_num_threads(before)
        for found in results[1:]:
            for tensor, expected in zip(found, results[0]):
                assert torch.equal(tensor, expected[: len(tensor)])

    @BOTH
    def test_many_calls_equal_one(self, method, any_size, monkeypatch):
        one = fit(method, problem())
        monkeypatch.setattr(wide, "MAX_CALL", 1)
        many = fit(method, problem())
        assert torch.equal(many.draws, one.draws)
        assert torch.equal(many.statistics["log_likelihood"], one.statistics["log_likelihood"])


@compiled
class TestFallback:
    @pytest.mark.parametrize("case", ["preconditioner", "float64", "laplace", "more than a stack"])
    def test_unsupported_cases_stay_in_pytorch(self, case, any_size):
        given, options = problem(), {}
        if case == "preconditioner":
            options = {"preconditioner": "rmsprop"}
        elif case == "float64":
            given = problem(widths=(5, 300, 4), dtype=torch.float64)
        else:
            stack = case == "laplace"
            net = nn.Sequential(nn.Linear(5, 40), nn.SiLU() if stack else nn.LayerNorm(40), nn.Linear(40, 4))
            prior = cr.priors.Laplace(0.5) if stack else cr.priors.Normal(0.5)
            given = cr.Problem(net, (given.x, given.y), cr.likelihoods.Categorical(), prior)
        assert not fit(cr.SGHMC, given, **options).record.history["native"]

    @BOTH
    def test_noise_is_the_same_without_the_library(self, method, any_size, monkeypatch):
        fast = fit(method, problem())
        monkeypatch.setattr(backend, "library", lambda: None)
        plain = fit(method, problem(), compile="auto")
        assert not plain.record.history["native"]
        torch.testing.assert_close(fast.draws, plain.draws, rtol=0, atol=2e-6)
