"""Decisions: expected utility, rejection, Thompson sampling and improvement against enumeration and closed forms."""

import math

import pytest
import torch
from torch import nn

import credibly as cr
from credibly import decide
from credibly.errors import InputError
from credibly.gaussians.families import FullRank, MeanField
from credibly.posterior.model import Model
from credibly.predictive.rescaling import in_units
from credibly.storage.record import Record


class Fixed:
    """A source of draws with given outputs (S, N, ..., K)."""

    def __init__(self, outputs, likelihood):
        self.values, self.likelihood, self.count = outputs, likelihood, len(outputs)

    def outputs(self, x, start, stop, first_row=0):
        return self.values[start:stop, first_row : first_row + len(x)]

    def extra(self, start, stop):
        return {}

    def row_width(self):
        return 1


def predictive(outputs, likelihood):
    outputs = torch.as_tensor(outputs, dtype=torch.float64)
    return cr.Predictive(Fixed(outputs, likelihood), torch.zeros(outputs.shape[1], 1, dtype=torch.float64))


def of_probabilities(p):
    """Return a predictive of classes whose draws have the probabilities p (S, N, K)."""
    return predictive(torch.as_tensor(p, dtype=torch.float64).log(), cr.likelihoods.Categorical())


def gaussian(means, noise):
    """Return a predictive of real targets whose draws have the given means, (S, N)."""
    means = torch.as_tensor(means, dtype=torch.float64)
    return predictive(means.unsqueeze(-1), cr.likelihoods.Gaussian(noise, squeeze=True))


@pytest.fixture
def labels():
    generator = torch.Generator().manual_seed(5)
    return torch.rand(4, 60, 3, generator=generator, dtype=torch.float64).pow(3).add(1e-3)


def normalised(p):
    return p / p.sum(-1, keepdim=True)


# -- expected utility


def test_utility_of_labels_is_the_sum_over_classes(labels):
    p = normalised(labels)
    table = torch.tensor([[5.0, -35.0, 1.0], [0.0, 0.0, 0.0], [2.0, -1.0, -3.0], [-4.0, 9.0, 0.5]])
    choice = decide.expected_utility(of_probabilities(p), table)
    average = p.mean(0)
    for row in range(len(average)):
        by_hand = [sum(float(average[row, k] * table[a, k]) for k in range(3)) for a in range(4)]
        torch.testing.assert_close(choice.utilities[row], torch.tensor(by_hand, dtype=torch.float64))
        assert int(choice.best[row]) == max(range(4), key=by_hand.__getitem__)
    assert choice.error is None
    assert len(set(choice.best.tolist())) >= 3  # the table matters

    def same(action, label):
        return float(table[action["row"], label])

    again = decide.expected_utility(of_probabilities(p), same, actions=[{"row": a} for a in range(4)])
    torch.testing.assert_close(again.utilities, choice.utilities)
    torch.testing.assert_close(choice.value, choice.utilities.max(-1).values)


def test_utility_of_two_classes():
    logits = torch.tensor([[[2.0], [-1.0]], [[0.5], [-3.0]]])
    p = torch.sigmoid(logits.double()).mean(0)
    found = predictive(logits, cr.likelihoods.Bernoulli(squeeze=True))
    choice = decide.expected_utility(found, [[0.0, 0.0], [5.0, -15.0]])
    torch.testing.assert_close(choice.utilities[:, 1], (5 * (1 - p) - 15 * p)[:, 0])
    assert choice.best.tolist() == [0, 1]


def test_class_costs():
    table = decide.class_costs(3, {(0, 2): 10.0, (1, 1): 0.5}, wrong=2.0)
    assert table.tolist() == [[0, -2, -10], [-2, -0.5, -2], [-2, -2, 0]]
    p = normalised(torch.tensor([[[0.7, 0.1, 0.2]]]))
    assert int(decide.expected_utility(of_probabilities(p), decide.class_costs(3)).best) == 0
    assert int(decide.expected_utility(of_probabilities(p), decide.class_costs(3, {(0, 2): 10.0})).best) == 2


