"""Continual learning: Bayes' rule over tasks, warm starts, coresets, heads, and runs stopped between tasks."""

import math

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.continual import learning as continual
from credibly.continual.coresets import k_centre
from credibly.continual.learning import MultiHead, learn
from credibly.gaussians.families import MeanField
from credibly.likelihoods import Categorical, Gaussian

DOUBLE = torch.float64
BRIEF = cr.BayesByBackprop(steps=60, compile=False)


def parts(conjugate):
    return [(conjugate.x[a:b], conjugate.y[a:b]) for a, b in ((0, 7), (7, 18), (18, 30))]


def classes(count=3, rows=40):
    """Tasks of two classes each, with a boundary that rotates from task to task."""
    tasks = []
    for t in range(count):
        x = randn(rows, 2, seed=t)
        angle = torch.tensor(0.5 * t)
        tasks.append((x, (x[:, 0] * angle.cos() + x[:, 1] * angle.sin() > 0).long()))
    return tasks


def begin(tasks, method=BRIEF, net=None, **kwargs):
    return learn(tasks, method, net or mlp(2, 6, 2), Categorical(), cr.priors.Normal(), **kwargs)


def test_tasks_in_turn_are_one_batch_fit(conjugate):
    """Full rank on a linear model: the last posterior is that of all rows, to the error of three fits."""
    samples, fits = 256, 3
    tolerance = 4 * math.sqrt(fits / (samples * 100))
    method = cr.BayesByBackprop(family="full-rank", samples=samples, steps=700, lr=0.04, init_scale=0.3, compile=False)
    learned = learn(
        parts(conjugate), method, conjugate.net, Gaussian(conjugate.noise), cr.priors.Normal(conjugate.prior)
    )
    mean, covariance = conjugate.exact()
    white = torch.linalg.inv(torch.linalg.cholesky(covariance))
    assert float((white @ (learned.posterior.loc[0] - mean)).abs().max()) < tolerance
    relative = white @ learned.posterior.covariance()[0] @ white.T
    torch.testing.assert_close(relative, torch.eye(4, dtype=DOUBLE), rtol=0, atol=2 * tolerance)
    assert len(learned.posteriors) == 3
    assert learned.posterior is learned.posteriors[-1]


def test_every_row_counts_once_with_a_coreset(conjugate, monkeypatch):
    """The fits to the tasks and to the coreset together use every row exactly once."""
    seen = []
    original = cr.BayesByBackprop.fit

    def fit(self, problem, **kwargs):
        seen.append(problem)
        return original(self, problem, **kwargs)

    monkeypatch.setattr(cr.BayesByBackprop, "fit", fit)
    learned = learn(
        parts(conjugate), BRIEF, conjugate.net, Gaussian(conjugate.noise), cr.priors.Normal(), coreset=2, seed=3
    )
    assert [p.n for p in seen] == [5, 9, 10, 6]
    rows = torch.cat([torch.cat([p.x, p.y.reshape(len(p.y), 1)], 1) for p in seen])
    given = torch.cat([conjugate.x, conjugate.y.unsqueeze(1)], 1)
    assert torch.equal(rows[rows[:, 0].argsort()], given[given[:, 0].argsort()])
    assert [len(k) for k in learned.coreset] == [2, 2, 2]
    assert learned.posterior is not learned.posteriors[-1]
    # The prior of each is the previous posterior.
    checks = [p.record.prior["checksum"] for p in (*learned.posteriors[1:], learned.posterior)]
    assert checks == [p.as_prior().checksum() for p in learned.posteriors]


def test_a_fit_continues_from_the_previous_posterior(monkeypatch):
    starts = []
    original = cr.BayesByBackprop.fit

    def fit(self, problem, **kwargs):
        starts.append(self.init)
        return original(self, problem, **kwargs)

    monkeypatch.setattr(cr.BayesByBackprop, "fit", fit)
    learned = begin(classes())
    assert starts[0] == "network"
    assert torch.equal(starts[1].phi, learned.posteriors[0].phi)
    assert torch.equal(starts[2].phi, learned.posteriors[1].phi)


