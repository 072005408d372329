"""Acquisition functions against enumeration and closed forms; batches; the loop, its folder and its error messages."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly import active
from credibly.posterior.model import Model
from credibly.predictive import blocks as predictive_module
from credibly.storage.record import Record


def posterior_of(net, x, y, likelihood, draws):
    problem = cr.Problem(net, data=(x, y), likelihood=likelihood, prior=cr.priors.Normal())
    return cr.DrawsPosterior(Model.of(problem), draws.reshape(1, -1, problem.dim), Record())


@pytest.fixture(scope="module")
def labels():
    """Five draws that disagree about six rows of three classes, in float64."""
    net = nn.Linear(2, 3).double()
    x = randn(6, 2, seed=1, dtype=torch.float64)
    draws = 1.5 * randn(5, 9, seed=2, dtype=torch.float64)
    posterior = posterior_of(net, x, torch.tensor([0, 1, 2, 0, 1, 2]), cr.likelihoods.Categorical(), draws)
    weight, bias = draws[:, :6].reshape(5, 3, 2), draws[:, 6:]
    p = torch.softmax(torch.einsum("skd,nd->snk", weight, x) + bias.unsqueeze(1), -1)
    return posterior.predict(x), p, posterior, x


def information(joint):
    """Return I(a; b) of a table p(a, b), term by term."""
    a, b = joint.sum(1), joint.sum(0)
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if joint[i, j] > 0]
    return sum(float(joint[i, j]) * math.log(float(joint[i, j] / (a[i] * b[j]))) for i, j in pairs)


def joint_by_enumeration(p, rows):
    """Return I(y_rows; w) from the table of all labellings by draws."""
    draws, _, classes = p.shape
    table = torch.zeros(classes ** len(rows), draws, dtype=p.dtype)
    for i, labelling in enumerate(itertools.product(range(classes), repeat=len(rows))):
        for s in range(draws):
            table[i, s] = math.prod(float(p[s, row, k]) for row, k in zip(rows, labelling)) / draws
    return information(table)


# -- the functions -----------------------------------------------------------------------------------------------------
def test_bald_is_the_mutual_information_of_label_and_draw(labels):
    predictive, p, *_ = labels
    scores = active.bald(predictive)
    assert scores.shape == (6,)
    for n in range(6):
        assert float(scores[n]) == pytest.approx(joint_by_enumeration(p, [n]), abs=1e-12)
    assert torch.allclose(scores, predictive.epistemic)
    assert float(scores.std()) > 0.05  # scores differ, so a wrong row order would fail


def test_entropy_and_variance_of_labels(labels):
    predictive, p, *_ = labels
    mean = p.mean(0)
    assert torch.allclose(active.entropy(predictive), -(mean * mean.log()).sum(-1))
    epistemic = ((p - mean) ** 2).mean(0).sum(-1)
    assert torch.allclose(active.variance(predictive), epistemic)
    assert torch.allclose(active.variance(predictive, kind="total"), (mean * (1 - mean)).sum(-1))


def test_epig_is_the_mean_information_about_other_labels(labels):
    predictive, p, posterior, _x = labels
    far = randn(4, 2, seed=7, dtype=torch.float64)
    q = posterior.predict(far).functions()
    scores = active.epig(predictive, posterior.predict(far))
    for n in range(6):
        each = [information(torch.einsum("sk,sl->kl", p[:, n], q[:, m]) / len(p)) for m in range(4)]
        assert float(scores[n]) == pytest.approx(sum(each) / 4, abs=1e-12)


def test_bernoulli_is_two_classes():
    x, draws = randn(5, 2, seed=3, dtype=torch.float64), randn(7, 3, seed=4, dtype=torch.float64)
    y = torch.tensor([0.0, 1, 1, 0, 1], dtype=torch.float64)
    one = posterior_of(nn.Linear(2, 1).double(), x, y, cr.likelihoods.Bernoulli(), draws)
    zero = torch.zeros(7, 2, dtype=torch.float64)  # logits (0, f) are equivalent to one logit f
    two_draws = torch.cat([zero, draws[:, :2], zero[:, :1], draws[:, 2:]], 1)
    two = posterior_of(nn.Linear(2, 2).double(), x, y.long(), cr.likelihoods.Categorical(), two_draws)
    for function in (active.bald, active.entropy, active.variance):
        assert torch.allclose(function(one.predict(x)), function(two.predict(x)))
    assert torch.allclose(
        active.epig(one.predict(x), one.predict(x[:2])), active.epig(two.predict(x), two.predict(x[:2]))
    )
    mine, theirs = active.batch_bald(one.predict(x), 3), active.batch_bald(two.predict(x), 3)
    assert torch.equal(mine.rows, theirs.rows)
    assert torch.allclose(mine.information, theirs.information)


def test_confident_draws_give_no_nan():
    x = randn(4, 2, seed=1)
    draws = 1000 * randn(3, 9, seed=2)  # probabilities of exactly 0 and 1
    posterior = posterior_of(nn.Linear(2, 3), x, torch.tensor([0, 1, 2, 0]), cr.likelihoods.Categorical(), draws)
    p = posterior.predict(x)
    for scores in (active.bald(p), active.entropy(p), active.epig(p, p), active.batch_bald(p, 3).information):
        assert bool(torch.isfinite(scores).all())


def test_bald_of_one_draw_is_zero():
    x, draws = randn(4, 2, seed=1), randn(1, 9, seed=2)
    posterior = posterior_of(nn.Linear(2, 3), x, torch.tensor([0, 1, 2, 0]), cr.likelihoods.Categorical(), draws)
    assert torch.equal(active.bald(posterior.predict(x)), torch.zeros(4))


@pytest.fixture(scope="module")
def linear(conjugate):
    """Draws with exactly the moments of a known Gaussian posterior, so closed forms hold without Monte Carlo error."""
    mean, covariance = conjugate.exact()
    raw = randn(400, 4, seed=5, dtype=torch.float64)
    raw = raw - raw.mean(0)
    white = raw @ torch.linalg.inv(torch.linalg.cholesky(raw.T @ raw / len(raw))).T
    draws = mean + white @ torch.linalg.cholesky(covariance).T
    posterior = posterior_of(conjugate.net, conjugate.x, conjugate.y, cr.likelihoods.Gaussian(conjugate.noise), draws)
    return posterior, conjugate, covariance


def test_real_targets_have_the_closed_forms_of_a_linear_model(linear):
    posterior, conjugate, covariance = linear
    p = posterior.predict(conjugate.x)
    shared = conjugate.design @ covariance @ conjugate.design.T
    noise = conjugate.noise**2
    epistemic = shared.diagonal()
    assert torch.allclose(active.bald(p), 0.5 * torch.log1p(epistemic / noise))
    assert torch.allclose(active.variance(p), epistemic)
    assert torch.allclose(active.variance(p, kind="total"), epistemic + noise)
    assert torch.allclose(active.entropy(p), 0.5 * torch.log(2 * math.pi * math.e * (epistemic + noise)))
    far = conjugate.x[:4] * 3
    design = torch.cat([far, torch.ones(4, 1, dtype=far.dtype)], 1)
    across, there = conjugate.design @ covariance @ design.T, (design @ covariance @ design.T).diagonal()
    squared = across**2 / ((epistemic + noise).unsqueeze(1) * (there + noise))
    assert torch.allclose(active.epig(p, posterior.predict(far)), (-0.5 * torch.log1p(-squared)).mean(1))


def test_batch_of_real_targets_is_the_greedy_log_determinant(linear):
    posterior, conjugate, covariance = linear
    chosen = active.batch_bald(posterior.predict(conjugate.x), 5)
    shared = conjugate.design @ covariance @ conjugate.design.T / conjugate.noise**2

    def together(rows):
        return 0.5 * float(torch.logdet(torch.eye(len(rows), dtype=shared.dtype) + shared[rows][:, rows]))

    rows: list[int] = []
    for i in range(5):
        best = max((n for n in range(30) if n not in rows), key=lambda n: together([*rows, n]))
        rows.append(best)
        assert float(chosen.information[i]) == pytest.approx(together(rows), abs=1e-9)
    assert chosen.rows.tolist() == rows
    assert active.joint_information(posterior.predict(conjugate.x[:6])) == pytest.approx(together(list(range(6))))


# -- batches -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [2, 3])
def test_batch_bald_is_the_greedy_joint_information(labels, count):
    predictive, p, *_ = labels
    chosen = active.batch_bald(predictive, count)
    rows: list[int] = []
    for i in range(count):
        value = {n: joint_by_enumeration(p, [*rows, n]) for n in range(6) if n not in rows}
        rows.append(max(value, key=value.__getitem__))
        assert float(chosen.information[i]) == pytest.approx(value[rows[-1]], abs=1e-12)
    assert chosen.rows.tolist() == rows
    assert bool((chosen.information.diff() >= 0).all())
    assert float(chosen.information[0]) == pytest.approx(float(active.bald(predictive).max()))


def test_batch_bald_avoids_duplicate_rows():
    """Copies of the best row have the highest scores; the batch contains one of them and then a different row."""
    x = torch.cat([torch.full((5, 1), 3.0), torch.full((1, 1), -1.0)]).double()
    draws = torch.tensor([[0.0, 2.0, 0, 0], [0.0, -2.0, 0, 0], [0.0, 2.0, 0, 3.0], [0.0, -2.0, 0, 3.0]]).double()
    posterior = posterior_of(
        nn.Linear(1, 2).double(), x, torch.tensor([0, 1, 0, 1, 0, 1]), cr.likelihoods.Categorical(), draws
    )
    p = posterior.predict(x)
    assert active.top(active.bald(p), 2).tolist() == [0, 1]
    assert 5 in active.batch_bald(p, 2).rows.tolist()


def test_sampled_labellings_agree_with_enumeration(labels):
    """The mean of 40 estimates lies within four standard errors of the exact value."""
    predictive, p, *_ = labels
    exact = active.joint_information(predictive, labellings=3**6)
    assert exact == pytest.approx(joint_by_enumeration(p, list(range(6))), abs=1e-10)
    many = [active.joint_information(predictive, labellings=200, seed=s) for s in range(40)]
    error = float(np.std(many, ddof=1)) / math.sqrt(40)
    assert abs(float(np.mean(many)) - exact) < 4 * error
    assert error < 0.01  # otherwise the assertion above is vacuous
    chosen = active.batch_bald(predictive, 5, labellings=50, seed=1)
    assert bool((chosen.information.diff() >= 0).all())
    assert len(set(chosen.rows.tolist())) == 5


def test_batch_bald_respects_rows_and_candidates(labels):
    predictive, *_ = labels
    allowed = torch.tensor([1, 3, 4])
    assert set(active.batch_bald(predictive, 3, rows=allowed).rows.tolist()) == {1, 3, 4}
    best = active.top(active.bald(predictive), 3)
    assert set(active.batch_bald(predictive, 3, candidates=3).rows.tolist()) == set(best.tolist())


def test_top_and_stochastic():
    scores = torch.tensor([0.1, 0.7, 0.7, 0.0, 0.2])
    assert active.top(scores, 3).tolist() == [1, 2, 4]
    picks = torch.stack([active.stochastic(scores, 2, seed=s) for s in range(4000)])
    first = torch.bincount(picks[:, 0], minlength=5) / 4000
    want = scores / scores.sum()
    assert bool(((first - want).abs() <= 4 * (want * (1 - want) / 4000).sqrt() + 1e-12).all())
    assert bool((picks[:, 0] != picks[:, 1]).all())
    assert set(active.stochastic(scores, 2, power=200.0, seed=0).tolist()) == {1, 2}
    closed = scores.masked_fill(torch.tensor([False, True, True, False, False]), -math.inf)
    assert set(active.stochastic(closed, 3, seed=0).tolist()) == {0, 3, 4}


# -- streaming ---------------------------------------------------------------------------------------------------------
def test_streamed_scores_equal_those_of_one_block(monkeypatch):
    x, net = randn(500, 4, seed=1), mlp(4, 16, 3)
    problem = cr.Problem(net, (x[:30], torch.arange(30) % 3), cr.likelihoods.Categorical(), cr.priors.Normal())
    draws = randn(1, 8, problem.dim, seed=2)
    posterior = cr.DrawsPosterior(Model.of(problem), draws, Record())

    def all_of():
        p, far = posterior.predict(x), posterior.predict(x[:7])
        return active.bald(p), active.entropy(p), active.variance(p), active.epig(p, far)

    whole = all_of()
    chosen = active.batch_bald(posterior.predict(x), 4)
    blocks = []
    monkeypatch.setattr(predictive_module, "BLOCK_VALUES", 1000)
    monkeypatch.setattr(predictive_module, "CACHE_VALUES", 0)
    monkeypatch.setattr(active.acquisition, "BLOCK_VALUES", 1000)
    monkeypatch.setattr(active.batch, "CACHED_VALUES", 1000)
    inner = cr.Predictive._outputs
    monkeypatch.setattr(
        cr.Predictive, "_outputs", lambda self, x, first: blocks.append(len(x)) or inner(self, x, first)
    )
    for a, b in zip(whole, all_of()):
        assert torch.allclose(a, b, atol=1e-6)
    assert len(blocks) > 20
    assert torch.equal(active.batch_bald(posterior.predict(x), 4).rows, chosen.rows)


def test_random_is_uniform_and_seeded(labels):
    predictive, *_ = labels
    assert torch.equal(active.random(predictive, seed=1), active.random(predictive, seed=1))
    assert not torch.equal(active.random(predictive, seed=1), active.random(predictive, seed=2))


# -- invalid arguments of the functions --------------------------------------------------------------------------------
def test_an_unsupported_acquisition_lists_the_supported_ones():
    x = randn(5, 2)
    counts = posterior_of(nn.Linear(2, 1), x, torch.tensor([0.0, 1, 2, 3, 1]), cr.likelihoods.Poisson(), randn(3, 3))
    with pytest.raises(cr.InputError, match=r"'bald' does not support counts.*variance, random"):
        active.bald(counts.predict(x))
    assert active.variance(counts.predict(x)).shape == (5,)
    two = posterior_of(nn.Linear(2, 2), x, randn(5, 2), cr.likelihoods.Gaussian(0.1), randn(3, 6))
    with pytest.raises(cr.InputError, match=r"'batch_bald' does not support several real targets.*bald, variance"):
        active.batch_bald(two.predict(x), 2)
    assert active.bald(two.predict(x)).shape == (5,)


@pytest.mark.parametrize(
    "score", [active.bald, active.entropy, lambda p: active.epig(p, p), lambda p: active.batch_bald(p, 2)]
)
def test_noise_of_infinite_variance_is_refused(score):
    """The scores compare variances: of a Student-t with df <= 2 they would be infinite or NaN."""
    x = randn(5, 2)
    for df, refused in ((2.0, True), (2.5, False)):
        likelihood = cr.likelihoods.StudentT(0.3, df=df)
        predictive = posterior_of(nn.Linear(2, 1), x, randn(5), likelihood, randn(3, 3)).predict(x)
        assert bool(torch.isfinite(active.variance(predictive)).all())
        if refused:
            with pytest.raises(cr.InputError, match=r"needs noise of finite variance, got StudentT\(.*Use 'variance'"):
                score(predictive)
        else:
            found = score(predictive)
            assert bool(torch.isfinite(found if isinstance(found, torch.Tensor) else found.information).all())


def test_bad_arguments_are_refused(labels):
    predictive, _, posterior, x = labels
    for call, message in (
        (lambda: active.epig(predictive, None), "targets must be a Predictive, got NoneType"),
        (lambda: active.epig(predictive, posterior.predict(x, draws=2)), "targets: has 2 draws"),
        (lambda: active.variance(predictive, kind="aleatoric"), "kind must be one of .*, got 'aleatoric'"),
        (lambda: active.batch_bald(predictive, 7), "count must be an integer from 1 to 6, got 7"),
        (lambda: active.batch_bald(predictive, 2, labellings=0), "labellings must be a positive integer, got 0"),
        (lambda: active.top(torch.zeros(3), 4), "count must be an integer from 1 to 3, got 4"),
        (lambda: active.stochastic(torch.tensor([-1.0, 2.0]), 1), "scores must be non-negative, got negative values"),
        (lambda: active.stochastic(torch.tensor([1.0, 2.0]), 1, power=-1), "power must be a non-negative .*, got -1"),
    ):
        with pytest.raises(cr.InputError, match=message):
            call()


# -- the loop ----------------------------------------------------------------------------------------------------------
POOL = 120


def toy(seed=0):
    """Two classes on a line, with the boundary at 0.6; the labelled rows lie far from it on both sides."""
    pool = torch.linspace(-2, 2, POOL).unsqueeze(1)
    truth = (pool[:, 0] > 0.6).long()
    net = mlp(1, 8, 2, seed=seed)
    start = (torch.tensor([[-2.0], [2.0]]), torch.tensor([0, 1]))
    problem = cr.Problem(net, start, cr.likelihoods.Categorical(), cr.priors.Normal(3.0))
    return problem, pool, truth


def learner_of(acquisition="bald", *, method=None, **settings):
    problem, pool, truth = toy()
    method = method or cr.DeepEnsemble(members=6, steps=80, lr=0.05, anchored=True, init="prior")
    oracle = settings.pop("oracle", lambda rows, x: truth[rows])
    return active.ActiveLearner(problem, pool, acquisition, batch=3, method=method, oracle=oracle, **settings), truth


def test_a_loop_asks_near_the_boundary_and_learns():
    learner, truth = learner_of()

    def accuracy(posterior):
        return float((posterior.predict(learner.pool).mean.argmax(-1) == truth).float().mean())

    history = learner.run(4, evaluate=accuracy)
    assert [entry["labels"] for entry in history] == [0, 3, 6, 9, 12]
    assert learner.problem.n == 14
    asked = learner.pool[learner.labelled[3:], 0]
    far = (learner.pool[:, 0] - 0.6).abs().median()
    assert float((asked - 0.6).abs().median()) < 0.5 * float(far)
    assert history[-1]["figures"]["figure"] > 0.97
    assert torch.equal(learner.labels, truth[learner.labelled])
    assert history[0]["asked"] == learner.labelled[:3].tolist()
    assert repr(learner) == "ActiveLearner(bald: 12 of 120 rows of the pool labelled)"


@pytest.mark.parametrize("acquisition", ["variance", "entropy", "epig", "random", "batch_bald"])
def test_every_acquisition_runs(acquisition):
    learner, _ = learner_of(acquisition, choose="stochastic" if acquisition == "entropy" else "top")
    learner.run(2)
    assert len(set(learner.labelled.tolist())) == 6
    assert learner.scores().shape == (POOL,)


@pytest.mark.parametrize(
    "method",
    [cr.MCDropout(insert="2", rate=0.2, steps=40), cr.BayesByBackprop(steps=40), cr.MAP(steps=40)],
    ids=lambda m: m.name,
)
def test_other_methods_and_a_custom_acquisition(method):
    def edge(predictive):
        return 1 - predictive.probabilities.max(-1).values

    learner, _ = learner_of(edge, method=method, draws=7)
    learner.run(1)
    assert len(learner.labelled) == 3


def test_the_default_method_depends_on_the_network():
    problem, pool, _ = toy()
    assert isinstance(active.ActiveLearner(problem, pool).method, cr.DeepEnsemble)
    net = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    dropped = cr.Problem(net, (pool[:2], torch.tensor([0, 1])), cr.likelihoods.Categorical(), cr.priors.Normal())
    assert isinstance(active.ActiveLearner(dropped, pool).method, cr.MCDropout)


def test_ask_and_tell():
    learner, truth = learner_of(oracle=None, initial=5)
    first = learner.ask()
    assert len(first) == 5
    assert torch.equal(learner.ask(), first)  # the same query until it is answered
    learner.tell(first[:2], truth[first[:2]].numpy())
    assert torch.equal(learner.ask(), first[2:])
    learner.tell([int(r) for r in first[2:]], [int(v) for v in truth[first[2:]]])
    assert len(learner.ask()) == 3
    other = next(n for n in range(POOL) if n not in learner.labelled and n not in learner.waiting)
    learner.tell([other], [0])  # rows that were not queried are accepted too
    assert len(learner.ask()) == 3


def test_regression_in_the_shape_of_y():
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    problem = cr.Problem(mlp(1, 8, 1), (x[:4], x[:4, 0]), cr.likelihoods.Gaussian(0.1), cr.priors.Normal())
    learner = active.ActiveLearner(
        problem, x, "batch_bald", batch=4, method=cr.DeepEnsemble(members=4, steps=30), oracle=lambda rows, x: x[:, 0]
    )
    learner.run(labels=8)
    assert learner.labels.shape == (8,)
    assert learner.problem.y.shape == (12, 1)
    with pytest.raises(cr.InputError, match=r"labels must have shape \(2,\), one label per row, got \(2, 1\)"):
        learner.tell(learner._unlabelled()[:2], x[:2])


def test_until_and_the_end_of_the_pool():
    learner, _ = learner_of("random")
    history = learner.run(labels=60, evaluate=lambda p: {"n": len(learner.labelled)}, until=lambda f: f["n"] >= 6)
    assert history[-1]["labels"] == 6
    problem, pool, truth = toy()
    small = active.ActiveLearner(problem, pool[:5], "random", batch=3, oracle=lambda rows, x: truth[rows])
    small.run(labels=99)
    assert sorted(small.labelled.tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(cr.InputError, match="pool: all of its 5 rows are labelled"):
        small.ask()


# -- the folder --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("acquisition", ["bald", "batch_bald", "epig", "random"])
def test_a_resumed_loop_makes_the_same_choices(acquisition, tmp_path):
    evaluate = lambda posterior: float(posterior.predict(torch.zeros(1, 1)).mean[0, 1])  # noqa: E731
    whole, truth = learner_of(acquisition, initial=4)
    whole.run(4, evaluate=evaluate)
    stopped, _ = learner_of(acquisition, initial=4, out=tmp_path / "loop")
    stopped.run(2, evaluate=evaluate)
    waiting = stopped.ask()  # interrupted between a query and its answer
    problem, pool, _ = toy()
    again = active.ActiveLearner.resume(tmp_path / "loop", problem, pool, oracle=lambda rows, x: truth[rows])
    assert torch.equal(again.waiting, waiting)
    again.run(2, evaluate=evaluate)
    assert torch.equal(again.labelled, whole.labelled)
    assert torch.equal(again.labels, whole.labels)
    assert again.history == whole.history
    kept = json.loads((tmp_path / "loop" / "manifest.json").read_text())
    assert kept["history"] == whole.history
    assert {p.name for p in (tmp_path / "loop").iterdir()} == {"manifest.json", *kept["files"]}
    with pytest.raises(cr.StoreError, match="another process has written to"):
        stopped.tell(waiting, truth[waiting])


def test_a_folder_of_another_loop_is_rejected(tmp_path):
    learner, _truth = learner_of(out=tmp_path / "loop", method=cr.MCDropout(insert="2", rate=0.2, steps=10))
    learner.run(1)
    problem, pool, _ = toy()
    resume = active.ActiveLearner.resume
    data, likelihood, prior = (problem.x, problem.y), cr.likelihoods.Categorical(), cr.priors.Normal(3.0)
    wide = cr.Problem(mlp(1, 9, 2), data, likelihood, prior)
    with pytest.raises(cr.StoreError, match=r"another problem.*0\.weight has shape \(9, 1\)"):
        resume(tmp_path / "loop", wide, pool)
    with pytest.raises(cr.StoreError, match="the rows of the pool differ"):
        resume(tmp_path / "loop", problem, pool + 1)
    with pytest.raises(cr.StoreError, match="the initial weights of the network differ"):
        resume(tmp_path / "loop", toy(seed=1)[0], pool)
    with pytest.raises(cr.StoreError, match="another method or other settings"):
        resume(tmp_path / "loop", problem, pool, method=cr.MCDropout(insert="2", rate=0.3, steps=10))
    with pytest.raises(cr.StoreError, match="already exists"):
        learner_of(out=tmp_path / "loop")
    with pytest.raises(cr.StoreError, match="not the folder of an active-learning loop"):
        resume(tmp_path / "nothing", problem, pool)
    state = next((tmp_path / "loop").glob("state-*"))
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    with pytest.raises(cr.StoreError, match=r"was altered \(checksum mismatch\)"):
        resume(tmp_path / "loop", problem, pool)


def test_a_custom_acquisition_must_be_passed_again(tmp_path):
    def edge(predictive):
        return predictive.total

    learner, _ = learner_of(edge, out=tmp_path / "loop", method=cr.MAP(steps=5))
    learner.run(1)
    problem, pool, _ = toy()
    with pytest.raises(cr.InputError, match="started with 'edge'"):
        active.ActiveLearner.resume(tmp_path / "loop", problem, pool)
    assert len(active.ActiveLearner.resume(tmp_path / "loop", problem, pool, acquisition=edge).labelled) == 3


# -- invalid arguments of the loop -------------------------------------------------------------------------------------
def test_bad_arguments_of_the_loop_raise_before_any_fit(monkeypatch):
    monkeypatch.setattr(cr.DeepEnsemble, "fit", lambda *a, **k: pytest.fail("fitting started"))
    problem, pool, _ = toy()
    make = active.ActiveLearner
    for call, message in (
        (lambda: make(None, pool), "problem must be a credibly.Problem, got NoneType"),
        (lambda: make(problem, pool[:5]), "batch must be at most 5, the rows of the pool, got 10"),
        (lambda: make(problem, pool, initial=200), "initial must be at most 120, the rows of the pool, got 200"),
        (lambda: make(problem, torch.zeros(50, 3)), "pool: the network cannot take rows of x"),
        (lambda: make(problem, torch.full((50, 1), math.nan)), "pool: has 50 values that are NaN"),
        (lambda: make(problem, pool, "bold"), "acquisition must be one of bald, .* or a function, got 'bold'"),
        (lambda: make(problem, pool, batch=0), "batch must be a positive integer, got 0"),
        (lambda: make(problem, pool, choose="best"), "choose must be one of 'top', 'stochastic', got 'best'"),
        (lambda: make(problem, pool, "epig", targets=torch.zeros(3, 2)), "targets: the network cannot take"),
        (lambda: make(problem, pool).run(1), "oracle: is None"),
        (lambda: make(problem, pool, oracle=len).run(), "rounds: is None and labels is None"),
        (lambda: make(problem, pool).tell([1, 1], [0, 1]), r"rows must be distinct .*, got \[1, 1\]"),
        (lambda: make(problem, pool).tell([120], [0]), r"rows must be .* from 0 to 119, got \[120\]"),
        (lambda: make(problem, pool).tell([1, 2], [0]), r"labels must have shape \(2,\), .* got \(1,\)"),
        (lambda: make(problem, pool).tell([1], [2]), "labels: has labels from 2 to 2"),
    ):
        with pytest.raises(cr.InputError, match=message):
            call()
    counts = cr.Problem(
        mlp(1, 4, 1), (pool[:3], torch.tensor([0.0, 1, 2])), cr.likelihoods.Poisson(), cr.priors.Normal()
    )
    with pytest.raises(cr.InputError, match="'bald' does not support counts"):
        make(counts, pool)


def test_a_row_is_labelled_once():
    learner, truth = learner_of("random")
    learner.run(1)
    with pytest.raises(cr.InputError, match="rows: .* are already labelled"):
        learner.tell(learner.labelled[:1], truth[:1])
    wrong, _ = learner_of(lambda p: torch.zeros(3), method=cr.MAP(steps=2))
    with pytest.raises(cr.InputError, match=r"acquisition must return scores of shape \(120,\), got \(3,\)"):
        wrong.ask()


def test_the_loop_shows_its_progress(capsys):
    learner, _ = learner_of("random", progress=True)
    learner.run(1)
    assert "active learning by random" in capsys.readouterr().err
