"""The export to ArviZ."""

import sys

import numpy as np
import pytest
import torch

from credibly.diagnostics import arviz_export
from credibly.diagnostics.summary import to_arviz
from credibly.errors import InputError


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
        (lambda: to_arviz({"w": np.zeros(5)}), r"weights: w must have shape \(chain, draw, ...\), got \(5,\)"),
        (lambda: to_arviz({"w": [1.0]}), "weights must hold tensors or arrays, got a list"),
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
