"""Threads of torch and of the C++ backend."""

import torch

import credibly as cr
from conftest import mlp, randn
from credibly.core.threads import native_threads, threads_for_native, torch_threads


def test_torch_leaves_its_threads_to_the_backend():
    with torch_threads(3):
        with threads_for_native():
            assert (torch.get_num_threads(), native_threads()) == (1, 3)
        assert (torch.get_num_threads(), native_threads()) == (3, 3)
        with threads_for_native(False):
            assert (torch.get_num_threads(), native_threads()) == (3, 3)


def test_a_small_problem_samples_and_trains_the_same_with_two_threads():
    x = randn(400, 3)
    problem = cr.Problem(mlp(3, 40, 1), (x, x.sum(1)), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))
    methods = (
        cr.HMC(chains=2, draws=3, warmup=20, start_steps=20),
        cr.HMC(chains=2, draws=3, warmup=20, start_steps=20, collapse=False),
        cr.DeepEnsemble(members=2, steps=30),
    )
    for method in methods:
        found = []
        for count in (1, 2):
            with torch_threads(count):
                found.append(method.fit(problem, seed=0).predict(x[:5]).mean)
                assert torch.get_num_threads() == count
        assert torch.equal(*found)
