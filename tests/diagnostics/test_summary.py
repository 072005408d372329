"""Diagnostics of all coordinates: summaries, draws read in chunks, forms of the input, and the table, JSON and HTML."""

import html
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from credibly.diagnostics import summary as diagnostics
from credibly.diagnostics.summary import Diagnostics, diagnose, e_bfmi, ess, mcse, rhat
from credibly.errors import InputError
from simulated_chains import autoregressive, awkward

X = np.random.default_rng(0).standard_normal((2, 10, 3))
GOOD_WEIGHTS = autoregressive(4, 500, 20, 0.0)
GOOD = autoregressive(4, 500, 120, 0.0, seed=1)


@pytest.mark.parametrize(
    "call, argument",
    [
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
    with pytest.raises(
        InputError, match=r"draws must have at least 4 draws per chain, got 3 .*ensemble members are not chains"
    ):
        diagnose(X[:, :3])


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
        r, bulk, tail = (g(values)[list(kept)] for g in (rhat, ess, lambda v: ess(v, "tail")))
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
    """Draws that are read by columns only, with a record of the requests."""

    def __init__(self, draws):
        self.draws, self.shape, self.requests = draws, draws.shape, []

    def columns(self, start, stop):
        self.requests.append((start, stop))
        return self.draws[..., start:stop]


@pytest.mark.parametrize("coordinates", [7, 40, 1000])
@pytest.mark.parametrize("values", [2 * 30 * 16, 2**22, 1])
def test_chunks_give_the_same_as_the_whole(coordinates, values, monkeypatch):
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
    assert max(b - a for a, b in source.requests) <= width
    assert len(source.requests) <= min(len(picks), 101 // width + 1)


def test_a_source_must_return_the_shape_it_has():
    class Short(Reader):
        def columns(self, start, stop):
            return self.draws[:, 1:, start:stop]

    with pytest.raises(InputError, match=r"draws: columns returned shape .*, expected "):
        diagnose(Short(X))


def test_the_default_checks_2000_coordinates():
    d = diagnose(np.random.default_rng(0).standard_normal((1, 4, 5001)))
    assert (d.weights.count, d.weights.total) == (2000, 5001)
    assert "2,000 of 5,001" in str(d)


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
        "constant 1 0",
        "acceptance 0.800",
        "divergences 2",
        f"E-BFMI {np.mean(d.e_bfmi):.3f} lowest chain {min(d.e_bfmi):.3f}",
    ):
        assert line in [" ".join(row.split()) for row in text.splitlines()]
    assert "constant" not in str(diagnose(GOOD_WEIGHTS, GOOD))
    assert max(map(len, text.splitlines())) <= 100
    plain = json.loads(json.dumps(d.to_dict(), allow_nan=False))
    assert plain == d.to_dict()
    assert plain["functions"]["rhat_worst"] == d.functions.rhat_worst
    assert "rhat" not in plain["weights"]
    assert (plain["ok"], plain["verdict"], plain["chains"]) == (d.ok, d.verdict, 4)
    assert diagnose(GOOD_WEIGHTS).to_dict()["functions"] is None
    shown = d._repr_html_()
    assert html.escape(d.verdict) in shown
    assert f"<td>{d.functions.ess_bulk_min:,.0f}</td>" in shown
    assert isinstance(d, Diagnostics)
    with pytest.raises(AttributeError):
        d.ok = True


def test_needs_only_torch_and_numpy():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "scipy sklearn arviz arviz_base arviz_stats xarray pandas matplotlib".split():
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
