"""The training loop: independent members, schedules, clipping, early stopping, and losses that are not finite."""

import io
import itertools
import math

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.core.inputs import map_inputs
from credibly.core.progress import Progress
from credibly.core.rng import stream
from credibly.inference.kernels.optimisers import SGD, Adam, clip_rows, learning_rates
from credibly.inference.training.batches import Batches
from credibly.inference.training.settings import Training
from credibly.likelihoods import Gaussian

f64 = torch.float64
X, Y = randn(50, 3, dtype=f64), randn(50, 3, dtype=f64).sum(1) + 0.1 * randn(50, seed=1, dtype=f64)


def problem(**kwargs):
    return cr.Problem(
        mlp(3, 6, 1, dtype=f64), data=(X, Y), likelihood=Gaussian(0.2), prior=cr.priors.Normal(), **kwargs
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"bootstrap": True}, {"anchored": True}, {"clip_norm": 0.5, "optimiser": "sgd", "lr": 0.02}],
    ids=str,
)
@pytest.mark.parametrize("batch_size", [16, 50])
def test_members_train_as_if_alone(options, batch_size):
    """Members 0 to 2 of an ensemble of five are those of an ensemble of three: members are independent."""
    five = cr.DeepEnsemble(members=5, steps=40, batch_size=batch_size, **options).fit(problem(), seed=0)
    three = cr.DeepEnsemble(members=3, steps=40, batch_size=batch_size, **options).fit(problem(), seed=0)
    torch.testing.assert_close(five.draws[:3], three.draws, rtol=1e-10, atol=1e-12)
    assert float((five.draws[0] - five.draws[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_adam_and_sgd_match_torch_optim(momentum):
    """A full-batch problem with torch.optim on a plain module has the same weights after 25 steps."""
    for name in ("adam", "sgd"):
        p = problem()
        net = mlp(3, 6, 1, dtype=f64)
        lr = 0.01 if name == "adam" else 1e-3
        if name == "adam":
            rule = torch.optim.Adam(net.parameters(), lr=lr, betas=(momentum, 0.999))
        else:
            rule = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
        for _ in range(25):
            rule.zero_grad()
            log_lik = torch.distributions.Normal(net(X).squeeze(1), 0.2).log_prob(Y).sum()
            log_prior = sum(torch.distributions.Normal(0.0, 1.0).log_prob(w).sum() for w in net.parameters())
            (-(log_lik + log_prior) / 50).backward()
            rule.step()
        options = {
            "steps": 25,
            "batch_size": 50,
            "lr": lr,
            "schedule": "constant",
            "optimiser": name,
            "momentum": momentum,
        }
        posterior = cr.MAP(**options).fit(p, seed=0)
        torch.testing.assert_close(posterior.draws[0, 0], p.layout.read(net), rtol=1e-8, atol=1e-10)


def test_optimisers_are_elementwise_on_rows():
    for rule in (Adam(), SGD()):
        theta, gradient = randn(3, 4), randn(3, 4, seed=1)
        whole = theta.clone()
        rule.update(whole, rule.init(whole), gradient, torch.tensor(0.1), torch.tensor(1.5), torch.tensor(2.0))
        for row in range(3):
            one = theta[row : row + 1].clone()
            rule.update(
                one, rule.init(one), gradient[row : row + 1], torch.tensor(0.1), torch.tensor(1.5), torch.tensor(2.0)
            )
            assert torch.equal(one[0], whole[row])


def test_clipping_is_per_row():
    clipped = clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


def test_schedules():
    cosine = learning_rates("cosine", 0.1, 100, 10)
    assert cosine[:10] == pytest.approx([0.01 * (i + 1) for i in range(10)])
    assert cosine[10] == pytest.approx(0.1)
    assert cosine[55] == pytest.approx(0.05)
    assert cosine[-1] < 1e-4
    assert all(a >= b for a, b in itertools.pairwise(cosine[10:]))
    assert set(learning_rates("constant", 0.1, 5, 0)) == {0.1}
    assert learning_rates("linear", 1.0, 4, 0) == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_batches_use_every_row_once_per_epoch_and_members_differ():
    batches = Batches(20, 5, seed=0, members=3)
    epoch = torch.stack([batches.at(t) for t in range(4)], 1).reshape(3, 20)
    for member in range(3):
        assert sorted(epoch[member].tolist()) == list(range(20))
    assert not torch.equal(epoch[0], epoch[1])
    later = torch.stack([batches.at(t) for t in range(4, 8)], 1).reshape(3, 20)
    assert not torch.equal(epoch[0], later[0])
    other = Batches(20, 5, seed=0, members=1, first=2)
    assert torch.equal(other.at(5)[0], batches.at(5)[2])


def test_bootstrap_gives_each_member_its_own_rows():
    rows = cr.DeepEnsemble(members=3, bootstrap=True).rows(problem(), 0, range(3)).resampled
    assert rows.shape == (3, 50)
    assert not torch.equal(rows[0], rows[1])
    assert 20 < len(rows[0].unique()) < 45  # with replacement: about 63 % of the rows
    mean = cr.DeepEnsemble(members=3, bootstrap=True, steps=50).fit(problem(), seed=0).draws
    plain = cr.DeepEnsemble(members=3, steps=50).fit(problem(), seed=0).draws
    assert not torch.equal(mean, plain)


def test_early_stopping_keeps_the_best_on_held_out_rows():
    """Pure noise as targets, which training overfits: the best parameters by held-out likelihood are kept."""
    noise = randn(40, seed=3)
    p = cr.Problem(mlp(3, 50, 1), data=(randn(40, 3), noise), likelihood=Gaussian(0.3), prior=cr.priors.Normal(10.0))
    method = cr.DeepEnsemble(members=3, steps=2000, lr=0.02, validation=0.25, patience=5, batch_size=10, rotate=False)
    posterior = method.fit(p, seed=0)
    history = posterior.record.history
    assert history["steps"] < 2000
    scores = torch.tensor(history["validation"])
    best = scores.max(0).values
    assert bool((best > scores[-1]).any())
    order = torch.randperm(40, generator=stream(0, "validation split"))[:10].sort().values
    kept = p.subset(order).log_likelihood_rows(posterior.draws[:, 0], p.x[order], p.y[order]).mean(1)
    torch.testing.assert_close(kept, best, rtol=1e-4, atol=1e-4)


def test_members_hold_out_rows_in_turn_and_stop_by_them():
    noise = randn(40, seed=3)
    p = cr.Problem(mlp(3, 50, 1), data=(randn(40, 3), noise), likelihood=Gaussian(0.3), prior=cr.priors.Normal(10.0))
    method = cr.DeepEnsemble(members=5, steps=2000, lr=0.02, validation=0.25, patience=5, batch_size=10)
    posterior = method.fit(p, seed=0)
    best = torch.tensor(posterior.record.history["validation"]).max(0).values
    order = torch.randperm(40, generator=stream(0, "validation split"))
    for member in range(5):
        part = member % 4
        held = order[10 * part : 10 * part + 10].sort().values
        kept = p.subset(held).log_likelihood_rows(posterior.draws[member], p.x[held], p.y[held]).mean()
        torch.testing.assert_close(kept, best[member], rtol=1e-4, atol=1e-4)
    rows = method.rows(p, 0, range(5)).resampled
    assert rows.shape == (5, 30)
    assert sorted(set(rows[0].tolist()) | set(rows[1].tolist())) == list(
        range(40)
    )  # rows held out by one member train another
    assert torch.equal(rows[0], rows[4])
    assert torch.equal(
        method.rows(p, 0, range(3, 5)).resampled, rows[3:]
    )  # however members are distributed over processes


@pytest.mark.parametrize("rotate", [True, False])
def test_held_out_rows_do_not_affect_the_members_that_hold_them_out(rotate):
    p, changed = problem(), problem()
    held = torch.randperm(50, generator=stream(0, "validation split"))[10:20]  # held out by member 1 if rows rotate
    changed.y = changed.y.clone()
    changed.y[held] += 100.0
    method = cr.DeepEnsemble(members=3, steps=30, validation=0.2, patience=1000, batch_size=8, rotate=rotate)
    a, b = (torch.tensor(method.fit(given, seed=0).record.history["loss"]) for given in (p, changed))
    untouched = [bool(torch.equal(a[:, m], b[:, m])) for m in range(3)]
    assert untouched == ([False, True, False] if rotate else [False, False, False])


def test_held_out_rows_do_not_affect_the_parameters():
    p, changed = problem(), problem()
    order = torch.randperm(50, generator=stream(0, "validation split"))[:10]
    changed.y = changed.y.clone()
    changed.y[order] += 100.0
    options = {"steps": 30, "validation": 0.2, "patience": 1000, "batch_size": 8}
    a = cr.MAP(**options).fit(p, seed=0).record.history["loss"]
    b = cr.MAP(**options).fit(changed, seed=0).record.history["loss"]
    assert a == b


def test_weights_in_float16_are_named_as_the_reason():
    p = cr.Problem(mlp(3, 6, 1), (X.float(), X.float()[:, :1]), Gaussian(0.5), cr.priors.Normal(), dtype="float16")
    with pytest.raises(cr.TrainingError, match='The weights are float16.*dtype="bfloat16" or "float32"'):
        cr.MAP(steps=5, compile=False).fit(p, seed=0)


def test_a_loss_that_is_not_finite_stops_with_step_member_and_hint(tmp_path):
    # Member 2 starts where exp(f) overflows; the others are fine.
    p = cr.Problem(
        mlp(3, 6, 1), data=(X.float(), torch.ones(50)), likelihood=cr.likelihoods.Poisson(), prior=cr.priors.Normal()
    )
    start = 0.1 * randn(4, p.dim)
    start[2, -1] = 1e4
    with pytest.raises(
        cr.TrainingError, match=r"member 2 was not finite at step 1\. Try a smaller learning rate"
    ) as caught:
        cr.DeepEnsemble(members=4, init=start, steps=50).fit(p, seed=0, out=tmp_path / "run")
    assert (caught.value.member, caught.value.step, caught.value.posterior) == (2, 1, None)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_native")
def test_the_last_finite_parameters_are_kept(tmp_path):
    p = problem()
    method = cr.MAP(steps=4000, optimiser="sgd", momentum=0.0, lr=1e-3, schedule="constant", batch_size=50)
    calls = []
    original = p.log_likelihood_rows

    def poisoned(theta, x, y, **kwargs):
        calls.append(1)
        return original(theta, x, y, **kwargs) * (math.nan if len(calls) > 700 else 1.0)

    p.log_likelihood_rows = poisoned
    with pytest.raises(cr.TrainingError, match="member 0 was not finite at step 701") as caught:
        method.fit(p, seed=0, out=tmp_path / "run")
    kept = caught.value.posterior
    assert bool(torch.isfinite(kept.draws).all())
    assert kept.record.status == "partial"
    assert torch.equal(cr.load(tmp_path / "run", mlp(3, 6, 1, dtype=f64)).draws, kept.draws)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        # The last two cover their steps: minibatches, and all rows at once.
        pytest.param({"batch_size": 16}, marks=pytest.mark.nightly),
        pytest.param({"batch_size": 50}, marks=pytest.mark.nightly),
        {"anchored": True, "batch_size": 16},
        {"bootstrap": True, "clip_norm": 1.0},
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_native")
def test_compiled_training_equals_eager_and_compiles_once(options):
    import torch._dynamo.utils as dynamo

    torch._dynamo.reset()
    dynamo.counters.clear()
    runs = [
        cr.DeepEnsemble(members=3, steps=60, compile=c, **options).fit(problem(), seed=0).draws for c in (True, False)
    ]
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-10)
    assert dynamo.counters["stats"]["unique_graphs"] == 1
    assert not dynamo.counters["graph_break"]


@pytest.mark.usefixtures("no_native")
def test_without_a_compiler_training_is_eager_and_logs_one_line(monkeypatch, caplog):
    monkeypatch.setattr("credibly.core.compilation.compiler_missing", lambda device: "no C++ compiler was found")
    with caplog.at_level("INFO", logger="credibly"):
        posterior = cr.MAP(steps=20, compile=True).fit(problem(), seed=0)
    assert caplog.messages == ["running eagerly: no C++ compiler was found"]
    assert torch.equal(posterior.draws, cr.MAP(steps=20, compile=False).fit(problem(), seed=0).draws)


@pytest.mark.parametrize(
    "name, value, constraint",
    [
        ("epochs", 0, "a positive integer"),
        ("steps", -1, "a positive integer"),
        ("batch_size", 2.5, "a positive integer"),
        ("lr", 0.0, "a positive number"),
        ("lr", math.inf, "a positive number"),
        ("clip_norm", -1.0, "a positive number"),
        ("validation", 1.0, "a fraction from 0 to below 1"),
        ("momentum", 1.0, "a number from 0 to below 1"),
        ("warmup", -1, "a non-negative number of steps"),
        ("optimiser", "lbfgs", "one of 'adam', 'sgd', 'gauss-newton'"),
        ("schedule", "zigzag", "one of 'constant', 'linear', 'cosine'"),
        ("patience", 0, "a positive integer"),
    ],
)
def test_bad_settings_are_refused_at_construction(name, value, constraint):
    with pytest.raises(cr.InputError, match=f"^{name} must be {constraint}, got {value!r}$"):
        Training(**{name: value})


def test_settings_that_do_not_fit_the_problem():
    with pytest.raises(cr.InputError, match="batch_size must be at most the number of training rows, 50, got 51"):
        cr.MAP(batch_size=51).fit(problem(), seed=0)
    with pytest.raises(cr.InputError, match="warmup must be below the number of steps, 100, got 1000"):
        cr.MAP(steps=100, warmup=1000)
    with pytest.raises(cr.InputError, match="warmup must be below the number of steps, 5, got 5"):
        cr.MAP(epochs=5, warmup=5).fit(problem(), seed=0)
    with pytest.raises(cr.InputError, match=r"validation must leave rows to train on .*, got 0\.001 of 50 rows"):
        cr.MAP(validation=0.001).fit(problem(), seed=0)
    with pytest.raises(cr.InputError, match=r"init must be a finite tensor of shape \(1, \d+\), got shape \(1, 3\)"):
        cr.MAP(init=torch.zeros(1, 3)).fit(problem(), seed=0)
    with pytest.raises(cr.InputError, match="init must be one of 'network', 'fresh', 'prior', got 'best'"):
        cr.MAP(init="best").fit(problem(), seed=0)
    laplace = cr.Problem(mlp(3, 6, 1, dtype=f64), data=(X, Y), likelihood=Gaussian(0.2), prior=cr.priors.Laplace())
    with pytest.raises(cr.InputError, match="anchored must be False unless the prior is Normal, got True"):
        cr.DeepEnsemble(anchored=True).fit(laplace, seed=0)
    with pytest.raises(cr.InputError, match="members must be a positive integer, got 0"):
        cr.DeepEnsemble(members=0)
    with pytest.raises(cr.InputError, match="steps must be None with epochs, got 5 and epochs=5"):
        cr.MAP(steps=5, epochs=5)


def test_progress_line():
    out = io.StringIO()
    with Progress("MAP", 10, show=True, stream=out) as line:
        line.update(5, loss=0.25)
        line.update(6, loss=0.2)  # too soon after the first
        line.update(10, final=True, loss=0.1)
    text = out.getvalue()
    assert "MAP" in text
    assert "5/10 loss 0.25" in text
    assert "6/10" not in text
    assert "10/10 loss 0.1" in text
    quiet = io.StringIO()
    with Progress("MAP", 10, stream=quiet) as line:
        line.update(10, final=True)
    assert quiet.getvalue() == ""


def test_map_inputs_keeps_the_structure():
    assert torch.equal(map_inputs(lambda t: t + 1, torch.zeros(2)), torch.ones(2))
    assert isinstance(map_inputs(lambda t: t, (torch.zeros(1), torch.ones(1))), tuple)
    assert list(map_inputs(lambda t: t, {"b": torch.zeros(1), "a": torch.ones(1)})) == ["b", "a"]
