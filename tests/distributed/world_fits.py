"""Fits of every method that trains, for test_world_training.py: in one process, under torchrun, and with failures.

torchrun --nproc-per-node 2 world_fits.py results FOLDER      fits all and writes the results of each process
python world_fits.py failures FOLDER                          two processes for each kind of failure
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import credibly as cr
from credibly.backends.cpp import in_use
from credibly.distributed import world
from credibly.inference.training import objectives
from credibly.likelihoods import Gaussian
from credibly.priors.elementwise import Normal

ROWS, STEPS = 37, 25
PLAIN = {"steps": STEPS, "compile": False}
CHAINS = {"warmup": 20, "draws": 3}

BIT_FOR_BIT = {
    "ensemble": cr.DeepEnsemble(members=3, batch_size=8, **PLAIN),
    "ensemble on one row": cr.DeepEnsemble(members=2, anchored=True, **PLAIN),
    "bootstrap": cr.DeepEnsemble(members=4, bootstrap=True, batch_size=8, **PLAIN),
    "stopped early": cr.DeepEnsemble(
        members=3, validation=0.3, patience=1, lr=0.1, steps=400, batch_size=8, compile=False
    ),
    "frozen ensemble": cr.DeepEnsemble(members=3, batch_size=8, **PLAIN),
    "frozen hmc": cr.HMC(chains=2, init="prior", compile=False, **CHAINS),
    "frozen sghmc": cr.SGHMC(chains=2, init="network", batch_size=8, thin=2, compile=False, **CHAINS),
}
TO_ROUNDING = {
    "mle on all rows": cr.MLE(**PLAIN),
    "map": cr.MAP(batch_size=5, clip_norm=0.5, **PLAIN),
    "map by sgd": cr.MAP(batch_size=8, optimiser="sgd", lr=0.002, validation=0.2, **PLAIN),
    "fewer rows than processes": cr.MAP(batch_size=1, **PLAIN),
    "bbb local": cr.BayesByBackprop(estimator="local", batch_size=7, samples=2, **PLAIN),
    "bbb flipout": cr.BayesByBackprop(estimator="flipout", batch_size=7, kl_weights="geometric", **PLAIN),
    "bbb weights": cr.BayesByBackprop(estimator="weights", init="map", members=2, learn_prior_scale=True, **PLAIN),
    "ivon": cr.IVON(batch_size=7, members=2, samples=2, clip_norm=0.5, hess_init=1.0, **PLAIN),
    "dropout grid": cr.MCDropout(insert="*", rate=(0.05, 0.3), batch_size=7, **PLAIN),
    "dropout concrete": cr.MCDropout(insert="*", concrete=True, **PLAIN),
    "swag": cr.SWAG(rank=2, iterates=4, every=5, batch_size=9, **PLAIN),
    "laplace": cr.Laplace(structure="full", batch_size=8, **PLAIN),
    "frozen map": cr.MAP(batch_size=5, **PLAIN),
    "frozen bbb": cr.BayesByBackprop(batch_size=7, **PLAIN),
    "frozen laplace": cr.Laplace(structure="full", batch_size=8, **PLAIN),
    "weighted map": cr.MAP(batch_size=5, validation=0.2, **PLAIN),
    "weighted dropout": cr.MCDropout(insert="*", rate=0.1, batch_size=7, **PLAIN),
}


def problem(seed=0, shift=0.0, weights=None):
    """Return a small regression in float64; the seed sets the network's weights, the shift is added to the data."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.randn(ROWS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return cr.Problem(
        net, (x, torch.sin(2 * x[:, :1]) + x[:, 1:] + shift), Gaussian(0.3), Normal(1.5), sample_weight=weights
    )


def with_frozen_body():
    """Return a regression whose last layer alone is random: the rest is run once per row, in every process."""
    torch.manual_seed(0)
    body = [nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 5), nn.Tanh()]
    given = problem()
    net = nn.Sequential(*body, nn.Linear(5, 1)).double()
    return cr.Problem(net, (given.x, given.y), Gaussian(0.3), Normal(1.5), random="4.*")


