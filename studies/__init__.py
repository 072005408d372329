"""Reproductions of published findings: each study ends in a table, pictures and conclusions computed from its numbers.

A study's module is imported only when the study is requested by name, so listing them is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from credibly.core.checks import check_choice

if TYPE_CHECKING:
    from studies.study import Study

# For each study, the module of this package whose dict `STUDIES` holds it.
MODULES: dict[str, str] = {
    "hmc-reference": "hmc_reference",
    "gap-regression": "pictures",
    "star-classification": "pictures",
    "posterior-sharpens": "sharpening",
    "synthetic-regression": "paper_regression",
    "aleatoric-epistemic": "kinds",
    "ood": "ood",
    "active-mnist": "active",
    "mushroom-bandit": "bandit",
    "reject-option": "reject",
    "trajectory-length": "hmc_length",
    "step-size-acceptance": "hmc_dynamics",
    "one-long-chain": "hmc_chains",
    "chains-at-equal-cost": "hmc_cost",
    "sgmcmc-vs-hmc": "hmc_methods",
    "bma-vs-sgd-vs-ensemble": "hmc_methods",
    "temperature": "hmc_target",
    "prior-scale": "hmc_target",
    "covariate-shift": "hmc_shift",
    "continual-mnist": "continual",
    "evidence-picks-the-model": "evidence",
    "lora-calibration": "lora",
}


def find(name: str) -> Study:
    """Return the study with the given name. Raise for an unknown one."""
    check_choice("NAME", name, MODULES)
    module = importlib.import_module(f"studies.{MODULES[name]}")
    found: Study = module.STUDIES[name]
    return found
