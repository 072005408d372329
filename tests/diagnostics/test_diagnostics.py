"""R-hat, ESS, MCSE and E-BFMI against arviz-stats and closed forms; verdicts; the export to ArviZ."""

import functools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import credibly
from credibly.diagnostics import arviz_export, convergence, verdict
from credibly.diagnostics import summary as diagnostics
from credibly.diagnostics.summary import Diagnostics, diagnose, e_bfmi, ess, mcse, rhat, to_arviz
from credibly.errors import InputError


def autoregressive(chains, draws, k, r, seed=0):
    """x_t = r x_t-1 + sqrt(1 - r^2) e_t, started where it stays: standard normal, autocorrelation r^t."""
    e = np.random.default_rng(seed).standard_normal((chains, draws, k))
    x = e.copy()
    for t in range(1, draws):
        x[:, t] = r * x[:, t - 1] + np.sqrt(1 - np.square(r)) * e[:, t]
    return x


def awkward(chains, draws, seed=0):
    """Columns from well to badly mixed, and constant, tied, NaN, infinite, binary, shifted and stretched ones; 20 in all."""
    x = autoregressive(chains, draws, 20, np.linspace(-0.9, 0.99, 20), seed)
    where = np.arange(chains)[:, None]
    x[..., 3] = 2.5
    x[..., 4] = np.round(x[..., 4])
    x[0, 2, 5] = np.nan
    x[..., 6] += 10 * where
    x[..., 7] *= 1 + where
    x[..., 8] = x[..., 8] > 0
    x[0, 1, 9] = np.inf
    x[..., 10] += 1000
    x[..., 11] *= 1e-9
    x[:, 1::2, 12] = x[:, : draws - draws % 2 : 2, 12]  # rejections: draws that come twice
    x[..., 13] = np.arange(draws)
    x[..., 14] *= 1e-17  # less than what arviz-stats calls constant in an ESS of the draws as they are
    return x


OURS = {
    "rhat": rhat,
    "bulk": ess,
    "tail": lambda x: ess(x, "tail"),
    "mean": lambda x: ess(x, "mean"),
    "mcse mean": mcse,
    "mcse sd": lambda x: mcse(x, "sd"),
}
THEIRS = {
    "rhat": array_stats.rhat,
    "bulk": lambda x: array_stats.ess(x, method="bulk"),
    "tail": lambda x: array_stats.ess(x, method="tail", prob=0.05),
    "mean": lambda x: array_stats.ess(x, method="mean"),
    "mcse mean": lambda x: array_stats.mcse(x, method="mean"),
    "mcse sd": lambda x: array_stats.mcse(x, method="sd"),
}


def arviz(name, x):
    with np.errstate(all="ignore"):
        return np.asarray(THEIRS[name](np.moveaxis(x, -1, 0)), dtype=float)


def split_scores(x):
    """Normal scores of half-chains of one coordinate (chain, draw), by scipy."""
    half = x.shape[1] // 2
    halves = np.concatenate([x[:, :half], x[:, -half:]])
    return stats.norm.ppf((stats.rankdata(halves) - 0.375) / (halves.size + 0.25)).reshape(halves.shape), halves


# -- against arviz-stats


@pytest.mark.parametrize("chains", [1, 2, 4, 7])
@pytest.mark.parametrize("draws", [4, 5, 6, 7, 8, 9, 11, 50, 333])
def test_equal_to_arviz(chains, draws):
    x = awkward(chains, draws)
    for name in OURS:
        if name != "rhat" or chains > 1:  # arviz-stats wants two chains for R-hat
            np.testing.assert_allclose(OURS[name](x), arviz(name, x), rtol=1e-10, atol=1e-10, err_msg=name)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 3), st.integers(4, 14), st.integers(1, 4))
