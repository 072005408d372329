"""Many processes: the same draws as one, whichever process dies, and the error of the one that failed."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import credibly as cr
from credibly.distributed.world import Mesh, World, alone, current, parse_mesh, shard
from credibly.errors import InputError
from credibly.storage.stored_draws import StoredDraws, join_shards
from warm_python import warm_python

PROGRAMS = Path(__file__).parent / "world_programs.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
]


def start(name, folder, processes=1, *, restarts=0, check=True, python=None, **environment):
    """Run a program of `world_programs` and return the completed process. `python` runs the workers of torchrun."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}",
    ]
    command = [warm_python(), *(torchrun if processes > 1 else []), str(PROGRAMS), name, str(folder)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CREDIBLY_", "PYTEST_"))}
    done = subprocess.run(
        command,
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python or warm_python(), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_shards_hold_everything_once():
    for count in range(12):
        for size in range(1, 6):
            parts = [shard(count, rank, size) for rank in range(size)]
            assert [i for part in parts for i in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text, size", [("2x3", 4), ("0x4", 4), ("two", 2), ("4", 4)])
def test_a_mesh_that_does_not_fit_is_refused(text, size):
    with pytest.raises(InputError, match=f"CREDIBLY_MESH must (be chains by rows|multiply to {size}).*, got {text!r}"):
        parse_mesh(text, size)


def test_meshes_are_chosen_by_the_chains(monkeypatch):
    monkeypatch.setattr("credibly.distributed.world._make_mesh", lambda world, shape: Mesh(world, shape))
    assert World(size=8).mesh(8).shape == (8, 1)
    assert World(size=8).mesh(3).shape == (2, 4)
    assert World(size=3).mesh(8).shape == (3, 1)
    assert World(size=4).mesh(1).shape == (1, 4)
    monkeypatch.setenv("CREDIBLY_MESH", "2x4")
    assert World(size=8).mesh(8).shape == (2, 4)
    with pytest.raises(InputError, match=r"CREDIBLY_MESH must have at most one chain rank per chain \(1\), got '2x4'"):
        World(size=8).mesh(1)


def test_in_a_single_process_everything_is_the_identity():
    world = World()
    mesh = world.mesh(4)
    values = torch.arange(8.0).reshape(4, 2)
    assert mesh.shape == (1, 1)
    assert mesh.chains(4) == range(4)
    assert torch.equal(mesh.all_chains(values, 4), values)
    assert torch.equal(mesh.sum_rows(values.clone()), values)
    assert world.gather({"a": 1}) == [{"a": 1}]
    with alone():
        assert current().size == 1


def test_shards_in_several_files_are_read_as_one(tmp_path):
    from safetensors.torch import save_file

    whole = torch.arange(5 * 6 * 2.0).reshape(5, 6, 2)
    for number, (draws, groups) in enumerate([(slice(0, 4), [(0, 2), (2, 5)]), (slice(4, 6), [(0, 5)])]):
        for first, last in groups:
            name = f"{number:05d}-c{first:05d}" if len(groups) > 1 else f"{number:05d}"
            save_file({f"draws/{name}": whole[first:last, draws].contiguous()}, tmp_path / f"draws-{name}.safetensors")
    names = sorted(p.name for p in tmp_path.iterdir())
    stored = StoredDraws(tmp_path, names, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(stored.tensor(), whole)
    assert torch.equal(stored.columns(1, 2), whole[..., 1:])
    assert torch.equal(stored.rows(3, 20), whole.reshape(-1, 2)[3:20])
    assert torch.equal(stored.pick(torch.tensor([29, 0, 13])), whole.reshape(-1, 2)[[29, 0, 13]])
    parts = {"00000-c00000": whole[:2, :4], "00000-c00002": whole[2:, :4], "00001": whole[:, 4:]}
    assert torch.equal(join_shards(parts), whole)


def test_chains_on_two_processes_are_bit_for_bit_those_of_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    start("samplers", one)
    start("samplers", two, 2, python=sys.executable)  # each with a hash seed of its own, which must change nothing
    names = ("hmc", "each", "nuts", "low-rank", "chees", "mclmc", "mile", "tempering", "sgld", "variate", "sghmc")
    for name in names:
        expected, found = load_file(one / f"{name}.safetensors"), load_file(two / f"{name}.safetensors")
        assert expected.keys() == found.keys()
        for key, values in expected.items():
            assert torch.equal(found[key], values), f"{name}: {key}"
        stored = cr.load(two / name)
        assert torch.equal(stored.draws, expected["draws"])
        assert torch.equal(stored.statistics["log_likelihood"], expected["log_likelihood"])
        assert {p.name[:18] for p in (two / name).glob("draws-*")} == {"draws-00000-c00000", "draws-00000-c00002"}


def test_rows_on_a_mesh_of_four_change_rounding_only(tmp_path):
    start("rows", tmp_path)
    alone_draws = load_file(tmp_path / "rows-0.safetensors")["draws"]
    start("rows", tmp_path, 4, CREDIBLY_MESH="2x2")
    found = [load_file(tmp_path / f"rows-{rank}.safetensors")["draws"] for rank in range(4)]
    assert all(torch.equal(f, found[0]) for f in found)  # every process made the same decisions
    torch.testing.assert_close(found[0], alone_draws, rtol=1e-9, atol=1e-11)


def test_killed_processes_are_restarted_and_end_in_the_same_draws(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    start("long", whole)
    moments = random.Random(5)
    deaths = ",".join(f"{moments.randrange(2)}:{moments.randrange(2, 50)}" for _ in range(2))
    start("long", broken, 2, restarts=3, DIE=deaths)
    assert torch.equal(cr.load(broken / "long").draws, cr.load(whole / "long").draws)


def test_a_run_resumes_with_another_number_of_processes(tmp_path):
    whole, fewer, more = (tmp_path / name for name in ("whole", "fewer", "more"))
    for folder in (whole, fewer, more):
        folder.mkdir()
    start("long", whole)
    expected = cr.load(whole / "long").draws
    assert start("long", fewer, 2, check=False, DIE="1:40").returncode != 0
    half_written = fewer / "long" / "draws-00000-c00002.safetensors"
    half_written.write_bytes(b"cut short")  # left by a process that died while writing a shard
    shutil.copytree(fewer, tmp_path / "three")
    start("resume", fewer)
    assert torch.equal(cr.load(fewer / "long").draws, expected)
    start("resume", tmp_path / "three", 3)
    assert torch.equal(cr.load(tmp_path / "three" / "long").draws, expected)
    assert start("long", more, check=False, DIE="0:40").returncode != 0
    start("resume", more, 2)
    assert torch.equal(cr.load(more / "long").draws, expected)


@pytest.mark.nightly
def test_programs_that_end_right_after_a_collective_call_succeed(tmp_path):
    for _ in range(3):  # threads that still held tensors used to abort about every second such program
        start("brief", tmp_path, 3, python=sys.executable)  # a warm interpreter shuts down in another order


def outcome(folder, kind, rank):
    name, seconds, message = (folder / f"{kind}-{rank}.txt").read_text().split("\n", 2)
    return name, float(seconds), message


def test_an_error_of_one_process_ends_the_others_at_once_with_its_message(tmp_path):
    done = start("trouble", tmp_path, 2, check=False, TROUBLE="raise")
    assert done.returncode != 0
    assert outcome(tmp_path, "raise", 1)[0] == "OSError"
    name, seconds, message = outcome(tmp_path, "raise", 0)
    assert name == "PeerError"
    assert seconds < 60  # not the time limit of ten minutes
    assert "process 1 of 2 failed" in message
    assert "the disk of process 1 is on fire" in message
    first, second = done.stderr.index("OSError: the disk"), done.stderr.index("PeerError: process 1")
    assert first < second


@pytest.mark.nightly
def test_a_process_that_hangs_is_named_after_the_time_limit(tmp_path):
    assert start("trouble", tmp_path, 2, check=False, TROUBLE="hang", CREDIBLY_TIMEOUT="5").returncode != 0
    name, _, message = outcome(tmp_path, "hang", 0)
    assert name == "PeerError"
    assert "process 1 of 2 did not answer" in message


def test_processes_with_other_data_or_without_shared_storage_are_refused(tmp_path):
    assert start("trouble", tmp_path, 2, check=False, TROUBLE="data").returncode != 0
    name, _, message = outcome(tmp_path, "data", 0)
    assert name == "InputError"
    assert "process 0" in message
    assert "process 1" in message
    assert start("trouble", tmp_path, 2, check=False, TROUBLE="folder").returncode != 0
    name, _, message = outcome(tmp_path, "folder", 1)
    assert name == "StoreError"
    assert "share" in message
