"""Log densities of the posteriors of posteriordb by scipy, written from the Stan programs with loops over rows.

Each takes the data and constrained parameters by name, and returns the log density of the constrained parameters.
"""

import numpy as np
from scipy import integrate, special, stats

norm, halfcauchy = stats.norm.logpdf, stats.halfcauchy.logpdf


def linear(y, mean, sigma):
    return norm(y, mean, sigma).sum()


def earn_height(d, beta, sigma):
    return linear(d["earn"], beta[0] + beta[1] * d["height"], sigma)


def log10earn_height(d, beta, sigma):
    return linear(np.log(d["earn"]) / np.log(10), beta[0] + beta[1] * d["height"], sigma)


def logearn_height(d, beta, sigma):
    return linear(np.log(d["earn"]), beta[0] + beta[1] * d["height"], sigma)


def logearn_height_male(d, beta, sigma):
    return linear(np.log(d["earn"]), beta[0] + beta[1] * d["height"] + beta[2] * d["male"], sigma)


def logearn_logheight_male(d, beta, sigma):
    return linear(np.log(d["earn"]), beta[0] + beta[1] * np.log(d["height"]) + beta[2] * d["male"], sigma)


def interaction(y, a, b, beta, sigma):
    return linear(y, beta[0] + beta[1] * a + beta[2] * b + beta[3] * a * b, sigma)


def logearn_interaction(d, beta, sigma):
    return interaction(np.log(d["earn"]), d["height"], d["male"], beta, sigma)


def logearn_interaction_z(d, beta, sigma):
    z = (d["height"] - np.mean(d["height"])) / np.std(d["height"], ddof=1)
    return interaction(np.log(d["earn"]), z, d["male"], beta, sigma)


def kidscore_momhs(d, beta, sigma):
    return linear(d["kid_score"], beta[0] + beta[1] * d["mom_hs"], sigma) + halfcauchy(sigma, 0, 2.5)


def kidscore_momiq(d, beta, sigma):
    return linear(d["kid_score"], beta[0] + beta[1] * d["mom_iq"], sigma) + halfcauchy(sigma, 0, 2.5)


def kidscore_momhsiq(d, beta, sigma):
    mean = beta[0] + beta[1] * d["mom_hs"] + beta[2] * d["mom_iq"]
    return linear(d["kid_score"], mean, sigma) + halfcauchy(sigma, 0, 2.5)


def kidscore_interaction(d, beta, sigma):
    return interaction(d["kid_score"], d["mom_hs"], d["mom_iq"], beta, sigma) + halfcauchy(sigma, 0, 2.5)


def kidscore_interaction_c(d, beta, sigma):
    hs, iq = (d[k] - np.mean(d[k]) for k in ("mom_hs", "mom_iq"))
    return interaction(d["kid_score"], hs, iq, beta, sigma)


def kidscore_interaction_c2(d, beta, sigma):
    return interaction(d["kid_score"], d["mom_hs"] - 0.5, d["mom_iq"] - 100, beta, sigma)


def kidscore_interaction_z(d, beta, sigma):
    hs, iq = ((d[k] - np.mean(d[k])) / (2 * np.std(d[k], ddof=1)) for k in ("mom_hs", "mom_iq"))
    return interaction(d["kid_score"], hs, iq, beta, sigma)


def kidscore_mom_work(d, beta, sigma):
    effect = np.array([0.0, 0.0, *beta[1:]])
    return linear(d["kid_score"], beta[0] + effect[d["mom_work"]], sigma)


def mesquite_rows(d, log):
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    return [np.log(d[k]) if log else d[k] for k in names]


def mesquite(d, beta, sigma):
    mean = beta[0] + sum(b * x for b, x in zip(beta[1:], [*mesquite_rows(d, False), d["group"]]))
    return linear(d["weight"], mean, sigma)


def logmesquite(d, beta, sigma):
    mean = beta[0] + sum(b * x for b, x in zip(beta[1:], [*mesquite_rows(d, True), d["group"]]))
    return linear(np.log(d["weight"]), mean, sigma)


