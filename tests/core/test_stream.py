"""Streams: which data are streamed, how many rows they have, what every pass sees, and what is refused by name."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from stream_rows import Rows
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import credibly as cr
from conftest import mlp
from credibly.core import loading, stream
from credibly.core.stream import as_stream

GAUSSIAN, PRIOR = cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0)


class Flow(IterableDataset):
    def __init__(self, n, rows=None):
        self.n, self.rows = n, rows or Rows(64)

    def __iter__(self):
        n = self.n.pop(0) if isinstance(self.n, list) else self.n
        return iter([self.rows[i % len(self.rows)] for i in range(n)])


class Endless(IterableDataset):
    def __iter__(self):
        rows, i = Rows(64), 0
        while True:
            yield rows[i % 64]
            i += 1


def problem(data, **kwargs):
    return cr.Problem(mlp(3, 4, 1), data, GAUSSIAN, PRIOR, **kwargs)


def passes(data, count, seed=0, purpose="training", **kwargs):
    """The batches of the first passes, as one tensor per pass."""
    bound = problem(cr.data.Stream(data, **kwargs)).stream
    found = list(islice(bound.passes(seed, purpose), count * bound.batches))
    return [torch.cat([b.x for b in found[k * bound.batches : (k + 1) * bound.batches]]) for k in range(count)]


# -- which data are streamed


def test_deterministic_loaders_stay_in_memory_in_order():
    rows = Rows()
    made = problem(DataLoader(rows, batch_size=6, shuffle=True, drop_last=True))
    assert made.stream is None
    assert torch.equal(made.x, rows.x)
    assert problem(TensorDataset(rows.x, rows.y)).fingerprint() == made.fingerprint()


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_augmented_data_are_streamed_and_the_record_says_why(source):
    made = problem(DataLoader(Rows(noise=0.1, source=source), batch_size=6))
    assert made.stream is not None
    posterior = cr.MAP(steps=3).fit(made)
    assert posterior.record.history["stream"]["reason"].startswith("augmented")
    assert posterior.record.n == 20


def test_data_larger_than_a_quarter_of_the_memory_are_streamed(monkeypatch):
    rows = Rows()
    monkeypatch.setattr(stream, "host_memory", lambda: 4.0 * 20 * 16)
    assert as_stream(rows) is None  # 16 bytes per row: exactly a quarter
    monkeypatch.setattr(stream, "host_memory", lambda: 4.0 * 20 * 16 - 1)
    assert "quarter of the memory" in as_stream(rows).reason


@pytest.mark.parametrize("limit", [{"host_memory": lambda: 16.0 * 200}, {"MOST_COUNTED": 200}])
def test_an_iterable_that_does_not_fit_names_the_way_out(monkeypatch, limit):
    for name, value in limit.items():
        monkeypatch.setattr(loading, name, value)
    with pytest.raises(cr.InputError, match=r"data: did not end within 256 rows.*Stream\(loader, n="):
        problem(Endless())


def test_small_iterables_are_read_into_memory():
    assert problem(DataLoader(Flow(10), batch_size=4)).n == 10


# -- N


def test_n_is_counted_given_or_the_length_of_the_data_set():
    loader = DataLoader(Flow(10), batch_size=4)
    assert (cr.data.Stream(loader).n, cr.data.Stream(loader).batches) == (10, 3)
    assert cr.data.Stream(DataLoader(Endless(), batch_size=4), n=64).n == 64
    assert cr.data.Stream(DataLoader(Rows(), batch_size=6, drop_last=True)).batches == 3
    assert cr.data.Stream(DataLoader(Rows(), batch_size=6, sampler=SubsetRandomSampler(range(9)))).n == 9


def test_an_endless_stream_is_refused_before_work(monkeypatch):
    monkeypatch.setattr(stream, "MOST_COUNTED", 500)
    with pytest.raises(cr.InputError, match=r"n must be given: the stream did not end within 500 rows"):
        cr.data.Stream(DataLoader(Endless(), batch_size=64))


def test_a_wrong_n_and_other_data_are_refused():
    with pytest.raises(cr.InputError, match="n must be the number of rows of the data set, 20, got 21"):
        cr.data.Stream(Rows(), n=21)
    with pytest.raises(cr.InputError, match="loader must be a DataLoader or a Dataset"):
        cr.data.Stream(torch.zeros(3, 2))
    with pytest.raises(cr.InputError, match="sample_weight must be None for a stream"):
        problem(cr.data.Stream(Rows()), sample_weight=torch.ones(20))


@pytest.mark.parametrize("lengths", [[10, 8], [10, 12]])
def test_a_changing_length_is_refused_in_the_pass_that_shows_it(lengths):
    made = problem(cr.data.Stream(DataLoader(Flow([*lengths, 10]), batch_size=4)))
    assert made.n == 10
    with pytest.raises(cr.InputError, match="its length changes: a pass had .* rows, N is 10"):
        cr.MAP(epochs=2).fit(made)


def test_an_endless_stream_with_n_continues_from_pass_to_pass():
    first, second = passes(DataLoader(Endless(), batch_size=8), 2, n=16)
    assert first[:, 0].tolist() == list(range(16))
    assert second[:, 0].tolist() == list(range(16, 32))


# -- what a pass sees


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_every_pass_has_its_own_shuffle_and_augmentations_and_the_seed_fixes_both(source):
    def loader():
        return DataLoader(Rows(noise=0.1, source=source), batch_size=6, shuffle=True)

    first, second = passes(loader(), 2)
    again, _ = passes(loader(), 2)
    (other,) = passes(loader(), 1, seed=1)
    assert torch.equal(first, again)
    for found in (first, second, other):
        assert sorted(found[:, 0].tolist()) == list(range(20))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    by_row = [found[found[:, 0].argsort()] for found in (first, second)]
    assert (by_row[0][:, 1] - by_row[1][:, 1]).abs().min() > 0


def test_streams_leave_the_generators_of_the_process_alone():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    made = problem(cr.data.Stream(DataLoader(Rows(noise=0.1), batch_size=6, shuffle=True)))
    cr.MAP(steps=8).fit(made)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()


def test_batch_samplers_are_respected():
    def loader(drop=True):
        return DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 6, drop_last=drop))

    made = problem(cr.data.Stream(loader()))
    assert (made.n, made.stream.batches) == (20, 3)
    assert cr.MAP(epochs=3).fit(made).record.history["stream"]["shuffled"]
    first, second = passes(loader(False), 2)
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(20))
    assert not torch.equal(first, second)
    assert torch.equal(first, passes(loader(False), 1)[0])


def test_the_loaders_own_generator_follows_the_seed():
    def loader():
        return DataLoader(Rows(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(9))

    assert torch.equal(passes(loader(), 1)[0], passes(loader(), 1)[0])
    assert not torch.equal(passes(loader(), 1, seed=1)[0], passes(loader(), 1)[0])


def test_set_epoch_is_called_for_every_pass():
    class Counting(Flow):
        seen = []  # noqa: RUF012

        def set_epoch(self, epoch):
            self.seen.append(epoch)

    made = problem(cr.data.Stream(DataLoader(Counting(8), batch_size=4), n=None))
    Counting.seen.clear()
    list(islice(made.stream.passes(0, "training"), 5))
    assert Counting.seen == [0, 1, 2]


def test_passes_can_be_continued_after_some_batches():
    bound = problem(cr.data.Stream(DataLoader(Rows(noise=0.1), batch_size=6, shuffle=True))).stream
    whole = list(islice(bound.passes(3, "training"), 11))
    rest = list(islice(bound.passes(3, "training", skip=6), 5))
    for a, b in zip(whole[6:], rest, strict=True):
        assert torch.equal(a.x, b.x)


def test_workers_read_the_same_rows_as_the_process_itself():
    """Without augmentation, so that their own random states do not matter."""
    here = passes(DataLoader(Rows(), batch_size=6, shuffle=True), 2)
    there = passes(DataLoader(Rows(), batch_size=6, shuffle=True, num_workers=1), 2)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b)


def test_in_memory_reads_a_stream_once():
    rows = Rows(noise=0.1)
    x, y = cr.data.in_memory(cr.data.Stream(DataLoader(rows, batch_size=6, shuffle=True)))
    assert x[:, 0].tolist() == list(range(20))
    assert torch.equal(y, rows.y)
    assert problem((x, y)).stream is None


def test_what_needs_all_rows_says_so():
    made = problem(cr.data.Stream(Rows()))
    with pytest.raises(cr.InputError, match=r"data: is a stream of 20 rows, .*in_memory\(loader\)"):
        _ = made.x
    assert "streamed (asked for)" in repr(made)
    assert not hasattr(made, "unknown")