def test_equal_to_arviz_on_tied_draws(data, chains, draws, levels):
    values = data.draw(st.lists(st.integers(0, levels), min_size=chains * draws, max_size=chains * draws))
    x = np.array(values, dtype=float).reshape(chains, draws, 1)
    for name in OURS:
        theirs, ours = arviz(name, x), OURS[name](x)
        if name == "rhat" and theirs > 1e6:
            assert ours == math.inf  # half-chains that stand still: 0 there up to rounding
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("draws", [4, 7, 100])
def test_rhat_of_one_chain_compares_its_halves(draws):
    x = autoregressive(1, draws, 3, 0.5)
    for k, found in enumerate(rhat(x)):
        scores, halves = split_scores(x[..., k])
        folded = split_scores(np.abs(halves - np.median(halves)).reshape(1, -1))[0].reshape(halves.shape)
        expected = max(_identity_rhat(scores), _identity_rhat(folded))
        assert found == pytest.approx(expected, rel=1e-10)
    drift = np.linspace(0, 3, draws)[None, :, None] + 0.1 * x
    assert (rhat(drift) > 1.2).all()


def _identity_rhat(z):
    n = z.shape[1]
    return math.sqrt((np.var(z.mean(1), ddof=1) * n / np.var(z, axis=1, ddof=1).mean() + n - 1) / n)


def test_e_bfmi_against_arviz_and_closed_forms():
    x = autoregressive(3, 2000, 1, 0.0)[..., 0]
    np.testing.assert_allclose(e_bfmi(x), array_stats.bfmi(x), rtol=1e-12)
    np.testing.assert_allclose(e_bfmi(x), 2.0, atol=0.15)  # independent: E (a - b)^2 = 2 Var
    np.testing.assert_allclose(e_bfmi(autoregressive(3, 20_000, 1, 0.9)[..., 0]), 2 * (1 - 0.9), atol=0.03)
    np.testing.assert_allclose(e_bfmi(np.array([[0.0, 1.0, 3.0, 0.0]])), (1 + 4 + 9) / 3 / 2)
    assert e_bfmi(torch.from_numpy(x)).shape == (3,)


# -- closed forms


@pytest.mark.parametrize("kind", ["bulk", "mean"])
@pytest.mark.parametrize("r", [-0.5, 0.0, 0.3, 0.8, 0.95])
def test_ess_of_an_autoregression(kind, r):
    chains, draws, k = 4, 2000, 60
    found = ess(autoregressive(chains, draws, k, r), kind)
    expected = chains * draws * (1 - r) / (1 + r)
    # a single estimate is off by some 10 %, their median by a few
    assert np.median(found) == pytest.approx(expected, rel=0.08)
    assert found.max() <= chains * draws * math.log10(chains * draws) * (1 + 1e-9)


def test_tail_ess_of_independent_draws_and_of_lost_tails():
    x = autoregressive(4, 1000, 50, 0.0)
    assert np.median(ess(x, "tail")) == pytest.approx(4000, rel=0.1)
    x[0] *= 3  # one chain alone visits the tails: the middle is unharmed
    assert np.median(ess(x, "tail")) < 400
    assert np.median(ess(x, "bulk")) > 2000


def test_mcse_is_the_spread_of_estimates_over_repetitions():
    x = 3 * autoregressive(2, 500, 400, 0.5)  # 400 repetitions of one experiment
    assert np.median(mcse(x)) == pytest.approx(x.mean((0, 1)).std(), rel=0.12)
    assert np.median(mcse(x[..., :200], "sd")) == pytest.approx(3 / math.sqrt(2 * 1000 / 3), rel=0.12)


def test_rhat_tells_chains_apart_by_place_and_by_spread():
    x = autoregressive(4, 1000, 30, 0.0)
    assert rhat(x).max() < 1.01
    assert np.median(rhat(x)) == pytest.approx(1.0, abs=1e-3)
    place, spread = x.copy(), x.copy()
    place[0] += 1.0
    spread[0] *= 4.0
    assert rhat(place).min() > 1.05
    assert rhat(spread).min() > 1.1
    np.testing.assert_allclose(rhat(np.exp(place)), rhat(place), rtol=1e-2)  # ranks: the scale hardly matters
    two = np.stack([np.zeros(100), np.ones(100)])
    two[0, 0], two[1, 0] = 1.0, 0.0
    z = split_scores(two)[0]
    assert rhat(two) == pytest.approx(_identity_rhat(z), rel=1e-10)


