"""MCMC plots: the artists hold the values they claim to show."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats

from credibly.diagnostics.summary import diagnose, rhat
from credibly.errors import InputError
from credibly.plot import BLUE, ORANGE
from credibly.plot import chains as plot_chains

mpl.use("Agg")
DRAWS = np.random.default_rng(0).standard_normal((4, 100, 3))


@pytest.fixture
def close():
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def stairs(ax, *, filled=False):
    """Return (heights, edges) of the step curves by label, or of the filled ones in order."""
    found = [p for p in ax.patches if hasattr(p, "get_data") and p.get_fill() == filled]
    return [p.get_data()[:2] for p in found] if filled else {p.get_label(): p.get_data()[:2] for p in found}


# -- traces


@pytest.mark.usefixtures("close")
def test_trace_draws_every_chain_of_every_quantity():
    panels = plot_chains.trace(torch.from_numpy(DRAWS), names=["a", "b", "c"])
    assert [p.get_ylabel() for p in panels] == ["a", "b", "c"]
    for k, panel in enumerate(panels):
        assert [line.get_label() for line in panel.lines] == [f"chain {i}" for i in range(4)]
        np.testing.assert_array_equal([line.get_ydata() for line in panel.lines], DRAWS[..., k])
    assert len({line.get_color() for line in panels[0].lines}) == 4
    assert [t.get_text() for t in panels[0].get_legend().get_texts()] == [f"chain {i}" for i in range(4)]
    assert panels[1].get_legend() is None
    assert [p.get_xlabel() for p in panels] == ["", "", "draw"]


def test_plots_on_given_axes():
    axes = Figure().subplots(3, 1)
    assert plot_chains.trace(DRAWS, axes=axes) == list(axes)
    assert axes[2].get_ylabel() == "[2]"
    axes = Figure().subplots()
    assert plot_chains.ranks(DRAWS[..., 0], axes=[axes]) == [axes]
    axes = Figure().subplots()
    assert plot_chains.rhat_histogram(rhat(DRAWS), ax=axes) is axes


def test_many_chains_have_no_legend():
    axes = Figure().subplots()
    plot_chains.trace(np.zeros((9, 10)), axes=[axes])
    assert axes.get_legend() is None
    assert len(axes.lines) == 9


# -- ranks


def test_ranks_count_the_ranks_of_each_chain():
    x = np.round(DRAWS[..., 0], 1)  # with ties
    x[0] -= 0.7
    axes = Figure().subplots()
    plot_chains.ranks(x, bins=8, names=["bias"], axes=[axes])
    ranked = ((stats.rankdata(x) - 0.5) / x.size).reshape(x.shape)
    found = stairs(axes)
    assert list(found) == [f"chain {i}" for i in range(4)]
    for chain, (heights, edges) in enumerate(found.values()):
        np.testing.assert_allclose(edges, np.arange(9) / 8)
        np.testing.assert_allclose(heights, np.histogram(ranked[chain], edges)[0] / (100 / 8))
    assert found["chain 0"][0][0] > 1.5
    together = np.mean([h for h, _ in found.values()], 0)
    np.testing.assert_allclose(together, 1, atol=0.2)  # flat, up to ties
    assert axes.get_ylabel().startswith("bias\n")


def test_the_grey_band_holds_independent_chains():
    x = np.random.default_rng(3).standard_normal((4, 200, 12))
    axes = Figure().subplots(12, 1)
    plot_chains.ranks(x, bins=10, axes=axes)
    (strip,) = [p for p in axes[0].patches if p.get_label() == "independent draws"]
    low, high = strip.get_y(), strip.get_y() + strip.get_height()
    sd = stats.hypergeom(800, 80, 200).std() / 20
    np.testing.assert_allclose([low, high], [1 - 2 * sd, 1 + 2 * sd])
    heights = np.array([h for ax in axes for h, _ in stairs(ax).values()])
    assert ((heights >= low) & (heights <= high)).mean() == pytest.approx(0.95, abs=0.03)


# -- R-hat


def test_rhat_histogram_shows_fractions_and_limits():
    weights, functions = np.array([0.9999, 1.005, 1.05, 1.2, 1.3, np.inf]), np.array([1.002, 1.004, np.nan])
    axes = Figure().subplots()
    plot_chains.rhat_histogram(weights, torch.from_numpy(functions), ax=axes)
    found = stairs(axes)
    assert list(found) == ["weights, median 1.125", "predictions, median 1.003"]
    for (heights, edges), values in zip(found.values(), (weights, functions[:2])):
        assert heights.sum() == pytest.approx(1)
        for limit in (1.01, 1.1):  # limits are edges: the fraction below is exact
            at = np.flatnonzero(np.isclose(edges, limit - 1))
            assert len(at) == 1
            assert heights[: at[0]].sum() == pytest.approx((values < limit).mean())
    assert found["weights, median 1.125"][0][[0, -1]] == pytest.approx([1 / 6, 1 / 6])  # below 1.0001, and infinite
    assert sorted(line.get_xdata()[0] for line in axes.lines) == pytest.approx([0.01, 0.1])
    assert [t.get_text().strip() for t in axes.texts] == ["good", "not mixed"]
    assert axes.get_xscale() == "log"
    assert axes.xaxis.get_major_formatter()(0.01) == "1.01"
    assert axes.xaxis.get_major_formatter()(1e-4) == "≤ 1.0001"
    assert len(stairs(axes, filled=True)) == 2
    assert {p.get_edgecolor() for p in axes.patches if not p.get_fill()} == {
        mpl.colors.to_rgba(c) for c in (BLUE, ORANGE)
    }


def test_rhat_histogram_takes_diagnostics():
    d = diagnose(DRAWS + 3 * np.arange(4)[:, None, None], DRAWS)
    panels = [Figure().subplots() for _ in range(3)]
    plot_chains.rhat_histogram(d, ax=panels[0])
    plot_chains.rhat_histogram(d.weights.rhat, d.functions.rhat, ax=panels[1])
    plot_chains.rhat_histogram(diagnose(DRAWS), ax=panels[2])
    first, second = (stairs(ax) for ax in panels[:2])
    assert list(first) == list(second)
    for label in first:
        np.testing.assert_array_equal(first[label][0], second[label][0])
    assert len(stairs(panels[2])) == 1


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: plot_chains.trace(np.zeros(5)), "draws"),
        (lambda: plot_chains.trace(np.zeros((2, 5, 13))), "draws"),
        (lambda: plot_chains.trace(np.zeros((2, 0, 3))), "draws"),
        (lambda: plot_chains.trace(np.full((2, 5), np.nan)), "draws"),
        (lambda: plot_chains.trace(DRAWS, names=["a"]), "names"),
        (lambda: plot_chains.trace(DRAWS, axes=[Figure().subplots()]), "axes"),
        (lambda: plot_chains.ranks(DRAWS[:1]), "draws"),
        (lambda: plot_chains.ranks(DRAWS, bins=1), "bins"),
        (lambda: plot_chains.ranks(DRAWS, bins=101), "bins"),
        (lambda: plot_chains.rhat_histogram(np.array([np.nan])), "weights"),
        (lambda: plot_chains.rhat_histogram(np.ones(3), np.array([])), "functions"),
    ],
)
def test_bad_input(call, argument):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.argument == argument
