"""Variational families: draws, entropy, moments and initialisation against torch.distributions."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

import credibly as cr
from conftest import randn
from credibly.gaussians.families import FULL_RANK_LIMIT, FullRank, LowRank, MeanField, family, inverse_softplus
from credibly.gaussians.relative import Relative

f64 = torch.float64
DIM, MEMBERS = 5, 3
FAMILIES = {"mean-field": MeanField(), "low-rank": LowRank(2), "wide low-rank": LowRank(7), "full-rank": FullRank()}
every_family = pytest.mark.parametrize("chosen", FAMILIES.values(), ids=FAMILIES)


def some_phi(chosen, members=MEMBERS, dim=DIM):
    """Arbitrary Gaussians, different per member and correlated where the family allows it."""
    start = chosen.init(randn(members, dim, seed=1, dtype=f64), 0.8)
    return start + 0.6 * randn(*start.shape, seed=2, dtype=f64)


def gaussians(chosen, phi, dim=DIM):
    return MultivariateNormal(chosen.loc(phi, dim), covariance_matrix=chosen.covariance(phi, dim))


@every_family
def test_draws_have_the_mean_and_the_covariance(chosen):
    count, phi = 100_000, some_phi(chosen)
    noise = randn(MEMBERS, count, chosen.noise_size(DIM), seed=3, dtype=f64)
    draws = chosen.draw(phi, noise)
    assert draws.shape == (MEMBERS, count, DIM)
    exact = gaussians(chosen, phi)
    for m in range(MEMBERS):
        whitened = torch.linalg.solve_triangular(exact.scale_tril[m], (draws[m] - exact.loc[m]).T, upper=False)
        assert float(whitened.mean(1).abs().max()) < 4.5 / math.sqrt(count)
        # Entries of a sample covariance of N(0, I) have standard deviation sqrt(1/K), sqrt(2/K) on the diagonal.
        away = torch.cov(whitened) - torch.eye(DIM, dtype=f64)
        assert float(away.abs().max()) < 4.5 * math.sqrt(2 / count)


@every_family
def test_phi_is_the_inverse_of_parts(chosen):
    phi = some_phi(chosen)
    torch.testing.assert_close(chosen.phi(chosen.parts(phi)), phi, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("base", [LowRank(2), FullRank()], ids=["low-rank", "full-rank"])
def test_relative_coordinates_describe_the_same_gaussians(base):
    loc, scale = randn(MEMBERS, DIM, seed=5, dtype=f64), randn(MEMBERS, DIM, seed=6, dtype=f64).exp()
    relative, phi = Relative(base, loc, scale), some_phi(base)
    there = relative.phi(base.parts(phi))
    noise = randn(MEMBERS, 3, base.noise_size(DIM), seed=7, dtype=f64)
    torch.testing.assert_close(relative.draw(there, noise), base.draw(phi, noise))
    torch.testing.assert_close(relative.entropy(there), base.entropy(phi))
    torch.testing.assert_close(relative.covariance(there, DIM), base.covariance(phi, DIM))
    torch.testing.assert_close(relative.precision(there).matrix(), base.precision(phi).matrix())
    start = relative.start()
    torch.testing.assert_close(relative.loc(start, DIM), loc)
    torch.testing.assert_close(relative.variance(start, DIM), scale.square())
    assert relative.size(DIM) == base.size(DIM) == start.shape[1]
    same = relative.init(loc, 0.3)
    torch.testing.assert_close(relative.covariance(same, DIM), base.covariance(base.init(loc, 0.3), DIM))


@every_family
def test_draws_at_zero_noise_are_the_mean(chosen):
    phi = some_phi(chosen)
    zeros = torch.zeros(MEMBERS, 1, chosen.noise_size(DIM), dtype=f64)
    assert torch.equal(chosen.draw(phi, zeros)[:, 0], chosen.loc(phi, DIM))


@every_family
def test_entropy_is_that_of_torch(chosen):
    phi = some_phi(chosen)
    torch.testing.assert_close(chosen.entropy(phi), gaussians(chosen, phi).entropy(), rtol=1e-12, atol=1e-12)


def test_mean_field_is_a_product_of_normals():
    phi = some_phi(MeanField())
    normal = Normal(phi[:, :DIM], torch.nn.functional.softplus(phi[:, DIM:]))
    torch.testing.assert_close(MeanField().entropy(phi), normal.entropy().sum(-1))
    torch.testing.assert_close(MeanField().variance(phi, DIM), normal.variance)


@every_family
def test_variance_is_the_diagonal_of_the_covariance(chosen):
    phi = some_phi(chosen)
    covariance = chosen.covariance(phi, DIM)
    assert covariance.shape == (MEMBERS, DIM, DIM)
    torch.testing.assert_close(chosen.variance(phi, DIM), covariance.diagonal(dim1=-2, dim2=-1))
    assert bool((torch.linalg.eigvalsh(covariance) > 0).all())


def test_only_the_mean_field_is_diagonal():
    for name, chosen in FAMILIES.items():
        covariance = chosen.covariance(some_phi(chosen), DIM)
        off = covariance - torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
        assert (float(off.abs().max()) == 0) == (name == "mean-field")


@every_family
@pytest.mark.parametrize("scale", [1e-4, 0.03, 1.7])
def test_the_start_has_the_stated_mean_and_scale(chosen, scale):
    loc = randn(MEMBERS, DIM, dtype=f64)
    phi = chosen.init(loc, scale)
    assert phi.shape == (MEMBERS, chosen.size(DIM))
    assert phi.dtype == f64
    assert torch.equal(chosen.loc(phi, DIM), loc)
    torch.testing.assert_close(chosen.variance(phi, DIM), torch.full_like(loc, scale**2), rtol=1e-9, atol=0)


@pytest.mark.parametrize("chosen", [MeanField(), FullRank()], ids=["mean-field", "full-rank"])
def test_the_start_has_independent_coordinates(chosen):
    covariance = chosen.covariance(chosen.init(torch.zeros(1, DIM, dtype=f64), 0.2), DIM)[0]
    torch.testing.assert_close(covariance, 0.04 * torch.eye(DIM, dtype=f64))


@pytest.mark.parametrize("rank, dim", [(1, 6), (5, 40), (10, 300), (4, 4), (7, 3)])
def test_the_low_rank_start_uses_all_its_columns(rank, dim):
    """The expected gradient of the factor is a matrix times the factor, so missing directions would stay missing."""
    phi = LowRank(rank).init(torch.zeros(1, dim, dtype=f64), 0.1)
    factor = phi[0, 2 * dim :].reshape(dim, rank)
    assert int(torch.linalg.matrix_rank(factor, rtol=1e-3)) == min(rank, dim)
    # Small: nearly independent coordinates.
    correlation = LowRank(rank).covariance(phi, dim)[0] / 0.01 - torch.eye(dim, dtype=f64)
    assert float(correlation.abs().max()) < 0.1


def test_lengths_of_phi_and_of_the_noise():
    assert [c.size(10) for c in (MeanField(), LowRank(3), FullRank())] == [20, 50, 65]
    assert [c.noise_size(10) for c in (MeanField(), LowRank(3), FullRank())] == [10, 13, 10]


@pytest.mark.parametrize("dim", [1, 2, 3, 10, 57])
def test_full_rank_packs_and_unpacks_any_dimension(dim):
    """phi holds the lower triangle row by row; the dimension follows from its length."""
    chosen = FullRank()
    phi = some_phi(chosen, 2, dim)
    factor = torch.zeros(2, dim, dim, dtype=f64)
    rows, columns = torch.tril_indices(dim, dim)
    factor[:, rows, columns] = phi[:, dim:]
    diagonal = torch.nn.functional.softplus(factor.diagonal(dim1=-2, dim2=-1))
    factor = factor.tril(-1) + torch.diag_embed(diagonal)
    torch.testing.assert_close(chosen.covariance(phi, dim), factor @ factor.mT)
    noise = randn(2, 4, dim, dtype=f64)
    torch.testing.assert_close(chosen.draw(phi, noise), phi[:, None, :dim] + noise @ factor.mT)


@every_family
def test_gradients_of_draws_and_entropy(chosen):
    phi = some_phi(chosen).requires_grad_()
    noise = randn(MEMBERS, 2, chosen.noise_size(DIM), seed=4, dtype=f64)
    assert torch.autograd.gradcheck(chosen.entropy, phi)
    assert torch.autograd.gradcheck(lambda p: chosen.draw(p, noise), phi)
    assert torch.autograd.gradcheck(lambda p: chosen.variance(p, DIM), phi)


@every_family
def test_members_are_independent(chosen):
    phi = some_phi(chosen)
    noise = randn(MEMBERS, 6, chosen.noise_size(DIM), seed=4, dtype=f64)
    for m in range(MEMBERS):
        one = slice(m, m + 1)
        torch.testing.assert_close(chosen.draw(phi, noise)[one], chosen.draw(phi[one], noise[one]))
        torch.testing.assert_close(chosen.entropy(phi)[one], chosen.entropy(phi[one]))
        torch.testing.assert_close(chosen.variance(phi, DIM)[one], chosen.variance(phi[one], DIM))
        torch.testing.assert_close(chosen.covariance(phi, DIM)[one], chosen.covariance(phi[one], DIM))


def test_low_rank_entropy_stays_right_where_the_factor_outweighs_the_diagonal():
    """The log determinant by an R x R matrix keeps its digits when F F' is 1e8 times diag(sigma^2)."""
    dim, rank, sigma = 6, 2, 1e-3
    factor = 10 * randn(dim, rank, dtype=f64)
    rho = torch.full((dim,), inverse_softplus(sigma), dtype=f64)
    phi = torch.cat([torch.zeros(dim, dtype=f64), rho, factor.flatten()]).unsqueeze(0)
    singular = torch.linalg.svdvals(factor)
    eigenvalues = torch.cat([singular.square(), torch.zeros(dim - rank, dtype=f64)]) + sigma**2
    exact = 0.5 * eigenvalues.log().sum() + 0.5 * dim * math.log(2 * math.pi * math.e)
    torch.testing.assert_close(LowRank(rank).entropy(phi)[0], exact, rtol=1e-9, atol=0)