def test_squared_loss_asks_for_the_mean():
    means = torch.tensor([[0.0, 3.0], [0.5, 3.5], [2.0, 4.0]])
    p = gaussian(means, 0.7)
    actions = torch.linspace(-1, 5, 121)
    choice = decide.expected_utility(p, lambda a, y: -((y - a) ** 2), actions=actions, samples=20_000)
    exact = -((p.mean.unsqueeze(-1) - actions) ** 2 + p.variance.unsqueeze(-1))
    assert float(((choice.utilities - exact) / choice.error).abs().max()) < 5
    # All actions share the draws, so the best is the grid point next to the mean, within the sample mean's own error.
    error = 0.7 / math.sqrt(20_000)
    assert float((actions[choice.best] - p.mean).abs().max()) < 0.025 + 5 * error


def test_standard_errors_are_calibrated():
    """400 identical rows with independent noise: error divided by standard error has a standard deviation of 1."""
    p = gaussian(torch.tensor([[0.0], [0.5], [2.0]]).expand(3, 400), 0.7)
    choice = decide.expected_utility(p, lambda a, y: -((y - a) ** 2), actions=[1.5], samples=600)
    exact = -((p.mean - 1.5) ** 2 + p.variance)
    z = (choice.utilities[:, 0] - exact) / choice.error[:, 0]
    assert abs(float(z.mean())) < 4 / math.sqrt(400)
    assert float(z.std()) == pytest.approx(1.0, abs=4 / math.sqrt(800))


def test_standard_errors_shrink_with_draws_and_are_reproducible():
    p = gaussian([[0.0, 3.0], [2.0, 4.0]], 0.7)
    few, many = (decide.expected_utility(p, lambda a, y: a * y, actions=[1.0], samples=n) for n in (1000, 16_000))
    torch.testing.assert_close(few.error / many.error, torch.full_like(few.error, 4.0), rtol=0.3, atol=0)
    # Only the noise within a draw contributes, not the variance between draws: 0.7 / sqrt(n).
    torch.testing.assert_close(many.error, torch.full_like(many.error, 0.7 / math.sqrt(16_000)), rtol=0.05, atol=0)
    same = decide.expected_utility(p, lambda a, y: a * y, actions=[1.0], samples=1000)
    assert torch.equal(same.utilities, few.utilities)


def test_utility_of_several_targets_and_of_counts():
    outputs = torch.tensor([[[1.0, -2.0], [0.0, 1.0]]])
    p = predictive(outputs, cr.likelihoods.Gaussian(0.5))
    choice = decide.expected_utility(p, lambda a, y: y[..., 0] * a + y[..., 1], actions=[1.0, -1.0], samples=40_000)
    exact = torch.tensor([[-1.0, -3.0], [1.0, 1.0]], dtype=torch.float64)
    assert float(((choice.utilities - exact) / choice.error).abs().max()) < 5
    one = predictive(outputs[..., :1], cr.likelihoods.Gaussian(0.5))  # y is passed without the axis of a single target
    choice = decide.expected_utility(one, lambda a, y: a * y, actions=[1.0], samples=40_000)
    assert choice.utilities.shape == (2, 1)
    assert float(((choice.utilities - outputs[0, :, :1]) / choice.error).abs().max()) < 5
    counts = predictive(torch.tensor([[[1.0], [2.0]]]), cr.likelihoods.Poisson(squeeze=True))
    choice = decide.expected_utility(counts, lambda a, y: (y == a).double(), actions=[0, 3], samples=40_000)
    rate = torch.tensor([1.0, 2.0], dtype=torch.float64).exp()
    exact = torch.stack([torch.exp(-rate), torch.exp(-rate) * rate**3 / 6], -1)
    assert float(((choice.utilities - exact) / choice.error).abs().max()) < 5


