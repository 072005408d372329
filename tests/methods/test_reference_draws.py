"""HMC against reference posteriors of posteriordb, each as a plain density on the unconstrained scale."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import credibly as cr

DOUBLE = torch.float64


def half_cauchy(value, scale):
    return -torch.log1p((value / scale).square())


def half_normal(value, scale):
    return -0.5 * (value / scale).square()


def eight_schools(data):
    """z (8), mu, log tau; theta = mu + tau z. The last term is the Jacobian of the exponential."""
    y, sigma = data["y"], data["sigma"]

    def log_prob(w):
        z, mu, log_tau = w[:, :8], w[:, 8:9], w[:, 9:]
        fit = -0.5 * ((y - mu - log_tau.exp() * z) / sigma).square().sum(-1)
        prior = -0.5 * z.square().sum(-1) - 0.5 * (mu / 5).square().sum(-1)
        return fit + prior + half_cauchy(log_tau.exp(), 5.0).sum(-1) + log_tau.sum(-1)

    def constrain(w):
        tau = w[..., 9:].exp()
        return torch.cat([w[..., 8:9] + tau * w[..., :8], w[..., 8:9], tau], -1)

    return log_prob, constrain, 10, 1.0


def autoregression(data):
    """alpha, beta (5), log sigma."""
    y = data["y"]
    order = int(data["K"])
    past = torch.stack([y[order - k - 1 : len(y) - k - 1] for k in range(order)], 1)  # beta[k] multiplies y[t - k]
    now = y[order:]

    def log_prob(w):
        alpha, beta, log_sigma = w[:, :1], w[:, 1:6], w[:, 6]
        rest = now - alpha - beta @ past.T
        fit = -0.5 * rest.square().sum(-1) / (2 * log_sigma).exp() - len(now) * log_sigma
        prior = -0.5 * (w[:, :6] / 10).square().sum(-1) + half_cauchy(log_sigma.exp(), 2.5)
        return fit + prior + log_sigma

    return log_prob, lambda w: torch.cat([w[..., :6], w[..., 6:].exp()], -1), 7, 0.1


def gaussian_process(data):
    """log rho, log alpha, log sigma."""
    x, y = data["x"], data["y"]
    gap = (x[:, None] - x).square()

    def log_prob(w):
        rho, alpha, sigma = w.exp().unbind(-1)
        kernel = alpha[:, None, None].square() * torch.exp(-gap / (2 * rho[:, None, None].square()))
        factor, failed = torch.linalg.cholesky_ex(kernel + sigma[:, None, None] * torch.eye(len(x), dtype=DOUBLE))
        white = torch.linalg.solve_triangular(factor, y.expand(len(w), -1).unsqueeze(-1), upper=False)
        fit = -0.5 * white.square().sum((1, 2)) - factor.diagonal(dim1=1, dim2=2).log().sum(-1)
        prior = 24 * w[:, 0] - 4 * rho + half_normal(alpha, 2.0) + half_normal(sigma, 1.0)
        return torch.where(failed == 0, fit + prior + w.sum(-1), -torch.inf)  # a trajectory can reach any point

    return log_prob, torch.exp, 3, 1.0


POSTERIORS = {
    "eight_schools-eight_schools_noncentered": eight_schools,
    "arK-arK": autoregression,
    "gp_pois_regr-gp_regr": gaussian_process,
}


@pytest.fixture(scope="module")
def reference(shared_data):
    def read(name):
        path = shared_data / "reference_draws" / f"{name}.npz"
        if not path.is_file():
            pytest.skip(f"no reference draws at {path}")
        with np.load(path, allow_pickle=False) as file:
            data = {
                k.removeprefix("data_"): torch.as_tensor(file[k], dtype=DOUBLE) for k in file if k.startswith("data_")
            }
            return data, torch.as_tensor(file["draws"], dtype=DOUBLE), [n.decode() for n in file["names"]]

    return read


def compare(posterior, constrain, draws):
    """Return the distance of first and second moments from the reference in standard errors, and its limit."""
    found = constrain(posterior.draws)
    assert found.shape == (32, 100, draws.shape[-1])
    mean, sd = draws.mean((0, 1)), draws.flatten(0, 1).std(0)
    # First and second moments about the reference mean, in its standard deviations: (chain, 2 p) each.
    seen, known = (torch.cat([z.mean(1), z.square().mean(1)], -1) for z in ((found - mean) / sd, (draws - mean) / sd))
    # Monte Carlo standard errors: chains are independent.
    errors = [v.std(0) / math.sqrt(len(v)) for v in (seen, known)]
    assert float(errors[0].max()) < 0.1  # otherwise the comparison is meaningless
    score = ((seen.mean(0) - known.mean(0)) / torch.hypot(*errors)).abs()
    return score, float(stats.t.isf(1e-5 / len(score), 9))  # the reference has 10 chains


METHOD = cr.HMC(chains=32, draws=100, warmup=100, mass="diagonal", jitter=0.3, target_accept=0.9, compile=False)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly) if n == "arK-arK" else n for n in POSTERIORS]
)
def test_means_and_standard_deviations_match_the_reference_draws(reference, name):
    data, draws, names = reference(name)
    log_prob, constrain, dim, scale = POSTERIORS[name](data)
    posterior = METHOD.fit(cr.Density(log_prob, dim, batched=True, scale=scale, name=name), seed=0)
    assert float(posterior.statistics["divergent"].mean()) < 0.01
    score, limit = compare(posterior, constrain, draws)
    labels = [f"mean of {n}" for n in names] + [f"sd of {n}" for n in names]
    far = {label: round(float(s), 1) for label, s in zip(labels, score) if s > limit}
    assert not far, f"{far} standard errors from the reference, limit {limit:.1f}"