def canopy(d):
    one, two, height, total, density = mesquite_rows(d, True)
    return {"v": one + two + height, "a": one + two, "s": one - two, "h": total, "d": density, "g": d["group"]}


def by_canopy(letters):
    def log_prob(d, beta, sigma):
        found = canopy(d)
        mean = beta[0] + sum(b * found[k] for b, k in zip(beta[1:], letters))
        return linear(np.log(d["weight"]), mean, sigma)

    return log_prob


def nes(d, beta, sigma):
    age = np.array([0.0, 0.0, *beta[3:6]])[d["age_discrete"]]
    mean = beta[0] + beta[1] * d["real_ideo"] + beta[2] * d["race_adj"] + age
    mean = mean + beta[6] * d["educ1"] + beta[7] * d["gender"] + beta[8] * d["income"]
    return linear(d["partyid7"], mean, sigma)


def blr(d, beta, sigma):
    return linear(d["y"], d["X"] @ beta, sigma) + norm(beta, 0, 10).sum() + norm(sigma, 0, 10)


def kilpisjarvi(d, alpha, beta, sigma):
    prior = norm(alpha, d["pmualpha"], d["psalpha"]) + norm(beta, d["pmubeta"], d["psbeta"])
    return linear(d["y"], alpha + beta * d["x"], sigma) + prior


def diamonds(d, b, Intercept, sigma):
    # The rows of the triangular factor stand for N rows with the same sum of squares.
    error = d["rows"] @ np.array([*-b, -Intercept, 1.0])
    fit = -int(d["N"]) * np.log(sigma) - 0.5 * error @ error / sigma**2
    return fit + norm(b).sum() + stats.t.logpdf(Intercept, 3, 8, 10) + stats.t.logpdf(sigma, 3, 0, 10)


def wells_dist100ars_model(d, alpha, beta):
    p = special.expit(alpha + beta[0] * d["dist"] / 100 + beta[1] * d["arsenic"])
    return stats.bernoulli.logpmf(d["switched"], p).sum()


def nes_logit_model(d, alpha, beta):
    return stats.bernoulli.logpmf(d["vote"], special.expit(alpha + beta[0] * d["income"])).sum()


def dogs(d, beta):
    total = norm(beta, 0, 100).sum()
    for row in d["y"]:
        avoided = shocks = 0
        for y in row:
            total += stats.bernoulli.logpmf(y, special.expit(beta[0] + beta[1] * avoided + beta[2] * shocks))
            avoided, shocks = avoided + 1 - y, shocks + y
    return total


def GLM_Poisson_model(d, alpha, beta1, beta2, beta3):
    year = d["year"]
    return stats.poisson.logpmf(d["C"], np.exp(alpha + beta1 * year + beta2 * year**2 + beta3 * year**3)).sum()


def eight_schools(d, theta, mu, tau):
    schools = norm(theta, mu, tau).sum() + norm(d["y"], theta, d["sigma"]).sum()
    return schools + norm(mu, 0, 5) + halfcauchy(tau, 0, 5)


def rats_model(d, alpha, beta, mu_alpha, mu_beta, sigma_y, sigma_alpha, sigma_beta):
    total = norm(mu_alpha, 0, 100) + norm(mu_beta, 0, 100)
    total += norm(alpha, mu_alpha, sigma_alpha).sum() + norm(beta, mu_beta, sigma_beta).sum()
    for rat, x, y in zip(d["rat"], d["x"], d["y"]):
        total += norm(y, alpha[rat - 1] + beta[rat - 1] * (x - d["xbar"]), sigma_y)
    return total


def surgical_model(d, mu, sigmasq, b):
    prior = norm(mu, 0, 1000) + stats.invgamma.logpdf(sigmasq, 0.001, scale=0.001)
    return prior + norm(b, mu, np.sqrt(sigmasq)).sum() + stats.binom.logpmf(d["r"], d["n"], special.expit(b)).sum()