def test_newsvendor_is_the_quantile():
    one = gaussian([[10.0, -3.0]], 2.0)
    level = 3.0 / (3.0 + 1.0)
    exact = torch.tensor([10.0, -3.0], dtype=torch.float64) + 2 * math.sqrt(2) * torch.erfinv(
        torch.tensor(2 * level - 1, dtype=torch.float64)
    )
    torch.testing.assert_close(decide.newsvendor(one, under=3.0, over=1.0), exact, rtol=1e-6, atol=1e-6)
    # A grid search with the pinball utility agrees for a mixture, which has no closed form.
    mixed = gaussian([[0.0], [5.0], [6.0]], 1.0)
    grid = torch.linspace(-3, 9, 241, dtype=torch.float64)
    found = decide.expected_utility(mixed, decide.pinball(under=3.0, over=1.0), actions=grid, samples=60_000)
    best = decide.newsvendor(mixed, under=3.0, over=1.0)
    density = float(mixed.log_prob(best).exp())
    error = math.sqrt(level * (1 - level) / 60_000) / density  # of a sample quantile
    assert abs(float(grid[found.best]) - float(best)) < 0.025 + 5 * error
    assert abs(float(best) - float(mixed.mean)) > 1


def test_bad_utilities():
    p, real = of_probabilities(normalised(torch.ones(1, 4, 3))), gaussian([[0.0, 1.0]], 1.0)
    with pytest.raises(InputError, match=r"table \(actions, 3\)"):
        decide.expected_utility(p, torch.ones(2, 4))
    with pytest.raises(InputError, match=r"table \(actions, 3\)"):
        decide.expected_utility(p, torch.ones(3))
    with pytest.raises(InputError, match="not finite"):
        decide.expected_utility(p, [[0.0, 1.0, -math.inf]])
    with pytest.raises(InputError, match="one number"):
        decide.expected_utility(p, lambda a, k: torch.ones(2))
    with pytest.raises(InputError, match="actions"):
        decide.expected_utility(p, torch.ones(2, 3), actions=[1, 2, 3])
    with pytest.raises(InputError, match="is for labels"):
        decide.expected_utility(real, torch.ones(2, 3))
    with pytest.raises(InputError, match="actions"):
        decide.expected_utility(real, decide.pinball(under=1, over=1))
    with pytest.raises(InputError, match=r"utility must return a tensor of shape \(500, 2\)"):
        decide.expected_utility(real, lambda a, y: y.mean(), actions=[1.0])
    with pytest.raises(InputError, match="samples"):
        decide.expected_utility(real, lambda a, y: y, actions=[1.0], samples=0)
    with pytest.raises(InputError, match="positive"):
        decide.newsvendor(real, under=0.0, over=1.0)
    with pytest.raises(InputError, match=r"predicted, true.* got \(0, 2\)"):
        decide.class_costs(2, {(0, 2): 1.0})


# -- the reject option


def test_chow_against_every_rule(labels):
    """No choice among "label k" and "abstain" has a lower expected cost in any row."""
    p = normalised(labels)
    average = p.mean(0)
    for cost in (0.0, 0.1, 0.3, 0.5, 0.9):
        found = decide.reject(of_probabilities(p), cost=cost)
        options = torch.cat([1 - average, torch.full((len(average), 1), cost, dtype=torch.float64)], -1)
        torch.testing.assert_close(found.expected_cost, options.min(-1).values)
        torch.testing.assert_close(found.accepted, options[:, :3].min(-1).values <= cost)
        assert torch.equal(found.label, average.argmax(-1))
    assert bool(decide.reject(of_probabilities(p), cost=2 / 3).accepted.all())
    uneven = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [8.0, 1.0, 0.0]])
    found = decide.reject(of_probabilities(p), cost=0.4, costs=uneven)
    expected = average @ uneven.double().T
    torch.testing.assert_close(found.accepted, expected.min(-1).values <= 0.4)
    assert torch.equal(found.label, expected.argmin(-1))


