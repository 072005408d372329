"""The active learning study on synthetic images: page, cells on disk, and conclusions from known numbers."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from credibly.cli import app
from credibly.errors import InputError
from studies import active, active_cell
from studies.study import Options


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A small file in the format of MNIST: "digits" are bright bars whose position is their class."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)

    def digits(count):
        labels = np.arange(count) % 10
        images = rng.integers(0, 30, (count, 28, 28))
        for image, label in zip(images, labels):
            image[:, 2 * label + 3 : 2 * label + 6] = 230
        return images.astype(np.uint8), labels.astype(np.uint8)

    x_train, y_train = digits(150)
    x_test, y_test = digits(50)
    np.savez(folder / "mnist.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return folder


def command(*words):
    return CliRunner().invoke(app, ["study", "active-mnist", *map(str, words), "--quick", "--quiet"])


def test_a_study_ends_in_a_page(root, tmp_path):
    done = command("--root", root, "--out", tmp_path / "out", "--set", "seeds=2")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "out"
    names = {"index.html", "README.md", "results.json", "active-mnist.svg"}
    assert {p.name for p in folder.iterdir()} == names
    stored = json.loads((folder / "results.json").read_text())
    assert set(stored["numbers"]["needed"]) == set(active_cell.ARMS)
    curve = stored["numbers"]["curves"]["bald-dropout"][0]
    assert curve["labels"][0] == 10
    assert curve["labels"] == sorted(curve["labels"])
    assert all(0 <= a <= 1 for a in curve["accuracy"])
    assert "BALD" in (folder / "README.md").read_text()


def test_cells_are_kept_and_arms_run_apart(root, tmp_path, monkeypatch):
    cells = tmp_path / "cells"

    def options(arms):
        extra = {"arms": arms, "cells": str(cells), "seeds": "1"}
        return Options(root=root, quick=True, extra=extra)

    active.run(options("bald-dropout"))
    kept = (cells / "bald-dropout-0.json").read_text()
    active.run(options("random-dropout"))
    monkeypatch.setattr(active, "run_cell", lambda *a, **k: pytest.fail("a cell was run again"))
    both = active.run(options("bald-dropout,random-dropout"))
    assert (cells / "bald-dropout-0.json").read_text() == kept
    assert list(both.numbers["needed"]) == ["random-dropout", "bald-dropout"]
    (cells / "settings.json").write_text("{}")
    with pytest.raises(InputError, match="runs of other settings"):
        active.run(options("bald-dropout"))


def test_a_cell_is_the_same_again(root):
    size = dataclasses.replace(active_cell.QUICK, target=2.0)  # out of reach, so that all rounds are made
    digits = active_cell.prepared(*active._read(Options(root=root), size))
    first = active_cell.run_cell("batch-ensemble", 1, digits, size)
    assert first == active_cell.run_cell("batch-ensemble", 1, digits, size)
    assert first["labels"] == [10, 15, 20, 25]
    assert first["needed"] is None


def test_edges_know_directions_and_places():
    upright, level = torch.zeros(1, 28, 28, dtype=torch.uint8), torch.zeros(1, 28, 28, dtype=torch.uint8)
    upright[:, 4:24, 10:13] = 255
    level[:, 10:13, 4:24] = 255
    a, b = (active_cell.edges(image).reshape(8, 7, 7) for image in (upright, level))
    assert a.reshape(-1).norm() == pytest.approx(1.0)
    assert set(a.sum((1, 2)).topk(2).indices.tolist()) == {0, 4}  # left and right edges
    assert set(b.sum((1, 2)).topk(2).indices.tolist()) == {2, 6}
    assert torch.allclose(a[0], b[2].T, atol=1e-6)


def made_up(needed):
    """Return cells that need the given numbers of labels; each curve reaches the target there."""
    return {
        arm: [
            {"seed": s, "labels": [20, n or 800], "accuracy": [0.5, 0.96 if n else 0.9], "needed": n}
            for s, n in enumerate(values)
        ]
        for arm, values in needed.items()
    }


def test_the_judgement_follows_the_numbers():
    size = active_cell.Size()
    fewer = {"random-dropout": [400, 420, 410], "bald-dropout": [200, 230, 205], "batch-dropout": [190, 210, 200]}
    result = active.result_of(made_up(fewer), size, 3)
    assert result.reproduced is True
    assert result.numbers["saved_against_random"]["bald-dropout"] == [200, 190, 205]
    assert (
        "BALD needs fewer labels than random acquisition for 95% accuracy (212 against 410; 198 ± 4 saved"
        in (result.sentences[1])
    )
    worse = {"random-dropout": [200, 230, 205], "bald-dropout": [400, 420, None]}
    result = active.result_of(made_up(worse), size, 3)
    assert result.reproduced is False
    assert result.numbers["saved_against_random"]["bald-dropout"] == [-200, -190, -595]
    assert any("Not every run of bald-dropout reached the target" in said for said in result.sentences)
    unclear = {"random-dropout": [300, 230, 205], "bald-dropout": [200, 320, 215]}
    assert active.result_of(made_up(unclear), size, 3).reproduced is None


def test_what_the_study_refuses(root, tmp_path):
    for extra, said in (
        ({"arms": "bald-hmc"}, "--set arms must be some of .*, got 'bald-hmc'"),
        ({"seeds": "none"}, "--set seeds must be a positive integer, got 'none'"),
        ({"colour": "red"}, "--set must name one of arms, seeds, cells, got 'colour'"),
    ):
        with pytest.raises(InputError, match=said):
            active.run(Options(root=root, quick=True, extra=extra))
    np.savez(tmp_path / "mnist.npz", x_train=np.zeros(3))
    with pytest.raises(InputError, match="has no y_train"):
        active.run(Options(root=tmp_path, quick=True))