def test_chains_that_do_not_move():
    assert rhat(np.repeat(np.arange(4.0)[:, None], 333, 1)) == math.inf
    assert rhat(np.repeat(np.arange(7.0)[:, None], 1001, 1)) == math.inf
    constant = np.full((4, 50), 0.1)
    assert math.isnan(rhat(constant))
    assert ess(constant) == ess(constant, "tail") == ess(constant, "mean") == 200
    assert mcse(constant) == pytest.approx(0, abs=1e-15)


# -- forms of the input


@pytest.mark.parametrize("name", OURS)
def test_tensors_and_arrays_of_any_shape(name):
    f = OURS[name]
    x = awkward(4, 51)[..., :18]
    expected = f(x)
    assert isinstance(expected, np.ndarray)
    assert expected.dtype == np.float64
    shaped = torch.from_numpy(x).reshape(4, 51, 3, 6)
    found = f(shaped)
    assert found.shape == (3, 6)
    np.testing.assert_array_equal(found.numpy().ravel(), expected)
    flipped = torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, 2, 0))).permute(1, 2, 0)
    np.testing.assert_array_equal(f(flipped), expected)
    single = x.astype(np.float32)
    np.testing.assert_array_equal(f(single), f(single.astype(np.float64)))
    np.testing.assert_array_equal(f(torch.from_numpy(single).requires_grad_()).numpy(), f(single))
    alone = f(x[..., 0])
    assert alone.shape == ()
    assert float(alone) == expected[0]
    whole = np.round(x[..., 14:18] * 3)
    np.testing.assert_array_equal(f(whole.astype(np.int64)), f(whole))
    frozen = x.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(f(frozen), expected)


@pytest.mark.parametrize("name", OURS)
def test_blocks_do_not_change_the_result(name, monkeypatch):
    x = awkward(4, 60)
    whole = OURS[name](x)
    monkeypatch.setitem(convergence.BLOCK_VALUES, "cpu", 4 * 60 * 3)
    np.testing.assert_allclose(OURS[name](x), whole, rtol=1e-12)


def test_measure_is_all_of_them_at_once():
    for draws in (40, 41):
        x = awkward(3, draws)
        found = convergence.measure(x)
        for name in ("rhat", "bulk", "tail", "mean"):
            np.testing.assert_allclose(getattr(found, name), OURS[name](x), rtol=1e-12)
        assert (~found.finite).nonzero().flatten().tolist() == [5, 9]
        assert found.constant.nonzero().flatten().tolist() == [3]
    x[1] = 7.0
    assert convergence.measure(x).still.all(0).tolist() == [False, True, False]


def test_nan_stays_in_its_column():
    x = autoregressive(2, 100, 3, 0.2)
    y = x.copy()
    y[1, 50, 1] = np.nan
    for f in OURS.values():
        assert np.isnan(f(y)).tolist() == [False, True, False]
        np.testing.assert_array_equal(f(y)[[0, 2]], f(x)[[0, 2]])


@pytest.mark.parametrize("least", [1, 2, 3, 7, 11, 13, 17, 121, 997, 1001, 2003, 65537])
def test_fast_lengths(least):
    found = convergence._fast_length(least)
    smooth = sorted(2**a * 3**b * 5**c for a in range(18) for b in range(11) for c in range(8))
    assert found == next(n for n in smooth if n >= least)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_gives_the_same():
    x = awkward(4, 101)
    for f in OURS.values():
        found = f(torch.from_numpy(x).cuda())
        assert found.is_cuda
        np.testing.assert_allclose(found.cpu(), f(x), rtol=1e-10, atol=1e-10)
    functions = torch.from_numpy(autoregressive(4, 101, 30, 0.1)).cuda()
    assert diagnose(functions, functions).to_dict() == pytest.approx(
        diagnose(functions.cpu(), functions.cpu()).to_dict()
    )