def test_binomial_bound_against_its_definition():
    # With no events in n the bound solves (1 - p)^n = alpha.
    assert decide.binomial_upper(0, 300, 0.95) == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-9)
    assert decide.binomial_upper(7, 7, 0.95) == 1.0
    p = decide.binomial_upper(3, 40, 0.9)
    tail = sum(math.comb(40, i) * p**i * (1 - p) ** (40 - i) for i in range(4))
    assert tail == pytest.approx(0.1, rel=1e-6)
    large = decide.binomial_upper(1000, 100_000, 0.975)
    assert large == pytest.approx(0.01 + 1.96 * math.sqrt(0.01 * 0.99 / 1e5), rel=5e-3)


def population(count, generator):
    """Return u, uniform on (0, 1), and mistakes with probability 0.3 u^2: the risk below t is 0.1 t^2."""
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    return u, torch.rand(count, generator=generator, dtype=torch.float64) < 0.3 * u**2


@pytest.mark.parametrize("digits", [None, 2])
def test_the_risk_bound_holds_at_the_stated_confidence(digits):
    """Over 400 calibration sets the true risk, known here, exceeds the limit in at most 10 %, also with ties."""
    generator = torch.Generator().manual_seed(1)
    broken, covered = 0, []
    for _ in range(400):
        u, wrong = population(1500, generator)
        if digits:
            u = u.mul(10**digits).floor() / 10**digits  # rounding down accepts the same rows below a rounded limit
        found = decide.selective_threshold(u, wrong, risk=0.04, confidence=0.9)
        t = min(max(found.threshold, 0.0), 1.0)
        broken += 0.1 * t**2 > 0.04
        covered.append(found.coverage)
        assert found.accepted == int(found.below(u).sum())
        assert found.mistakes == int(wrong[found.below(u)].sum())
        assert not found.accepted or found.bound <= 0.04
    assert broken <= 40 + 3 * math.sqrt(400 * 0.1 * 0.9)
    assert broken >= 1  # a bound that never fails would be far too conservative
    best = math.sqrt(0.4)  # the fraction that could be accepted if the risk were known
    assert sum(covered) / 400 > 0.7 * best


def test_selective_on_a_predictive():
    generator = torch.Generator().manual_seed(0)
    p = normalised(torch.rand(1, 4000, 3, generator=generator, dtype=torch.float64).pow(6) + 1e-6)
    y = torch.multinomial(p[0], 1, generator=generator)[:, 0]
    cal, rest = of_probabilities(p[:, :2000]), of_probabilities(p[:, 2000:])
    found = decide.selective(cal, y[:2000], risk=0.1, confidence=0.95)
    assert 0.1 < found.coverage < 1
    accepted = found.accept(rest)
    assert accepted.shape == (2000,)
    wrong = decide.mistakes(rest, y[2000:])[accepted].double()
    assert float(wrong.mean()) < 0.1 + 4 * math.sqrt(0.09 / len(wrong))
    looser = decide.selective(cal, y[:2000], risk=0.2, confidence=0.95, score="total")
    assert looser.coverage > found.coverage
    assert looser.score == "total"


def test_nothing_is_accepted_where_nothing_can_be_guaranteed():
    u, never = torch.linspace(0, 1, 200), torch.zeros(200, dtype=torch.bool)
    found = decide.selective_threshold(u, never, risk=0.01, confidence=0.95)  # needs log(0.01) / log(0.99) = 459 rows
    assert (found.threshold, found.coverage) == (-math.inf, 0.0)
    assert math.isnan(found.bound)
    assert not bool(found.below(u).any())
    found = decide.selective_threshold(u, ~never, risk=0.5, confidence=0.95)
    assert found.threshold == -math.inf
    found = decide.selective_threshold(torch.linspace(0, 1, 600), torch.zeros(600), risk=0.01, confidence=0.95)
    assert (found.threshold, found.coverage, found.mistakes) == (math.inf, 1.0, 0)