def seeds_centered_model(d, alpha0, alpha1, alpha12, alpha2, c, sigma):
    logit = alpha0 + alpha1 * d["x1"] + alpha2 * d["x2"] + alpha12 * d["x1"] * d["x2"] + c - np.mean(c)
    prior = norm([alpha0, alpha1, alpha12, alpha2]).sum() + halfcauchy(sigma) + norm(c, 0, sigma).sum()
    return prior + stats.binom.logpmf(d["n"], d["N"], special.expit(logit)).sum()


def radon(d, alpha, beta, mu_alpha, sigma_alpha, sigma_y):
    total = norm(sigma_alpha) + norm(sigma_y) + norm(mu_alpha, 0, 10) + norm(beta, 0, 10).sum()
    mean = alpha[d["county_idx"] - 1] + beta[0] * d["log_uppm"] + beta[1] * d["floor_measure"]
    return total + norm(alpha, mu_alpha, sigma_alpha).sum() + norm(d["log_radon"], mean, sigma_y).sum()


def arK(d, alpha, beta, sigma):
    total, y, order = norm(alpha, 0, 10) + norm(beta, 0, 10).sum() + halfcauchy(sigma, 0, 2.5), d["y"], int(d["K"])
    for t in range(order, len(y)):
        total += norm(y[t], alpha + sum(beta[k] * y[t - 1 - k] for k in range(order)), sigma)
    return total


def arma11(d, mu, phi, theta, sigma):
    total = norm(mu, 0, 10) + norm(phi, 0, 2) + norm(theta, 0, 2) + halfcauchy(sigma, 0, 2.5)
    before, error = mu, 0.0
    for y in d["y"]:
        error = y - (mu + phi * before + theta * error)
        total, before = total + norm(error, 0, sigma), y
    return total


def garch11(d, mu, alpha0, alpha1, beta1):
    total, sigma, before = 0.0, float(d["sigma1"]), None
    for y in d["y"]:
        if before is not None:
            sigma = np.sqrt(alpha0 + alpha1 * (before - mu) ** 2 + beta1 * sigma**2)
        total, before = total + norm(y, mu, sigma), y
    return total


def hidden_markov(emission, theta1, theta2):
    log_theta, state = np.log([theta1, theta2]), emission[0]
    for seen in emission[1:]:
        state = special.logsumexp(state[:, None] + log_theta, 0) + seen
    return special.logsumexp(state)


def hmm_example(d, theta1, theta2, mu):
    return hidden_markov(norm(d["y"][:, None], mu, 1), theta1, theta2) + norm(mu, [3, 10], 1).sum()


def hmm_drive(d, theta1, theta2, phi, lam, pdf):
    total = norm(phi, [0, 3], 1).sum() + norm(lam, [0, 3], 1).sum()
    total += sum(stats.dirichlet.logpdf(t, a) for t, a in zip((theta1, theta2), d["alpha"]))
    return total + hidden_markov(pdf(d["u"], phi, "tau") + pdf(d["v"], lam, "rho"), theta1, theta2)


def hmm_drive_0(d, theta1, theta2, phi, **lam):
    return hmm_drive(
        d, theta1, theta2, phi, lam["lambda"], lambda x, rate, _: stats.expon.logpdf(x[:, None], 0, 1 / rate)
    )


def hmm_drive_1(d, theta1, theta2, phi, **lam):
    return hmm_drive(d, theta1, theta2, phi, lam["lambda"], lambda x, mean, sd: norm(x[:, None], mean, float(d[sd])))


def gauss_mix(d, mu, sigma, theta):
    prior = norm(sigma, 0, 2).sum() + norm(mu, 0, 2).sum() + stats.beta.logpdf(theta, 5, 5)
    parts = theta * stats.norm.pdf(d["y"], mu[0], sigma[0]) + (1 - theta) * stats.norm.pdf(d["y"], mu[1], sigma[1])
    return prior + np.log(parts).sum()


def kernel(x, rho, alpha):
    return alpha**2 * np.exp(-((x[:, None] - x) ** 2) / (2 * rho**2))


def gp_prior(rho, alpha):
    return stats.gamma.logpdf(rho, 25, scale=1 / 4) + norm(alpha, 0, 2)


