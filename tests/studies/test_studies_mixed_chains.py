"""The conclusions of the HMC studies that need chains that have mixed, from known numbers."""

import pytest

from studies import hmc_chains, hmc_cost, hmc_length, hmc_target
from tests.studies.known_cells import NOISY, cells, joined


def length_cells(share, drawn, paid, cost, rhat):
    names = ("_0p25", "_0p5", "_1", "_1p5")
    made = [
        cells(k, **dict(zip(names, v, strict=True)))
        for k, v in (
            ("ess_share", share),
            ("log_density", drawn),
            ("log_density_paid", paid),
            ("per_1000_gradients", cost),
            ("ess_weights", share),
            ("worst_rhat", (1.2, 1.0, rhat, 1.0)),
            ("accuracy", (0.8, 0.8, 0.8, 0.8)),
            ("accuracy_paid", (0.8, 0.8, 0.8, 0.8)),
        )
    ]
    return joined(*made)


ESS, BEST, COST = (0.1, 0.2, 0.5, 0.5), (-2, -2, -1, -1), (3, 3, 4, 3)
LONGER = (-2, -2, -1, -0.5)


@pytest.mark.parametrize(
    "draws, gradients, share, drawn, paid, cost, rhat",
    [
        (True, True, ESS, BEST, BEST, COST, 1.04),
        (False, True, (0.1, 0.6, 0.5, 0.5), BEST, BEST, COST, 1.04),  # half the length gives more effective draws
        (False, True, ESS, LONGER, BEST, COST, 1.04),  # a longer one predicts better from as many draws
        (True, False, ESS, BEST, LONGER, COST, 1.04),  # or from as many gradients
        (True, False, ESS, BEST, BEST, (9, 3, 4, 3), 1.04),  # a short one costs less than half
        (None, True, (0.1, NOISY, 0.5, 0.5), BEST, BEST, COST, 1.04),
        (True, None, ESS, BEST, BEST, ((3, 9, 15), 3, 4, 3), 1.04),
        (None, None, ESS, BEST, LONGER, COST, 1.06),  # chains at tau have not mixed
    ],
)
def test_trajectory_length_is_judged_by_its_rule_in_both_comparisons(draws, gradients, share, drawn, paid, cost, rhat):
    result = hmc_length.result_of_length({"mnist": length_cells(share, drawn, paid, cost, rhat)}, ())
    words = {True: "reproduced", False: "not reproduced", None: "inconclusive"}
    assert result.numbers["held_by_group"] == {"mnist": {"draws": draws, "gradients": gradients}}
    assert result.sentences[1:3] == (
        f"At equal draws alone: {words[draws]}.",
        f"At equal gradients alone: {words[gradients]}.",
    )
    reproduced = False if False in (draws, gradients) else None if None in (draws, gradients) else True
    assert result.reproduced is reproduced
    assert result.sentences[0].startswith(f"{words[reproduced].capitalize()} at this size: tau")
    assert any(s.split(" in ")[-1].startswith("mnist at 0.25") for s in result.sentences)  # where R-hat is 1.2
    if reproduced:
        assert "ESS / draws is 0.50 ± 0.00 at tau, 0.20 ± 0.00 at 0.5 tau" in result.sentences[3]
        assert "is cheapest at 1 tau" in result.sentences[3]
        assert "+1.0000 ± 0.0000, +1.0000 ± 0.0000, 0.0000 ± 0.0000 at equal draws" in result.sentences[3]


def chain_cells(one, all_, point, mixed, rhat):
    density = cells("log_density", all=all_, MAP=point)
    for name, value in (("one chain", one), ("spread", (one + all_) / 2)):
        density[name] = {"log_density": [value - 0.001, value, value + 0.0012]}
    density["one draw"] = {"log_density": [-9.0, -9.0, -9.1]}
    spaces = {s: {"mixed": [m, m, m], "most": [1.0, 1.0, 1.1]} for s, m in (("predictions", mixed), ("weights", 0.2))}
    for row in density.values():
        row["accuracy"] = [0.8, 0.8, 0.81]
    density["all"]["worst_rhat"] = [rhat, rhat, rhat]
    density["one chain"]["total_variation"] = [0.02, 0.02, 0.03]
    return density | spaces


