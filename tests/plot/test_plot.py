"""Plots: the artists hold the values they claim to show."""

from __future__ import annotations

import subprocess

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import nn

import credibly as cr
from credibly import plot
from credibly.metrics import scores as metrics
from warm_python import warm_python


def net(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.SiLU(), nn.Linear(8, 1))


@pytest.fixture(scope="module")
def wave():
    return cr.data.gap_regression(30)


@pytest.fixture(scope="module")
def curve(wave):
    """An ensemble of three on the wave."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        problem = cr.Problem(net(1), (wave.x, wave.y), cr.likelihoods.Gaussian(0.2), cr.priors.Normal(2.0))
    return cr.DeepEnsemble(members=3, steps=60, init="prior", compile=False).fit(problem)


@pytest.fixture(scope="module")
def star():
    return cr.data.star_classification()


@pytest.fixture(scope="module")
def labels(star):
    """An ensemble of three on the clusters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        problem = cr.Problem(net(2), (star.x, star.y), cr.likelihoods.Bernoulli(), cr.priors.Normal(1.0))
    return cr.DeepEnsemble(members=3, steps=60, init="prior", compile=False).fit(problem)


@pytest.fixture
def ax():
    return Figure().subplots()


def filled(ax, label: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, lower and upper edge of the band with this label."""
    (band,) = [c for c in ax.collections if isinstance(c, PolyCollection) and c.get_label() == label]
    points = band.get_paths()[0].vertices
    x = np.unique(points[:, 0])
    edges = [points[points[:, 0] == at, 1] for at in x]
    return x, np.array([e.min() for e in edges]), np.array([e.max() for e in edges])


def line(ax, label: str) -> np.ndarray:
    (found,) = [entry for entry in ax.lines if entry.get_label() == label]
    return np.asarray(found.get_xydata())


def offsets(ax, label: str) -> np.ndarray:
    (found,) = [c for c in ax.collections if isinstance(c, PathCollection) and c.get_label() == label]
    return np.asarray(found.get_offsets())


class TestBands:
    def test_draws_intervals_epistemic_part_mean_truth_and_data(self, ax, wave, curve):
        p = curve.predict(wave.grid)
        assert plot.bands(p, wave.grid, data=(wave.x, wave.y), truth=wave.truth, ax=ax) is ax
        for level in (0.5, 0.9):
            x, lower, upper = filled(ax, f"{level:.0%} interval of y")
            low, high = p.interval(level)
            np.testing.assert_allclose(x, wave.grid[:, 0], rtol=1e-6)
            np.testing.assert_allclose(lower, low[:, 0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(upper, high[:, 0], rtol=1e-5, atol=1e-6)
        _, lower, upper = filled(ax, "epistemic part, ± 1 sd")
        np.testing.assert_allclose((upper - lower) / 2, p.epistemic.sqrt()[:, 0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(line(ax, "mean")[:, 1], p.mean[:, 0], rtol=1e-6)
        np.testing.assert_allclose(line(ax, "truth")[:, 1], wave.truth[:, 0], rtol=1e-6)
        np.testing.assert_allclose(offsets(ax, "data"), torch.cat([wave.x, wave.y], 1), rtol=1e-6)
        legend = {text.get_text() for text in ax.get_legend().get_texts()}
        assert legend == {"90% interval of y", "50% interval of y", "epistemic part, ± 1 sd", "mean", "truth", "data"}

    def test_a_point_estimate_has_no_epistemic_band(self, ax, wave, curve):
        plot.bands(curve.predict(wave.grid, draws=1), wave.grid, ax=ax, legend=False)
        assert [c.get_label() for c in ax.collections] == ["90% interval of y", "50% interval of y"]
        assert ax.get_legend() is None

    def test_row_order_does_not_matter(self, ax, wave, curve):
        order = torch.randperm(len(wave.grid), generator=torch.Generator().manual_seed(3))
        plot.bands(curve.predict(wave.grid[order]), wave.grid[order, 0].numpy(), ax=ax)
        np.testing.assert_allclose(line(ax, "mean")[:, 1], curve.predict(wave.grid).mean[:, 0], rtol=1e-4, atol=1e-5)

    def test_single_functions(self, ax, wave, curve):
        p = curve.predict(wave.grid)
        plot.bands(p, wave.grid, functions=3, ax=ax)
        drawn = np.array([entry.get_ydata() for entry in ax.lines if entry.get_label() == "_draw"])
        np.testing.assert_allclose(drawn, p.functions(3)[..., 0], rtol=1e-6)

    def test_bad_input(self, ax, wave, curve, star, labels):
        with pytest.raises(cr.InputError, match="x: has 5 rows"):
            plot.bands(curve.predict(wave.grid), wave.grid[:5], ax=ax)
        with pytest.raises(cr.InputError, match="one column"):
            plot.bands(curve.predict(wave.grid), wave.grid.expand(-1, 2), ax=ax)
        with pytest.raises(cr.InputError, match="decision and reliability"):
            plot.bands(labels.predict(star.x), star.x[:, 0], ax=ax)


class TestDecision:
    def test_the_surface_is_the_probabilities(self, ax, star, labels):
        plot.decision(labels.predict, star.grid, data=(star.x, star.y), marks=star.star, ax=ax)
        expected = labels.predict(star.grid).mean.reshape(star.grid_shape)
        np.testing.assert_allclose(ax.images[0].get_array(), expected.T, rtol=1e-5)
        assert ax.images[0].get_clim() == (0, 1)
        left, right, bottom, top = ax.images[0].get_extent()
        np.testing.assert_allclose([left, right, bottom, top], [-6.1, 6.1, -5.1, 15.1], rtol=1e-6)  # whole cells
        for label in (0, 1):
            np.testing.assert_allclose(offsets(ax, f"class {label}"), star.x[star.y == label], rtol=1e-6)

    def test_the_star_carries_its_probability(self, ax, star, labels):
        plot.decision(labels.predict, star.grid, marks=star.star, colorbar=False, ax=ax)
        assert [t.get_text() for t in ax.texts] == [f"P(1) = {float(labels.predict(star.star).mean):.2f}"]
        np.testing.assert_allclose(ax.texts[0].xy, star.star[0])

    def test_a_predictive_at_a_shuffled_grid(self, ax, star, labels):
        order = torch.randperm(len(star.grid), generator=torch.Generator().manual_seed(5))
        plot.decision(labels.predict(star.grid[order]), star.grid[order], ax=ax)
        expected = labels.predict(star.grid).mean.reshape(star.grid_shape)
        np.testing.assert_allclose(ax.images[0].get_array(), expected.T, rtol=1e-4)

    def test_a_plain_function_and_the_default_grid(self, ax, star):
        plot.decision(lambda x: torch.full((len(x),), 0.8), data=(star.x, star.y), marks=star.star, ax=ax)
        assert np.all(ax.images[0].get_array() == np.float32(0.8))
        left, right, bottom, top = ax.images[0].get_extent()
        assert left < star.x[:, 0].min()
        assert right > star.x[:, 0].max()
        assert bottom < star.x[:, 1].min()
        assert top > 12

    @pytest.mark.parametrize("shape", [(2,), (1,), ()])
    def test_probabilities_of_every_layout(self, ax, star, shape):
        def predict(x):
            p = torch.sigmoid(x[:, 0])
            return torch.stack([1 - p, p], 1) if shape == (2,) else p.reshape(-1, *shape)

        plot.decision(predict, star.grid, ax=ax)
        expected = torch.sigmoid(star.grid[:, 0]).reshape(star.grid_shape)
        np.testing.assert_allclose(ax.images[0].get_array(), expected.T, rtol=1e-6)

    def test_bad_input(self, ax, star, labels):
        with pytest.raises(cr.InputError, match="grid must be a full grid"):
            plot.decision(labels.predict, star.grid[:-1], ax=ax)
        with pytest.raises(cr.InputError, match=r"posterior\.predict"):
            plot.decision(labels.predict(star.grid), star.grid, marks=star.star, ax=ax)
        with pytest.raises(cr.InputError, match="without data or marks"):
            plot.decision(labels.predict, ax=ax)
        with pytest.raises(cr.InputError, match="two classes"):
            plot.decision(lambda x: torch.full((len(x), 3), 1 / 3), star.grid, ax=ax)


class TestCalibration:
    def test_reliability_shows_each_bin_with_its_count(self, ax, star, labels):
        p = labels.predict(star.x)
        plot.reliability(p, star.y, bins=6, ax=ax)
        found = metrics.calibration(p.probabilities, star.y, 6)
        used = found.count > 0
        expected = torch.stack([found.confidence, found.accuracy], 1)[used]
        np.testing.assert_allclose(line(ax, "observed"), expected, rtol=1e-6)
        assert [t.get_text() for t in ax.texts] == [str(int(n)) for n in found.count[used]]
        np.testing.assert_allclose([bar.get_height() for bar in ax.patches], found.count / len(star.y), rtol=1e-6)

    def test_reliability_takes_a_calibration_or_probabilities(self, star, labels):
        p = labels.predict(star.x).probabilities
        first, second = (Figure().subplots() for _ in range(2))
        plot.reliability(metrics.calibration(p, star.y, 10), ax=first)
        plot.reliability(p.numpy(), star.y.numpy(), bins=10, ax=second)
        np.testing.assert_array_equal(line(first, "observed"), line(second, "observed"))
        with pytest.raises(cr.InputError, match="labels must be the observed labels, got None"):
            plot.reliability(p)

    def test_coverage_curve_agrees_with_the_intervals(self, ax, wave, curve):
        p = curve.predict(wave.x)
        plot.coverage_curve(p, wave.y, ax=ax)
        drawn = line(ax, "observed")
        np.testing.assert_allclose(drawn[:, 0], np.arange(0.05, 0.96, 0.05))
        for level, observed in drawn[::3]:
            assert observed == pytest.approx(float(metrics.coverage(*p.interval(float(level)), wave.y)), abs=1e-6)

    def test_several_curves_share_one_diagonal(self, ax, wave, curve):
        plot.coverage_curve(curve.predict(wave.x), wave.y, label="all", ax=ax)
        plot.coverage_curve(curve.predict(wave.x, draws=1), wave.y, label="one", ax=ax)
        assert [entry.get_label() for entry in ax.lines] == ["calibrated", "all", "one"]
        with pytest.raises(cr.InputError, match="levels"):
            plot.coverage_curve(curve.predict(wave.x), wave.y, levels=[0.5, 1.0], ax=ax)

    def test_predicted_observed_separates_inside_from_outside(self, ax, wave, curve):
        p = curve.predict(wave.x)
        plot.predicted_observed(p, wave.y, level=0.5, ax=ax)
        inside = float(metrics.coverage(*p.interval(0.5), wave.y))
        names = {text.get_text() for text in ax.get_legend().get_texts()}
        expected = {f"inside the 50% interval ({inside:.0%})", f"outside the 50% interval ({1 - inside:.0%})", "equal"}
        assert names == expected
        with pytest.raises(cr.InputError, match="y: has 3 values"):
            plot.predicted_observed(p, wave.y[:3], ax=ax)


class TestParts:
    def test_regression_in_standard_deviations(self, ax, wave, curve):
        p = curve.predict(wave.x)
        plot.uncertainty_parts(p, label="wave", ax=ax)
        expected = torch.cat([p.aleatoric, p.epistemic], 1).sqrt()
        np.testing.assert_allclose(offsets(ax, "wave"), expected, rtol=1e-5, atol=1e-7)
        assert "(sd)" in ax.get_xlabel()

    def test_labels_in_nats(self, ax, star, labels):
        p = labels.predict(star.x)
        plot.uncertainty_parts(p, label="star", ax=ax)
        np.testing.assert_allclose(offsets(ax, "star"), torch.stack([p.aleatoric, p.epistemic], 1), rtol=1e-6)
        assert "(nats)" in ax.get_xlabel()

    def test_risk_coverage(self, ax, wave, curve, star, labels):
        p = curve.predict(wave.x)
        plot.risk_coverage(p, wave.y, label="wave", ax=ax)
        curve_ = metrics.risk_coverage(p.ood_score(), (p.mean - wave.y)[:, 0].square())
        np.testing.assert_allclose(line(ax, "wave"), torch.stack([curve_.coverage, curve_.risk], 1), rtol=1e-5)
        other = Figure().subplots()
        plot.risk_coverage(labels.predict(star.x), star.y, label="star", ax=other)
        errors = 1 - float(metrics.accuracy(labels.predict(star.x).probabilities, star.y))
        assert line(other, "star")[-1, 1] == pytest.approx(errors)
        assert "error rate" in other.get_ylabel()
        again = Figure().subplots()
        plot.risk_coverage(curve_, label="given", ax=again)
        np.testing.assert_allclose(line(again, "given"), line(ax, "wave"), rtol=1e-6)
        with pytest.raises(cr.InputError, match="y must be the observed targets, got None"):
            plot.risk_coverage(p)
        with pytest.raises(cr.InputError, match="y: has shape"):
            plot.risk_coverage(p, wave.y[:, 0])


class TestStyle:
    def test_a_new_axes_is_created_and_styled(self, wave, curve):
        import matplotlib.pyplot as plt

        before = dict(mpl.rcParams)
        ax = plot.bands(curve.predict(wave.grid), wave.grid)
        assert ax.figure.get_facecolor()[3] == 0
        assert ax.xaxis.label.get_color() == plot.INK
        assert to_hex(ax.get_legend().get_texts()[0].get_color()) == plot.INK
        assert dict(mpl.rcParams) == before
        plt.close(ax.figure)

    def test_additions_use_the_text_colour_of_the_given_axes(self, wave, curve):
        with mpl.rc_context({"axes.labelcolor": "#123456"}):
            ax = Figure().subplots()
        plot.bands(curve.predict(wave.grid), wave.grid, truth=wave.truth, ax=ax)
        assert to_hex(ax.get_legend().get_texts()[0].get_color()) == "#123456"

    def test_the_text_colour_is_legible_on_white_and_on_black(self):
        channel = int(plot.INK[1:3], 16) / 255
        luminance = ((channel + 0.055) / 1.055) ** 2.4
        assert 1.05 / (luminance + 0.05) > 4
        assert (luminance + 0.05) / 0.05 > 4

    def test_importing_plot_does_not_import_matplotlib(self):
        code = "import sys, credibly.plot, credibly.report; sys.exit(bool({'matplotlib', 'jinja2'} & set(sys.modules)))"
        assert subprocess.run([warm_python(), "-c", code], check=False).returncode == 0
