"""The C++ backend for small networks matches the PyTorch path, for any number of threads and chains."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

import credibly as cr
from credibly.backends.cpp import density
from credibly.backends.cpp.library import library
from credibly.backends.cpp.moments import mean_of_draws, moments_of_draws
from credibly.backends.cpp.stack import Stack
from credibly.inference.kernels.hmc import LEAPFROG, MINIMUM_ERROR
from credibly.inference.sampling.trajectory import Trajectory
from credibly.inference.target import ProblemTarget
from credibly.inference.training.cpp_steps import cpp_step
from credibly.inference.training.dropout_objective import DropoutObjective, Dropped
from credibly.inference.training.objectives import NegativeLogDensity, Perturbation
from credibly.inference.training.settings import Training
from credibly.posterior.model import Model
from credibly.storage.record import Record

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
DOUBLE = torch.float64
# Sums over a thousand rows in another order differ by about 1e-6 of the largest term in float32, 1e-15 in float64.
TOLERANCE = {torch.float32: 2e-5, DOUBLE: 1e-13}


def problem(
    widths=(3, 7, 5, 4),
    rows=70,
    activation=nn.SiLU,
    kind="gaussian",
    dtype=DOUBLE,
    temperature=0.7,
    loc=0.2,
    floor=0.0,
    **options,
):
    generator = torch.Generator().manual_seed(3)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), activation()]
    net = nn.Sequential(*layers[:-1]).to(dtype)
    x = torch.randn(rows, widths[0], generator=generator, dtype=dtype)
    real = torch.randn(rows, widths[-1], generator=generator, dtype=dtype)
    y, likelihood = {
        "gaussian": (real, cr.likelihoods.Gaussian(**({"scale": 0.4} | options))),
        "heteroscedastic": (real[:, : widths[-1] // 2], cr.likelihoods.HeteroscedasticGaussian(floor=floor)),
        "categorical": (real.argmax(-1), cr.likelihoods.Categorical()),
        "bernoulli": ((real > 0.3).to(dtype), cr.likelihoods.Bernoulli()),
    }[kind]
    return cr.Problem(net, (x, y), likelihood, cr.priors.Normal(1.3, loc=loc), temperature=temperature)


def both(given):
    plain, fast = ProblemTarget(given), ProblemTarget(given)
    assert fast.select_backend("auto").fused
    return plain, fast


def points(target, chains=3, scale=0.6):
    generator = torch.Generator().manual_seed(11)
    return scale * torch.randn(chains, target.dim, generator=generator, dtype=DOUBLE).to(target.dtype)


def assert_same(given, chains=3):
    plain, fast = both(given)
    theta = points(plain, chains)
    (value, gradient), (found, slope) = plain.likelihood_and_grad(theta), fast.likelihood_and_grad(theta)
    limit = TOLERANCE[plain.dtype]
    assert found.dtype == torch.float64
    assert float(((found - value) / value).abs().max()) < limit
    assert float((slope - gradient).abs().max()) < limit * float(gradient.abs().max())


class TestDensity:
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    @pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.SiLU, nn.Sigmoid, nn.Identity])
    @pytest.mark.parametrize("kind", ["gaussian", "heteroscedastic", "categorical", "bernoulli"])
    def test_matches_pytorch(self, kind, activation, dtype):
        assert_same(problem(kind=kind, activation=activation, dtype=dtype))

    @pytest.mark.parametrize(
        "options",
        [{"scale": "learned"}, {"scale": "learned", "per_target": True}, {"scale": (0.1, 2.0, 0.5, 1.0)}],
        ids=str,
    )
    def test_with_other_noise_scales(self, options):
        assert_same(problem(**options))

    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    @pytest.mark.parametrize("floor", [0.01, 0.8])
    def test_with_a_noise_floor(self, floor, dtype):
        assert_same(problem(kind="heteroscedastic", floor=floor, dtype=dtype))

    @pytest.mark.parametrize("rows", [1, 31, 32, 33, 511, 512, 513, 1100])
    def test_for_row_counts_around_the_tile_size(self, rows):
        assert_same(problem(rows=rows))

    @pytest.mark.parametrize("widths", [(1, 1), (2, 1, 1), (5, 9, 1), (17, 16, 15, 2), (4, 256, 3)])
    def test_for_unit_counts_that_fill_no_block(self, widths):
        assert_same(problem(widths=widths))

    def test_without_biases_and_with_different_priors(self):
        net = nn.Sequential(
            nn.Linear(3, 6, bias=False), nn.Tanh(), nn.Sequential(nn.Linear(6, 1), nn.Identity())
        ).double()
        x = torch.linspace(-1, 2, 60, dtype=DOUBLE).reshape(20, 3)
        priors = {"0.*": cr.priors.Normal(0.5, loc=-0.3), "*": cr.priors.Normal(2.0, fan_in=True)}
        assert_same(cr.Problem(net, (x, x[:, :1] ** 2), cr.likelihoods.Gaussian(0.2), priors))

    @pytest.mark.parametrize("kind", ["gaussian", "categorical"])
    def test_where_exponentials_overflow(self, kind):
        plain, fast = both(problem(kind=kind))
        theta = points(plain, scale=60.0)
        (value, gradient), (found, slope) = plain.likelihood_and_grad(theta), fast.likelihood_and_grad(theta)
        assert bool(torch.isfinite(found).all() & torch.isfinite(slope).all())
        torch.testing.assert_close(found, value, rtol=1e-10, atol=0)
        torch.testing.assert_close(slope, gradient, rtol=1e-8, atol=1e-8 * float(gradient.abs().max()))


class TestReproducibility:
    @pytest.mark.parametrize("options", [{}, {"scale": "learned"}], ids=["fixed", "learned"])
    def test_independent_of_threads_and_other_chains(self, options, monkeypatch):
        monkeypatch.setattr(density, "MIN_THREADED", 0)
        _, fast = both(problem(rows=1300, dtype=torch.float32, **options))
        theta, before = points(fast, 5), torch.get_num_threads()
        results = []
        try:
            for threads in (1, 2, 7):  # fewer than the chains, and more: threads then share the rows of a chain
                torch.set_num_threads(threads)
                results.append(fast.likelihood_and_grad(theta))
                results.append(tuple(torch.cat(r) for r in zip(*(fast.likelihood_and_grad(t) for t in theta.split(1)))))
        finally:
            torch.set_num_threads(before)
        for value, gradient in results[1:]:
            assert torch.equal(value, results[0][0])
            assert torch.equal(gradient, results[0][1])


class TestMinibatches:
    @pytest.mark.parametrize("kind", [cr.SGHMC, cr.SGLD])
    @pytest.mark.parametrize("batch", [7, 33, 70])
    @pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
    def test_matches_pytorch(self, kind, batch, likelihood):
        given = problem(kind=likelihood)
        settings = {"chains": 3, "draws": 4, "thin": 7, "warmup": 9, "batch_size": batch, "init": "prior"}
        fast = kind(**settings).fit(given, seed=1, progress=False)
        plain = kind(**settings, compile=False).fit(given, seed=1, progress=False)
        assert fast.record.history["native"]
        assert not plain.record.history["native"]
        torch.testing.assert_close(fast.draws, plain.draws, rtol=1e-9, atol=1e-9)
        value = "log_likelihood"
        torch.testing.assert_close(fast.statistics[value], plain.statistics[value], rtol=1e-8, atol=0)

    @pytest.mark.parametrize("kind", [cr.SGHMC, cr.SGLD])
    def test_the_prior_as_preconditioner_matches_pytorch(self, kind):
        made = problem()
        net, prior = made.layout.module, cr.priors.Normal(1.3, fan_in=True)
        given = cr.Problem(net, (made.x, made.y), made.likelihood, prior)
        settings = {"chains": 3, "draws": 4, "thin": 7, "warmup": 9, "batch_size": 33, "init": "prior"}
        fast, plain = (kind(**settings, compile=c).fit(given, seed=1, progress=False) for c in ("auto", False))
        assert fast.record.history["preconditioner"] == "prior"
        assert (fast.record.history["native"], plain.record.history["native"]) == (True, False)
        torch.testing.assert_close(fast.draws, plain.draws, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("options", [{"preconditioner": "rmsprop"}, {"control_variate": True}], ids=str)
    def test_an_adapted_preconditioner_and_control_variates_stay_in_pytorch(self, options):
        settings = {"chains": 2, "draws": 2, "thin": 2, "warmup": 4, "batch_size": 8, "init": "prior"}
        found = cr.SGHMC(**settings, **options).fit(problem(), seed=1, progress=False)
        assert not found.record.history["native"]


FITS = {
    "mle": cr.MLE(steps=60),
    "map": cr.MAP(steps=60, batch_size=16),
    "clipped": cr.MAP(steps=60, batch_size=16, clip_norm=0.05),
    "descent": cr.MAP(steps=60, batch_size=16, optimiser="sgd", lr=1e-3, warmup=5),
    "ensemble": cr.DeepEnsemble(members=3, steps=60, batch_size=16),
    "held out": cr.DeepEnsemble(members=3, steps=60, batch_size=16, validation=0.3, patience=2),
    "bootstrap": cr.DeepEnsemble(members=3, steps=60, bootstrap=True),
    "all rows of a split": cr.MAP(steps=60, batch_size=49, validation=0.3),
    "swag": cr.SWAG(steps=60, iterates=5, every=7, rank=2, batch_size=16, sgd_lr=1e-3),
}


DROPOUT_FITS = {
    "minibatches": cr.MCDropout(insert="*", rate=0.2, steps=60, batch_size=16),
    "all rows": cr.MCDropout(insert="*", rate=0.2, steps=60, clip_norm=0.05),
    "one layer": cr.MCDropout(insert="2", rate=0.3, steps=60, batch_size=40, optimiser="sgd", lr=1e-3),
    "held out": cr.MCDropout(insert="*", rate=0.1, steps=60, batch_size=16, validation=0.3),
    "several rates": cr.MCDropout(insert="*", rate=(0.1, 0.4), steps=60, batch_size=16),
}


class TestTraining:
    """Fits in C++ and in torch agree; 60 steps amplify the rounding error of the first to about 1e-12."""

    @pytest.mark.parametrize("kind", ["gaussian", "categorical"])
    @pytest.mark.parametrize("name", FITS)
    def test_matches_pytorch(self, name, kind, monkeypatch):
        self.assert_same_fit(FITS[name], problem(kind=kind), monkeypatch)

    def assert_same_fit(self, method, given, monkeypatch):
        used = []
        training_steps = density.CppDensity.training_steps
        monkeypatch.setattr(
            density.CppDensity,
            "training_steps",
            lambda self, *rest: (used.append(1), training_steps(self, *rest))[1],
        )
        fast = method.fit(given, seed=2, progress=False)
        assert used
        used.clear()
        plain = dataclasses.replace(method, compile=False).fit(given, seed=2, progress=False)
        assert not used
        torch.testing.assert_close(fast.sample(4, seed=1), plain.sample(4, seed=1), rtol=1e-7, atol=1e-8)
        found, expected = fast.record.history, plain.record.history
        assert found["step"] == expected["step"]
        for part, values in expected["parts"].items():
            torch.testing.assert_close(torch.tensor(found["parts"][part]), torch.tensor(values), rtol=1e-7, atol=1e-10)
        return fast

    @pytest.mark.parametrize("kind", ["gaussian", "categorical"])
    @pytest.mark.parametrize("activation", [nn.SiLU, nn.Identity])
    @pytest.mark.parametrize("name", DROPOUT_FITS)
    def test_dropout_matches_pytorch(self, name, activation, kind, monkeypatch):
        self.assert_same_fit(DROPOUT_FITS[name], problem(kind=kind, activation=activation, loc=0.0), monkeypatch)

    @pytest.mark.parametrize("tau", [None, 4.0])
    def test_dropout_on_several_tiles_with_a_learned_or_fixed_noise_scale(self, tau, monkeypatch):
        given = problem(rows=1100, loc=0.0, scale="learned", temperature=1.0)
        method = cr.MCDropout(insert="*", rate=0.2, tau=tau, steps=20, batch_size=1100)
        fast = self.assert_same_fit(method, given, monkeypatch)
        assert (float(fast.theta[-1]) == -0.5 * math.log(4.0)) == (tau is not None)

    def test_dropout_layers_of_the_network_itself(self, monkeypatch):
        net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 1)).double()
        x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
        given = cr.Problem(net, (x, x.sum(1)), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))
        self.assert_same_fit(cr.MCDropout(steps=40, batch_size=16), given, monkeypatch)

    def test_unsupported_dropout_stays_in_pytorch(self):
        net = nn.Sequential(nn.Linear(3, 6), nn.SELU(), nn.AlphaDropout(0.4), nn.Linear(6, 1)).double()
        x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
        for module, concrete in ((net, False), (problem(loc=0.0).layout.module, True)):
            y = torch.zeros(50, 1 if module is net else 4, dtype=DOUBLE)
            given = cr.Problem(module, (x, y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))
            network = Dropped(given, None if module is net else "*", None)
            rates = torch.tensor([network.rate_row(None)], dtype=DOUBLE)
            objective = DropoutObjective(
                given, network, 50, rates, batch=8, seed=0, concrete=concrete, fixed_scale=False
            )
            theta = torch.zeros(1, given.dim, dtype=DOUBLE)
            assert cpp_step(given, objective, Training(), 10, theta, 8) is None

    def test_a_loss_that_is_not_finite_is_reported_with_its_step(self):
        given = problem()
        start = torch.zeros(3, given.dim, dtype=DOUBLE)
        start[2] = 1e200
        with pytest.raises(cr.TrainingError, match="member 2 was not finite at step 1"):
            cr.DeepEnsemble(members=3, init=start, steps=50).fit(given, progress=False)

    def test_anchored_members_stay_in_pytorch(self):
        given = problem()
        theta = torch.zeros(2, given.dim, dtype=DOUBLE)
        anchored = NegativeLogDensity(given, given.n, perturbation=Perturbation(anchors=theta.clone()))
        assert cpp_step(given, NegativeLogDensity(given, given.n), Training(), 10, theta, 8) is not None
        assert cpp_step(given, anchored, Training(), 10, theta, 8) is None
        assert cpp_step(given, NegativeLogDensity(given, given.n), Training(compile=False), 10, theta, 8) is None


class TestTrajectories:
    @pytest.mark.parametrize("scheme", [LEAPFROG, MINIMUM_ERROR], ids=lambda s: s.name)
    @pytest.mark.parametrize("has_mass", [False, True])
    def test_matches_pytorch(self, scheme, has_mass):
        plain, fast = both(problem(kind="categorical"))
        theta = points(plain)
        momentum = points(plain, scale=1.0).flip(0)
        gradient = plain.likelihood_and_grad(theta)[1]
        size = torch.tensor([0.01, 0.02, 0.005], dtype=DOUBLE)
        mass = torch.linspace(0.5, 2, plain.dim, dtype=DOUBLE) if has_mass else None
        ends = []
        for target in (plain, fast):
            path = Trajectory(target, scheme, 3, 0)
            path.run_each((theta, momentum, gradient), size, mass, [9, 4, 12])
            ends.append([path.theta, path.momentum, path.gradient, path.log_likelihood])
        for one, other in zip(*ends):
            torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)

    def test_several_calls_equal_one(self, monkeypatch):
        _, fast = both(problem())
        assert fast.backend.fused
        monkeypatch.setattr(fast.backend.density, "steps_per_call", lambda chains: 2)
        path = Trajectory(fast, LEAPFROG, 3, 0)
        theta = points(fast)
        gradient = fast.likelihood_and_grad(theta)[1]
        size = torch.full((3,), 0.01, dtype=DOUBLE)
        path.run_each((theta, torch.ones_like(theta), gradient), size, None, [5, 5, 5])
        chunked = path.theta.clone()
        monkeypatch.undo()
        path.run_each((theta, torch.ones_like(theta), gradient), size, None, [5, 5, 5])
        assert torch.equal(path.theta, chunked)


class TestOutputs:
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    @pytest.mark.parametrize("rows", [600, 8192, 9001])
    def test_matches_pytorch(self, dtype, rows):
        given = problem(kind="categorical", dtype=dtype)
        theta = points(ProblemTarget(given), 40)
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(5), dtype=DOUBLE).to(dtype)
        found = given.forward(theta, x)
        assert given.forward.cpp_stack is not None
        wanted = given.forward.apply(given.layout.split(theta)[0], x)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    @pytest.mark.parametrize("activation", [nn.Sigmoid, nn.SiLU])
    def test_exponentials_are_accurate_to_a_few_ulp(self, activation):
        # In units of 2^-23: polynomial 0.8; log(2) as one float 2.1 at 86; rounding of r, p, 1 + e and the ratio 1.5.
        net = nn.Sequential(nn.Linear(1, 1, bias=False), activation())
        x = torch.linspace(-86, 86, 100_001)[:, None]
        given = cr.Problem(net, (x, x), cr.likelihoods.Gaussian(scale=1.0), cr.priors.Normal(1.0))
        found = given.forward(torch.ones(1, 1), x)[0].double()
        assert given.forward.cpp_stack is not None
        wanted = torch.sigmoid(x.double()) * (x.double() if activation is nn.SiLU else 1)
        error = ((found - wanted) / wanted).abs().nan_to_num(0)
        assert error.max() < 4.5 * 2**-23
        assert error[x.abs() < 10].max() < 2.5 * 2**-23

    def test_nan_stays_nan(self):
        net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.SiLU())
        x = torch.zeros(20_000, 1)
        x[3], x[4], x[5] = torch.nan, torch.inf, -200
        given = cr.Problem(net, (x[10:], x[10:]), cr.likelihoods.Gaussian(scale=1.0), cr.priors.Normal(1.0))
        found = given.forward(torch.ones(1, 1), x)[0, :, 0]
        assert found[3].isnan()
        assert found[4] == torch.inf
        assert -1e-30 < found[5] <= 0
        assert (found[6:] == 0).all()

    def test_a_copy_has_its_own_addresses(self):
        given = problem()
        theta, x = points(ProblemTarget(given), 40), torch.ones(600, 3, dtype=DOUBLE)
        found = given.forward(theta, x)
        again = copy.deepcopy(given)
        assert again.forward.cpp_stack is not given.forward.cpp_stack
        wanted = found.clone()
        del given
        assert torch.equal(again.forward(theta, x), wanted)

    def test_autograd_still_works(self):
        given = problem()
        x = torch.randn(5000, 3, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
        theta = points(ProblemTarget(given), 4)
        with torch.enable_grad():
            leaf = theta.clone().requires_grad_()
            (slope,) = torch.autograd.grad(given.forward(leaf, x).sum(), leaf)
        again = torch.func.grad(lambda t: given.forward(t, x).sum())(theta)
        torch.testing.assert_close(slope, again)
        assert float(slope.abs().max()) > 0


class TestMoments:
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    @pytest.mark.parametrize("shape", [(1, 3), (7, 256, 1), (300, 1001, 2)])
    def test_matches_pytorch(self, dtype, shape):
        values = (100 + torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)).to(dtype)
        # Sums of 300 terms in float64 in another order: 300 roundings of 1e-16. Both paths centre by the mean rounded
        # to float32, which is the same unless the two sums lie on either side of the midpoint between two floats.
        for found, wanted in zip(moments_of_draws(values, use_cpp=True), moments_of_draws(values), strict=True):
            assert found.dtype == wanted.dtype == DOUBLE
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0)

    def test_independent_of_threads(self):
        values = torch.randn(50, 3000, generator=torch.Generator().manual_seed(1))
        before = torch.get_num_threads()
        found = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(torch.stack(moments_of_draws(values, use_cpp=True)))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    def test_expanded_axes_are_averaged_once(self):
        values = torch.rand(5, 1, 2, generator=torch.Generator().manual_seed(1))
        for given in (values.expand(5, 9, 2), values[:1].expand(5, 9, 2), torch.tensor(0.3).expand(5, 9, 2)):
            torch.testing.assert_close(mean_of_draws(given), given.contiguous().double().mean(0), rtol=1e-15, atol=0)

    def test_predictions_match_pytorch(self, monkeypatch):
        given = problem(widths=(3, 7, 2), dtype=torch.float32)
        theta = points(ProblemTarget(given), 90)
        x = torch.randn(3001, 3, generator=torch.Generator().manual_seed(5))
        model = Model.of(given)
        posterior = cr.DrawsPosterior(model, theta[None], Record(method="test"))
        fast = posterior.predict(x)
        assert fast._cpp_width == 2
        monkeypatch.setattr("credibly.predictive.blocks.MANY", 2**40)
        monkeypatch.setattr("credibly.forward.use_cpp_outputs", lambda *_: False)
        plain = posterior.predict(x)
        assert plain._cpp_width is None
        for name in ("mean", "variance", "aleatoric", "epistemic"):
            found, wanted = getattr(fast, name), getattr(plain, name)
            torch.testing.assert_close(found, wanted, rtol=TOLERANCE[torch.float32], atol=TOLERANCE[torch.float32])


class TestSupport:
    def test_hmc_uses_it_and_records_it(self):
        given = problem(rows=40)
        method = cr.HMC(chains=2, draws=4, warmup=25, init="prior", max_steps=8)
        assert method.fit(given, seed=1).record.history["native"]
        plain = cr.HMC(chains=2, draws=4, warmup=25, init="prior", max_steps=8, compile=False).fit(given, seed=1)
        assert not plain.record.history["native"]

    @pytest.mark.parametrize(
        "net",
        [
            nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 1)),
            nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1)),
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.ReLU(), nn.Linear(4, 1)),
            nn.Sequential(nn.ReLU(), nn.Linear(3, 1)),
            nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)),
        ],
        ids=["wide", "another activation", "two activations", "one before", "another layer"],
    )
    def test_other_networks_stay_in_pytorch(self, net):
        x = torch.zeros(5, 3)
        target = ProblemTarget(cr.Problem(net, (x, x[:, :1]), cr.likelihoods.Gaussian(1.0), cr.priors.Normal(1.0)))
        assert not target.select_backend("auto").fused

    def test_tied_frozen_and_hooked_layers_stay_in_pytorch(self):
        tied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        tied[2].weight = tied[0].weight
        x = torch.zeros(5, 3)
        rest = ((x, x), cr.likelihoods.Gaussian(1.0), cr.priors.Normal(1.0))
        assert not ProblemTarget(cr.Problem(tied, *rest)).select_backend("auto").fused
        free = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        assert ProblemTarget(cr.Problem(free, *rest)).select_backend("auto").fused
        assert not ProblemTarget(cr.Problem(free, *rest, random="2.*")).select_backend("auto").fused
        free[1].register_forward_hook(lambda module, given, out: out + 1)
        assert not ProblemTarget(cr.Problem(free, *rest)).select_backend("auto").fused

    @pytest.mark.parametrize(
        "likelihood, prior",
        [
            (cr.likelihoods.StudentT(1.0), cr.priors.Normal(1.0)),
            (cr.likelihoods.Gaussian(1.0), cr.priors.Laplace(1.0)),
        ],
    )
    def test_other_likelihoods_and_priors_stay_in_pytorch(self, likelihood, prior):
        x = torch.zeros(5, 3)
        net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
        assert not ProblemTarget(cr.Problem(net, (x, x[:, :1]), likelihood, prior)).select_backend("auto").fused


def test_layers_are_described_in_order():
    given = problem(widths=(3, 7, 2))
    stack = Stack.of(given.layout.module, given.layout)
    assert stack is not None
    assert (stack.inputs, stack.outputs, stack.dim) == (3, 2, 3 * 7 + 7 + 7 * 2 + 2)
    assert list(stack.struct.weight[:2]) == [0, 28]
    assert list(stack.struct.activation[:2]) == [3, 0]
