"""The posteriors of posteriordb: densities against scipy, stored references against closed forms, samplers."""

import json

import pytest
import torch
from posterior_oracles import log_density

from benchmarks.posteriordb import __main__ as command
from benchmarks.posteriordb import page
from benchmarks.posteriordb.models import POSTERIORS, regression
from benchmarks.posteriordb.models.mixtures import forward
from benchmarks.posteriordb.models.series import recurrence
from benchmarks.posteriordb.reference import FUNCTIONS, read_data, read_reference, referenced, summarise
from benchmarks.posteriordb.run import Outcome, compare, model_of, run_ours
from benchmarks.posteriordb.torch_arrays import TorchArrays

DOUBLE = torch.float64
# The quick ones. `python -m benchmarks.posteriordb` samples all of them.
SAMPLED = (
    pytest.param("arma-arma11", "NUTS", marks=pytest.mark.nightly),
    pytest.param("gp_pois_regr-gp_regr", "NUTS", marks=pytest.mark.nightly),
    ("gp_pois_regr-gp_regr", "HMC"),
)


def points_of(posterior, model):
    """Return two unconstrained points; for differential equations in the bulk of the posterior."""
    if model.constrain is torch.exp and "gp" not in posterior:
        mean = read_reference(posterior).mean
        return torch.stack([mean, 1.05 * mean]).log()
    return 0.3 * torch.randn(2, model.dim, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)


def log_jacobian(model, w):
    """Return the log determinant of the transform; rows of a transition matrix have one free element each."""
    kept = [i for i, name in enumerate(model.names) if name not in ("theta1[2]", "theta2[2]")]
    return float(torch.linalg.slogdet(torch.autograd.functional.jacobian(model.constrain, w)[kept]).logabsdet)


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_log_density_is_that_of_the_stan_program(posterior):
    model, data = model_of(posterior), read_data(posterior)
    points = points_of(posterior, model)
    expected = [
        log_density(posterior, data, model.constrain(w).numpy(), model.names) + log_jacobian(model, w) for w in points
    ]
    found = model.log_prob(points)
    torch.testing.assert_close(model.log_prob(points[1]), found[1])  # one point, as under JAX
    # Constants are omitted. Differential equations are solved with steps of fixed size.
    approximate = posterior.startswith(("hudson", "one_comp"))
    error = abs(float(found[1] - found[0]) - (expected[1] - expected[0]))
    assert error < (1e-3 if approximate else 1e-8 * max(1.0, abs(expected[0]), abs(expected[1])))


@pytest.mark.parametrize(
    "posterior", [p for p in regression.REGRESSIONS if not p.startswith(("diamonds", "kilp", "sblr"))]
)
def test_references_of_flat_priors_are_least_squares(posterior):
    """With a flat prior E beta is the least-squares solution whatever sigma: data, columns and reference agree."""
    model, reference = model_of(posterior), read_reference(posterior)
    size = model.dim - 1
    # The density is quadratic in beta: its Newton step from anywhere is the solution.
    w = torch.zeros(model.dim, dtype=DOUBLE)
    w[size] = reference.mean[size].log()
    slope = torch.autograd.functional.jacobian(model.log_prob, w)[:size]
    curvature = torch.autograd.functional.hessian(model.log_prob, w)[:size, :size]
    solution = -torch.linalg.solve(curvature, slope)
    z = (solution - reference.mean[:size]) / (reference.sd * reference.errors[0])[:size]
    assert float(z.abs().max()) < 4.5
    # Var beta = sigma^2 (X'X)^-1 for given sigma, and E sigma^2 over them.
    wide = reference.mean[size].square() + reference.sd[size].square()
    sd = (torch.linalg.inv(-curvature).diagonal() * wide / reference.mean[size].square()).sqrt()
    error = (sd / reference.sd[:size]).square() - 1
    assert float((error / reference.errors[1][:size]).abs().max()) < 5


def test_recurrence_and_forward_algorithm_equal_their_loops():
    inputs, factor = torch.randn(3, 13, dtype=DOUBLE), torch.tensor([0.5, -1.1, 0.0], dtype=DOUBLE)
    value, values = torch.zeros(3, dtype=DOUBLE), []
    for t in range(13):
        value = inputs[:, t] + factor * value
        values.append(value)
    torch.testing.assert_close(recurrence(TorchArrays(), inputs, factor), torch.stack(values, 1))
    for count in (2, 7, 8):
        emission, move = torch.randn(count, 3, dtype=DOUBLE), torch.randn(3, 3, dtype=DOUBLE)
        state = emission[0]
        for seen in emission[1:]:
            state = torch.logsumexp(state[:, None] + move, 0) + seen
        torch.testing.assert_close(forward(TorchArrays(), emission, move), torch.logsumexp(state, 0))