@pytest.mark.parametrize(
    "method", [cr.SWAG(steps=40, rank=2, iterates=3, every=2), cr.Laplace(steps=40, structure="kron", compile=False)]
)
def test_methods_that_start_at_the_network_get_the_last_weights(method, monkeypatch):
    begun, original = [], type(method).fit

    def fit(self, problem, **kwargs):
        begun.append(problem.layout.read(problem.layout.module))
        return original(self, problem, **kwargs)

    monkeypatch.setattr(type(method), "fit", fit)
    net = mlp(2, 6, 2)
    learned = begin(classes(), method, net=net)
    given = torch.cat([p.detach().flatten() for p in net.parameters()])
    ended = [p.loc.reshape(-1) for p in learned.posteriors]
    for start, expected in zip(begun, [given, *ended]):
        assert torch.equal(start, expected)
    assert float((ended[0] - given).abs().max()) > 0.01
    assert [p.record.prior["checksum"] for p in learned.posteriors[1:]] == [
        p.as_prior().checksum() for p in learned.posteriors[:-1]
    ]


def test_online_laplace_is_one_batch_fit(conjugate):
    """Full curvature on a linear model: mode and precision after the last task are those of all rows."""
    method = cr.Laplace(structure="full", steps=2000, lr=0.05, compile=False)
    learned = learn(
        parts(conjugate), method, conjugate.net, Gaussian(conjugate.noise), cr.priors.Normal(conjugate.prior)
    )
    mean, covariance = conjugate.exact()
    torch.testing.assert_close(learned.posterior.loc, mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(learned.posterior.covariance(), covariance, rtol=1e-8, atol=1e-10)


def test_draws_become_a_prior_by_their_moments():
    learned = begin(classes(2), cr.DeepEnsemble(members=6, steps=30, init="fresh", compile=False), family="diag")
    first, second = learned.posteriors
    assert second.record.prior["checksum"] == first.as_prior("diag").checksum()
    with pytest.raises(cr.InputError, match="do not determine the covariance"):
        begin(classes(2), cr.DeepEnsemble(members=6, steps=5), family="full")


# -- coresets


def test_k_centre_takes_the_farthest():
    x = torch.tensor([[0.0], [0.1], [10.0], [0.2], [4.0], [10.1]])
    for seed in range(6):
        chosen = k_centre(x, 3, seed).tolist()
        assert len({("low", "middle", "high")[int(x[i] > 2) + int(x[i] > 7)] for i in chosen}) == 3
    assert sorted(k_centre(x, 6, 0).tolist()) == list(range(6))
    same = torch.zeros(4, 2)
    assert sorted(k_centre(same, 4, 0).tolist()) == [0, 1, 2, 3]  # identical rows are not chosen twice


def test_a_coreset_is_chosen_by_the_seed():
    one, two, other = (begin(classes(2), coreset=5, seed=s) for s in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.coreset, two.coreset))
    assert torch.equal(one.posterior.phi, two.posterior.phi)
    assert not all(torch.equal(a, b) for a, b in zip(one.coreset, other.coreset))
    assert len(set(begin(classes(2), coreset=5, choose="k-centre").coreset[0].tolist())) == 5


# -- heads


def headed(tasks=3):
    torch.manual_seed(0)
    return MultiHead(nn.Sequential(nn.Linear(2, 6), nn.SiLU()), [nn.Linear(6, 2) for _ in range(tasks)])


def numbered(tasks):
    return [((x, torch.full((len(x),), t)), y) for t, (x, y) in enumerate(tasks)]


def test_rows_use_the_head_of_their_task():
    net = headed()
    x, task = randn(5, 2), torch.tensor([0, 2, 1, 2, 0])
    expected = torch.stack([net.heads[t](net.body(x[i : i + 1]))[0] for i, t in enumerate(task.tolist())])
    torch.testing.assert_close(net(x, task), expected)


def test_heads_stay_at_the_prior_until_their_task_and_as_they_are_after():
    patterns = [f"heads.{t}.*" for t in range(3)]
    learned = learn(numbered(classes()), BRIEF, headed(), Categorical(), cr.priors.Normal(0.7), heads=patterns)
    layout = learned.posterior.layout
    indices = [
        torch.cat([torch.arange(e.start, e.stop) for e in layout.entries if e.name.startswith(f"heads.{t}.")])
        for t in range(3)
    ]
    first, second, third = learned.posteriors
    for posterior, later in ((first, (1, 2)), (second, (2,))):
        for t in later:
            torch.testing.assert_close(posterior.std[0, indices[t]], torch.full((14,), 0.7))
            assert float(posterior.loc[0, indices[t]].abs().max()) == 0.0
    # Later tasks have no data for an earlier head, so its posterior stays at its prior.
    torch.testing.assert_close(second.loc[0, indices[0]], first.loc[0, indices[0]], rtol=0, atol=1e-3)
    torch.testing.assert_close(third.std[0, indices[0]], first.std[0, indices[0]], rtol=0.02, atol=0)
    assert float(second.std[0, indices[1]].max()) < 0.3  # it was trained, from a narrow start
    (x, task), y = numbered(classes())[2]
    assert float((learned.predict((x, task)).probabilities.argmax(-1) == y).float().mean()) > 0.7


