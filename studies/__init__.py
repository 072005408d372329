"""Published findings as runs that anyone can repeat: each study ends in a table, a picture and a sentence from the numbers.

Nothing is imported before a study is asked for by name, so that listing them is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from credibly.errors import InputError

if TYPE_CHECKING:
    from studies.study import Study

# The module in this package that holds the study of each name, as its value STUDY or in its dict STUDIES.
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
    "trajectory-length": "hmc_dynamics",
    "step-size-acceptance": "hmc_dynamics",
    "one-long-chain": "hmc_chains",
    "chains-at-equal-cost": "hmc_chains",
    "sgmcmc-vs-hmc": "hmc_methods",
    "bma-vs-sgd-vs-ensemble": "hmc_methods",
    "temperature": "hmc_target",
    "prior-scale": "hmc_target",
    "covariate-shift": "hmc_shift",
    "continual-mnist": "continual",
    "evidence-picks-the-model": "evidence",
}


def find(name: str) -> Study:
    """The study of a name; an unknown one is refused with those there are."""
    if name not in MODULES:
        raise InputError("NAME", f"found {name!r}", f"The studies are {', '.join(MODULES)}")
    module = importlib.import_module(f"studies.{MODULES[name]}")
    found: Study = module.STUDIES[name]
    return found