def gp_regr(d, rho, alpha, sigma):
    covariance = kernel(d["x"], rho, alpha) + sigma * np.eye(len(d["x"]))
    fit = stats.multivariate_normal.logpdf(d["y"], np.zeros(len(d["y"])), covariance)
    return fit + gp_prior(rho, alpha) + norm(sigma)


def gp_pois_regr(d, rho, alpha, f):
    covariance = kernel(d["x"], rho, alpha) + 1e-10 * np.eye(len(d["x"]))
    latent = stats.multivariate_normal.logpdf(f, np.zeros(len(f)), covariance)
    return latent + gp_prior(rho, alpha) + stats.poisson.logpmf(d["k"], np.exp(f)).sum()


def accel_gp(d, **p):
    total, lines = 0.0, []
    for s, centre, scale in (("", -13, 36), ("_sigma", 0, 10)):
        sd, length, z = p[f"sdgp{s}_1"], p[f"lscale{s}_1"], p[f"zgp{s}_1"]
        total += stats.t.logpdf(p[f"Intercept{s}"], 3, centre, scale) + stats.t.logpdf(sd, 3, 0, 36) + norm(z).sum()
        total += stats.invgamma.logpdf(length, 1.124909, scale=0.0177)
        spectrum = sd**2 * np.sqrt(2 * np.pi) * length * np.exp(-0.5 * length**2 * d[f"slambda{s}_1"][:, 0] ** 2)
        lines.append(p[f"Intercept{s}"] + d[f"Xgp{s}_1"] @ (np.sqrt(spectrum) * z))
    return total + norm(d["Y"], lines[0], np.exp(lines[1])).sum()


def solve(slope, start, times):
    found = integrate.solve_ivp(slope, (0, times[-1]), start, "LSODA", times, rtol=1e-9, atol=1e-9)
    return found.y.T


def lotka_volterra(d, theta, z_init, sigma):
    a, b, c, e = theta
    path = solve(lambda t, z: [(a - b * z[1]) * z[0], (-c + e * z[0]) * z[1]], z_init, d["ts"].astype(float))
    total = norm(theta, [1, 0.05, 1, 0.05], [0.5, 0.05, 0.5, 0.05]).sum()
    total += stats.lognorm.logpdf(sigma, 1, scale=np.exp(-1)).sum() + stats.lognorm.logpdf(z_init, 1, scale=10).sum()
    total += stats.lognorm.logpdf(d["y_init"], sigma, scale=z_init).sum()
    return total + stats.lognorm.logpdf(d["y"], sigma, scale=path).sum()


def one_comp_mm_elim_abs(d, k_a, K_m, V_m, sigma):
    dose, volume = float(d["D"]), float(d["V"])

    def slope(t, y):
        return np.exp(-k_a * t) * dose * k_a / volume - V_m / volume * y / (K_m + y)

    path = solve(slope, [0.0], d["times"])[:, 0]
    prior = stats.halfcauchy.logpdf([k_a, K_m, V_m, sigma]).sum()
    return prior + stats.lognorm.logpdf(d["C_hat"], sigma, scale=path).sum()


# By the name of the model where the function has another name.
OTHER = {
    "logmesquite_logvolume": by_canopy("v"),
    "logmesquite_logva": by_canopy("vag"),
    "logmesquite_logvas": by_canopy("vashdg"),
    "logmesquite_logvash": by_canopy("vashg"),
    "eight_schools_centered": eight_schools,
    "eight_schools_noncentered": eight_schools,
    "radon_hierarchical_intercept_noncentered": radon,
    "low_dim_gauss_mix": gauss_mix,
    "low_dim_gauss_mix_collapse": gauss_mix,
}


def log_density(posterior, data, values, names):
    """Return the log density of constrained parameters, given as a vector with names such as beta[1]."""
    model = posterior.rsplit("-", 1)[1]
    groups = {}
    for name, value in zip(names, values):
        groups.setdefault(name.split("[")[0], []).append((name, value))
    given = {k: np.array([v for _, v in found]) if "[" in found[0][0] else found[0][1] for k, found in groups.items()}
    return OTHER.get(model, globals().get(model))(data, **given)
