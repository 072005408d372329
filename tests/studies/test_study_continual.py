"""The continual learning study on synthetic images."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from credibly.cli import app
from credibly.errors import InputError
from studies import continual, continual_benchmarks, find
from studies.study import Options


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A small file in the format of MNIST: "digits" are bright bars."""
    folder = tmp_path_factory.mktemp("digits")
    rng = np.random.default_rng(0)

    def digits(count):
        labels = rng.integers(0, 10, count)
        images = rng.integers(0, 30, (count, 28, 28))
        for image, label in zip(images, labels):
            image[:, 2 * label + 3 : 2 * label + 6] = 230
        return images.astype(np.uint8), labels.astype(np.uint8)

    x_train, y_train = digits(400)
    x_test, y_test = digits(150)
    np.savez(folder / "mnist.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return folder


def data_of(root):
    return continual.arrays(Options(root=root), continual.HOME, "x_train", "y_train", "x_test", "y_test")


def test_it_ends_in_a_page(root, tmp_path):
    words = ["study", "continual-mnist", "--root", str(root), "--out", str(tmp_path / "out"), "--quick", "--quiet"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "out"
    results, text = json.loads((folder / "results.json").read_text()), (folder / "README.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\((\w[\w-]*)\.svg\)", text)
    assert len(shown) == 2
    assert all(0 < (folder / f"{s}.svg").stat().st_size < 200_000 for s in shown)
    assert all(sentence in text for sentence in results["sentences"])
    assert results["sentences"][0].startswith("Reproduced:" if results["held"] else "Not reproduced:")
    found = results["numbers"]["accuracy"]
    assert set(found) == set(continual.BENCHMARKS)
    for strategies in found.values():
        assert list(strategies) == list(continual.STRATEGIES)
        for seeds in strategies.values():
            assert np.shape(seeds) == (continual.QUICK_SEEDS, 2)
            assert all(0 <= value <= 1 for values in seeds for value in values)


def test_the_same_seed_gives_the_same_accuracies(root):
    size = continual.Size(2, 60, 30, 15, 5)
    runs = []
    for _ in range(2):
        benchmark = continual_benchmarks.permuted(data_of(root), size, 3, "cpu")
        runs.append(continual.accuracies(continual.fitted("vcl-coreset", benchmark, size, 3), benchmark))
    assert runs[0] == runs[1]


def test_permuted_tasks_have_the_same_pixels_in_other_places(root):
    data = data_of(root)
    benchmark = continual_benchmarks.permuted(data, continual.Size(3, 50, 20, 1, 0), 0, "cpu")
    assert [x.shape for x, _ in benchmark.tasks] == [(50, 784)] * 3
    for (x, y), (x_test, y_test) in zip(benchmark.tasks, benchmark.tests):
        # A row is a permuted training image with its label.
        sums = data[0].sort(1).values
        match = (sums.unsqueeze(0) == x[:1].sort(1).values.unsqueeze(1)).all(-1).nonzero()[:, 1]
        assert int(data[1][match[0]]) == int(y[0])
        assert x_test.shape == (20, 784)
        assert len(y_test) == 20
    # Training and test images of a task have the same permutation: bright bars of a class are at the same pixels.
    x, y = benchmark.tasks[1]
    x_test, y_test = benchmark.tests[1]
    label = int(y_test[0])
    assert torch.equal(x[y == label][0] > 0.5, x_test[0] > 0.5)
    assert not torch.equal(benchmark.tasks[0][0][benchmark.tasks[0][1] == label][0] > 0.5, x_test[0] > 0.5)


def test_split_tasks_have_two_digits_and_their_number(root):
    benchmark = continual_benchmarks.split(data_of(root), continual.Size(5, 30, 10, 1, 0), 0, "cpu")
    for t, ((x, task), y) in enumerate(benchmark.tasks):
        assert set(y.tolist()) == {0, 1}
        assert set(task.tolist()) == {t}
        bar = x.reshape(-1, 28, 28)[:, 0].gt(0.5).float().argmax(1)
        assert torch.equal((bar - 3) // 2 - 2 * t, y)
    assert benchmark.heads == [f"heads.{t}.*" for t in range(5)]


def test_fine_tuning_forgets_and_joint_training_does_not(root, monkeypatch):
    """On easy tasks: after the last of three permutations, the first is forgotten by one and kept by the other."""
    monkeypatch.setitem(continual.SETTINGS, "fine-tuning", continual.Setting(3e-2))  # bars are hard to forget
    monkeypatch.setitem(continual.SETTINGS, "joint", continual.Setting(3e-3, 3.0))
    size = continual.Size(3, 250, 100, 80, 0)
    benchmark = continual_benchmarks.permuted(data_of(root), size, 1, "cpu")
    tuned, both = (
        continual.accuracies(continual.fitted(strategy, benchmark, size, 1), benchmark)
        for strategy in ("fine-tuning", "joint")
    )
    assert tuned[-1] > 0.95
    assert min(both) > 0.95
    assert tuned[0] < both[0] - 0.1


def test_fine_tuning_leaves_the_heads_of_other_tasks_alone(root):
    """A prior would not: Adam turns any pull to zero, however weak, into a full step."""
    size = continual.Size(2, 60, 20, 15, 0, hidden=8)
    benchmark = continual_benchmarks.split(data_of(root), size, 2, "cpu")
    first = continual.fitted("fine-tuning", replace(benchmark, tasks=benchmark.tasks[:1]), size, 2)
    both = continual.fitted("fine-tuning", benchmark, size, 2)
    for entry in both.layout.entries:
        same = torch.equal(*(p.draws.flatten()[entry.start : entry.stop] for p in (first, both)))
        assert same is entry.name.startswith("heads.0."), entry.name


def made(vcl=0.2, coreset=0.3):
    """Return accuracies in which these strategies exceed fine-tuning by the given amounts, within a hundredth."""
    wobble = (-0.01, 0.0, 0.01)
    base = {"fine-tuning": 0.0, "vcl": vcl, "vcl-coreset": coreset, "laplace": 0.1, "joint": 0.4}
    return {
        name: {
            strategy: [[0.5 + gain + w * (1 + place), 0.6 + gain] for w in wobble]
            for place, (strategy, gain) in enumerate(base.items())
        }
        for name in continual.BENCHMARKS
    }


@pytest.mark.parametrize(
    "change, reproduced",
    [({}, True), ({"vcl": 0.0}, False), ({"coreset": -0.1}, False), ({"vcl": 0.004}, False), ({"vcl": -0.2}, False)],
)
def test_the_rule(change, reproduced):
    sentences, found = continual.judge(made(**change))
    assert found is reproduced
    assert sentences[0].startswith("Reproduced:" if reproduced else "Not reproduced:")


def test_missing_files_arrays_and_options(root, tmp_path):
    study = find("continual-mnist")
    with pytest.raises(InputError, match=r"has no mnist.npz"):
        study.run(Options(root=tmp_path, quick=True))
    np.savez(tmp_path / "mnist.npz", other=np.zeros(3))
    with pytest.raises(InputError, match=r"mnist.npz has no x_train"):
        study.run(Options(root=tmp_path, quick=True))
    with pytest.raises(InputError, match="--set rows must be a positive integer, got 'many'"):
        continual.size_of("split", Options(root=root, extra={"rows": "many"}))
    assert continual.size_of("permuted", Options(extra={"rows": "600", "steps": "7"})).rows == 600
