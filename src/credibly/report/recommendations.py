"""Recommendations on a fit, as commands to paste into a shell."""

from __future__ import annotations

import shlex

from credibly.inference.sampling.run import SamplingMethod
from credibly.methods import METHODS, Method
from credibly.report.page import Recommendation
from credibly.tables.fit_summary import FitSummary
from credibly.tables.recipe import PREDICTED

# The --noise option of likelihoods other than the default.
NOISES = {
    "HeteroscedasticGaussian": "heteroscedastic",
    "StudentT": "student",
    "HeteroscedasticStudentT": "heteroscedastic-student",
}


def refit_command(facts: FitSummary, *options: str, method: str | None = None) -> str:
    """Return the `credibly fit` command that repeats the fit with other options."""
    noise = noise_option(facts)
    command = ["credibly", "fit", facts.table, "--target", facts.target, "--method", method or facts.method]
    if noise is not None and "--noise" not in options:
        command += ["--noise", noise]
    command += facts.options
    return shlex.join([*command, *options, "--out", "new-run"])


def compare_command(facts: FitSummary) -> str:
    """Return the command that fits every method to the table."""
    return shlex.join(["credibly", "compare", facts.table, "--target", facts.target, *facts.options])


def noise_option(facts: FitSummary) -> str | None:
    """Return the --noise option of the fit, or None if it is the default."""
    likelihood = getattr(facts.predictive.likelihood, "inner", facts.predictive.likelihood)
    return NOISES.get(type(likelihood).__name__)


def use_heteroscedastic_noise(facts: FitSummary) -> tuple[Recommendation, ...]:
    """Recommend heteroscedastic noise for a regression that does not have it."""
    noise = noise_option(facts)
    if facts.kind != "regression" or noise in PREDICTED:
        return ()
    command = refit_command(facts, "--noise", "heteroscedastic-student" if noise == "student" else "heteroscedastic")
    return (Recommendation("Let the noise level depend on the inputs.", command),)


def use_sampling(facts: FitSummary) -> tuple[Recommendation, ...]:
    """Recommend HMC for a fit that was not made by a sampler."""
    if facts.diagnostics is not None or issubclass(METHODS.get(facts.method, Method), SamplingMethod):
        return ()
    return (Recommendation("Sample the posterior with HMC.", refit_command(facts, method="hmc")),)
