"""The mushroom bandit on synthetic mushrooms: one column of letters determines which are poisonous."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import credibly as cr
from credibly.cli import app
from credibly.errors import InputError
from studies import bandit, find
from studies.study import Options


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mushrooms")
    rng = np.random.default_rng(0)
    letters = rng.choice(np.array([b"a", b"b", b"c"]), (120, 4))
    np.savez(folder / bandit.FILE, X=letters, y=(letters[:, 1] == b"b").astype(np.uint8))
    return folder


def options(root, **extra):
    return Options(root=root, seed=0, quick=True, extra={k: str(v) for k, v in extra.items()})


def test_it_ends_in_a_page(root, tmp_path):
    words = ["study", "mushroom-bandit", "--root", str(root), "--out", str(tmp_path / "out"), "--quick", "--quiet"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    text = (tmp_path / "out" / "README.md").read_text()
    assert "![" in text
    assert all(sentence in text for sentence in results["sentences"])
    found = results["numbers"]["cumulative_regret"]
    assert list(found) == list(bandit.POLICIES)
    assert all(len(v) == 2 and all(0 <= r <= 40 * 15 for r in v) for v in found.values())
    assert results["numbers"]["curve"]["mushrooms"][-1] == 40


def test_what_is_remembered(root):
    """A row of the problem is a mushroom, an action and the reward it brought."""
    mushrooms, poisonous = bandit.load(options(root))
    assert mushrooms.shape == (120, 12)
    assert torch.equal(mushrooms.reshape(120, 4, 3).sum(-1), torch.ones(120, 4))
    assert torch.equal(poisonous, mushrooms[:, 4] == 1)
    problem = bandit.problem_of(mushrooms, options(root))
    for kind, (action, reward) in enumerate([((1, 0), 0.0), ((0, 1), 5.0), ((0, 1), -35.0)]):
        rows = slice(120 * kind, 120 * (kind + 1))
        assert torch.equal(problem.x[rows, :12], mushrooms)
        assert torch.equal(problem.x[rows, 12:], torch.tensor([action]).float().expand(120, 2))
        torch.testing.assert_close(problem.y[rows, 0], torch.full((120,), reward / bandit.UNIT))


def test_the_loss_is_the_free_energy(root):
    """Misfit and KL of two agents against torch.distributions, and the gradient against finite differences."""
    made = bandit.problem_of(bandit.load(options(root))[0], options(root))
    noise, like = bandit.NOISE / bandit.UNIT, {"dtype": torch.float64}
    likelihood, prior = cr.likelihoods.Gaussian(noise), cr.priors.Normal(1.0, fan_in=True)
    problem = cr.Problem(made.layout.module, (made.x, made.y[:, 0]), likelihood, prior, **like)
    loss = bandit.FreeEnergies(problem, 2, updates=4, seed=0)
    assert loss.controls(0) == (1.0,)
    assert loss.controls(4 * 9) == (0.1,)
    assert loss.controls(4 * 9999) == (1 / bandit.MEMORY,)
    generator = torch.Generator().manual_seed(1)
    phi = torch.cat(
        [0.1 * torch.randn(2, problem.dim, generator=generator, **like), torch.full((2, problem.dim), -2.0, **like)], 1
    )
    rows = torch.randint(360, (2, 16), generator=generator)
    drawn = torch.randn(2, 1, problem.dim, generator=generator, **like)
    controls = torch.tensor([0.05], dtype=torch.float64)
    parts, gradient = loss.evaluate(phi, (), problem.x, problem.y, rows, (drawn,), controls)
    mu, sigma = phi[:, : problem.dim], torch.nn.functional.softplus(phi[:, problem.dim :])
    prior = torch.distributions.Normal(problem.prior.loc, problem.prior.std)
    kl = torch.distributions.kl_divergence(torch.distributions.Normal(mu, sigma), prior).sum(-1)
    torch.testing.assert_close(parts[:, 1], 0.05 * kl)
    for agent in range(2):
        weights = (mu + sigma * drawn[:, 0])[agent : agent + 1]
        output = problem.forward(weights, problem.x[rows[agent]])[0, :, 0]
        density = torch.distributions.Normal(output, noise)
        expected = -density.log_prob(problem.y[rows[agent], 0]).mean()
        torch.testing.assert_close(parts[agent, 0], expected)
    direction = torch.randn(phi.shape, generator=generator, **like)
    ends = [
        loss.evaluate(phi + s * 1e-6 * direction, (), problem.x, problem.y, rows, (drawn,), controls)[0].sum()
        for s in (1, -1)
    ]
    slope = float((ends[0] - ends[1]) / 2e-6)
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5)


def test_regret_falls_and_runs_repeat(root, monkeypatch):
    monkeypatch.setattr(bandit, "HIDDEN", (20,))
    chosen = options(root, steps=240, updates=4, repeats=2)
    sizes = bandit.sizes_of(chosen)
    mushrooms, poisonous = bandit.load(chosen)
    regret = bandit.play(bandit.problem_of(mushrooms, chosen), poisonous, sizes, chosen)
    assert regret.shape == (4, 2, 240)
    assert set(regret.unique().tolist()) <= {0.0, 5.0, 15.0}
    early, late = regret[..., :60].mean((1, 2)), regret[..., -60:].mean((1, 2))
    assert float(late[0]) < 0.5 * float(early[0])  # Thompson sampling
    result = bandit.result_of(regret, sizes, (120, 14))
    total = regret[0].double().sum(-1)
    assert result.numbers["cumulative_regret"]["Bayes by Backprop"] == total.tolist()
    gap = regret[1].double().sum(-1) - total
    mean, error = result.numbers["difference"]["greedy"]
    assert mean == pytest.approx(float(gap.mean()))
    assert error == pytest.approx(float(gap.std()) / math.sqrt(2))
    short = options(root, steps=6, updates=1, repeats=2)
    first, second = (
        bandit.play(bandit.problem_of(mushrooms, short), poisonous, bandit.sizes_of(short), short) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_the_rule():
    """Reproduced if every difference exceeds two standard errors, not if one policy is as good."""
    regret = torch.zeros(4, 3, 10)
    regret[1:] = 5.0
    regret[:, :, 0] += torch.tensor([0.0, 5.0, 10.0])  # repeats differ, alike for all
    assert bandit.result_of(regret, bandit.Sizes(10, 1, 3), (120, 14)).reproduced is True
    regret[2] = regret[0]
    assert bandit.result_of(regret, bandit.Sizes(10, 1, 3), (120, 14)).reproduced is False


def test_bad_input(root, tmp_path):
    study = find("mushroom-bandit")
    with pytest.raises(InputError, match=r"mushroom\.npz"):
        study.run(options(tmp_path))
    np.savez(tmp_path / bandit.FILE, X=np.zeros((3, 2), "S1"))
    with pytest.raises(InputError, match="no X or no y"):
        study.run(options(tmp_path))
    with pytest.raises(InputError, match="--set repeats must be an integer of at least 2, got '1'"):
        study.run(options(root, repeats=1))
    with pytest.raises(InputError, match="--set steps must be an integer of at least 1, got 'many'"):
        study.run(options(root, steps="many"))
    with pytest.raises(InputError, match="--set must name one of steps, updates, repeats, got agents"):
        study.run(options(root, agents=3))