@pytest.fixture(scope="module")
def reference():
    draws = torch.randn(10, 1000, 2, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    return summarise(draws * torch.tensor([1.0, 3.0]) + torch.tensor([0.0, 5.0]), ("a", "b"), "simulated")


class TestComparison:
    def draws(self, shift=0.0, stretch=1.0):
        draws = torch.randn(4, 500, 2, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
        return (draws * stretch + shift) * torch.tensor([1.0, 3.0]) + torch.tensor([0.0, 5.0])

    def test_right_draws_agree(self, reference):
        assert float(reference.scores(self.draws()).abs().max()) < reference.limit

    def test_z_of_a_shift_and_of_a_scale_are_as_computed_by_hand(self, reference):
        z = reference.scores(self.draws(shift=0.2))
        error = (1 / 2000 + 1 / 10_000) ** 0.5
        assert torch.allclose(z[0], torch.full((2,), 0.2 / error, dtype=DOUBLE), atol=2.5)
        wide = reference.scores(self.draws(stretch=1.2))
        # The variance of x^2 is 2 s^4.
        error = (2 * 1.2**4 / 2000 + 2 / 10_000) ** 0.5
        assert torch.allclose(wide[1], torch.full((2,), 0.44 / error, dtype=DOUBLE), atol=3.0)
        assert bool((wide[0].abs() < 4).all())

    def test_chains_that_do_not_move_are_infinitely_far(self, reference):
        assert bool(torch.isinf(reference.scores(torch.zeros(4, 500, 2))).all())

    def test_verdicts(self, reference, monkeypatch):
        monkeypatch.setattr("benchmarks.posteriordb.run.read_reference", lambda name: reference)
        blank = Outcome("p", "NUTS", 2, 0, steps=7.0, divergent=0.0)
        assert compare(blank, self.draws()).verdict == "agrees"
        assert compare(blank, self.draws(shift=0.3)).verdict == "differs"
        apart = self.draws() + torch.tensor([0.0, 0.0, 5.0, 5.0])[:, None, None]
        assert compare(blank, apart).verdict == "not mixed"
        assert Outcome("p", "NUTS", 2, 0, failure="no step size").verdict == "failed"


def test_references_are_of_the_parameters_of_their_models():
    assert len(referenced()) >= 45
    for posterior in referenced():
        reference = read_reference(posterior)
        assert model_of(posterior).names == reference.names
        assert reference.errors.shape == (len(FUNCTIONS), len(reference.names))
        # Ten thousand draws that are nearly independent.
        assert float(reference.errors[0].max()) < 0.02, posterior


def test_page_and_csv_show_failures(tmp_path):
    given = {"z": (1.0, 2.0, 0.5, 0.25), "limit": 4.0, "rhat": 1.001, "divergent": 0.0, "warmup_gradients": 100.0}
    outcomes = [
        Outcome("arK-arK", "HMC", 7, 0, **given, ess=1000.0, steps=5.0),
        Outcome("arK-arK", "NUTS", 7, 0, failure="no step size was found"),
        Outcome("arK-arK", "BlackJAX NUTS", 7, 0, **given, ess=1000.0, steps=10.0),
    ]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(one.record()) + "\n" for one in outcomes))
    (tmp_path / "README.md").write_text(f"Title\n{page.MARKERS[0]}\nold\n{page.MARKERS[1]}\nrest\n")
    assert command.main(["--out", str(tmp_path / "runs.jsonl"), "--page", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("Title\n")
    assert text.endswith("rest\n")
    assert "old" not in text
    assert "NUTS, 1 posteriors: failed 1." in text
    assert "HMC over that of BlackJAX's NUTS, on the 1 posteriors" in text
    assert "median 2.00" in text
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("arK-arK,time series,posteriordb,NUTS,7,0,failed,")
    assert lines[2].split(",")[7:11] == ["1", "2", "0.5", "0.25"]
    assert lines[2].split(",")[15] == "100"  # 1000 / (4 * 500 * 5) per gradient


def test_unknown_names_are_refused(capsys):
    assert command.main(["--posteriors", "arK"]) == 2
    assert "unknown: 'arK'" in capsys.readouterr().err


@pytest.mark.parametrize("posterior,sampler", SAMPLED)
def test_samplers_agree_with_the_reference(posterior, sampler):
    outcome = run_ours(posterior, sampler, seed=0, warmup=150, draws=250)
    assert outcome.verdict == "agrees", outcome
    assert outcome.count == 1000
    assert outcome.ess > 300
