"""Tables for notebooks: escaped, complete, and quick."""

from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.core.html import fact_table
from credibly.likelihoods import Bernoulli, Categorical, Gaussian

X = randn(8, 3)


class Cells(HTMLParser):
    """The text of every cell, and whether all tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


def test_text_is_escaped():
    text = fact_table("<T>", {"a<b": "<script>"}, head=["&"], rows=[["<i>", "x"]], note="1 < 2")
    assert "<script>" not in text
    assert Cells(text).rows == [["a<b", "<script>"], ["&"], ["<i>", "x"]]
    assert "1 &lt; 2" in text


def fitted(outputs, y, likelihood):
    problem = cr.Problem(mlp(3, 4, outputs), data=(X, y), likelihood=likelihood, prior=cr.priors.Normal())
    return problem, cr.DeepEnsemble(members=2, steps=2).fit(problem, seed=0, progress=False)


def test_problem():
    problem, _ = fitted(1, X.sum(1), Gaussian(0.5))
    rows = dict(row for row in Cells(problem._repr_html_()).rows if len(row) == 2)
    assert rows["rows (N)"] == "8"
    assert rows["random parameters (D)"] == "21 in 4 tensors"
    assert rows["parameter vectors"] == f"batched: {problem.forward.reason}"


@pytest.mark.parametrize(
    "outputs, y, likelihood",
    [(2, torch.stack([X[:, 0], X[:, 1]], 1), Gaussian(0.5)), (3, torch.arange(8) % 3, Categorical())],
    ids=["targets", "classes"],
)
def test_predictions_of_the_first_rows(outputs, y, likelihood):
    _, posterior = fitted(outputs, y, likelihood)
    predictive = posterior.predict(X)
    cells = Cells(predictive._repr_html_()).rows
    head = next(row for row in cells if row[0] == "row")
    values = np.array([row for row in cells if row[0] in "01234" and len(row) == len(head)], dtype=float)
    assert values.shape == (5, len(head))
    if outputs == 3:
        assert (values[:, 1] == predictive.probabilities[:5].argmax(-1).numpy()).all()
        np.testing.assert_allclose(values[:, 3], values[:, 4] + values[:, 5], atol=2e-3)
    else:
        np.testing.assert_allclose(values[:, head.index("std 1")], predictive.std[:5, 1], rtol=1e-3)


def test_pixels_show_their_shape_alone():
    _, posterior = fitted(1, (X[:, 0] > 0).long(), Bernoulli())
    assert "label" in posterior.predict(X)._repr_html_()
    net = torch.nn.Conv2d(2, 3, 1)
    y = torch.zeros(4, 5, 5, dtype=torch.long)
    y[0, 0, :3] = torch.arange(3)
    problem = cr.Problem(net, (randn(4, 2, 5, 5), y), Categorical(axis=1), cr.priors.Normal())
    text = cr.MAP(steps=2).fit(problem, seed=0).predict(problem.x)._repr_html_()
    assert "(4, 3, 5, 5)" in text


def test_long_predictions_are_not_computed_to_be_shown(monkeypatch):
    _, posterior = fitted(1, X.sum(1), Gaussian(0.5))
    monkeypatch.setattr("credibly.predictive.display.SHOWN_VALUES", 1)
    predictive = posterior.predict(X)
    assert "Not computed yet" in predictive._repr_html_()
    assert "_summary" not in vars(predictive)
    assert predictive.variance.shape == (8,)
    assert "Not computed yet" not in predictive._repr_html_()


def test_diagnostics():
    draws = randn(4, 50, 6)
    found = cr.diagnostics.diagnose(draws, acceptance=0.8, divergences=1)
    cells = Cells(found._repr_html_()).rows
    assert ["divergences", "1"] in cells
    assert ["R-hat, worst", f"{found.weights.rhat_worst:.3f}"] in cells
    assert found.verdict.split(".")[0] in found._repr_html_()