@pytest.mark.parametrize("value", [1e-12, 1e-4, 0.03, 1.0, 30.0, 1000.0])
def test_softplus_is_inverted_at_every_size(value):
    back = torch.nn.functional.softplus(torch.tensor(inverse_softplus(value), dtype=f64))
    assert float(back) == pytest.approx(value, rel=1e-9)


def test_full_rank_is_refused_for_large_networks():
    assert FullRank().size(FULL_RANK_LIMIT) > FULL_RANK_LIMIT
    with pytest.raises(
        cr.InputError, match=r'family: "full-rank" supports at most 4000 parameters, .* has 4001. Use "low-rank"'
    ):
        FullRank().size(FULL_RANK_LIMIT + 1)


@pytest.mark.parametrize("rank", [0, -3, 2.0, True, "all"])
def test_a_bad_rank_is_refused(rank):
    with pytest.raises(cr.InputError, match=f"rank must be a positive integer, got {rank!r}"):
        LowRank(rank)
    with pytest.raises(cr.InputError, match=f"rank must be a positive integer, got {rank!r}"):
        family("low-rank", rank)


def test_families_by_name():
    assert (family("mean-field", 3), family("low-rank", 3), family("full-rank", 3)) == (
        MeanField(),
        LowRank(3),
        FullRank(),
    )
    with pytest.raises(
        cr.InputError, match="family must be one of 'mean-field', 'low-rank', 'full-rank', got 'cauchy'"
    ):
        family("cauchy", 3)


@every_family
def test_parts_can_replace_phi(chosen):
    phi = some_phi(chosen)
    parts, noise = chosen.parts(phi), randn(MEMBERS, 2, chosen.noise_size(DIM), seed=4, dtype=f64)
    assert chosen.parts(parts) is parts
    assert torch.equal(chosen.draw(parts, noise), chosen.draw(phi, noise))
    assert torch.equal(chosen.entropy(parts), chosen.entropy(phi))
    for ask in (chosen.loc, chosen.variance, chosen.covariance):
        assert torch.equal(ask(parts, DIM), ask(phi, DIM))