@pytest.mark.parametrize(
    "reproduced, one, all_, point, mixed, rhat",
    [
        (True, -0.51, -0.5, -1.0, 0.97, 1.04),
        (False, -0.70, -0.5, -1.0, 0.97, 1.04),  # keeps 60 % only
        (None, -0.70, -0.5, -1.0, 0.97, 1.06),  # of a reference that has not mixed
        (False, -0.51, -0.5, -1.0, 0.5, 1.06),  # predictions have not mixed
        (None, -0.51, -0.5, -0.4, 0.97, 1.04),  # nothing was gained over MAP
    ],
)
def test_one_long_chain_is_judged_by_its_rule(reproduced, one, all_, point, mixed, rhat):
    result = hmc_chains.result_of_one({"mnist": chain_cells(one, all_, point, mixed, rhat)}, (), [])
    assert result.reproduced is reproduced
    if reproduced:
        assert "one chain retains 98.0 ±" in result.sentences[1]
        assert "as many draws spread over all chains 99.0 ±" in result.sentences[1]
        assert "97.0 % of the predictions and 20.0 % of the weights" in result.sentences[1]
    if rhat > 1.05:
        assert result.sentences[2].split(" in ")[-1].startswith("mnist: there")


@pytest.mark.parametrize(
    "reproduced, two, three, rhat",
    [
        (True, -0.4, -0.6, 1.04),
        (False, -0.6, -0.7, 1.04),
        (None, -0.6, -0.5, 1.04),
        (None, -0.5, NOISY, 1.04),
        (None, -0.4, -0.6, 1.06),
    ],
)
def test_chains_at_equal_cost_are_judged_by_their_rule(reproduced, two, three, rhat):
    made = {"_1": -0.5, "_2": two, "_3": three, "_4": -0.5}
    groups = {"mnist": joined(cells("log_density", **made), cells("accuracy", **dict.fromkeys(made, 0.8)))}
    result = hmc_cost.result_of_cost(groups, {"mnist": cells("worst_rhat", all=rhat)}, ())
    assert result.reproduced is reproduced
    if reproduced:
        assert "log density relative to one chain: +0.1000 ± 0.0000 with 2 chains" in result.sentences[1]


@pytest.mark.parametrize(
    "reproduced, worst, rhat",
    [
        (True, -0.52, 1.04),
        (False, -0.9, 1.04),
        (None, (-0.9, -0.5, -0.45), 1.04),
        (None, -0.52, 1.06),
        (None, -0.9, 1.06),
    ],
)
def test_prior_scale_is_judged_by_its_rule_where_chains_have_mixed(reproduced, worst, rhat):
    names = [f"_{v:g}".replace(".", "p") for v in hmc_target.VARIANCES]
    made = dict(zip(names, (worst, -0.5, -0.5, -0.51), strict=True))
    points = dict(zip(names, (-2, -0.5, -0.5, -0.5), strict=True))
    accuracy = cells("accuracy", **dict.fromkeys(made, 0.9))
    mixing = cells("worst_rhat", **dict(zip(names, (rhat, 1.02, 1.02, 1.02), strict=True)))
    groups = [{"mnist": joined(cells("log_density", **d), accuracy, mixing)} for d in (made, points)]
    result = hmc_target.result_of_scale(*groups, ())
    assert result.reproduced is reproduced
    assert "from the worst (0.125 times the variance)" in result.sentences[1]
    assert "MAP 1.500" in result.sentences[1]
    if rhat > 1.05:
        assert result.sentences[2].split(" in ")[-1].startswith("mnist at 0.125:")
    else:
        assert result.sentences[2].endswith("R-hat of the worst test row, in the worst run: mnist 1.041.")
