"""Plots for tabular fits: the artists hold the values they claim to show, and bad input raises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import credibly as cr
from credibly import plot
from tabular import facts_of


@pytest.fixture
def ax():
    return Figure().subplots()


@pytest.fixture(scope="module")
def plane():
    return facts_of("plane")


@pytest.fixture(scope="module")
def wine():
    return facts_of("wine")


class TestOodHistogram:
    def test_fractions_add_up_and_each_score_is_in_its_bin(self, ax):
        assert plot.ood_histogram([0.1, 0.11, 0.9], [0.99, 0.5], ax=ax) is ax
        heights = [patch.get_data() for patch in ax.patches if patch.get_label().startswith(("like", "out"))]
        assert [float(h.values.sum()) for h in heights] == pytest.approx([1, 1])
        assert heights[0].values[2] == pytest.approx(2 / 3)  # 0.1 and 0.11 lie in [0.08, 0.12)
        assert [t.get_text() for t in ax.get_legend().get_texts()] == [
            "like the training data (3)",
            "out of distribution (2)",
        ]

    def test_scores_outside_0_to_1_and_all_equal(self, ax):
        assert plot.ood_histogram([5.0, 7.0], ax=ax).get_xlim() == (5.0, 7.0)
        assert plot.ood_histogram([5.0, 5.0], ax=Figure().subplots()).get_xlim() == (5.0, 6.0)

    @pytest.mark.parametrize("scores", [[], [0.1, np.nan], [[0.1, 0.2], [0.3, 0.4]]])
    def test_bad_scores(self, scores):
        with pytest.raises(cr.InputError, match="scores"):
            plot.ood_histogram(scores)


class TestFreeEnergy:
    def test_lines_are_the_means_over_members(self, ax):
        history = {
            "step": [1, 2],
            "loss": [[4.0, 2.0], [3.0, 1.0]],
            "parts": {"misfit": [[3.0, 1.0], [2.0, 0.5]], "other": [[1, 1], [1, 0.5]]},
        }
        plot.free_energy(history, ax=ax)
        lines = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
        assert lines == {"loss": [3.0, 2.0], "misfit": [2.0, 1.25], "other": [1.0, 0.75]}
        assert len(ax.collections) == 3  # from the lowest to the highest member
        assert ax.get_yscale() == "log"

    def test_a_real_history_and_a_loss_below_zero(self, ax):
        bbb = facts_of("wave", "bbb").posterior.record.history
        plot.free_energy(bbb, ax=ax)
        assert [line.get_label() for line in ax.lines] == ["loss", "misfit", "complexity"]
        low = Figure().subplots()
        plot.free_energy({"step": [1, 2], "loss": [1.0, -1.0], "parts": {"loss": [1.0, -1.0]}}, ax=low)
        assert (len(low.lines), low.get_yscale(), low.get_legend()) == (1, "linear", None)

    @pytest.mark.parametrize("history", [{}, {"seconds": 3.0}, None, {"step": [1], "loss": [[1.0], [2.0]]}])
    def test_bad_history(self, history):
        with pytest.raises(cr.InputError, match="history"):
            plot.free_energy(history)


class TestConfusion:
    def test_counts(self, ax):
        p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]])
        plot.confusion(p, [0, 0, 1, 1], classes=["cat", "dog"], ax=ax)
        found = {(round(t.get_position()[1]), round(t.get_position()[0])): t.get_text() for t in ax.texts}
        assert found == {(0, 0): "2", (1, 0): "1", (1, 1): "1"}
        assert ax.images[0].get_array().tolist() == [[1, 0], [0.5, 0.5]]
        assert [t.get_text() for t in ax.get_yticklabels()] == ["cat", "dog"]

    def test_of_a_predictive(self, wine, ax):
        plot.confusion(wine.predictive, wine.y, classes=wine.classes, ax=ax)
        assert sum(int(t.get_text()) for t in ax.texts) == len(wine.y)

    @pytest.mark.parametrize(
        "p, y, classes, name",
        [
            (np.full((2, 2), 0.5), [0, 1, 1], None, "predictive"),
            (np.full((2, 2), 0.5), [0, 2], None, "y"),
            (np.full((2, 2), 0.5), [0, 1], ["a"], "classes"),
            (np.full((2, 40), 1 / 40), [0, 1], None, "predictive"),
        ],
    )
    def test_bad_input(self, p, y, classes, name):
        with pytest.raises(cr.InputError, match=f"^{name}"):
            plot.confusion(p, y, classes=classes)


class TestSurface:
    @pytest.mark.parametrize("part", ["mean", "epistemic", "aleatoric", "total"])
    def test_the_image_is_the_prediction_in_any_order_of_the_grid(self, plane, part):
        grid = np.stack([a.ravel() for a in np.meshgrid([30.0, 50.0, 70.0], [40.0, 60.0], indexing="ij")], 1)
        shuffled = grid[[3, 0, 5, 1, 4, 2]]
        ax = plot.surface(plane.view.predict(shuffled), shuffled, part=part, ax=Figure().subplots())
        values = getattr(plane.view.predict(grid), part).numpy().reshape(3, 2).T
        assert np.asarray(ax.images[0].get_array()) == pytest.approx(
            values if part == "mean" else np.sqrt(values), rel=1e-5
        )

    def test_a_callable_places_a_grid_around_the_data(self, plane, ax):
        view = plane.view
        plot.surface(view.predict, data=(view.x, view.y), ax=ax)
        assert ax.images[0].get_array().shape == (101, 101)
        assert ax.get_xlim()[0] < view.x[:, 0].min()
        assert ax.collections[0].get_array().tolist() == view.y.tolist()

    def test_bad_input(self, plane, wine):
        with pytest.raises(cr.InputError, match="part must be one of 'mean', .*, got 'nothing'"):
            plot.surface(plane.view.predict, part="nothing")
        with pytest.raises(cr.InputError, match="Pass grid="):
            plot.surface(plane.predictive)
        with pytest.raises(cr.InputError, match="grid must be a full grid"):
            plot.surface(plane.view.predict, plane.view.x)
        with pytest.raises(cr.InputError, match="labels"):
            plot.surface(wine.predictive, [[0, 0], [0, 1], [1, 0], [1, 1]])


class TestClassCurves:
    def test_probabilities_in_order_of_x(self, ax):
        facts = facts_of("steps")
        x = np.array([[60.0], [40.0], [50.0]])
        p = facts.view.predict(x)
        plot.class_curves(p, x, data=(facts.view.x, facts.view.y), classes=facts.classes, ax=ax)
        lines = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
        assert list(lines) == ["low", "middle", "high"]
        assert lines["low"].get_xdata().tolist() == [40, 50, 60]
        assert lines["low"].get_ydata() == pytest.approx(p.probabilities[[1, 2, 0], 0].numpy())

    def test_bad_input(self, plane, wine):
        with pytest.raises(cr.InputError, match="bands"):
            plot.class_curves(plane.predictive, plane.y)
        with pytest.raises(cr.InputError, match="x: has 3 rows"):
            plot.class_curves(wine.predictive, [1, 2, 3])
        with pytest.raises(cr.InputError, match="classes: has 1 names"):
            plot.class_curves(wine.predictive, np.arange(len(wine.y)), classes=["a"])


class TestNamespace:
    def test_mcmc_plots_are_in_plot_too(self):
        for name in ("trace", "ranks", "rhat_histogram"):
            assert getattr(plot, name) is getattr(cr.plot_chains, name)
        assert {"ood_histogram", "free_energy", "confusion", "surface", "bands"} <= set(plot.__all__)

    def test_without_axes_a_figure_is_created(self):
        import matplotlib.pyplot as plt

        before = plt.get_fignums()
        made = plot.ood_histogram([0.1, 0.2])
        assert made.figure.get_layout_engine() is not None
        plt.close(made.figure)
        assert plt.get_fignums() == before

    def test_decision_names_the_classes(self, ax):
        facts = facts_of("moons")
        plot.decision(
            lambda t: facts.view.predict(t.numpy()), data=(facts.view.x, facts.view.y), classes=("no", "yes"), ax=ax
        )
        assert [c.get_label() for c in ax.collections if c.get_label() in ("no", "yes")] == ["no", "yes"]
        with pytest.raises(cr.InputError, match="two classes"):
            plot.decision(facts.view.predict, data=(facts.view.x, facts.view.y), classes=("a", "b", "c"))
