"""Every network of the registry by every method: it works, or it is refused with the expected words."""

import runpy
from pathlib import Path

import pytest
import torch

import credibly as cr
from credibly.inference.training import gradient_noise
from tests.networks import library_cases, plain_cases  # noqa: F401  (they fill the registry)
from tests.networks.module_cases import CASES, QUICK, WORKS

# The same architecture, or one of its siblings, is among the others.
REPEATED = ("DistilBERT (transformers)", "timm ViT")
TOOL = Path(__file__).resolve().parents[2] / "tools" / "module_table.py"


def outcome(case, method, problem):
    """Return "works" or the words of the refusal. Other errors are raised."""
    try:
        predictive = case.fit(method, problem)
    except cr.InputError as error:
        return str(error)
    assert bool(torch.isfinite(predictive.mean).all())
    return WORKS


@pytest.fixture(scope="module", autouse=True)
def short_measurements():
    """Measure what sets the learning rate of SWAG with a few gradients, not hundreds: here any rate will do."""
    with pytest.MonkeyPatch.context() as patch:
        for name, count in {"SCALE_BATCHES": 6, "NOISE_BATCHES": 6, "PROBES": 2, "POWER_STEPS": 2}.items():
            patch.setattr(gradient_noise, name, count)
        yield


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) if n in REPEATED else n for n in CASES])
def test_network_by_every_method(name):
    case = CASES[name]
    if case.refused and set(case.exceptions) < set(QUICK):
        with pytest.raises(cr.InputError) as error:
            case.problem()
        assert case.refused in str(error.value)
        return
    problem = case.problem()
    found = {method: outcome(case, method, problem) for method in QUICK}
    wrong = {m: words for m, words in found.items() if case.expected(m) not in words}
    assert wrong == {}


def test_the_registry_covers_every_method_and_thirty_networks():
    assert set(QUICK) == set(cr.METHODS)
    assert len(CASES) >= 30
    assert sum(not case.refused for case in CASES.values()) >= 30


def test_the_page_is_in_step():
    tool = runpy.run_path(str(TOOL), run_name="module_table")
    assert tool["PAGE"].read_text() == tool["table"](), "python tools/module_table.py writes the page"
