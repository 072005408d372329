"""LoRA on few labels: the texts, the rule of the verdict, and a run on synthetic reviews."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from credibly.cli import app
from credibly.errors import InputError
from studies import find, lora, lora_fits, lora_text
from studies.study import Options

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Reviews in the format of the real ones, padded in front; word 9 is in the positive ones."""
    folder = tmp_path_factory.mktemp("reviews")
    rng = np.random.default_rng(0)

    def part(count):
        ids, labels = rng.integers(10, 400, (count, 100)), rng.integers(0, 2, count)
        for row, label in zip(ids, labels):
            row[: rng.integers(0, 60)] = 0
            row[-3] = 9 if label else 8
        return ids.astype(np.uint16), labels.astype(np.uint8)

    (x_train, y_train), (x_test, y_test) = part(250), part(120)
    np.savez(folder / lora_text.FILE, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return folder


def test_texts_are_padded_at_the_end_and_rare_words_are_unknown(root):
    ids, labels = lora_text.texts(Options(root), "train", 300)
    with np.load(root / lora_text.FILE) as archive:
        given = torch.from_numpy(archive["x_train"].astype(np.int64))
        assert labels.tolist() == archive["y_train"].tolist()
    for before, after in zip(given, ids):
        words = before[before != 0]
        words[words >= 300] = lora_text.UNKNOWN
        assert after.tolist() == words.tolist() + [0] * (100 - len(words))


def test_other_texts_keep_lengths_and_words(root):
    ids, _ = lora_text.texts(Options(root), "test", 300)
    mixed = lora_text.shuffled(ids, 0)
    assert torch.equal(mixed == 0, ids == 0)
    assert torch.equal(mixed.sort(1).values, ids.sort(1).values)
    assert not torch.equal(mixed, ids)
    drawn = lora_text.random_words(ids, ids, 0)
    assert torch.equal(drawn == 0, ids == 0)
    assert set(drawn.unique().tolist()) <= set(ids.unique().tolist())


def test_a_seed_selects_rows_without_overlap(root):
    size = lora_text.QUICK
    data = lora_text.reviews(Options(root), size, 3)
    train, validation = (part[0]["input_ids"] for part in (data.train, data.validation))
    assert (len(train), len(validation)) == (32, 8)
    assert len(torch.cat([train, validation]).unique(dim=0)) == 40
    assert len(data.test[1]) == size.test
    assert all(len(far["input_ids"]) == size.far for far in data.far.values())


def test_the_attention_mask_changes_nothing(root):
    """Padding is at the end, attention is causal, and the classifier reads the last word."""
    size = lora_text.QUICK
    options = Options(root)
    state = lora_text.pretrained(options, size)
    net = lora_text.with_adapter(state, size, 0).eval()
    ids = lora_text.texts(options, "test", size.words)[0][:6]
    with torch.no_grad():
        masked = net(input_ids=ids, attention_mask=(ids != 0).long()).logits
        torch.testing.assert_close(net(**lora_text.batch_of(ids)).logits, masked, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "temperature, laplace, held, start",
    [
        ((0.2, 0.21), (0.1, 0.11), True, "Reproduced:"),
        ((0.05, 0.06), (0.1, 0.11), False, "Not fully reproduced:"),
        ((0.05, 0.06), (0.4, 0.41), False, "Not reproduced:"),
    ],
)
def test_the_verdict_follows_the_rule(temperature, laplace, held, start):
    ece = {"plain": (0.3, 0.31), "temperature": temperature, "laplace": laplace}
    cells = [
        {
            "metrics": {name: dict.fromkeys(lora.METRICS, 0.5) | {"ece": values[i]} for name, values in ece.items()},
            "chosen": {"temperature": 2.0, "laplace": 1.0},
        }
        for i in range(2)
    ]
    found = lora.result_of(cells, tuple(ece), lora_text.QUICK, Options())
    assert found.reproduced is held
    assert found.sentences[0].startswith(start)


def test_it_ends_in_a_page_and_resumes(root, tmp_path, monkeypatch):
    kept = tmp_path / "cells"
    kept.mkdir()
    words = ["study", "lora-calibration", "--root", str(root), "--quick", "--quiet", "--set", f"cells={kept}"]
    words += ["--set", "methods=plain", "--out"]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    text = (tmp_path / "out" / "README.md").read_text()
    assert all(sentence in text for sentence in results["sentences"])
    assert len(results["numbers"]["cells"]) == lora.QUICK_SEEDS
    names = {"plain", "temperature", "laplace"}
    assert all(set(cell["metrics"]) == names for cell in results["numbers"]["cells"])
    assert all(set(cell["chosen"]) == {"temperature", "laplace"} for cell in results["numbers"]["cells"])
    monkeypatch.setattr(lora_fits, "posterior_of", None)  # nothing is fitted again
    again = CliRunner().invoke(app, [*words, str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "again" / "results.json").read_text())["numbers"] == results["numbers"]


@pytest.mark.parametrize("extra", [{"methods": "plain,other"}, {"seeds": "1"}, {"cells": "no such folder"}], ids=str)
def test_options_are_checked_first(root, extra):
    with pytest.raises(InputError, match=f"--set {next(iter(extra))}"):
        find("lora-calibration").run(Options(root, quick=True, extra=extra))
