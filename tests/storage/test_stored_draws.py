"""Draws on disk are bit-for-bit the tensor they were, however they are read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import credibly as cr
from conftest import mlp, randn
from credibly.posterior import draws as posteriors
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.model import Model
from credibly.storage.record import Record
from credibly.storage.run_folder import write_tensors
from credibly.storage.stored_draws import StoredDraws

CHAINS, DIM = 3, 5


def stored(folder, counts, tail=0, *, keep=torch.float32, dtype=torch.float32, chains=CHAINS, dim=DIM):
    """Return draws in shards of the given lengths and a tail, and the tensor they hold."""
    whole = randn(chains, sum(counts) + tail, dim).to(keep)
    files, first = [], 0
    for number, count in enumerate(counts):
        files.append(f"draws-{number:05d}.safetensors")
        write_tensors(folder / files[-1], {f"draws/{number:05d}": whole[:, first : first + count]})
        first += count
    rest = whole[:, first:].clone() if tail else None
    return StoredDraws(folder, files, dtype=dtype, device=torch.device("cpu"), tail=rest), whole.to(dtype)


CASES = {
    "one shard": ([7], 0),
    "several": ([4, 4, 4, 2], 0),
    "of one draw": ([1, 1, 1], 0),
    "with a tail": ([4, 4], 3),
    "a tail alone": ([], 6),
    "one draw": ([1], 0),
}


@pytest.mark.parametrize("keep", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_way_of_reading_gives_the_tensor(tmp_path, case, keep):
    draws, whole = stored(tmp_path, *CASES[case], keep=keep)
    flat = whole.flatten(0, 1)
    total = len(flat)
    assert draws.shape == whole.shape
    assert draws.bytes == whole.numel() * 4
    assert torch.equal(draws.tensor(), whole)
    assert draws.tensor().dtype == torch.float32
    for start in range(DIM):
        for stop in range(start, DIM + 1):
            assert torch.equal(draws.columns(start, stop), whole[..., start:stop])
    for start in range(total):
        for stop in range(start, total + 1):
            assert torch.equal(draws.rows(start, stop), flat[start:stop])
    order = torch.randint(total, (40,), generator=torch.Generator().manual_seed(1))
    for indices in (order, torch.arange(total).flip(0), order[:0], torch.tensor([total - 1])):
        assert torch.equal(draws.pick(indices), flat[indices])


@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(1, 6), max_size=5), tail=st.integers(0, 4), data=st.data())
def test_any_shards_and_any_slice(tmp_path_factory, counts, tail, data):
    if not counts and not tail:
        tail = 1
    draws, whole = stored(tmp_path_factory.mktemp("draws"), counts, tail)
    flat = whole.flatten(0, 1)
    start = data.draw(st.integers(0, len(flat) - 1))
    stop = data.draw(st.integers(start, len(flat)))
    indices = torch.tensor(data.draw(st.lists(st.integers(0, len(flat) - 1), max_size=10)), dtype=torch.long)
    assert torch.equal(draws.rows(start, stop), flat[start:stop])
    assert torch.equal(draws.pick(indices), flat[indices])


def test_only_what_is_requested_is_read(tmp_path, monkeypatch):
    """A slice of one chain reads only the shards it lies in, and of them only its rows and columns."""
    draws, whole = stored(tmp_path, [4, 4, 4], 2)
    read = []
    part = draws._part

    def watched(number, *slices):
        tensor = part(number, *slices)
        read.append((number, tuple(tensor.shape)))
        return tensor

    monkeypatch.setattr(draws, "_part", watched)
    draws.rows(15, 20)  # chain 1, draws 1 to 5
    assert read == [(0, (1, 3, DIM)), (1, (1, 2, DIM))]
    read.clear()
    draws.columns(2, 4)
    assert read == [(0, (3, 4, 2)), (1, (3, 4, 2)), (2, (3, 4, 2)), (3, (3, 2, 2))]
    read.clear()
    assert torch.equal(draws.pick(torch.tensor([0, 41])), whole.flatten(0, 1)[[0, 41]])
    assert [number for number, _ in read] == [0, 3]


def test_they_are_found_after_a_change_of_directory(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    _, whole = stored(tmp_path / "run", [3, 3])
    monkeypatch.chdir(tmp_path)
    files = ["draws-00000.safetensors", "draws-00001.safetensors"]
    draws = StoredDraws("run", files, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert torch.equal(draws.tensor(), whole)


def test_shards_that_are_missing_truncated_or_replaced_raise(tmp_path):
    draws, _ = stored(tmp_path, [3, 3])
    second = tmp_path / "draws-00001.safetensors"
    content = second.read_bytes()
    for damage in ("gone", "cut", "other"):
        if damage == "gone":
            second.unlink()
        elif damage == "cut":
            second.write_bytes(content[:-9])
        else:
            write_tensors(second, {"draws/00000": randn(CHAINS, 3, DIM)})
        with pytest.raises(cr.StoreError, match=r"draws-00001.safetensors in .* is missing or was changed"):
            draws.tensor()
        with pytest.raises(cr.StoreError, match=r"draws-00001.safetensors in"):
            StoredDraws(tmp_path, draws.files, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(draws.rows(0, 3), draws.rows(0, 3))  # the first shard still reads


def test_shards_of_other_shapes_raise(tmp_path):
    draws, _ = stored(tmp_path, [3, 3])
    for shape in ((CHAINS + 1, 3, DIM), (CHAINS, 3, DIM + 1), (CHAINS, 3)):
        write_tensors(tmp_path / "draws-00001.safetensors", {"draws/00001": randn(*shape)})
        with pytest.raises(cr.StoreError, match="have incompatible shapes"):
            StoredDraws(tmp_path, draws.files, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("learned", [False, True])
def test_predictions_from_disk_are_those_from_memory(tmp_path, monkeypatch, learned):
    likelihood = cr.likelihoods.Gaussian() if learned else cr.likelihoods.Gaussian(0.3)
    x = randn(9, 3)
    problem = cr.Problem(mlp(3, 4, 1), (x, randn(9, seed=1)), likelihood, cr.priors.Normal())
    draws, whole = stored(tmp_path, [4, 4], 3, dim=problem.dim, keep=torch.float16)
    known = DrawsPosterior(Model.of(problem), whole, Record())
    disk = DrawsPosterior(Model.of(problem), draws, Record())
    assert torch.equal(disk.draws, known.draws)
    assert torch.equal(disk.sample(50, seed=3), known.sample(50, seed=3))
    assert torch.equal(disk.predict(x, draws=5).mean, known.predict(x, draws=5).mean)
    for left in (2**28, 0):  # read into memory first, or in blocks
        monkeypatch.setattr(posteriors, "KEPT_BYTES", left)
        for name in ("mean", "aleatoric", "epistemic"):
            assert torch.equal(getattr(disk.predict(x), name), getattr(known.predict(x), name))
    for a, b in zip(disk.module(2, 9).parameters(), known.module(2, 9).parameters()):
        assert torch.equal(a, b)