def tensors_and_history(posterior):
    """Return every tensor of a fitted posterior, and its history."""
    tensors = {"draws": posterior.sample(3, seed=1)}
    for name in ("draws", "phi", "theta", "loc"):
        value = getattr(posterior, name, None)
        if isinstance(value, torch.Tensor):
            tensors[name] = value
    history = json.loads(json.dumps(posterior.record.history))
    # These depend on the processes.
    for own in ("seconds", "mesh", "chains_at_once"):
        history.pop(own, None)
    return tensors, history


def fit_all(target):
    """Return the tensors and the histories of all fits, by name."""
    every = {**BIT_FOR_BIT, **TO_ROUNDING}
    others = {"weighted": problem(weights=torch.arange(ROWS) % 4), "frozen": with_frozen_body()}
    found = {
        name: tensors_and_history(method.fit(others.get(name.partition(" ")[0], target), seed=3, progress=False))
        for name, method in every.items()
    }
    return {name: tensors for name, (tensors, _) in found.items()}, {name: past for name, (_, past) in found.items()}


def results(folder):
    """Write the results of each process of a joint fit. They build different networks, and use the leader's."""
    here = world.current()
    target = problem(seed=here.rank)
    tensors, histories = fit_all(target)
    torch.save(tensors, folder / f"tensors-{here.rank}.pt")
    (folder / f"histories-{here.rank}.json").write_text(json.dumps(histories))
    saved = cr.MAP(**PLAIN).fit(target, seed=3, out=folder / "saved")
    assert torch.equal(cr.load(folder / "saved").draws, saved.draws)  # the other processes waited until it was written


# -- failures ----------------------------------------------------------------------------------------------------------
def other_data(rank, folder):
    cr.MAP(**PLAIN).fit(problem(shift=float(rank)))


def other_settings(rank, folder):
    cr.DeepEnsemble(members=2 + rank, **PLAIN).fit(problem())


def error_in_one(rank, folder):
    """Process 1 fails during training."""
    if rank == 1:
        evaluate = objectives.NegativeLogDensity.evaluate
        calls = []

        def failing(self, *args):
            calls.append(1)
            if len(calls) == 7:
                raise ArithmeticError("the seventh evaluation went wrong")
            return evaluate(self, *args)

        objectives.NegativeLogDensity.evaluate = failing
    cr.MAP(**PLAIN).fit(problem())


def diverging_member(rank, folder):
    """Member 2, trained by process 1, starts where the loss is not finite."""
    start = torch.zeros(3, problem().dim, dtype=torch.float64)
    start[2] = 1e200
    cr.DeepEnsemble(members=3, init=start, **PLAIN).fit(problem(), out=folder / "diverged")


def no_place_to_write(rank, folder):
    """The folder cannot be created: its parent is a file. Only the leader notices."""
    (folder / "file").write_text("")
    cr.MAP(**PLAIN).fit(problem(), out=folder / "file" / "saved")


def library_in_one(rank, folder):
    """Process 1 has no C++ library, so that its members would round differently."""
    if rank == 1:
        in_use.load_library = lambda: None
    cr.DeepEnsemble(members=2, **PLAIN).fit(problem())


FAILURES = [library_in_one, other_data, other_settings, error_in_one, diverging_member, no_place_to_write]


def failures(folder):
    """Run two processes for each kind of failure, with a store that outlives them, as with torchrun.

    They are forked before the stores are created: a store has a thread, which may hold a lock during a fork.
    """
    children, pipes = [], []
    for case in FAILURES:
        for rank in range(2):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(writer)
                _run(case, rank, int(os.read(reader, 16)), folder)
            os.close(reader)
            children.append(child)
            pipes.append(writer)
    stores = [torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in FAILURES]
    for i, writer in enumerate(pipes):
        os.write(writer, str(stores[i // 2].port).encode())
        os.close(writer)
    for child in children:
        os.waitpid(child, 0)


def _run(case, rank, port, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK="0")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    started = time.monotonic()
    outcome = {"kind": None, "message": ""}
    try:
        case(rank, folder)
    except BaseException as error:
        outcome = {"kind": type(error).__name__, "message": str(error)}
    outcome["seconds"] = time.monotonic() - started
    (folder / f"{case.__name__}-{rank}.json").write_text(json.dumps(outcome))
    os._exit(0)


if __name__ == "__main__":
    {"results": results, "failures": failures}[sys.argv[1]](Path(sys.argv[2]))
