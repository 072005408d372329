"""Targets of samplers, problems and plain densities: both parts of the density, its gradient, blocks of rows."""

import math

import pytest
import torch
from torch import nn

import credibly as cr
import credibly.inference.target
import credibly.problem
from conftest import mlp, randn
from credibly.inference.target import DensityTarget, ProblemTarget, to_target
from credibly.likelihoods import Categorical, Gaussian

DOUBLE = torch.float64
X, Y = randn(23, 3, dtype=DOUBLE), randn(23, seed=1, dtype=DOUBLE)


def problem(**kwargs):
    prior = kwargs.pop("prior", cr.priors.Normal(0.7))
    likelihood = kwargs.pop("likelihood", Gaussian(0.4))
    return cr.Problem(mlp(3, 5, 1, dtype=DOUBLE), data=(X, Y), likelihood=likelihood, prior=prior, **kwargs)


def theta(p, chains=4):
    return 0.5 * randn(chains, p.dim, seed=2, dtype=p.layout.dtype)


# -- problems ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("t_lik, t_prior", [(1.0, 1.0), (0.3, 0.3), (0.2, 1.0), (1.0, 4.0)])
def test_the_target_is_the_density_of_the_problem(t_lik, t_prior):
    p = problem(temperature=cr.Tempering(t_lik, t_prior))
    target, points = ProblemTarget(p), theta(p)
    known = p.log_density_and_grad(points)
    log_lik, gradient = target.likelihood_and_grad(points)
    assert target.weights == pytest.approx((1 / t_lik, 1 / t_prior))
    torch.testing.assert_close(log_lik, known.log_likelihood, rtol=1e-12, atol=0)
    torch.testing.assert_close(target.log_prior(points), known.log_prior, rtol=1e-12, atol=0)
    torch.testing.assert_close(target.log_density(points), known.log_density, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, known.gradient, rtol=1e-10, atol=1e-10)