X = np.random.default_rng(0).standard_normal((2, 10, 3))


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: rhat([[1.0, 2.0, 3.0, 4.0]]), "draws"),
        (lambda: rhat(X[0, :, 0]), "draws"),
        (lambda: rhat(X[:, :3]), "draws"),
        (lambda: ess(X[:, :, :0]), "draws"),
        (lambda: ess(X[:0]), "draws"),
        (lambda: ess(X.astype(complex)), "draws"),
        (lambda: ess(torch.from_numpy(X).to(torch.complex64)), "draws"),
        (lambda: mcse(X.astype(str)), "draws"),
        (lambda: ess(X, "median"), "kind"),
        (lambda: mcse(X, "bulk"), "kind"),
        (lambda: e_bfmi(X), "energy"),
        (lambda: e_bfmi(X[:, :3, 0]), "energy"),
        (lambda: diagnose(X[:, :3]), "draws"),
        (lambda: diagnose(X[..., 0]), "draws"),
        (lambda: diagnose([1.0, 2.0]), "draws"),
        (lambda: diagnose(X, X[:, :2]), "functions"),
        (lambda: diagnose(X, X[:1]), "functions"),
        (lambda: diagnose(X, energy=X[:1, :, 0]), "energy"),
        (lambda: diagnose(X, acceptance=1.5), "acceptance"),
        (lambda: diagnose(X, acceptance=-0.1), "acceptance"),
        (lambda: diagnose(X, acceptance=np.zeros(3)), "acceptance"),
        (lambda: diagnose(X, divergences=-1), "divergences"),
        (lambda: diagnose(X, divergences=0.5), "divergences"),
        (lambda: diagnose(X, coordinates=0), "coordinates"),
        (lambda: diagnose(X, coordinates=True), "coordinates"),
    ],
)
def test_bad_input(call, argument):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.argument == argument


def test_too_few_draws_are_named():
    with pytest.raises(InputError, match=r"3 draws a chain .*members of an ensemble are no chains"):
        diagnose(X[:, :3])


# -- the summary


def test_diagnose_sums_up_every_coordinate():
    x, y = awkward(4, 200), autoregressive(4, 200, 130, 0.4)
    energy = autoregressive(4, 200, 1, 0.5, seed=1)[..., 0]
    accepted = np.linspace(0.6, 0.9, 800).reshape(4, 200)
    jumped = accepted > 0.89
    d = diagnose(x, y, energy, accepted, jumped)
    assert (d.chains, d.draws, d.still) == (4, 200, ())
    assert d.divergences == jumped.sum() > 0
    np.testing.assert_allclose(d.e_bfmi, e_bfmi(energy))
    np.testing.assert_allclose(d.acceptance, accepted.mean(1))
    w, f = d.weights, d.functions
    assert (w.count, w.total, w.constant, w.nonfinite, w.moving) == (20, 20, 1, 2, 17)
    use = [i for i in range(20) if i not in (3, 5, 9)]
    np.testing.assert_allclose(w.rhat, rhat(x)[use])
    for space, kept, values in ((w, use, x), (f, range(130), y)):
        r, bulk, tail = (g(values)[list(kept)] for g in (rhat, ess, OURS["tail"]))
        relative = mcse(values[..., kept]) / values[..., kept].std((0, 1), ddof=1)
        assert space.rhat_worst == pytest.approx(r.max())
        assert space.rhat_median == pytest.approx(np.median(r))
        assert space.share_over_1_01 == pytest.approx((r > 1.01).mean())
        assert space.share_over_1_1 == pytest.approx((r > 1.1).mean())
        assert (space.ess_bulk_min, space.ess_bulk_median) == pytest.approx((bulk.min(), np.median(bulk)))
        assert (space.ess_tail_min, space.ess_tail_median) == pytest.approx((tail.min(), np.median(tail)))
        assert (space.mcse_worst, space.mcse_median) == pytest.approx((relative.max(), np.median(relative)))
    assert w.rhat_most == w.rhat_worst  # fewer than 100
    assert f.rhat_most == pytest.approx(np.sort(rhat(y))[-2])  # one of 130 may be worse
    assert f.ess_most == pytest.approx(min(np.sort(ess(y))[1], np.sort(ess(y, "tail"))[1]))


