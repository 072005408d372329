"""Guarantees for a network with several heads: each head is calibrated by itself."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.size, self.kind = nn.Linear(2, 1), nn.Linear(2, 3)

    def forward(self, x):
        return {"size": self.size(x), "kind": self.kind(x)}


def test_each_head_is_calibrated_by_itself():
    x = randn(60, 2)
    y = {"size": x.sum(1) + randn(60, seed=1), "kind": torch.arange(60) % 3}
    heads = cr.likelihoods.Heads({"size": cr.likelihoods.Gaussian(0.1), "kind": cr.likelihoods.Categorical()})
    problem = cr.Problem(TwoHeads(), (x, y), heads, cr.priors.Normal())
    posterior = cr.MAP(steps=50, compile=False).fit(problem, seed=0, progress=False)
    with pytest.raises(cr.InputError, match=r"Calibrate each head: c = conformal\.calibrate"):
        posterior.calibrate(x, y)
    # As the message says. Of 60 rows the ceil(0.9 * 61) = 55th smallest score is the limit, so 55 are inside.
    predictions = posterior.predict(x)["size"]
    calibration = cr.conformal.calibrate(predictions, y["size"])
    low, high = cr.conformal.CalibratedPredictive(predictions, calibration).interval(0.9)
    assert int(((low <= y["size"]) & (y["size"] <= high)).sum()) == 55
    low, high = predictions.interval(0.9)
    assert int(((low <= y["size"]) & (y["size"] <= high)).sum()) < 30
