"""The studies of aleatoric and epistemic uncertainty and of out-of-distribution images, on synthetic images."""

import json
import math
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from credibly.cli import app
from credibly.errors import InputError
from studies import find, kinds, ood, pixels
from studies import side_by_side as side
from studies.study import Options

FILES = ("mnist.npz", "fashion_mnist_test.npz", "kmnist_test.npz", "notmnist_test.npz")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Small files in the format of the real ones: "digits" are bright bars, the others noise with some digits among it.

    No score separates those digits from the digits at home, so no AUROC is 1 and none is without error.
    """
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)

    def digits(count):
        labels = rng.integers(0, 10, count)
        images = rng.integers(0, 30, (count, 28, 28))
        for image, label in zip(images, labels):
            image[:, 2 * label + 3 : 2 * label + 6] = 230
        return images.astype(np.uint8), labels.astype(np.uint8)

    x_train, y_train = digits(220)
    x_test, y_test = digits(60)
    np.savez(folder / FILES[0], x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    for name, most in zip(FILES[1:], (255, 120, 200)):
        noise = rng.integers(0, most, (45, 28, 28)).astype(np.uint8)
        np.savez(folder / name, x_test=np.concatenate([noise, digits(15)[0]]), y_test=y_test)
    return folder


def command(*words):
    return CliRunner().invoke(app, ["study", *map(str, words), "--quick", "--quiet"])


@pytest.mark.parametrize("name", [pytest.param("aleatoric-epistemic", marks=pytest.mark.nightly), "ood"])
def test_a_study_ends_in_a_page(name, root, tmp_path, monkeypatch):
    real = ood.settings
    short = {"sghmc": {"start_steps": 30}}
    monkeypatch.setattr(ood, "settings", lambda method, options: real(method, options) | short.get(method, {}))
    done = command(name, "--root", root, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "out"
    results, text = json.loads((folder / "results.json").read_text()), (folder / "README.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\((\w[\w-]*)\.svg\)", text)
    assert len(shown) >= 2
    assert {p.name for p in folder.iterdir()} == {
        "index.html",
        "README.md",
        "results.json",
        *(f"{s}.svg" for s in shown),
    }
    assert all((folder / f"{s}.svg").stat().st_size < 200_000 for s in shown)
    assert all(sentence in text for sentence in results["sentences"])
    failed = "Not fully reproduced:" if name == "aleatoric-epistemic" else "Not reproduced:"
    assert results["sentences"][0].startswith("Reproduced:" if results["held"] else failed)
    if name == "ood":
        by_set = results["numbers"]["auroc"]["ensemble"]
        assert set(by_set) == set(ood.FAR)
        assert all(0 <= value <= 1 and error > 0 for scores in by_set.values() for value, error in scores.values())
        # Without a model average there is no epistemic part: chance level, without error.
        assert results["numbers"]["auroc"]["map"]["KMNIST"]["epistemic"] == [0.5, 0.0]
    else:
        found = results["numbers"]["mean_variance"]
        assert set(found) == {"curve", "pixels"}
        assert list(found["pixels"]["dropout"]) == ["10", "20", "40"]
        assert set(found["pixels"]["dropout"]["40"]) == {"mnist", "fashion", "kmnist"}


@pytest.mark.parametrize("name", ["aleatoric-epistemic", "ood"])
def test_missing_files_and_arrays_are_named(name, root, tmp_path):
    done = command(name, "--root", tmp_path, "--out", tmp_path / "out")
    assert done.exit_code != 0
    assert "mnist.npz" in done.output
    for file in find(name).files:
        np.savez(tmp_path / file, other=np.zeros(3))
    with pytest.raises(InputError, match=r"mnist.npz has no x_train"):
        find(name).run(Options(root=tmp_path, quick=True))


# -- the per-pixel task


def test_the_noise_of_pixels_grows_to_the_right_and_copies_differ():
    clean = torch.zeros(400, 1, 14, 14)
    pair = pixels.noisy(clean, 0, "test")
    assert pair.x.shape == (400, 2, 14, 14)
    for copy in (pair.x[:, 0], pair.y[:, 0]):
        assert torch.allclose(copy.std((0, 1)), pixels.noise_levels(), rtol=0.06)
    both = torch.stack([pair.x[:, 0].flatten(), pair.y[:, 0].flatten()])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.02
    assert torch.equal(pair.x[0, 1, 3], torch.linspace(-0.5, 0.5, 14))


def test_training_pairs_of_fewer_rows_are_the_first_of_more(root):
    raw = pixels.read(Options(root=root))
    few, places = pixels.pairs(raw, 3, 10, 5)
    more, _ = pixels.pairs(raw, 3, 30, 5)
    assert torch.equal(few.clean, more.clean[:10])
    assert list(places) == ["mnist", "fashion", "kmnist"]
    assert not torch.equal(places["mnist"].x[:, 0], pixels.pairs(raw, 4, 10, 5)[1]["mnist"].x[:, 0])


def test_the_wave_has_the_same_noise_beyond_the_data():
    here, beyond = kinds.grid(0, 2), kinds.grid(2, 4)
    assert here.abs().max() == 2
    assert beyond.abs().min() > 2
    assert kinds.noise_variance(beyond) == pytest.approx(kinds.noise_variance(here), rel=0.02)


# -- the rules


def made(epistemic_rows=0.4, aleatoric_rows=1.0, epistemic_far=3.0, aleatoric_far=1.0):
    """Return variances in which each kind changes by the given factors, within a hundredth."""
    wobble = (0.99, 1.0, 1.01)

    def parts(epistemic, aleatoric):
        return {"epistemic": [epistemic * w for w in wobble], "aleatoric": [aleatoric * w for w in wobble[::-1]]}

    by_size = {
        100: {"here": parts(1.0, 2.0), "far": parts(5.0, 2.0)},
        400: {
            "here": parts(epistemic_rows, 2.0 * aleatoric_rows),
            "far": parts(epistemic_rows * epistemic_far, 2.0 * aleatoric_rows * aleatoric_far),
        },
    }
    return {task: dict.fromkeys(kinds.METHODS, by_size) for task in kinds.TASKS}


@pytest.mark.parametrize(
    "change, claim",
    [
        ({}, None),
        ({"epistemic_rows": 1.0}, "epistemic falls with more data"),
        ({"aleatoric_rows": 1.5}, "aleatoric is unchanged with more data"),
        ({"aleatoric_rows": 0.6}, "aleatoric is unchanged with more data"),
        ({"epistemic_far": 0.9}, "epistemic rises on inputs 'far'"),
        ({"aleatoric_far": 1.4}, "aleatoric does not rise on inputs 'far'"),
    ],
)
def test_kinds_rule(change, claim):
    variances = made(**change)
    sentences, reproduced = kinds.judge(variances)
    assert reproduced is (claim is None)
    failed = {name for name, ok in kinds.checks(variances["curve"]["dropout"]).items() if not ok}
    assert failed == ({claim} if claim else set())
    assert sentences[0].startswith("Reproduced: 16 of 16" if reproduced else "Not fully reproduced: 12 of 16")
    if claim:
        assert f"{claim} (pixels, MC-Dropout)" in sentences[0]
    assert side.mean_text(kinds.factors(variances["curve"]["dropout"])["far"]["epistemic"]) in sentences[1]


def ood_numbers(gain, error):
    auroc = {
        m: {name: dict.fromkeys(ood.SCORES, (0.9, 0.01)) for name in ood.FAR}
        for m in ("map", "dropout", "bbb", "ensemble", "sghmc")
    }
    for name in ood.FAR:
        auroc["ensemble"][name] = dict.fromkeys(ood.SCORES, (0.9 + gain, 0.01))
    return auroc, {m: dict.fromkeys(ood.SCORES, (gain if m == "ensemble" else 0.0, error)) for m in auroc}


@pytest.mark.parametrize("gain, error, reproduced", [(0.03, 0.005, True), (0.03, 0.02, False), (-0.03, 0.005, False)])
def test_ood_rule(gain, error, reproduced):
    sentences, found = ood.judge(*ood_numbers(gain, error))
    assert found is reproduced
    assert f"{gain:+.3f} ± {error:.3f}" in sentences[0]
    best = "highest AUROC is that of deep ensemble" if gain > 0 else "the lowest that of deep ensemble"
    assert best in sentences[2]


def test_bootstrap_gives_the_error_of_an_auroc_and_of_paired_differences():
    generator = torch.Generator().manual_seed(0)
    draw = lambda shift: torch.randn(400, generator=generator, dtype=torch.float64) + shift  # noqa: E731
    scores = {name: dict.fromkeys(ood.SCORES, draw(float(name != ""))) for name in ("", *ood.FAR)}
    kept = dict.fromkeys(ood.METHODS, scores)
    auroc = {m: {n: dict.fromkeys(ood.SCORES, (0.76, math.nan)) for n in ood.FAR} for m in ood.METHODS}
    gains = ood.bootstrap(kept, auroc, 0, 200)
    # Two normals one standard deviation apart: AUROC 0.76, error 0.0168 for 400 against 400 (Hanley and McNeil).
    for name in ood.FAR:
        assert auroc["ensemble"][name]["total"][1] == pytest.approx(0.0168, rel=0.25)
    assert gains["ensemble"]["total"] == (0.0, 0.0)  # the same scores on the same resamples
