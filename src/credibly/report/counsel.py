"""What to do next about a fit, as commands that can be pasted into a shell."""

from __future__ import annotations

import shlex

from credibly.report.page import Step
from credibly.tables.fit_summary import Facts


def again(facts: Facts, *options: str, method: str | None = None) -> str:
    """The command of the same fit with other options."""
    noise = noise_of(facts)
    words = ["credibly", "fit", facts.table, "--target", facts.target, "--method", method or facts.method]
    if noise is not None and "--noise" not in options:
        words += ["--noise", noise]
    return shlex.join([*words, *options, "--out", "new-run"])


def noise_of(facts: Facts) -> str | None:
    """The --noise option that the fit was made with, where it is not the one that is taken by default."""
    likelihood = getattr(facts.predictive.likelihood, "inner", facts.predictive.likelihood)
    return {"HeteroscedasticGaussian": "heteroscedastic", "StudentT": "student"}.get(type(likelihood).__name__)


def vary_noise(facts: Facts) -> tuple[Step, ...]:
    """To let the noise of a regression depend on the inputs, unless it does."""
    if facts.task != "regression" or noise_of(facts) == "heteroscedastic":
        return ()
    return (Step("Let the noise depend on the inputs.", again(facts, "--noise", "heteroscedastic")),)


def compare(facts: Facts) -> str:
    """The command that tries every method on the table."""
    return shlex.join(["credibly", "compare", facts.table, "--target", facts.target])


def sample(facts: Facts) -> tuple[Step, ...]:
    """To sample the posterior itself, unless that is what was done."""
    if facts.diagnostics is not None or facts.method in ("hmc", "sgld", "sghmc"):
        return ()
    return (Step("Average over the posterior, by sampling it.", again(facts, method="hmc")),)
