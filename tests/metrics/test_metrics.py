import math
from itertools import permutations

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

from credibly.errors import InputError
from credibly.metrics import scores as m

T = torch.tensor


def close(a, b, tol=1e-6):
    torch.testing.assert_close(torch.as_tensor(a).double(), torch.as_tensor(b).double(), rtol=tol, atol=tol)


@pytest.fixture
def g():
    return torch.Generator().manual_seed(0)


def classified(g, rows=500, classes=4, sharp=2.0, dtype=torch.float64):
    p = torch.randn(rows, classes, generator=g, dtype=dtype).mul(sharp).softmax(-1)
    return p, torch.multinomial(torch.full((rows, classes), 1.0 / classes) + p, 1, generator=g)[:, 0]


# -- regression


def test_rmse_and_mae_by_hand():
    mean, y = T([[1.0], [2.0], [3.0], [4.0]]), T([[1.0], [4.0], [3.0], [0.0]])
    close(m.rmse(mean, y), math.sqrt(5.0))
    close(m.mae(mean, y), 1.5)
    assert m.rmse(mean, y).shape == ()
    close(m.rmse(mean + 7, y + 7), m.rmse(y, mean))
    assert m.rmse(mean.half(), y.half()).dtype == torch.float32
    close(m.mae(mean, y.long()), 1.5)