def test_heads_that_cannot_be_used():
    with pytest.raises(cr.InputError, match="heads must be one name pattern per task, got .* for 3 tasks"):
        begin(classes(), heads=["0.*"])
    with pytest.raises(cr.InputError, match="heads: pattern 'tail.*' matches no parameter"):
        begin(classes(), heads=["tail.*"] * 3)
    with pytest.raises(cr.InputError, match="heads must be None with family='full-rank'"):
        begin(classes(), cr.BayesByBackprop(family="full-rank"), heads=["2.*"] * 3)


# -- stopped runs


def test_a_stopped_run_resumes_between_tasks(tmp_path, monkeypatch):
    tasks = classes()
    whole = begin(tasks, coreset=4, seed=2)
    fits, original = [], cr.BayesByBackprop.fit

    def fit(self, problem, **kwargs):
        fits.append(problem.n)
        if len(fits) == 3:
            raise KeyboardInterrupt
        return original(self, problem, **kwargs)

    monkeypatch.setattr(cr.BayesByBackprop, "fit", fit)
    with pytest.raises(KeyboardInterrupt):
        begin(tasks, coreset=4, seed=2, out=tmp_path / "run")
    again = begin(tasks, coreset=4, seed=2, out=tmp_path / "run")
    assert fits == [36, 36, 36, 36, 12]  # the first two are not fitted twice
    assert torch.equal(again.posterior.phi, whole.posterior.phi)
    assert all(torch.equal(a.phi, b.phi) for a, b in zip(again.posteriors, whole.posteriors))
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "continual.json",
        "task-00",
        "task-01",
        "task-02",
        "coreset",
    }
    begin(tasks, coreset=4, seed=2, out=tmp_path / "run")
    assert len(fits) == 5
    with pytest.raises(cr.StoreError, match="was started with another seed"):
        begin(tasks, coreset=4, seed=3, out=tmp_path / "run")
    with pytest.raises(cr.StoreError, match="was started with another method"):
        begin(tasks, cr.BayesByBackprop(steps=5), coreset=4, seed=2, out=tmp_path / "run")
    with pytest.raises(cr.StoreError, match="task-00' is of other data"):
        begin(classes(rows=41), coreset=4, seed=2, out=tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(cr.StoreError, match="not a run of continual learning"):
        begin(tasks, out=tmp_path / "other")


# -- errors


@pytest.mark.parametrize(
    "change, message",
    [
        ({"method": cr.MAP()}, "method: map gives no Gaussian"),
        ({"method": cr.MCDropout()}, "method: dropout gives no Gaussian"),
        ({"method": cr.BayesByBackprop(members=2)}, "method: bbb gives a mixture"),
        ({"method": "bbb"}, r"method must be a method such as BayesByBackprop\(\), got 'bbb'"),
        ({"coreset": -1}, "coreset must be a non-negative integer, got -1"),
        ({"coreset": 40}, "coreset must be less than the 40 rows of task 0, got 40"),
        ({"choose": "best"}, "choose must be one of 'random', 'k-centre', got 'best'"),
        ({"seed": -1}, "seed must be a non-negative integer .*got -1"),
    ],
)
def test_settings_that_cannot_be_used(change, message):
    with pytest.raises(cr.InputError, match=message):
        begin(classes(), **change)


def test_tasks_that_cannot_be_used():
    with pytest.raises(
        cr.InputError, match="tasks must be a list with the data of at least one task, got an empty one"
    ):
        begin([])
    with pytest.raises(cr.InputError, match="x: the network cannot take rows"):
        begin([*classes(1), (randn(5, 3), torch.zeros(5).long())])
    assert continual.prior_of(begin(classes(1)).posterior).precision.structure == "diagonal"
    assert isinstance(begin(classes(1)).posterior.family, MeanField)