def test_predictions_may_have_any_shape_and_fewer_draws():
    x, y = autoregressive(2, 60, 5, 0.0), autoregressive(2, 60, 12, 0.0)
    shaped = diagnose(x, torch.from_numpy(y[:, ::3]).reshape(2, 20, 4, 3)).functions
    np.testing.assert_array_equal(shaped.rhat, rhat(y[:, ::3]))


class Reader:
    """Draws that are handed out by columns only, with a note of what was asked."""

    def __init__(self, draws):
        self.draws, self.shape, self.asked = draws, draws.shape, []

    def columns(self, start, stop):
        self.asked.append((start, stop))
        return self.draws[..., start:stop]


@pytest.mark.parametrize("coordinates", [7, 40, 1000])
@pytest.mark.parametrize("values", [2 * 30 * 16, 2**22, 1])
def test_pieces_give_what_the_whole_gives(coordinates, values, monkeypatch):
    monkeypatch.setattr(diagnostics, "READ_VALUES", values)
    x = torch.from_numpy(autoregressive(2, 30, 101, 0.5))
    source = Reader(x)
    found, whole = (diagnose(form, coordinates=coordinates).weights for form in (source, x))
    picks = np.linspace(0, 100, min(101, coordinates)).round().astype(int)
    assert (found.count, found.total) == (len(picks), 101)
    assert (picks[0], picks[-1]) == (0, 100)
    for form in (found, whole):
        np.testing.assert_allclose(form.rhat, rhat(x)[picks], rtol=1e-12)
    width = max(1, values // 60)
    assert max(b - a for a, b in source.asked) <= width
    assert len(source.asked) <= min(len(picks), 101 // width + 1)


def test_a_source_has_to_keep_its_word():
    class Short(Reader):
        def columns(self, start, stop):
            return self.draws[:, 1:, start:stop]

    with pytest.raises(InputError, match="columns gave"):
        diagnose(Short(X))


def test_the_default_looks_at_2000():
    d = diagnose(np.random.default_rng(0).standard_normal((1, 4, 5001)))
    assert (d.weights.count, d.weights.total) == (2000, 5001)
    assert "2,000 of 5,001" in str(d)


# -- the verdict

GOOD_WEIGHTS = autoregressive(4, 500, 20, 0.0)
GOOD = autoregressive(4, 500, 120, 0.0, seed=1)


def test_good_functions_excuse_the_weights():
    apart = GOOD_WEIGHTS + 5 * np.arange(4)[:, None, None]
    d = diagnose(apart, GOOD, acceptance=0.8, divergences=0, energy=GOOD[..., 0])
    assert d.ok
    assert d.verdict.startswith("Good: the chains agree about the predictions")
    assert "The weights mix worse" in d.verdict
    assert "to be expected" in d.verdict
    both = diagnose(GOOD_WEIGHTS, GOOD)
    assert both.ok
    assert "weights" not in both.verdict
    alone = diagnose(apart)
    assert not alone.ok
    assert alone.verdict.startswith("Not mixed: the chains disagree about the weights")
    assert "judged by the weights alone" in alone.verdict


def test_functions_that_disagree_are_not_excused_by_weights():
    d = diagnose(GOOD_WEIGHTS, GOOD + 2 * np.arange(4)[:, None, None])
    assert not d.ok
    assert d.verdict.startswith("Not mixed: the chains disagree about the predictions (R-hat above 1.1 for 100%")
    assert "warm-up" in d.verdict
    shifted = 2 * np.arange(4)[:, None, None]
    assert "to be expected" not in diagnose(GOOD_WEIGHTS + shifted, GOOD + shifted).verdict


def test_a_stray_prediction_is_named_not_decisive():
    y = GOOD.copy()
    y[..., 7] += 2 * np.arange(4)[:, None]
    d = diagnose(GOOD_WEIGHTS, y)
    assert d.ok
    assert "0.8% of the predictions are above 1.1" in d.verdict
    y[..., 8:12] += 2 * np.arange(4)[:, None, None]
    assert not diagnose(GOOD_WEIGHTS, y).ok


def test_one_chain():
    d = diagnose(GOOD_WEIGHTS[:1], GOOD[:1])
    assert d.ok
    assert "halves of the chain" in d.verdict
    assert "One chain cannot show modes that it never reached" in d.verdict


def test_chains_that_stand_still():
    x, y = GOOD_WEIGHTS.copy(), GOOD.copy()
    x[2], y[2] = x[2, :1], y[2, :1]
    d = diagnose(x, y)
    assert d.still == (2,)
    assert not d.ok
    assert d.verdict.startswith("Not mixed: chain 2 never moved")
    x[0] = x[0, :1]
    assert diagnose(x, y).verdict.startswith("Not mixed: chains 0, 2 never moved")
    x[:] = x[:, :1]
    d = diagnose(x, y)
    assert d.verdict.startswith("Not moving")
    assert d.weights.rhat_worst == math.inf
    assert d.to_dict()["weights"]["rhat_worst"] is None
    assert diagnose(np.ones((4, 50, 3))).verdict.startswith("Not moving")


def test_nan_and_nothing_to_see():
    y = GOOD.copy()
    y[3, 4, 5] = np.nan
    y[3, 4, 6] = -np.inf
    d = diagnose(GOOD_WEIGHTS, y)
    assert not d.ok
    assert d.functions.nonfinite == 2
    assert d.verdict.startswith("Broken: NaN or infinite draws in 2 of the 120 predictions")
    d = diagnose(y, GOOD)
    assert d.verdict.startswith("Broken: NaN or infinite draws in 2 of the 120 weights")
    d = diagnose(GOOD_WEIGHTS, np.ones_like(GOOD))
    assert not d.ok
    assert d.verdict.startswith("Nothing to judge: the predictions are the same in every draw")
    assert math.isnan(d.functions.rhat_worst)


def mixed(rhat_most=1.0, ess_most=1000.0, moving=1000):
    values = {"rhat_worst": rhat_most, "rhat_median": 1.0, "ess_bulk_min": ess_most, "rhat": np.ones(moving)}
    figures = dict.fromkeys(verdict.Mixing.__dataclass_fields__, 0.0) | values
    counts = {"count": moving, "total": moving, "constant": 0, "nonfinite": 0}
    return verdict.Mixing(**figures | counts | {"rhat_most": rhat_most, "ess_most": ess_most})


@pytest.mark.parametrize(
    "rhat_most, word, ok",
    [
        (1.01, "Good", True),
        (1.0101, "Usable", True),
        (1.05, "Usable", True),
        (1.0501, "Poorly mixed", False),
        (1.1, "Poorly mixed", False),
        (1.1001, "Not mixed", False),
        (math.inf, "Not mixed", False),
    ],
)
def test_grades(rhat_most, word, ok):
    found, words = verdict.judge(4, mixed(), mixed(rhat_most))
    assert found is ok
    assert words.startswith(f"{word}: ")
    assert verdict.judge(4, mixed(rhat_most), mixed())[0]
    assert verdict.judge(4, mixed(rhat_most), None)[0] is ok


@pytest.mark.parametrize("chains, least", [(1, 100), (2, 200), (4, 400), (8, 400)])
def test_enough_draws(chains, least):
    assert verdict.judge(chains, mixed(), mixed(ess_most=least))[0]
    found, words = verdict.judge(chains, mixed(), mixed(ess_most=least / 3 + 1))
    assert not found
    assert words.startswith("Not yet: ")
    assert f"ESS reaches only {least / 3 + 1:.0f}, {least} are wanted. Run about 3 times as many draws." in words
    apart = verdict.judge(chains, mixed(), mixed(rhat_most=2.0, ess_most=5))[1]
    assert "times as many" not in apart  # more of the same is no cure
    assert "Run about 4 times as long" in verdict.judge(4, mixed(), mixed(rhat_most=1.08, ess_most=101))[1]


def test_other_faults():
    def say(**given):
        return verdict.judge(4, mixed(), mixed(), **given)

    assert say(divergences=0, e_bfmi=(0.3, 1.0, math.nan, 1.0), acceptance=(0.3,) * 4) == say()
    ok, words = say(divergences=3)
    assert not ok
    assert "3 trajectories diverged" in words
    assert "lower the step size" in words
    assert "1 trajectory diverged" in say(divergences=1)[1]
    ok, words = say(e_bfmi=(math.nan, 1.0, 0.29, 0.2))
    assert not ok
    assert "E-BFMI is 0.2 in chain 3" in words
    ok, words = say(acceptance=(0.8, 0.12, 0.9, 0.7))
    assert ok  # remarked on, no fault
    assert "Acceptance is 12%" in words


def test_acceptance_and_divergences_in_every_form():
    x = GOOD_WEIGHTS
    assert diagnose(x, acceptance=0.7).acceptance == (0.7,)
    assert diagnose(x, acceptance=torch.tensor([0.5, 0.6, 0.7, 0.8])).acceptance == pytest.approx((0.5, 0.6, 0.7, 0.8))
    rates = np.ones((4, 500))
    rates[1, :250] = np.nan
    assert diagnose(x, acceptance=rates).acceptance == (1.0, 0.5, 1.0, 1.0)
    assert diagnose(x, divergences=torch.ones(4, 500, dtype=torch.bool)).divergences == 2000
    assert diagnose(x, divergences=7).divergences == 7
    bare = diagnose(x)
    assert (bare.acceptance, bare.divergences, bare.e_bfmi, bare.functions) == (None, None, None, None)


def test_table_json_and_html():
    d = diagnose(awkward(4, 100), GOOD[:, :100], energy=GOOD[:, :100, 0], acceptance=0.8, divergences=2)
    text = str(d)
    assert text.startswith("4 chains of 100 draws\n")
    assert " ".join(text.split("\n\n")[1].split()) == d.verdict
    for line in (
        f"R-hat, worst {d.weights.rhat_worst:.3f} {d.functions.rhat_worst:.3f}",
        f"bulk ESS, lowest {d.weights.ess_bulk_min:.0f} {d.functions.ess_bulk_min:.0f}",
        "never change 1 0",
        "acceptance 0.800",
        "divergences 2",
        f"E-BFMI {np.mean(d.e_bfmi):.3f} lowest chain {min(d.e_bfmi):.3f}",
    ):
        assert line in [" ".join(row.split()) for row in text.splitlines()]
    assert "never change" not in str(diagnose(GOOD_WEIGHTS, GOOD))
    assert max(map(len, text.splitlines())) <= 100
    plain = json.loads(json.dumps(d.to_dict(), allow_nan=False))
    assert plain == d.to_dict()
    assert plain["functions"]["rhat_worst"] == d.functions.rhat_worst
    assert "rhat" not in plain["weights"]
    assert (plain["ok"], plain["verdict"], plain["chains"]) == (d.ok, d.verdict, 4)
    assert diagnose(GOOD_WEIGHTS).to_dict()["functions"] is None
    assert d._repr_html_() == f"<pre>{text}</pre>".replace("'", "&#x27;")
    assert isinstance(d, Diagnostics)
    with pytest.raises(AttributeError):
        d.ok = True


def test_needs_torch_and_numpy_alone():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"scipy", "sklearn", "arviz", "arviz_base", "arviz_stats", "xarray", "pandas", "matplotlib"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
import torch
from credibly.diagnostics.summary import diagnose, to_arviz
x = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0))
print(diagnose(x, x, energy=x[..., 0]).verdict[:4])
try:
    to_arviz({"w": x})
