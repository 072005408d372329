"""Labels that do not count: padded tokens, unlabelled pixels and rows."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.likelihoods import Categorical

DOUBLE = torch.float64
X = randn(8, 5, 3, dtype=DOUBLE)  # 8 rows of 5 tokens
Y = torch.randint(4, (8, 5), generator=torch.Generator().manual_seed(0))
KEPT = torch.rand(8, 5, generator=torch.Generator().manual_seed(1)) < 0.6
KEPT[3] = False  # one row without any label
MASKED = torch.where(KEPT, Y, -100)


def problem(x=X, y=MASKED, likelihood=None, **kwargs):
    net = nn.Linear(3, 4).double()
    net.weight.data, net.bias.data = randn(4, 3, seed=2, dtype=DOUBLE), randn(4, seed=3, dtype=DOUBLE)
    return cr.Problem(net, (x, y), likelihood or Categorical(ignore_index=-100), cr.priors.Normal(1.0), **kwargs)


def tokens():
    """The same tokens as rows of their own, without those that do not count."""
    return problem(X[KEPT], Y[KEPT], Categorical())


def test_the_density_and_its_gradient_are_those_of_the_other_labels():
    theta = randn(2, 16, dtype=DOUBLE)
    masked, plain = problem(), tokens()
    torch.testing.assert_close(masked.log_density(theta), plain.log_density(theta))
    torch.testing.assert_close(masked.log_density_and_grad(theta).gradient, plain.log_density_and_grad(theta).gradient)


def test_rows_without_a_label_are_left_out_of_n():
    assert problem().n == 7
    single = problem(X[:, 0], torch.where(KEPT[:, 0], Y[:, 0], -100))
    assert single.n == int(KEPT[:, 0].sum())
    weighted = problem(sample_weight=torch.arange(1.0, 9.0, dtype=DOUBLE))
    assert weighted.total_weight == 36 - 4
    with pytest.raises(cr.InputError, match="y: has no label that counts"):
        problem(y=torch.full((8, 5), -100))


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_laplace_has_the_curvature_of_the_other_labels(structure, fisher):
    method = cr.Laplace(start="network", structure=structure, fisher=fisher)
    if fisher == "empirical":
        # Scores of a row are summed over its tokens, so rows of one token are compared.
        masked, plain = (
            problem(X[:, :1], MASKED[:, :1]),
            problem(X[:, 0][KEPT[:, 0]], Y[:, 0][KEPT[:, 0]], Categorical()),
        )
    else:
        masked, plain = problem(), tokens()
    one, two = (method.fit(p) for p in (masked, plain))
    assert one.log_evidence == pytest.approx(two.log_evidence, rel=1e-10)
    torch.testing.assert_close(one.predict(X[:2]).mean, two.predict(X[:2]).mean, rtol=1e-8, atol=1e-10)


def test_sampled_fisher_is_zero_where_nothing_counts():
    method = cr.Laplace(start="network", structure="full", fisher="sampled", fisher_samples=400)
    exact = cr.Laplace(start="network", structure="full").fit(problem())
    assert method.fit(problem()).log_evidence == pytest.approx(exact.log_evidence, rel=0.02)


def test_metrics_are_those_of_the_other_labels():
    posterior = cr.MAP(steps=5).fit(problem())
    found = cr.evaluate(posterior.predict(X), MASKED)
    flat = cr.evaluate(posterior.predict(X[KEPT]), Y[KEPT])
    assert set(found) <= set(flat)
    for name, value in found.items():
        assert value == pytest.approx(flat[name], rel=1e-9), name


def test_minibatch_methods_take_masked_labels():
    for method in (
        cr.MAP(steps=5, batch_size=3),
        cr.BayesByBackprop(steps=5, batch_size=3),
        cr.HMC(draws=3, warmup=20),
    ):
        assert torch.isfinite(method.fit(problem()).predict(X).mean).all()


def test_tables_with_unlabelled_rows_do_not_reach_compiled_code_with_them():
    x, y = X[:, 0], torch.where(KEPT[:, 0], Y[:, 0], -100)
    masked = cr.MAP(steps=20).fit(problem(x, y))
    plain = cr.MAP(steps=20).fit(problem(x[KEPT[:, 0]], Y[:, 0][KEPT[:, 0]], Categorical()))
    torch.testing.assert_close(masked.draws, plain.draws, rtol=1e-9, atol=1e-9)
    held_out = masked.predict(x).log_prob(y)
    assert (held_out[~KEPT[:, 0]] == 0).all()


def test_other_labels_are_checked_as_before():
    with pytest.raises(cr.InputError, match="y: has labels from -100 to"):
        problem(likelihood=Categorical())
    with pytest.raises(cr.InputError, match="labels from 0 to 9"):
        problem(y=torch.where(KEPT, 9 * (Y > 0), -100))


def test_conformal_calibration_needs_labels_that_count():
    x, y = X[:, 0], torch.where(KEPT[:, 0], Y[:, 0], -100)
    posterior = cr.MAP(steps=5).fit(problem(x, y))
    with pytest.raises(cr.InputError, match="y: has labels that do not count"):
        posterior.calibrate(x, y)
    assert posterior.calibrate(x, Y[:, 0]).calibration.rows == 8
