"""Samplers of loaders: the rows that they name are the rows of the problem and of predictions, and no others."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import credibly as cr
from conftest import mlp, randn
from credibly.core import row_order

X, Y = randn(40, 3), randn(40, 1, seed=1)
DATA = TensorDataset(X, Y)
PICKED = [31, 4, 17, 8, 2, 25]


class Fixed(Sampler):
    """The same rows in the same order in every pass."""

    def __iter__(self):
        return iter(PICKED)


class Shuffled(Sampler):
    """The same rows in another order in every pass."""

    def __iter__(self):
        return (torch.tensor(PICKED[int(i)]) for i in torch.randperm(len(PICKED)))


class Buckets:
    """A batch sampler of its own."""

    def __iter__(self):
        return iter([PICKED[:4], PICKED[4:]])


class Some(Sampler):
    def __iter__(self):
        return iter(torch.randperm(40)[:10].tolist())


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 0


class OwnEpoch(Sampler):
    """Shuffled from a generator of its own."""

    generator = torch.Generator().manual_seed(7)

    def __iter__(self):
        return (PICKED[int(i)] for i in torch.randperm(len(PICKED), generator=self.generator))


def sampled(sampler):
    return DataLoader(DATA, batch_size=5, sampler=sampler)


LOADERS = {
    "subset": (lambda: sampled(SubsetRandomSampler(PICKED)), PICKED),
    "batches": (lambda: DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler(PICKED), 4, True)), PICKED),
    "shorter source": (lambda: sampled(RandomSampler(range(7))), range(7)),
    "part of a shuffle": (lambda: sampled(RandomSampler(DATA, num_samples=3)), range(40)),
    "own order": (lambda: sampled(Fixed()), PICKED),
    "own shuffle": (lambda: sampled(Shuffled()), sorted(PICKED)),
    "own generator": (lambda: sampled(OwnEpoch()), sorted(PICKED)),
    "own batches": (lambda: DataLoader(DATA, batch_sampler=Buckets()), PICKED),
    "one process": (lambda: sampled(DistributedSampler(DATA, num_replicas=1, rank=0)), range(40)),
    "repeated rows": (lambda: sampled([3, 3, 1]), [3, 3, 1]),
    "lists": (lambda: DataLoader(DATA, None, sampler=BatchSampler(RandomSampler(DATA), 8, True)), range(40)),
}  # fmt: skip


def problem(data):
    return cr.Problem(mlp(3, 4, 1), data, cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))


@pytest.fixture(scope="module")
def posterior():
    return cr.MAP(steps=3).fit(problem((X, Y)))


@pytest.mark.parametrize("name", LOADERS)
def test_problems_and_predictions_have_the_rows_of_the_sampler(name, posterior):
    make, rows = LOADERS[name]
    made = problem(make())
    assert torch.equal(made.x, X[list(rows)])
    assert torch.equal(cr.data.in_memory(make())[1], Y[list(rows)])
    predicted = posterior.predict(make())
    torch.testing.assert_close(predicted.mean, posterior.predict(X[list(rows)]).mean)
    assert torch.equal(predicted.targets, Y[list(rows)])
    assert len(predicted) == len(rows)


def test_reading_the_order_leaves_generators_as_they_were():
    before, own = torch.get_rng_state(), OwnEpoch.generator.get_state()
    row_order.in_order(sampled(Shuffled()))
    row_order.in_order(sampled(OwnEpoch()))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(own, OwnEpoch.generator.get_state())


REFUSED = {
    "weighted": (WeightedRandomSampler(torch.ones(40), 40), "has a WeightedRandomSampler that draws rows with replace"),
    "bootstrap": (RandomSampler(DATA, replacement=True), "has a RandomSampler that draws rows with replacement"),
    "some rows": (Some(), "has a Some that names different rows in every pass"),
    "some by weight": (WeightedRandomSampler(torch.ones(40), 9, replacement=False), ".* names different rows in every"),
    "endless": (Endless(), "has a Endless that does not end"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_samplers_without_definite_rows_are_refused_with_the_way_out(name, posterior, monkeypatch):
    monkeypatch.setattr(row_order, "MOST_INDICES", 1000)
    sampler, message = REFUSED[name]
    with pytest.raises(
        cr.InputError, match=f"data: {message}.*number of rows is not defined. Stream it.*Stream.loader"
    ):
        problem(sampled(sampler))
    with pytest.raises(cr.InputError, match=f"x: {message}.*predictions match no rows. Pass a loader without it"):
        posterior.predict(sampled(sampler))


def test_the_way_out_of_sampling_with_replacement_works():
    made = problem(cr.data.Stream(sampled(WeightedRandomSampler(torch.ones(40), 25))))
    assert made.n == 25
    assert torch.isfinite(cr.MAP(epochs=2).fit(made).draws).all()


def test_samplers_of_several_processes_are_refused():
    split = sampled(DistributedSampler(DATA, num_replicas=2, rank=1))
    with pytest.raises(
        cr.InputError, match="data: has a DistributedSampler, which gives each of 2 processes other rows"
    ):
        problem(split)


def test_a_batch_sampler_does_not_hide_augmentation():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return X[i] + torch.randn(3), Y[i]

    assert problem(DataLoader(Noisy(), batch_sampler=BatchSampler(SequentialSampler(X), 5, False))).stream is not None


class Batches(torch.utils.data.Dataset):
    """Ready-made batches of 7 rows, the last one smaller, or single rows."""

    def __init__(self, size=7):
        self.size = size

    def __len__(self):
        return -(-40 // self.size)

    def __getitem__(self, i):
        rows = slice(self.size * i, self.size * (i + 1)) if self.size > 1 else i
        return X[rows], Y[rows, 0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_ready_made_batches_are_joined(shuffle, posterior):
    loader = DataLoader(Batches(), batch_size=None, shuffle=shuffle)
    assert torch.equal(problem(loader).x, X)
    assert torch.equal(cr.data.in_memory(loader)[1], Y[:, 0])
    assert problem(cr.data.Stream(loader)).n == 40
    torch.testing.assert_close(posterior.predict(loader).mean, posterior.predict(X).mean)


def test_rows_without_batches_are_refused():
    loader = DataLoader(Batches(1), batch_size=None)
    for read in (cr.data.in_memory, cr.data.Stream, problem):
        with pytest.raises(
            cr.InputError, match=r"its items are rows, and the loader makes no batches.*batch_size=\.\.\."
        ):
            read(loader)