except ModuleNotFoundError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.stdout.splitlines()[1:] == ["to_arviz needs arviz-base: pip install arviz-base (or credibly[arviz])"], (
        out
    )


# -- ArviZ


def test_to_arviz_has_every_group():
    g = torch.Generator().manual_seed(0)
    weights = {"0.weight": torch.randn(3, 8, 5, 2, generator=g), "log_scale": torch.randn(3, 8, generator=g)}
    statistics = {"acceptance": torch.rand(3, 8), "divergent": torch.zeros(3, 8), "energy": torch.randn(3, 8)}
    y, seen = torch.randn(3, 8, 6, generator=g), np.arange(6)
    tree = to_arviz(
        weights,
        statistics=statistics,
        functions=y.bfloat16(),
        predictive=y,
        observed=seen,
        log_likelihood={"y": -y.square()},
    )
    assert set(tree.children) == {
        "posterior",
        "sample_stats",
        "posterior_predictive",
        "observed_data",
        "log_likelihood",
    }
    assert set(tree.posterior.data_vars) == {"0.weight", "log_scale", "functions"}
    assert tree.posterior["0.weight"].dims[:2] == ("chain", "draw")
    np.testing.assert_array_equal(tree.posterior["0.weight"].values, weights["0.weight"])
    np.testing.assert_array_equal(tree.posterior["functions"].values, y.bfloat16().float())
    assert set(tree.sample_stats.data_vars) == {"acceptance_rate", "diverging", "energy"}
    assert tree.sample_stats["diverging"].dtype == bool
    np.testing.assert_array_equal(tree.sample_stats["energy"].values, statistics["energy"])
    assert tree.observed_data["y"].shape == (6,)
    assert tree.log_likelihood["y"].dims == tree.posterior_predictive["y"].dims
    assert tree.observed_data["y"].dims == tree.posterior_predictive["y"].dims[2:]
    assert tree.attrs["inference_library"] == "credibly"
    assert set(to_arviz({"w": np.zeros((9, 4))}).children) == {"posterior"}  # more chains than draws: no warning