def test_bad_rejections():
    p, real = of_probabilities(normalised(torch.ones(1, 4, 3))), gaussian([[0.0, 1.0]], 1.0)
    with pytest.raises(InputError, match="cost"):
        decide.reject(p, cost=-0.1)
    with pytest.raises(InputError, match=r"\(3, 3\)"):
        decide.reject(p, cost=0.1, costs=torch.ones(2, 3))
    with pytest.raises(InputError, match="predictive must be predictions of labels, got real"):
        decide.reject(real, cost=0.1)
    with pytest.raises(InputError, match="y: has shape"):
        decide.selective(p, torch.zeros(5))
    with pytest.raises(InputError, match="risk"):
        decide.selective(p, torch.zeros(4), risk=1.0)
    with pytest.raises(InputError, match="NaN"):
        decide.selective_threshold(torch.tensor([math.nan]), torch.tensor([True]))
    with pytest.raises(InputError, match="True or False"):
        decide.selective_threshold(torch.rand(3), torch.tensor([0, 1, 2]))
    with pytest.raises(InputError, match="events"):
        decide.binomial_upper(3, 2)


# -- Thompson sampling


def exact_posterior(mean, covariance, x, noise=0.5):
    """Return the Gaussian posterior with this mean and covariance over the weights of a linear model without bias."""
    net = nn.Linear(len(mean), 1, bias=False).double()
    problem = cr.Problem(net, data=(x, x[:, 0]), likelihood=cr.likelihoods.Gaussian(noise), prior=cr.priors.Normal(1.0))
    factor = torch.linalg.cholesky(covariance)
    rows, columns = torch.tril_indices(len(mean), len(mean))
    packed = factor[rows, columns]
    packed = torch.where(rows == columns, torch.log(torch.expm1(packed.clamp_min(1e-12))), packed)
    phi = torch.cat([mean, packed]).unsqueeze(0)
    return cr.GaussianPosterior(Model.of(problem), FullRank(), phi, Record())


def test_thompson_picks_a_candidate_with_the_probability_that_it_is_best(conjugate):
    """Two candidates under the posterior of a linear regression: P(f_1 > f_0) is exactly that of a Gaussian."""
    design = conjugate.x
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(3, dtype=torch.float64))
    mean = covariance @ design.T @ conjugate.y / 0.25
    posterior = exact_posterior(mean, covariance, design)
    first, other = torch.tensor([[1.0, 0.0, 0.2], [1.3, 0.8, 0.0]], dtype=torch.float64)
    other = other - ((other - first) @ mean - 0.05) / (mean @ mean) * mean  # 0.05 better, by the mean
    candidates, gap = torch.stack([first, other]), other - first
    z = float(gap @ mean / (gap @ covariance @ gap).sqrt())
    p = 0.5 * math.erfc(-z / math.sqrt(2))
    assert 0.1 < p < 0.9
    picks = decide.thompson(posterior, candidates, 4000, seed=3)
    assert picks.shape == (4000,)
    error = math.sqrt(p * (1 - p) / 4000)
    assert abs(float(picks.double().mean()) - p) < 4 * error
    worst = decide.thompson(posterior, candidates, 4000, seed=3, goal="min")
    assert torch.equal(worst, 1 - picks)
    assert torch.equal(picks, decide.thompson(posterior, candidates, 4000, seed=3))