def test_the_likelihood_by_hand():
    """A sum over all rows, not a mean; the gradient is that of the weighted sum."""
    p = problem(temperature=cr.Tempering(0.5, 2.0))
    target, points = ProblemTarget(p), theta(p, 1).requires_grad_()
    output = torch.func.functional_call(
        p.layout.module, {k: v[0] for k, v in p.layout.split(points)[0].items()}, (X,)
    ).squeeze(1)
    log_lik = (-0.5 * ((Y - output) / 0.4) ** 2 - math.log(0.4 * math.sqrt(2 * math.pi))).sum()
    log_prior = (-0.5 * (points / 0.7) ** 2 - math.log(0.7 * math.sqrt(2 * math.pi))).sum()
    (gradient,) = torch.autograd.grad(2.0 * log_lik + 0.5 * log_prior, points)
    found, slope = target.likelihood_and_grad(points.detach())
    torch.testing.assert_close(found[0], log_lik.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(slope, gradient, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(target.log_prior(points.detach())[0], log_prior.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("rows", [1, 5, 22, 23, 100])
def test_micro_batches_give_the_same_value(rows):
    p, points = problem(temperature=cr.Tempering(0.5, 2.0)), theta(problem())
    whole, blocks = ProblemTarget(p), ProblemTarget(problem(temperature=p.tempering, micro_batch=rows))
    assert blocks.whole(4) == (rows >= 23)
    for a, b in zip(whole.likelihood_and_grad(points), blocks.likelihood_and_grad(points)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_parts_are_in_float64_whatever_the_network():
    p = cr.Problem(mlp(3, 5, 1), data=(X.float(), Y.float()), likelihood=Gaussian(0.4), prior=cr.priors.Normal())
    target, points = ProblemTarget(p), theta(p)
    log_lik, gradient = target.likelihood_and_grad(points)
    assert log_lik.dtype == target.log_prior(points).dtype == DOUBLE
    assert gradient.dtype == target.dtype == torch.float32
    # The prior's sum itself is taken in float64: as exact as the float32 points allow.
    exact = -0.5 * (points.double() ** 2 + math.log(2 * math.pi)).sum(-1)
    torch.testing.assert_close(target.log_prior(points), exact, rtol=1e-14, atol=0)


def test_the_scale_is_that_of_the_prior():
    layers = {"0.*": cr.priors.Normal(0.5), "2.*": cr.priors.Normal(2.0)}
    p = problem(prior=layers)
    names = p.layout.split(ProblemTarget(p).scale)[0]
    assert all(bool((v == (0.5 if k.startswith("0") else 2.0)).all()) for k, v in names.items())


def test_a_prior_without_a_variance_takes_the_scale_of_the_others():
    p = problem(prior={"0.*": cr.priors.Normal(0.5), "2.*": cr.priors.StudentT(df=1.5)})
    assert ProblemTarget(p).scale.tolist() == pytest.approx([0.5] * p.dim)
    alone = problem(prior=cr.priors.StudentT(df=1.5))
    assert ProblemTarget(alone).scale.tolist() == [1.0] * p.dim


def test_chains_at_once_by_the_budget_of_activations(monkeypatch):
    p = problem()
    assert ProblemTarget(p).chains_at_once(100) == 100
    width = p.forward.row_width
    monkeypatch.setattr(credibly.problem, "ACTIVATION_BUDGET", 7 * 23 * width)
    assert ProblemTarget(p).chains_at_once(100) == 7
    assert ProblemTarget(p).chains_at_once(3) == 3
    assert ProblemTarget(problem(micro_batch=5)).chains_at_once(100) == 7 * 23 // 5
    monkeypatch.setattr(credibly.problem, "ACTIVATION_BUDGET", 1)
    assert ProblemTarget(p).chains_at_once(100) == 1


@pytest.mark.parametrize("values", [1, 200, 600, 2**30])
def test_strips_of_rows_that_fit_into_the_caches_give_the_same_value(monkeypatch, values):
    p = problem(temperature=cr.Tempering(0.5, 2.0))
    points = theta(p)
    usual = ProblemTarget(p).likelihood_and_grad(points)
    calls = []
    monkeypatch.setattr(credibly.inference.target, "CACHED", values)
    target = ProblemTarget(p)
    evaluate = target._evaluate
    monkeypatch.setattr(target, "_evaluate", lambda t, rows, w: calls.append(len(rows.y)) or evaluate(t, rows, w))
    for a, b in zip(usual, target.likelihood_and_grad(points)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert sum(calls) == 23
    assert len(calls) == max(1, min(8, target.work(4) // values))
    assert target.chains_at_once(4) == (4 if values == 2**30 else max(1, min(4, values // (23 * p.forward.row_width))))


def test_networks_that_cannot_be_batched_are_looped():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)

        def forward(self, x):
            return self.head(self.cell(x)[0][:, -1])

    p = cr.Problem(Recurrent(), data=(randn(6, 4, 2), randn(6)), likelihood=Gaussian(1.0), prior=cr.priors.Normal())
    target = ProblemTarget(p)
    assert target.looped
    assert target.chains_at_once(8) == 1
    assert "LSTM" in target.reason


def test_the_fingerprint_is_that_of_the_data():
    assert to_target(problem()).fingerprint() == problem().fingerprint()


# -- plain densities ---------------------------------------------------------------------------------------------------
PRECISION = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=DOUBLE)


def one_point(w):
    return -0.5 * w @ PRECISION.to(w) @ w + torch.sin(w[0])


def many_points(w):
    return -0.5 * ((w @ PRECISION.to(w)) * w).sum(-1) + torch.sin(w[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_one_point_by_vmap_and_many_points_agree(dtype):
    one = DensityTarget(cr.Density(one_point, 2, dtype=dtype))
    many = DensityTarget(cr.Density(many_points, 2, batched=True, dtype=dtype))
    points = randn(9, 2, dtype=dtype)
    values = [t.likelihood_and_grad(points) for t in (one, many)]
    assert values[0][0].dtype == DOUBLE
    assert values[0][1].dtype == dtype
    for a, b in zip(*values):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=1e-6)
    by_hand = -points.double() @ PRECISION
    by_hand[:, 0] += points[:, 0].double().cos()
    torch.testing.assert_close(values[0][1].double(), by_hand, rtol=1e-5, atol=1e-5)


def test_all_of_a_density_counts_as_likelihood():
    target, points = to_target(cr.Density(one_point, 2, scale=torch.tensor([1.0, 3.0]))), randn(3, 2, dtype=DOUBLE)
    assert target.weights == (1.0, 1.0)
    assert target.log_prior(points).tolist() == [0.0] * 3
    torch.testing.assert_close(target.log_density(points), many_points(points))
    assert target.scale.tolist() == [1.0, 3.0]
    assert target.whole(10**9)
    assert target.chains_at_once(77) == 77


def test_the_fingerprint_changes_with_the_function():
    def fingerprint(function, dim=2, **kwargs):
        return to_target(cr.Density(function, dim, **kwargs)).fingerprint()

    assert fingerprint(one_point) == fingerprint(one_point)
    assert fingerprint(one_point) == fingerprint(many_points, batched=True)  # the same density, written differently
    others = [
        fingerprint(lambda w: one_point(w) * 1.001),
        fingerprint(lambda w: one_point(w) + 0.001 * w[1] ** 3),
        fingerprint(one_point, name="another"),
        fingerprint(lambda w: one_point(w[:2]), 3),
    ]
    assert len({fingerprint(one_point), *others}) == 5


@pytest.mark.parametrize("dim", [0, -1, 2.0, True, "2", None])
def test_a_density_needs_a_dimension(dim):
    with pytest.raises(cr.InputError, match=f"dim must be a positive integer, got {dim!r}"):
        cr.Density(one_point, dim)


def test_a_density_needs_a_function():
    with pytest.raises(cr.InputError, match=r"log_prob must be a function of a \(D,\) tensor, got Tensor"):
        cr.Density(torch.ones(3), 3)


@pytest.mark.parametrize(
    "function, batched, found",
    [
        (lambda w: w, False, r"\(2, 3\)"),
        (lambda w: w[:1], False, r"\(2, 1\)"),
        (lambda w: w.sum(), True, r"\(\)"),
        (lambda w: w, True, r"\(2, 3\)"),
    ],
)
def test_a_density_returns_one_number_per_point(function, batched, found):
    with pytest.raises(cr.InputError, match=f"log_prob must return .*, got shape {found} for 2 points"):
        cr.Density(function, 3, batched=batched)


@pytest.mark.parametrize(
    "function, batched, found",
    [
        (lambda w: -0.5 * float((w**2).sum()), False, "log_prob must return a tensor, got float. Use torch operations"),
        (
            lambda w: -w.square().sum() if w[0] > 0 else -w.abs().sum(),
            False,
            "log_prob: cannot be evaluated at several points at once .*torch.where instead of if",
        ),
        (
            lambda w: torch.tensor(-w.square().sum().item()),
            False,
            "log_prob: cannot be evaluated at several points at once .*or pass batched=True",
        ),
        (lambda w: -w.detach().square().sum(), False, "log_prob: has no gradient in its argument"),
        (lambda w: -w.detach().square().sum(-1), True, "log_prob: has no gradient in its argument"),
        (torch.no_grad()(lambda w: -w.square().sum()), False, "log_prob: has no gradient in its argument"),
        (lambda w: -(torch.eye(4) @ w).sum(), False, r"log_prob: failed on a tensor of shape \(3,\) \(RuntimeError"),
    ],
)
def test_a_density_consists_of_torch_operations_with_a_gradient(function, batched, found):
    with pytest.raises(cr.InputError, match=found):
        cr.Density(function, 3, batched=batched)


def test_a_density_is_made_where_gradients_are_off():
    with torch.no_grad():
        cr.Density(one_point, 2)
    with torch.inference_mode():
        cr.Density(one_point, 2, dtype="float32")
    for name, value in (("dtype", torch.int64), ("device", "gpu")):
        with pytest.raises(cr.InputError, match=f"{name} must be "):
            cr.Density(one_point, 2, **{name: value})


@pytest.mark.parametrize(
    "scale, constraint",
    [
        (0.0, "positive and finite, got 0.0"),
        (-1.0, "positive and finite, got -1.0"),
        (math.nan, "positive and finite, got nan"),
        (math.inf, "positive and finite, got inf"),
        (torch.tensor([1.0, 0.0, 1.0]), "positive and finite, got 0.0"),
        (torch.ones(2), r"a number or a tensor of shape \(3,\), got shape \(2,\)"),
        (torch.ones(1, 3), r"a number or a tensor of shape \(3,\), got shape \(1, 3\)"),
    ],
)
def test_the_scale_of_a_density_is_positive_and_has_its_shape(scale, constraint):
    with pytest.raises(cr.InputError, match=f"scale must be {constraint}"):
        cr.Density(lambda w: -w.square().sum(), 3, scale=scale)


@pytest.mark.parametrize("wrong", [nn.Linear(1, 1), lambda w: w.sum(), None])
def test_only_problems_and_densities_are_targets(wrong):
    with pytest.raises(cr.InputError, match="problem must be a credibly.Problem or a credibly.Density, got .*"):
        to_target(wrong)


def test_the_repr_of_a_density():
    assert repr(cr.Density(one_point, 2)) == "Density(one_point, D = 2)"
    assert repr(cr.Density(one_point, 2, name="bowl")) == "Density(bowl, D = 2)"


def test_a_classifier_counts_every_row_once():
    y = torch.arange(23) % 3
    p = cr.Problem(mlp(3, 4, 3, dtype=DOUBLE), data=(X, y), likelihood=Categorical(), prior=cr.priors.Normal())
    points = torch.zeros(2, p.dim, dtype=DOUBLE)
    log_lik, _ = to_target(p).likelihood_and_grad(points)
    assert log_lik.tolist() == pytest.approx([-23 * math.log(3)] * 2)