def test_to_arviz_refuses():
    w = {"w": np.zeros((2, 5, 3))}
    for call, match in (
        (lambda: to_arviz({}), "weights: is empty"),
        (lambda: to_arviz({"w": np.zeros(5)}), r"weights: w has shape \(5,\)"),
        (lambda: to_arviz({"w": [1.0]}), "found a list"),
        (lambda: to_arviz(w, statistics={"energy": np.zeros((2, 4))}), r"energy of sample_stats has shape \(2, 4\)"),
        (lambda: to_arviz(w, functions=np.zeros((10, 3))), "functions of posterior"),
        (lambda: to_arviz({**w, "functions": w["w"]}, functions=w["w"]), "also the name of a tensor"),
    ):
        with pytest.raises(InputError, match=match):
            call()


def test_to_arviz_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(ModuleNotFoundError, match="pip install arviz-base"):
        arviz_export.to_arviz({"w": np.zeros((2, 5))})


def test_the_verdict_on_a_density_speaks_of_its_coordinates():
    def log_prob(x):
        return -0.5 * x.square().sum(-1)

    method = credibly.HMC(chains=4, draws=200, warmup=100)
    found = method.fit(credibly.Density(log_prob, 3), seed=0).diagnostics()
    assert "coordinates" in found.verdict
    assert "weights" not in found.verdict
    assert "held-out" not in found.verdict


def test_a_low_e_bfmi_counts_where_it_is_no_accident_of_few_draws():
    judged = functools.partial(verdict.judge, 4, mixed(), mixed())
    assert judged(e_bfmi=(0.25, 0.6, 0.5, 0.7), draws=80)[0]  # within two errors of 0.3, the average above
    assert not judged(e_bfmi=(0.25, 0.6, 0.5, 0.7), draws=10_000)[0]
    assert not judged(e_bfmi=(0.05, 0.6, 0.5, 0.7), draws=80)[0]
    assert not judged(e_bfmi=(0.25, 0.28, 0.27, 0.29), draws=80)[0]  # all of them together are no accident
