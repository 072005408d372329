"""Runs of HMC: equivalent ways to compute them, the record, and starting points."""

import math

import pytest
import torch
from hmc_targets import DOUBLE, SHORT, X, Y, density, hmc, problem

import credibly as cr
import credibly.problem
from conftest import mlp, randn
from credibly.core.chain_noise import ChainNoise
from credibly.inference.sampling.trajectory import even_chunk
from credibly.inference.target import to_target
from credibly.likelihoods import Gaussian


# -- equivalent computations -------------------------------------------------------------------------------------------
def test_batched_looped_micro_batched_and_chunked_runs_agree(monkeypatch):
    # No adaptation and short trajectories: rounding differences are not magnified yet.
    settings = {"chains": 5, "draws": 6, "warmup": 0, "init": "prior", "step_size": 0.03, "trajectory_length": 0.3}
    usual = hmc(problem(plan="batched"), **settings)
    history = usual.record.history
    assert (history["chains_at_once"], history["one_piece"]) == (5, True)
    looped = hmc(problem(plan="looped"), **settings)
    assert looped.record.history["chains_at_once"] == 1
    assert looped.record.history["plan"].startswith("looped")
    micro = hmc(problem(micro_batch=7), **settings)
    assert not micro.record.history["one_piece"]
    width = problem().forward.row_width
    monkeypatch.setattr(credibly.problem, "ACTIVATION_BUDGET", 2 * 25 * width)
    chunks = hmc(problem(), **settings)
    assert (chunks.record.history["chains_at_once"], chunks.record.history["one_piece"]) == (2, True)
    monkeypatch.setattr(credibly.problem, "ACTIVATION_BUDGET", 10 * width)
    least = hmc(problem(), **settings)
    assert (least.record.history["chains_at_once"], least.record.history["one_piece"]) == (1, False)
    for other in (looped, micro, chunks, least):
        torch.testing.assert_close(other.draws, usual.draws, rtol=1e-9, atol=1e-9)
        for name, values in usual.statistics.items():
            torch.testing.assert_close(other.statistics[name], values, rtol=1e-7, atol=1e-7)
    assert 0 < float(usual.statistics["acceptance"].mean()) < 1


def test_chunks_have_equal_size_if_that_costs_little():
    for chains in range(1, 40):
        for most in range(1, 40):
            size = even_chunk(chains, most)
            assert 1 <= size <= most
            fewest = math.ceil(chains / most)
            assert math.ceil(chains / size) <= 1.5 * fewest
            assert chains % size == 0 or all(chains % k for k in range(fewest, int(1.5 * fewest) + 1))
    assert [even_chunk(8, most) for most in (8, 7, 4, 3, 1)] == [8, 4, 4, 2, 1]
    assert even_chunk(7, 4) == 4  # seven chunks of one chain would be too many


def test_chunks_of_chains_adapt_together(monkeypatch):
    """One step size for all chains, from the acceptance of all chains."""
    settings = {**SHORT, "draws": 2}
    usual = hmc(problem(), **settings)
    monkeypatch.setattr(credibly.problem, "ACTIVATION_BUDGET", 2 * 25 * problem().forward.row_width)
    chunks = hmc(problem(), **settings)
    assert chunks.record.history["chains_at_once"] == 2
    assert chunks.record.history["step_size"] == pytest.approx(usual.record.history["step_size"], rel=1e-4)
    torch.testing.assert_close(chunks.draws, usual.draws, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"pooled": False},
        {"pooled": False, "jitter": 0.3, "refresh": 0.5},
        {"step_size": 0.05},
        {"step_size": 0.05, "integrator": "minimum-error"},
    ],
    ids=str,
)
def test_a_chain_does_not_depend_on_the_others_without_pooling(settings):
    start = 0.1 * randn(6, problem().dim, dtype=DOUBLE)
    start[2:] *= 30  # the others start where steps have to be much smaller
    # An adapted mass is shared by all chains.
    plain = {**SHORT, "mass": "identity", **settings}
    many = hmc(problem(), **{**plain, "chains": 6, "init": start})
    few = hmc(problem(), **{**plain, "chains": 2, "init": start[:2]})
    # Rounding differs with the number of chains, and adaptation magnifies it; a shared step size would give 1e-1.
    torch.testing.assert_close(few.draws, many.draws[:2], rtol=0, atol=1e-4)
    torch.testing.assert_close(
        torch.tensor(few.record.history["step_size"]), torch.tensor(many.record.history["step_size"][:2])
    )


