"""Runs that cannot fit into memory are refused before they start, with their size and the way out."""

import logging
import re

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.core import memory
from credibly.curvature import cost
from credibly.curvature.gauss_newton import curvature_blocks
from credibly.curvature.parts import find_parts
from credibly.curvature.scores import Fisher
from credibly.errors import InputError

X, Y = randn(30, 4), randn(30)
MB = 10**6


def problem(width=2000):
    net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    return cr.Problem(net, (X, Y), cr.likelihoods.Gaussian(0.3), cr.priors.Normal())


@pytest.fixture
def free(monkeypatch):
    """Let a device have this many bytes left."""

    def leave(count):
        monkeypatch.setattr(memory, "available", lambda device: float(count))

    return leave


def test_available_memory_is_that_of_the_machine():
    with open("/proc/meminfo") as file:
        total = 1024 * int(re.search(r"MemTotal:\s+(\d+)", file.read())[1])
    assert 0 < memory.available(torch.device("cpu")) <= total


def test_a_container_leaves_its_limit_less_what_is_used_and_cannot_be_dropped(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 200000\nactive_file 100000\n")
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path)
    assert memory._container() == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container() == float("inf")


@pytest.mark.parametrize(
    "method", [cr.SGHMC(chains=4, draws=50), cr.HMC(chains=4, draws=50), cr.SGLD(chains=4, draws=50)]
)
def test_draws_that_do_not_fit_are_refused_with_their_size_and_out(method, free):
    given = problem()
    free(4 * 50 * given.dim * 4)  # the draws alone
    with pytest.raises(InputError, match=r'draws 9\.6 MB.*9\.6 MB are free\. Pass out="run/".*random="head') as caught:
        method.fit(given)
    assert caught.value.argument == "draws"
    assert f"{type(method).__name__} with 4 chains of 50 draws of {given.dim:,} parameters" in str(caught.value)


def test_with_a_folder_only_the_state_of_the_chains_has_to_fit(free, tmp_path):
    given = problem()
    method = cr.SGHMC(chains=4, draws=50, warmup=0, thin=1, step_size=1e-4, init="fresh")
    free(8 * 4 * given.dim * 4)
    posterior = method.fit(given, out=tmp_path / "run")
    assert posterior.draws.shape == (4, 50, given.dim)
    free(3 * 4 * given.dim * 4)
    with pytest.raises(InputError, match="state of the chains.*Use fewer chains"):
        method.fit(given, out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_disk_that_is_too_small_is_found_before_the_run(monkeypatch, tmp_path):
    from credibly.inference import footprint

    given = problem()
    usage = type(footprint.shutil.disk_usage("/"))(10 * MB, 9 * MB, 1 * MB)
    monkeypatch.setattr(footprint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"out: the draws of .* need 9\.6 MB on disk, 1\.0 MB are free.*draw_dtype"):
        cr.SGHMC(chains=4, draws=50).fit(given, out=tmp_path / "deep" / "run")


@pytest.mark.parametrize(
    "method, values",
    [
        (cr.MAP(steps=2), 4),
        (cr.DeepEnsemble(members=3, steps=2), 12),
        (cr.BayesByBackprop(steps=2), 8 + 2),
        (cr.BayesByBackprop(steps=2, family="low-rank", rank=5), 28 + 2),
        (cr.SWAG(steps=2, rank=5, iterates=6, sgd_lr=0.01, batch_size=8), 3 + 4 + 7),
        (cr.SWAG(steps=2, rank=5, iterates=6, batch_size=8), 3 + 7 + 4 + 7),
    ],
    ids=str,
)
def test_training_that_does_not_fit_is_refused(method, values, free):
    """Each needs so many vectors of the size of the network, and activations."""
    given = problem()
    rows = method.batch_size or 30
    need = values * given.dim * 4 + 0.5 * rows * given.forward.row_width * 4
    free(need - 1)
    with pytest.raises(InputError, match=rf"{type(method).__name__} of {given.dim:,} parameters needs at least"):
        method.fit(given)
    free(need)
    method.check_memory(given)


def test_activations_that_do_not_fit_are_refused_with_a_smaller_batch(free):
    given = problem()
    free(given.dim * 4 * 4 + 100)
    with pytest.raises(InputError, match="parameters needs at least"):
        cr.MAP(batch_size=30).check_memory(given)
    free(given.dim * 4 * 4 + 0.5 * 3 * given.forward.row_width * 4)
    cr.MAP(batch_size=30, accumulate=10).check_memory(given)


def words(width=300):
    torch.manual_seed(0)
    net = nn.Linear(4, width)
    return cr.Problem(net, (X, torch.arange(30) % width), cr.likelihoods.Categorical(), cr.priors.Normal())


def test_a_long_laplace_fit_is_announced_with_its_backward_passes(caplog, monkeypatch):
    monkeypatch.setattr(cost, "LONG", 0.0)
    with caplog.at_level(logging.WARNING, logger="credibly"):
        assert cost.warn_if_long(words(), Fisher(), 1500, 8) == 300 * 4
        assert cost.warn_if_long(words(), Fisher("sampled", 2), 1500, 8) == 2 * 4
    assert len(caplog.records) == 1
    assert "300 values per row of output take 1,200 backward passes over blocks of 8 rows" in caplog.text
    assert 'fisher="sampled"' in caplog.text


def test_wide_outputs_take_fewer_rows_at_a_time(monkeypatch):
    """The matrix of a row of 300 classes has 90,000 values, far more than the network; the curvature is the same."""
    from credibly.curvature import gauss_newton

    seen = []
    given = words()
    theta = given.layout.read(given.layout.module)
    parts = find_parts(given.layout, [e.name for e in given.layout.entries], X[:1])
    original = gauss_newton.rows_per_block
    monkeypatch.setattr(gauss_newton, "rows_per_block", lambda *a: seen.append(original(*a)) or 30)
    whole = curvature_blocks(given, theta, "diag", parts)
    monkeypatch.setattr(gauss_newton, "rows_per_block", original)
    monkeypatch.setattr(gauss_newton, "BLOCK_VALUES", 2**20)
    small = curvature_blocks(given, theta, "diag", parts)
    assert seen == [2**22 // 300**2]
    for a, b in zip(whole, small):
        for left, right in zip(a.tensors, b.tensors):
            torch.testing.assert_close(left, right)