def test_thompson_draws_whole_functions_of_a_laplace_posterior(conjugate):
    """Frequencies follow its mean and covariance; independent draws per row would lose the correlation."""
    posterior = cr.Laplace(structure="full", steps=2000).fit(conjugate.problem(), seed=0, progress=False)
    mean, covariance = posterior.loc.reshape(-1), posterior.covariance().reshape(4, 4)
    first, other = torch.tensor([[1.0, 0.0, 0.2], [1.1, 0.05, 0.25]], dtype=torch.float64)
    gap = torch.cat([other - first, torch.zeros(1, dtype=torch.float64)])
    other = other - (gap @ mean - 0.01) / (mean @ mean) * mean[:3] / (1 - mean[3] ** 2 / (mean @ mean))
    gap[:3] = other - first
    p = 0.5 * math.erfc(-float(gap @ mean / (gap @ covariance @ gap).sqrt()) / math.sqrt(2))
    assert 0.55 < p < 0.95
    picks = decide.thompson(posterior, torch.stack([first, other]), 4000, seed=2)
    assert abs(float(picks.double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / 4000)


def test_thompson_with_stored_draws_blocks_and_components(monkeypatch):
    x = torch.linspace(-1, 1, 50, dtype=torch.float64).unsqueeze(-1)
    net = nn.Linear(1, 1).double()
    problem = cr.Problem(net, (x, x[:, 0]), cr.likelihoods.Gaussian(0.1), cr.priors.Normal(1.0))
    draws = torch.tensor([[[2.0, 0.0], [-1.0, 3.0], [0.5, 0.0], [-2.0, 1.0]]], dtype=torch.float64)
    posterior = cr.DrawsPosterior(Model.of(problem), draws, Record())
    picks = decide.thompson(posterior, x, 2000, seed=1)
    assert set(picks.tolist()) == {0, 49}  # a falling line is best at the left end, a rising one at the right
    assert abs(float((picks == 49).double().mean()) - 0.5) < 4 * math.sqrt(0.25 / 2000)
    monkeypatch.setattr("credibly.predictive.blocks.CACHE_VALUES", 0)
    monkeypatch.setattr("credibly.predictive.blocks.BLOCK_VALUES", 2**13)
    assert torch.equal(picks, decide.thompson(posterior, x, 2000, seed=1))
    # An even mixture of a falling and a rising Gaussian: a single pick comes from either component, not always the
    # first.
    phi = torch.tensor([[-1.0, 0.0, -9.0, -9.0], [1.0, 0.0, -9.0, -9.0]], dtype=torch.float64)
    mixture = cr.GaussianPosterior(Model.of(problem), MeanField(), phi, Record())
    singles = [int(decide.thompson(mixture, x, seed=s)) for s in range(40)]
    assert set(singles) == {0, 49}
    assert 8 <= singles.count(0) <= 32


def test_thompson_of_labels_needs_a_value():
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    net = nn.Linear(2, 3)
    problem = cr.Problem(net, (x, torch.arange(30) % 3), cr.likelihoods.Categorical(), cr.priors.Normal(1.0))
    posterior = cr.DrawsPosterior(Model.of(problem), torch.randn(1, 5, 9), Record())
    with pytest.raises(InputError, match="3 values per row"):
        decide.thompson(posterior, x)
    picks = decide.thompson(posterior, x, 3, value=lambda p: p[..., 1])
    assert picks.shape == (3,)
    with pytest.raises(InputError, match=r"value must return shape \(3, 30\)"):
        decide.thompson(posterior, x, 3, value=lambda p: p.sum())
    for wrong in ({"count": 0}, {"goal": "best"}, {"seed": -1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            decide.thompson(posterior, x, **{"value": lambda p: p[..., 1], **wrong})


def test_regret_falls_with_time():
    """A linear bandit with a known exact posterior: late regret is a fraction of early regret."""
    dim, noise, steps = 4, 0.5, 120
    regret = torch.zeros(10, steps, dtype=torch.float64)
    for run in range(10):
        generator = torch.Generator().manual_seed(run)
        truth = torch.randn(dim, generator=generator, dtype=torch.float64)
        precision, weighted = torch.eye(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)
        for t in range(steps):
            arms = torch.randn(6, dim, generator=generator, dtype=torch.float64)
            covariance = torch.linalg.inv(precision)
            posterior = exact_posterior(covariance @ weighted, covariance, arms)
            pick = int(decide.thompson(posterior, arms, seed=1000 * run + t)[0])
            value = arms @ truth
            reward = value[pick] + noise * torch.randn((), generator=generator, dtype=torch.float64)
            precision += torch.outer(arms[pick], arms[pick]) / noise**2
            weighted += arms[pick] * reward / noise**2
            regret[run, t] = value.max() - value[pick]
    early, late = regret[:, :20].mean(1), regret[:, -40:].mean(1)
    assert float(late.mean()) < 0.25 * float(early.mean())
    assert bool((late < early).all())


# -- improvement


def integral(function, low=-40.0, high=40.0, points=400_001):
    y = torch.linspace(low, high, points, dtype=torch.float64)
    return float(torch.trapezoid(function(y), y))


@pytest.mark.parametrize("goal", ["max", "min"])
def test_improvement_of_an_observation_against_the_integral(goal):
    means = torch.tensor([[0.0, 3.0, -8.0], [1.0, 2.5, -9.0], [4.0, -2.0, -7.0]])
    p, best, sign = gaussian(means, 0.8), 1.5, 1 if goal == "max" else -1
    found = decide.expected_improvement(p, best, of="observation", goal=goal)
    chance = decide.probability_of_improvement(p, best, of="observation", goal=goal)
    for row in range(3):

        def density(y, row=row):
            z = (y.unsqueeze(-1) - means[:, row].double()) / 0.8
            return (torch.exp(-0.5 * z**2) / (0.8 * math.sqrt(2 * math.pi))).mean(-1)

        exact = integral(lambda y, d=density: (sign * (y - best)).clamp_min(0) * d(y))
        assert float(found[row]) == pytest.approx(exact, abs=1e-7)
        exact = integral(lambda y, d=density: (sign * (y - best) > 0).double() * d(y))
        assert float(chance[row]) == pytest.approx(exact, abs=2e-4)
    stretched = in_units(p, 10.0, 2.0)
    torch.testing.assert_close(
        decide.expected_improvement(stretched, 10.0 + 2 * best, of="observation", goal=goal), 2 * found
    )


def test_improvement_of_the_function_ignores_noise():
    means = torch.tensor([[0.0, 3.0], [1.0, 2.5], [4.0, -2.0]])
    for noise in (0.1, 5.0):
        p = gaussian(means, noise)
        value = decide.expected_improvement(p, 1.5)
        torch.testing.assert_close(value, (means.double() - 1.5).clamp_min(0).mean(0))
        torch.testing.assert_close(
            decide.probability_of_improvement(p, 1.5), torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
        )
        margin = decide.expected_improvement(p, 1.5, margin=0.5, goal="min")
        torch.testing.assert_close(margin, (1.0 - means.double()).clamp_min(0).mean(0))
        assert float(decide.upper_bound(p, 0.5)[0]) == 1.0


def test_improvement_of_a_gaussian_against_the_integral_and_many_draws():
    generator = torch.Generator().manual_seed(2)
    means = torch.tensor([1.0, -1.0]) + torch.tensor([0.5, 2.0]) * torch.randn(20_000, 2, generator=generator)
    p = gaussian(means, 0.3)
    smooth = decide.expected_improvement(p, 1.2, of="gaussian")
    for row in range(2):
        m, s = float(p.mean[row]), float(p.epistemic[row]) ** 0.5
        exact = integral(
            lambda y, m=m, s=s: (
                (y - 1.2).clamp_min(0) * torch.exp(-0.5 * ((y - m) / s) ** 2) / (s * math.sqrt(2 * math.pi))
            )
        )
        assert float(smooth[row]) == pytest.approx(exact, abs=1e-7)
    gain = (means.double() - 1.2).clamp_min(0)
    error = gain.std(0) / math.sqrt(20_000)
    assert float(((smooth - decide.expected_improvement(p, 1.2)) / error).abs().max()) < 5
    chance = decide.probability_of_improvement(p, 1.2, of="gaussian")
    assert float((chance - decide.probability_of_improvement(p, 1.2)).abs().max()) < 5 * 0.5 / math.sqrt(20_000)
    bound = decide.upper_bound(p, 0.975, of="gaussian")
    torch.testing.assert_close(bound, p.mean + 1.959964 * p.epistemic.sqrt(), rtol=1e-6, atol=1e-6)
    assert float((bound - decide.upper_bound(p, 0.975)).abs().max()) < 0.15
    torch.testing.assert_close(decide.upper_bound(p, 0.9, of="observation"), p.quantile(0.9))


def test_improvement_of_one_draw_is_a_plain_difference():
    p = gaussian([[1.0, 2.0]], 0.5)
    assert decide.expected_improvement(p, 1.5, of="gaussian").tolist() == [0.0, 0.5]
    assert decide.probability_of_improvement(p, 1.5, of="gaussian").tolist() == [0.0, 1.0]


def test_bad_improvements():
    real, labels = gaussian([[0.0, 1.0]], 1.0), of_probabilities(normalised(torch.ones(1, 4, 3)))
    heavy = predictive(torch.zeros(1, 2, 1), cr.likelihoods.StudentT(1.0, squeeze=True))
    with pytest.raises(InputError, match="of must be one of 'function', .*, got 'latent'"):
        decide.expected_improvement(real, 0.0, of="latent")
    with pytest.raises(InputError, match="goal"):
        decide.expected_improvement(real, 0.0, goal="up")
    with pytest.raises(InputError, match="best"):
        decide.expected_improvement(real, math.nan)
    with pytest.raises(InputError, match="Gaussian noise"):
        decide.expected_improvement(heavy, 0.0, of="observation")
    with pytest.raises(InputError, match="3 values per row"):
        decide.expected_improvement(labels, 0.0)
    with pytest.raises(InputError, match="epistemic variance"):
        decide.expected_improvement(labels, 0.0, of="gaussian")
    with pytest.raises(InputError, match="level"):
        decide.upper_bound(real, 1.5)


# -- the loop


def polynomial_posterior(x, y, seed):
    """Return the exact posterior of a cubic whose features are the candidates."""
    precision = x.T @ x / 0.05**2 + torch.eye(x.shape[1], dtype=x.dtype) / 9
    covariance = torch.linalg.inv(precision)
    return exact_posterior(covariance @ x.T @ y / 0.05**2, covariance, x, noise=0.05)


@pytest.mark.parametrize("acquisition", ["thompson", decide.expected_improvement])
def test_the_loop_finds_the_best_candidate(acquisition):
    at = torch.linspace(-1, 1, 101, dtype=torch.float64)
    candidates = torch.stack([at**k for k in range(4)], -1)
    truth = candidates @ torch.tensor([0.3, 1.0, -0.8, -1.2], dtype=torch.float64)
    loop = decide.BayesianOptimiser(candidates, polynomial_posterior, acquisition=acquisition, initial=4, seed=2)
    for _ in range(14):
        rows = loop.ask()
        assert not set(rows.tolist()) & set(loop.tried)
        loop.tell(rows, truth[rows])
    assert loop.best[1] > float(truth.max()) - 1e-3
    assert truth.argsort(descending=True)[:5].tolist().count(loop.best[0]) == 1
    several = loop.ask(5)
    assert len(set(several.tolist())) == 5


def test_bad_loops():
    x = torch.zeros(6, 1)
    for wrong in ({"acquisition": "ei"}, {"initial": 1}, {"initial": 7}, {"goal": "most"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            decide.BayesianOptimiser(x, polynomial_posterior, **wrong)
    loop = decide.BayesianOptimiser(x, polynomial_posterior)
    with pytest.raises(InputError, match="best: no values recorded yet"):
        _ = loop.best
    with pytest.raises(InputError, match="count"):
        loop.ask(7)
    with pytest.raises(InputError, match="values"):
        loop.tell([0, 1], [1.0])
    with pytest.raises(InputError, match="rows"):
        loop.tell([6], [1.0])