def test_the_same_seed_gives_identical_draws():
    one, two, other = (hmc(problem(), seed=s, **SHORT) for s in (3, 3, 4))
    assert torch.equal(one.draws, two.draws)
    assert all(torch.equal(one.statistics[k], two.statistics[k]) for k in one.statistics)
    assert not torch.equal(one.draws, other.draws)
    assert len({tuple(row.tolist()) for row in one.draws[:, 0]}) == 5  # each chain has its own stream


def test_each_chain_has_its_own_noise():
    def noise(chains, seed=0, dim=3, purpose="momentum", **kwargs):
        return ChainNoise(seed, purpose, chains, dim, device=torch.device("cpu"), dtype=DOUBLE, **kwargs)

    many = noise(range(4))
    values = torch.stack([many.at(t).clone() for t in range(600)], 1)  # more than two blocks
    assert values.shape == (4, 600, 3)
    assert len(set(values.flatten().tolist())) == values.numel()  # no value repeats
    limit = 4.5 / math.sqrt(values.numel())
    assert abs(float(values.mean())) < limit
    assert abs(float(values.square().mean()) - 1) < math.sqrt(2) * limit
    assert torch.equal(
        noise(range(2, 3)).at(599)[0], values[2, 599]
    )  # independent of the other chains and of the order
    assert torch.equal(many.at(0), values[:, 0])
    assert not torch.equal(noise(range(4), seed=1).at(0), values[:, 0])
    assert not torch.equal(noise(range(4), purpose="other").at(0), values[:, 0])
    flat = noise(range(50), dim=40, uniform=True).at(5)
    assert 0 <= float(flat.min()) < 0.01
    assert 0.99 < float(flat.max()) < 1


def test_the_global_generator_is_not_used():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    hmc(problem(), **{**SHORT, "jitter": 0.3})
    assert torch.equal(torch.random.get_rng_state(), before)


def test_thinning_keeps_every_third_draw():
    usual = hmc(density(), chains=3, draws=30, warmup=40)
    third = hmc(density(), chains=3, draws=10, warmup=40, thin=3)
    assert torch.equal(third.draws, usual.draws[:, 2::3])
    assert torch.equal(third.statistics["energy"], usual.statistics["energy"][:, 2::3])


def test_a_shorter_run_is_a_prefix_of_a_longer_one():
    long, short = (hmc(density(), chains=3, draws=n, warmup=40) for n in (30, 12))
    assert torch.equal(long.draws[:, :12], short.draws)


