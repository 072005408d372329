"""The study against a public HMC reference, on synthetic data: data formats, distances, and the rule for the order."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from credibly.cli import app
from credibly.errors import InputError
from studies import hmc_reference, reference_data
from studies.study import Options


@pytest.fixture
def root(tmp_path):
    """Two classes of 6 x 6 images, bright above or below, and a reference that is nearly certain of the right one."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 80).astype(np.uint8)
    x = rng.integers(0, 100, (80, 6, 6)).astype(np.uint8)
    x[y == 0, :3] += 120
    x[y == 1, 3:] += 120
    np.savez(tmp_path / "images.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    sure = np.where(y[60:, None] == np.arange(2), 0.95, 0.05).astype(np.float32)
    np.savez(tmp_path / "reference.npz", probs=sure, probs_earlier=0.99 * sure + 0.005)
    return tmp_path


def options(root, **extra):
    known = {
        "network": "mlp",
        "data": "images.npz",
        "reference": "reference.npz",
        "prior_variance": "0.1",
        "train_rows": "0",
    }
    return Options(root=root, quick=True, extra=known | extra)


def test_every_method_against_a_reference_of_images(root):
    result = hmc_reference.run(options(root, **{"map.epochs": "30", "ensemble.epochs": "30"}))
    assert list(result.numbers) == ["hmc", "sghmc", "sgld", "ensemble", "bbb", "dropout", "map", "reference, earlier"]
    assert result.numbers["ensemble"]["agreement"] > 0.9
    for row in result.numbers.values():
        assert 0 <= row["total_variation"] <= 1
    assert result.numbers["reference, earlier"]["agreement"] == 1
    assert result.numbers["reference, earlier"]["total_variation"] == pytest.approx(0.0045, abs=1e-4)
    best = max(list(result.numbers)[:-1], key=lambda name: result.numbers[name]["agreement"])
    assert any(f"The best is {best}" in line for line in result.sentences)


def test_token_ids_and_stored_differences():
    ids = np.arange(12, dtype=np.uint16).reshape(3, 4)
    x, _ = reference_data.tensors(ids, ids)
    assert x.dtype == torch.int64
    rng = np.random.default_rng(0)
    rgb = rng.integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    r, g, b = (rgb[..., i] for i in range(3))
    planes = np.stack([g, r - g, b - g], 1)
    d = np.diff(np.diff(planes, axis=3, prepend=np.uint8(0)), axis=2, prepend=np.uint8(0))
    found = reference_data.images({"d_train": d.astype(np.uint8)}, "train")
    assert np.array_equal(found, rgb)
    scaled, _ = reference_data.tensors(rgb, rgb)
    assert scaled.shape == (2, 3, 32, 32)
    assert float(scaled[0, 0, 0, 0]) == pytest.approx((rgb[0, 0, 0, 0] / 255 - 0.49) / 0.2, rel=1e-5)


@pytest.mark.parametrize(
    "steps, reproduced", [((0.0, 0.1, 0.2, 0.3), True), ((0.3, 0.2, 0.1, 0.0), False), ((0.1,) * 4, None)]
)
def test_the_order_is_judged_by_paired_differences(steps, reproduced):
    rng = np.random.default_rng(0)
    rows = 0.05 * rng.random(200)
    noise = 0.001 * rng.normal(size=(4, 200))
    given = {name: rows + step + n for name, step, n in zip(("hmc", "ensemble", "bbb", "map"), steps, noise)}
    found, sentences = hmc_reference.judge(given)
    assert found is reproduced
    assert len(sentences) == 4


def test_the_command_and_what_it_refuses(root, tmp_path):
    out = tmp_path / "out"
    words = [
        "study",
        "hmc-reference",
        "--root",
        str(root),
        "--quick",
        "--out",
        str(out),
        "--set",
        "methods=map,ensemble",
    ]
    words += ["--set", "network=mlp", "--set", "data=images.npz", "--set", "reference=reference.npz"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert set(json.loads(done.stdout)["numbers"]) == {"ensemble", "map", "reference, earlier"}
    assert {"index.html", "README.md", "results.json", "hmc-reference.svg"} == {p.name for p in out.iterdir()}
    with pytest.raises(InputError, match="has no nothing.npz"):
        hmc_reference.run(options(root, data="nothing.npz"))
    with pytest.raises(InputError, match="--set network must be one of .*, got 'big'"):
        hmc_reference.run(options(root, network="big"))
    with pytest.raises(InputError, match="--set must name one of .*, got wrong"):
        hmc_reference.run(options(root, wrong="1"))


def test_a_time_budget_continues_where_it_stopped(root, tmp_path):
    """Chains average their predictions as they run; a second run adds to the same averages."""
    out, extra = tmp_path / "out", ["network=mlp", "data=images.npz", "reference=reference.npz", "train_rows=0"]
    words = ["study", "hmc-reference", "--root", str(root), "--quick", "--out", str(out), "--budget", "2s"]
    words += [word for pair in [*extra, "sghmc.step_size=0.002"] for word in ("--set", pair)]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    state = tmp_path / "out.state.safetensors"
    before = load_file(state)
    rounds = len(before["tables"])
    assert before["tables"].shape == (rounds, 20, 2)
    torch.testing.assert_close(before["tables"].sum(-1), torch.ones(rounds, 20).double())
    second = CliRunner().invoke(app, words)
    assert second.exit_code == 0, second.output
    assert "continuing after" in second.output
    assert "total variation" in second.output
    after = load_file(state)
    assert len(after["tables"]) > rounds
    assert torch.equal(after["tables"][:rounds], before["tables"])
    ends = after["counts"][2:]
    assert bool((ends.diff() > 0).all())
    # The first third of the steps is warm-up.
    starts = torch.cat([torch.zeros(1), ends[:-1]])
    mean = after["tables"][starts >= ends[-1] / 3].mean(0)
    stored = json.loads((out / "results.json").read_text())["numbers"]
    found = torch.from_numpy(np.load(root / "reference.npz")["probs"])
    assert stored["sghmc"]["total_variation"] == pytest.approx(float(0.5 * (mean - found).abs().sum(-1).mean()), 1e-4)


def test_budgets_are_for_studies_that_have_one(tmp_path):
    done = CliRunner().invoke(app, ["study", "gap-regression", "--out", str(tmp_path / "out"), "--budget", "1min"])
    assert done.exit_code == 2
    assert "study gap-regression has no time budget" in done.output


def test_a_mixture_adds_members_until_its_budget(root, tmp_path):
    extra = {"method": "ivon", "ivon.epochs": "20", "ivon.lr": "0.1"}
    lines = []
    given = {"budget": 3.0, "state": tmp_path / "state.safetensors", "show": lines.append}
    first = hmc_reference.run(dataclasses.replace(options(root, **extra), **given))
    assert list(first.numbers) == ["ivon", "one member", "one member's mean", "reference, earlier"]
    assert first.numbers["ivon"]["agreement"] > 0.9
    trained = len(load_file(given["state"])["tables"])
    assert trained >= 4
    second = hmc_reference.run(dataclasses.replace(options(root, **extra), **given))
    after = load_file(given["state"])["tables"]
    assert len(after) > trained
    assert f"{len(after)} members" in second.notes[0]
    assert any(line.startswith(f"continuing after {first.notes[0].split()[3]}") for line in lines)
    mean = after.mean(0)
    torch.testing.assert_close(mean.sum(-1), torch.ones(20).double())
    found = torch.from_numpy(np.load(root / "reference.npz")["probs"])
    assert second.numbers["ivon"]["total_variation"] == pytest.approx(
        float(0.5 * (mean - found).abs().sum(-1).mean()), 1e-4
    )
    with pytest.raises(InputError, match=r"--set method must be that of the run in .*state.safetensors"):
        hmc_reference.run(dataclasses.replace(options(root), **given))
