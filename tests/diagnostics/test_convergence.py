"""R-hat, ESS, MCSE and E-BFMI against arviz-stats and closed forms, for every form of input."""

import math

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from credibly.diagnostics import convergence
from credibly.diagnostics.summary import diagnose, e_bfmi, ess, mcse, rhat
from credibly.errors import InputError
from simulated_chains import autoregressive, awkward

X = np.random.default_rng(0).standard_normal((2, 10, 3))
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
        if name != "rhat" or chains > 1:  # arviz-stats needs two chains for R-hat
            np.testing.assert_allclose(OURS[name](x), arviz(name, x), rtol=1e-10, atol=1e-10, err_msg=name)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 3), st.integers(4, 14), st.integers(1, 4))
def test_equal_to_arviz_on_tied_draws(data, chains, draws, levels):
    values = data.draw(st.lists(st.integers(0, levels), min_size=chains * draws, max_size=chains * draws))
    x = np.array(values, dtype=float).reshape(chains, draws, 1)
    for name in OURS:
        theirs, ours = arviz(name, x), OURS[name](x)
        if name == "rhat" and theirs > 1e6:
            assert ours == math.inf  # constant half-chains: their variance is 0 up to rounding
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


def test_mcse_is_the_standard_deviation_of_estimates_over_repetitions():
    x = 3 * autoregressive(2, 500, 400, 0.5)  # 400 repetitions of one experiment
    assert np.median(mcse(x)) == pytest.approx(x.mean((0, 1)).std(), rel=0.12)
    assert np.median(mcse(x[..., :200], "sd")) == pytest.approx(3 / math.sqrt(2 * 1000 / 3), rel=0.12)


def test_rhat_detects_differences_in_location_and_scale():
    x = autoregressive(4, 1000, 30, 0.0)
    assert rhat(x).max() < 1.01
    assert np.median(rhat(x)) == pytest.approx(1.0, abs=1e-3)
    shifted, scaled = x.copy(), x.copy()
    shifted[0] += 1.0
    scaled[0] *= 4.0
    assert rhat(shifted).min() > 1.05
    assert rhat(scaled).min() > 1.1
    np.testing.assert_allclose(rhat(np.exp(shifted)), rhat(shifted), rtol=1e-2)  # ranks: the scale hardly matters
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


def test_measure_computes_all_of_them_at_once():
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
    ],
)
def test_bad_input(call, argument):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.argument == argument