@pytest.mark.slow
@pytest.mark.usefixtures("no_native")
@pytest.mark.nightly
def test_compiled_equals_eager():
    """Eleven steps per trajectory: eight in one call and three on their own."""
    settings = {**SHORT, "step_size": 0.05, "trajectory_length": 0.55, "warmup": 0}
    eager, fast = hmc(problem(), **settings), hmc(problem(), **{**settings, "compile": True})
    assert eager.record.history["steps"] == 11
    assert fast.record.history["compiled"]
    assert not eager.record.history["compiled"]
    torch.testing.assert_close(fast.draws, eager.draws, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(fast.statistics["energy"], eager.statistics["energy"], rtol=1e-8, atol=1e-8)


# -- record and statistics ---------------------------------------------------------------------------------------------
def test_the_record_describes_the_run():
    posterior = hmc(density(), chains=3, draws=20, warmup=100, thin=2, jitter=0.2)
    history = posterior.record.history
    assert history["phases"][0]["name"] == "step size"
    assert "mass" in [p["name"] for p in history["phases"]]
    assert history["phases"][-1] == {"name": "sampling", "first": 100, "end": 140}
    assert [p["first"] for p in history["phases"][1:]] == [p["end"] for p in history["phases"][:-1]]
    assert len(history["step_size"]) == len(history["acceptance"]) == len(history["divergences"]) == 3
    assert all(0 < a <= 1 for a in history["acceptance"])
    assert history["trajectory_length"] == pytest.approx(math.pi / 2)
    assert history["steps"] == math.ceil(math.pi / 2 / history["step_size"][0])
    assert history["mass"]["kind"] == "diagonal"
    assert history["gradients"] > 140 * 3
    assert history["seconds"] > 0
    assert not history["trajectory_shortened"]
    assert posterior.record.settings["chains"] == 3
    assert posterior.record.fingerprint == to_target(density()).fingerprint()
    for name in ("acceptance", "divergent", "energy", "log_likelihood", "log_prior"):
        assert posterior.statistics[name].shape == (3, 20)


def test_truncated_trajectories_are_recorded():
    posterior = hmc(density(), chains=2, draws=5, warmup=30, max_steps=2, trajectory_length=10.0)
    assert posterior.record.history["trajectory_shortened"]
    assert posterior.record.history["steps"] == 2


def test_the_recorded_density_is_that_of_the_draws():
    p = problem(temperature=cr.Tempering(0.5, 2.0))
    posterior = hmc(p, **SHORT)
    known = p.log_density_and_grad(posterior.draws.flatten(0, 1))
    torch.testing.assert_close(posterior.statistics["log_likelihood"].flatten(), known.log_likelihood)
    torch.testing.assert_close(posterior.statistics["log_prior"].flatten(), known.log_prior)


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_draws_stored_in_another_dtype_predict_alike(name, out, tmp_path):
    net = mlp(3, 6, 1)
    p = cr.Problem(net, data=(X.float(), Y.float()), likelihood=Gaussian(0.5), prior=cr.priors.Normal())
    settings = {**SHORT, "warmup": 0, "step_size": 0.05}
    usual = hmc(p, **settings)
    posterior = hmc(p, **settings, draw_dtype=name, out=tmp_path / "run" if out else None)
    error = torch.finfo(getattr(torch, name)).eps
    torch.testing.assert_close(posterior.draws.to(usual.draws), usual.draws, rtol=max(error, 1e-6), atol=1e-6)
    if name in ("float16", "bfloat16"):
        assert not torch.equal(posterior.draws.to(usual.draws), usual.draws)
    assert posterior.predict(X.float()).mean.dtype == torch.float32
    torch.testing.assert_close(
        posterior.predict(X.float()).mean, usual.predict(X.float()).mean, rtol=0, atol=20 * error + 1e-5
    )
    assert posterior.module(0, -1)(X.float()).dtype == torch.float32
    if not out:
        posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 6, 1, seed=5))
    assert torch.equal(loaded.predict(X.float()).mean, posterior.predict(X.float()).mean)


# -- starting points ---------------------------------------------------------------------------------------------------
def start_of(p, init, chains=3, seed=0):
    """Return the only draw of a run that does not move, which is its starting point."""
    settings = {"chains": chains, "draws": 1, "warmup": 0, "step_size": 1e-12, "trajectory_length": 1e-12}
    return hmc(p, init=init, seed=seed, **settings).draws[:, 0]


def test_chains_start_where_init_says():
    p = problem()
    own = p.layout.read(p.layout.module)
    given = randn(3, p.dim, dtype=DOUBLE)
    torch.testing.assert_close(start_of(p, given), given, rtol=0, atol=1e-9)
    torch.testing.assert_close(start_of(p, "network"), own.expand(3, -1), rtol=0, atol=1e-9)
    drawn = start_of(p, "prior", chains=40)
    assert float(drawn.std()) == pytest.approx(1.0, abs=4.5 / math.sqrt(2 * drawn.numel()))
    fresh = start_of(p, "fresh")
    assert float((fresh - own).abs().min(0).values.max()) > 0.01
    assert not torch.equal(fresh[0], fresh[1])
    bound = 1 / math.sqrt(3)  # of nn.Linear(3, ...)
    assert float(fresh.abs().max()) < bound
    point = start_of(p, "map")
    torch.testing.assert_close(point, point[:1].expand(3, -1), rtol=0, atol=1e-9)
    members = start_of(p, "ensemble")
    assert float((members[0] - members[1]).abs().max()) > 0.1
    for found in (point, members):
        assert float(p.log_density(found).min()) > float(p.log_density(fresh).max()) + 10


def test_chains_start_at_draws_of_a_posterior():
    p = problem()
    earlier = cr.DeepEnsemble(members=4, steps=20).fit(p, seed=0)
    started = start_of(p, earlier)
    gaps = torch.cdist(started, earlier.draws[:, 0])
    assert float(gaps.min(1).values.max()) < 1e-9


def test_chains_of_a_density_start_at_its_scale():
    flat = cr.Density(lambda w: -0.5 * w.square().sum(-1), 2, batched=True, scale=torch.tensor([1.0, 50.0]))
    started = start_of(flat, "prior", chains=400)
    assert float(started[:, 0].std()) == pytest.approx(1.0, rel=0.16)
    assert float(started[:, 1].std()) == pytest.approx(50.0, rel=0.16)
    assert not torch.equal(started, start_of(flat, "prior", chains=400, seed=1))