@pytest.mark.parametrize("f", [m.rmse, m.mae])
def test_column_against_row_is_refused(f):
    with pytest.raises(InputError, match=r"y: has shape \(3,\), mean has shape \(3, 1\)"):  # would broadcast to (3, 3)
        f(torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(InputError, match=r"y: has shape \(1, 1\), mean has shape \(3, 1\)"):
        f(torch.zeros(3, 1), torch.zeros(1, 1))


def brute_crps(samples, y):
    n = len(samples)
    pairs = (samples[:, None] - samples[None]).abs().sum((0, 1)) / (n * (n - 1))
    return (samples - y).abs().mean(0) - pairs / 2


@pytest.mark.parametrize("n", [2, 3, 10, 101])
def test_crps_from_samples_against_all_pairs(g, n):
    samples, y = torch.randn(n, 5, 2, generator=g).double(), torch.randn(5, 2, generator=g).double()
    close(m.crps_from_samples(samples, y, reduction="none"), brute_crps(samples, y), 1e-12)
    close(m.crps_from_samples(samples, y), brute_crps(samples, y).mean(), 1e-12)
    close(m.crps_from_samples(samples[torch.randperm(n)], y), brute_crps(samples, y).mean(), 1e-12)


def test_crps_from_samples_by_hand():
    close(m.crps_from_samples(T([0.0, 2.0]), T(1.0)), 0.0)  # 1 - 2/2
    close(m.crps_from_samples(T([0.0, 0.0, 3.0]), T(0.0)), 0.0)  # 1 - (2 * 2 * 3 / 6) / 2
    close(m.crps_from_samples(T([5.0, 5.0]), T(3.0)), 2.0)


def test_crps_of_samples_keeps_its_digits_far_from_zero(g):
    samples, y = torch.randn(1000, generator=g), T(0.3)
    offset = T(4096.0)  # there float32 resolves 1/2048
    expected = m.crps_from_samples((samples + offset).double(), (y + offset).double())
    close(m.crps_from_samples(samples + offset, y + offset), expected, 1e-5)


def test_crps_is_fair_in_the_number_of_draws(g):
    """The mean over repetitions equals the closed form even with two draws; the plain estimator is biased."""
    y = torch.full((200_000,), 0.7)
    for n in (2, 5):
        values = m.crps_from_samples(torch.randn(n, 200_000, generator=g), y, reduction="none")
        expected = m.crps_gaussian(T([0.0]), T([1.0]), T([0.7]))
        assert (values.mean() - expected).abs() < 4 * values.std() / math.sqrt(200_000)


def test_crps_gaussian_by_integration():
    mean, sd, y = 0.4, 1.7, -1.1
    x = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    cdf = 0.5 * (1 + torch.erf((x - mean) / sd / math.sqrt(2)))
    close(m.crps_gaussian(T([mean]), T([sd]), T([y])), torch.trapezoid((cdf - (x >= y).double()).square(), x), 1e-4)


def test_crps_gaussian_agrees_with_samples_and_scales(g):
    mean, sd, y = T([0.0, 2.0]), T([1.0, 3.0]), T([0.5, -4.0])
    samples = mean + sd * torch.randn(200_000, 2, generator=g)
    exact = m.crps_gaussian(mean, sd, y, reduction="none")
    close(m.crps_from_samples(samples, y, reduction="none"), exact, 0.02)
    close(m.crps_gaussian(3 * mean + 1, 3 * sd, 3 * y + 1), 3 * exact.mean())
    close(m.crps_gaussian(mean, torch.full((2,), 1e-6), y), m.mae(mean, y), 1e-5)  # a point forecast


def test_crps_is_proper(g):
    y = torch.randn(100_000, generator=g)

    def score(mean, sd):
        return m.crps_gaussian(torch.full_like(y, mean), torch.full_like(y, sd), y)

    best = score(0.0, 1.0)
    assert all(score(*other) > best + 1e-3 for other in ((0.2, 1.0), (-0.2, 1.0), (0.0, 0.8), (0.0, 1.25)))


def test_coverage_and_width():
    lower, upper, y = T([0.0, 0.0, 0.0, -math.inf]), T([1.0, 1.0, 1.0, 5.0]), T([0.0, 1.0, 1.5, -9.0])
    close(m.coverage(lower, upper, y), 0.75)  # the interval is inclusive
    close(m.width(lower[:3], upper[:3] * T([1.0, 2.0, 3.0])), 2.0)
    assert m.width(lower, upper) == math.inf


def test_coverage_of_true_intervals(g):
    y = torch.randn(40_000, generator=g)
    half = torch.full_like(y, 1.6448536)
    error = m.coverage_standard_error(0.9, len(y))
    assert error == pytest.approx(0.0015)
    assert abs(m.coverage(-half, half, y) - 0.9) < 4 * error
    observed = torch.stack([m.coverage(-half[:100], half[:100], part) for part in y.split(100)]).std()
    assert 0.85 < observed / m.coverage_standard_error(0.9, 100) < 1.15


def test_regression_calibration_by_hand():
    pit = T([0.1, 0.2, 0.2, 0.9])
    close(m.regression_calibration(pit, T([0.05, 0.2, 0.5, 0.95])), [0.0, 0.75, 0.75, 1.0])
    close(m.regression_calibration_error(pit, T([0.05, 0.2])), (0.05 + 0.55) / 2)
    close(m.regression_calibration(pit, T(0.5)), 0.75)
    levels = torch.linspace(0.01, 0.99, 50)
    close(m.regression_calibration(pit, levels), (pit[:, None] <= levels).float().mean(0))


def test_regression_calibration_error_tells_too_narrow_from_right(g):
    y = torch.randn(50_000, generator=g)
    normal = torch.distributions.Normal(0.0, 1.0)
    right = m.regression_calibration_error(normal.cdf(y))
    narrow = m.regression_calibration_error(normal.cdf(2 * y))
    assert right < 0.006
    assert narrow > 0.08
    # at 0.05 too many rows are below, at 0.95 too few
    low, high = m.regression_calibration(normal.cdf(2 * y), T([0.05, 0.95]))
    assert low > 0.15
    assert high < 0.85


# -- classification


def test_classification_scores_by_hand():
    p, y = T([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]), T([0, 1])
    close(m.accuracy(p, y), 0.5)
    close(m.brier(p, y, reduction="none"), [0.09 + 0.04 + 0.01, 0.01 + 0.49 + 0.36])
    close(m.brier(p, y), 0.5)
    close(m.log_score(p, y), (math.log(0.7) + math.log(0.3)) / 2)
    close(m.negative_log_likelihood(p, y, reduction="none"), [-math.log(0.7), -math.log(0.3)])
    close(m.brier(T([[0.0, 1.0]]), T([0])), 2.0)
    assert m.negative_log_likelihood(T([[0.0, 1.0]]), T([0])) == math.inf


def test_classification_scores_against_sklearn_and_torchmetrics(g):
    p, y = classified(g)
    close(m.negative_log_likelihood(p, y), sk.log_loss(y, p))
    close(m.accuracy(p, y), multiclass_accuracy(p, y, 4, average="micro"))
    two = p[:, :2] / p[:, :2].sum(-1, keepdim=True)
    close(
        m.brier(two, y % 2), 2 * sk.brier_score_loss(y % 2, two[:, 1])
    )  # scikit-learn sums over one of the two classes


def test_per_pixel_shapes_and_class_order(g):
    p, y = classified(g)
    grid, labels = p.reshape(5, 10, 10, 4), y.reshape(5, 10, 10)
    order = T([2, 0, 3, 1])
    back = torch.argsort(order)
    for f in (m.accuracy, m.brier, m.log_score, m.negative_log_likelihood, m.ece):
        close(f(grid, labels), f(p, y), 1e-12)
        close(f(p[:, order], back[y]), f(p, y), 1e-12)
        assert f(p, y).shape == ()
    assert m.brier(grid, labels, reduction="none").shape == (5, 10, 10)


@pytest.mark.parametrize("score", [m.brier, m.negative_log_likelihood])
def test_scores_are_proper(g, score):
    truth = T([0.5, 0.3, 0.2])
    y = torch.multinomial(truth, 50_000, replacement=True, generator=g)
    best = score(truth.expand(len(y), 3), y)
    for other in ([0.6, 0.25, 0.15], [0.4, 0.35, 0.25], [0.5, 0.2, 0.3]):
        assert score(T(other).expand(len(y), 3), y) > best


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("sharp", [0.5, 2.0, 4.0])
def test_calibration_against_torchmetrics(g, bins, sharp):
    p, y = classified(g, sharp=sharp)
    assert p.float().max() < 1  # torchmetrics puts confidence 1 into an extra bin
    for name, norm in (("ece", "l1"), ("mce", "max")):
        expected = multiclass_calibration_error(p, y, num_classes=4, n_bins=bins, norm=norm)
        close(getattr(m.calibration(p, y, bins), name), expected, 1e-6)  # torchmetrics computes in float32
    assert m.ece(p, y, bins) > 0.01 or sharp == 0.5


def test_calibration_by_hand():
    p = T([[0.5, 0.5], [0.4, 0.6], [0.25, 0.75], [1.0, 0.0]])
    c = m.calibration(p, T([1, 1, 1, 0]), bins=4)
    close(c.edges, [0.0, 0.25, 0.5, 0.75, 1.0])
    assert c.count.tolist() == [0, 1, 2, 1]  # 0.5 and 0.75 belong to the bins they close, and 1 to the last
    close(c.confidence, [0.0, 0.5, 0.675, 1.0])
    close(c.accuracy, [0.0, 0.0, 1.0, 1.0])
    close(c.ece, (0.5 + 2 * 0.325) / 4)
    close(c.mce, 0.5)


def test_calibration_of_certain_predictions():
    p = torch.eye(3)[[0, 1, 2, 0]]
    close(m.ece(p, T([0, 1, 2, 0])), 0.0)
    c = m.calibration(p, T([1, 1, 2, 0]))
    close(c.ece, 0.25)
    assert c.count.tolist() == [0] * 14 + [4]
    assert all(torch.isfinite(x).all() for x in c)


def test_calibrated_predictions_have_a_small_error(g):
    p = torch.randn(100_000, 3, generator=g).mul(2).softmax(-1)
    y = torch.multinomial(p, 1, generator=g)[:, 0]
    assert m.ece(p, y) < 0.01
    sharper = (p.log() * 3).softmax(-1)
    assert m.ece(sharper, y) > 0.1


# -- two predictives


def test_agreement_and_total_variation(g):
    p = T([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    q = T([[0.5, 0.4, 0.1], [0.1, 0.6, 0.3]])
    close(m.agreement(p, q), 0.5)
    close(m.total_variation(p, q), (0.2 + 0.3) / 2)
    close(m.total_variation(p, p), 0.0)
    close(m.total_variation(T([[1.0, 0.0]]), T([[0.0, 1.0]])), 1.0)
    a, b = classified(g)[0], classified(g)[0]
    close(m.total_variation(a, b), m.total_variation(b, a))
    # the largest difference of probability over every set of labels
    subsets = [[bool(i >> k & 1) for k in range(4)] for i in range(16)]
    best = torch.stack([(a - b)[:, T(s)].sum(-1) for s in subsets]).max(0).values
    close(m.total_variation(a, b), best.mean(), 1e-12)


# -- out of distribution


def test_ood_scores_by_hand():
    inside, outside = T([0.1, 0.2, 0.3, 0.4]), T([0.35, 0.5])
    close(m.auroc(inside, outside), 7 / 8)
    close(m.aupr(inside, outside), 0.5 * 1 + 0.5 * 2 / 3)
    close(m.fpr95(inside, outside), 1 / 4)
    for f, best in ((m.auroc, 1.0), (m.aupr, 1.0), (m.fpr95, 0.0)):
        close(f(inside, inside + 1), best)
    close(m.auroc(inside + 1, inside), 0.0)
    close(m.fpr95(inside + 1, inside), 1.0)


def test_ood_ties():
    flat_in, flat_out = torch.zeros(6), torch.zeros(2)
    close(m.auroc(flat_in, flat_out), 0.5)
    close(m.aupr(flat_in, flat_out), 0.25)
    close(m.fpr95(flat_in, flat_out), 1.0)
    close(m.fpr95(T([0.0, 1.0, 1.0, 2.0]), T([1.0, 1.0, 3.0])), 0.75)


def test_auroc_and_fpr95_against_all_pairs_and_thresholds(g):
    inside = torch.randint(0, 20, (57,), generator=g).float()
    outside = torch.randint(5, 25, (40,), generator=g).float()
    pairs = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside).double()
    close(m.auroc(inside, outside), pairs.mean())
    truth = np.r_[np.zeros(57), np.ones(40)]
    close(m.aupr(inside, outside), sk.average_precision_score(truth, torch.cat([inside, outside])))
    fpr, tpr, _ = sk.roc_curve(truth, torch.cat([inside, outside]), drop_intermediate=False)
    close(m.fpr95(inside, outside), fpr[tpr >= 0.95 - 1e-12].min())
    for f in (m.auroc, m.aupr, m.fpr95):  # only the order counts
        close(f(inside.exp(), outside.exp()), f(inside, outside))
        close(f(inside.flip(0), outside.flip(0)), f(inside, outside))


def test_fpr95_needs_95_of_100():
    outside = torch.arange(100.0)
    close(m.fpr95(T([4.9, 5.0, 5.1, 4.0]), outside), 0.5)  # the threshold is 5
    close(m.fpr95(T([0.5, -1.0]), torch.arange(19.0)), 0.5)  # 18 of 19 would be 94.7 %


def test_infinite_scores():
    close(m.auroc(T([0.0, -math.inf]), T([math.inf, 1.0])), 1.0)
    close(m.aupr(T([0.0, math.inf]), T([math.inf, 1.0])), 0.5 * 0.5 + 0.5 * 2 / 3)


# -- selective prediction


def test_risk_coverage_by_hand():
    r = m.risk_coverage(T([0.3, 0.1, 0.2]), T([6.0, 0.0, 3.0]))
    close(r.coverage, [1 / 3, 2 / 3, 1.0])
    close(r.risk, [0.0, 1.5, 3.0])
    close(r.area, 1.5)


def test_risk_coverage_averages_over_the_order_of_ties():
    u, loss = T([1.0, 1.0, 0.0, 1.0, 2.0]), T([3.0, 0.0, 1.0, 6.0, 5.0])
    orders = [(2, *middle, 4) for middle in permutations((0, 1, 3))]
    rows = torch.arange(1.0, 6.0)
    expected = torch.stack([loss[list(o)].cumsum(0) / rows for o in orders]).mean(0)
    close(m.risk_coverage(u, loss).risk, expected)
    for order in permutations(range(5)):
        r = m.risk_coverage(u[list(order)], loss[list(order)])
        close(r.risk, expected)
        close(r.area, expected.mean())


def test_risk_coverage_rewards_good_order(g):
    loss = torch.rand(1000, generator=g)
    good, none, bad = (m.risk_coverage(u, loss) for u in (loss, torch.zeros(1000), -loss))
    assert good.area < none.area - 0.1 < bad.area - 0.2
    close(none.risk, loss.mean().expand(1000))
    close(good.risk[-1], loss.mean())
    assert (good.risk.diff() >= 0).all()


def gaussian_cdf(points, mean, sd):
    return torch.distributions.Normal(T(mean).double(), T(sd).double()).cdf(points)


def test_total_variation_from_cdf_between_gaussians_is_known_in_closed_form():
    points = torch.linspace(-12, 12, 2001, dtype=torch.float64)
    phi = torch.distributions.Normal(T(0.0).double(), T(1.0).double()).cdf
    # Equal stds, means d apart: the densities cross half-way, and the distance is 2 Phi(d/2) - 1.
    for d in (0.0, 0.3, 1.0, 4.0):
        found = m.total_variation_from_cdf(gaussian_cdf(points, 0.0, 1.0), gaussian_cdf(points, d, 1.0))
        close(found, 2 * phi(T(d).double() / 2) - 1, 1e-5)
    # Equal means, stds 1 and r: they cross at +-c with c^2 = 2 r^2 ln r / (r^2 - 1).
    for r in (1.1, 2.0, 3.0):
        c = T(math.sqrt(2 * r**2 * math.log(r) / (r**2 - 1))).double()
        found = m.total_variation_from_cdf(gaussian_cdf(points, 0.0, 1.0), gaussian_cdf(points, 0.0, r))
        close(found, 2 * (phi(c) - phi(c / r)), 1e-4)  # the mass beyond the points counts too


def test_total_variation_from_cdf_is_that_of_the_cells(g):
    """Against total_variation on rows with their own points; finer cells never decrease it."""
    points = torch.randn(64, 5, generator=g, dtype=torch.float64).mul(2).sort(0).values
    p, q = gaussian_cdf(points, 0.2, 0.8), gaussian_cdf(points, -0.1, 1.1)

    def cells(cdf):
        ends = torch.zeros(1, 5).double()
        return torch.cat([ends, cdf, ends + 1]).diff(dim=0).T

    found = m.total_variation_from_cdf(p, q)
    close(found, m.total_variation(cells(p), cells(q)), 1e-12)
    close(found, m.total_variation_from_cdf(q, p), 1e-12)
    assert m.total_variation_from_cdf(p[::8], q[::8]) < found
    close(m.total_variation_from_cdf(p[:, 0], p[:, 0]), 0.0)
    close(m.total_variation_from_cdf(T([0.0, 1.0, 1.0]), T([0.0, 0.0, 1.0])), 1.0)
    assert m.total_variation_from_cdf(p.half(), q.half()).dtype == torch.float32


# -- bad input

P, Y, V = T([[0.7, 0.3], [0.2, 0.8]]), T([0, 1]), T([0.2, 0.8])
NAN, EMPTY = T([math.nan, 0.5]), torch.zeros(0)
LABELLED = [m.accuracy, m.brier, m.log_score, m.negative_log_likelihood, m.calibration, m.ece]


@pytest.mark.parametrize("f", LABELLED)
@pytest.mark.parametrize(
    "p, y, argument",
    [
        (P, T([0, 2]), "labels"),
        (P, T([-1, 0]), "labels"),
        (P, T([0.0, 1.0]), "labels"),
        (P, T([0, 1, 0]), "labels"),
        (P, T([[0], [1]]), "labels"),
        (P, [0, 1], "labels"),
        (T([[math.nan, 1.0], [0.5, 0.5]]), Y, "probabilities"),
        (T([[2.0, -1.0], [0.5, 0.5]]), Y, "probabilities"),  # logits
        (T([[0.5, 0.6], [0.5, 0.5]]), Y, "probabilities"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), "probabilities"),
    ],
)
def test_bad_labels_and_probabilities(f, p, y, argument):
    with pytest.raises(InputError) as caught:
        f(p, y)
    assert caught.value.argument == argument


@pytest.mark.parametrize("f", [m.rmse, m.mae, m.auroc, m.aupr, m.fpr95, m.width, m.risk_coverage])
def test_nan_empty_and_lists_are_refused(f):
    for bad in (NAN, EMPTY, [0.1, 0.2], T([1j, 2j])):
        for pair in ((bad, V), (V, bad)):
            with pytest.raises(InputError):
                f(*pair)


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: m.rmse(V, T([math.inf, 0.0])), "y"),
        (lambda: m.coverage(V, V, T([0.1])), "y"),
        (lambda: m.coverage(V, V, NAN), "y"),
        (lambda: m.coverage(V + 1, V, V), "lower"),
        (lambda: m.width(V + 1, V), "lower"),
        (lambda: m.width(V, V[:1]), "upper"),
        (lambda: m.coverage_standard_error(1.0, 10), "level"),
        (lambda: m.coverage_standard_error(0.0, 10), "level"),
        (lambda: m.coverage_standard_error(math.nan, 10), "level"),
        (lambda: m.coverage_standard_error(0.5, 0), "count"),
        (lambda: m.regression_calibration(V, T([0.5, 1.0])), "levels"),
        (lambda: m.regression_calibration(V, T([0.0])), "levels"),
        (lambda: m.regression_calibration(V + 1, T([0.5])), "cdf_values"),
        (lambda: m.regression_calibration_error(NAN), "cdf_values"),
        (lambda: m.regression_calibration_error(EMPTY), "cdf_values"),
        (lambda: m.crps_from_samples(V[None], V), "samples"),
        (lambda: m.crps_from_samples(torch.zeros(3, 2), torch.zeros(3)), "y"),
        (lambda: m.crps_from_samples(torch.stack([V, NAN]), V), "samples"),
        (lambda: m.crps_gaussian(V, T([0.0, 1.0]), V), "sd"),
        (lambda: m.crps_gaussian(V, V, V[:, None]), "y"),
        (lambda: m.brier(P, Y, reduction="sum"), "reduction"),
        (lambda: m.calibration(P, Y, bins=0), "bins"),
        (lambda: m.agreement(P, P[:1]), "q"),
        (lambda: m.total_variation(P, P[None]), "q"),
        (lambda: m.total_variation(P, 2 * P), "q"),
        (lambda: m.total_variation_from_cdf(V, V.flip(0)), "q"),
        (lambda: m.total_variation_from_cdf(V + 1, V), "p"),
        (lambda: m.total_variation_from_cdf(V[0], V[0]), "p"),
        (lambda: m.total_variation_from_cdf(V, V[:1]), "q"),
        (lambda: m.total_variation_from_cdf(NAN, V), "p"),
        (lambda: m.risk_coverage(P, P), "uncertainty"),
        (lambda: m.risk_coverage(V, V[:1]), "loss"),
    ],
)
def test_bad_arguments(call, argument):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.argument == argument
