"""The reject option with out-of-distribution images among the digits, on synthetic images."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from credibly.cli import app
from credibly.errors import InputError
from credibly.metrics import scores as metrics
from studies import find, ood, reject
from studies.study import Options


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Small files in the format of the real ones: "digits" are bright bars, the others noise."""
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
    np.savez(folder / ood.HOME, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    for file, most in zip(reject.FAR.values(), (255, 120)):
        np.savez(folder / file, x_test=rng.integers(0, most, (40, 28, 28)).astype(np.uint8))
    return folder


@pytest.mark.nightly
def test_it_ends_in_a_page(root, tmp_path):
    words = ["study", "reject-option", "--root", str(root), "--out", str(tmp_path / "out"), "--quick", "--quiet"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    text = (tmp_path / "out" / "README.md").read_text()
    assert all(sentence in text for sentence in results["sentences"])
    assert results["sentences"][0].startswith("Reproduced:" if results["held"] else "Not reproduced:")
    assert "nan %" not in text
    found = results["numbers"]
    assert set(found["aurc"]) == set(reject.METHODS)
    assert set(found["aurc"]["ensemble"]) == set(reject.SCORES)
    assert "epistemic" not in found["aurc"]["map"]
    assert all(0 < area < 1 for by_score in found["aurc"].values() for area in by_score.values())
    assert found["gain_over_map"]["map"]["max_probability"] == [0.0, 0.0]


def made(seed=0, n=3000, skill=1.0):
    """Return mistakes with probability u^4 and an uncertainty that mixes u with noise, less of it for more skill."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    wrong = torch.rand(n, generator=generator, dtype=torch.float64) < u**4
    noise = torch.rand(n, generator=generator, dtype=torch.float64)
    shown = skill * u + (1 - skill) * noise
    return reject.Answers(wrong, dict.fromkeys(reject.SCORES, shown))


def test_gains_and_promises():
    found = {m: made(skill=1.0 if m == "ensemble" else 0.5) for m in reject.METHODS}
    result = reject.result_of(found, dict.fromkeys(found, 0.9), 1.0, Options(quick=True))
    assert result.reproduced is True
    areas = result.numbers["aurc"]
    mine = found["ensemble"]
    expected = metrics.risk_coverage(mine.uncertainty["total"], mine.wrong.double()).area
    assert areas["ensemble"]["total"] == pytest.approx(float(expected))
    gain, error = result.numbers["gain_over_map"]["ensemble"]["total"]
    assert gain == pytest.approx(areas["map"]["max_probability"] - areas["ensemble"]["total"])
    assert 0 < error < gain
    kept = result.numbers["promise"]["ensemble"]["total"]
    # Below t the risk is t^4 / 5: at most t = 0.25^(1/4) = 0.71 can be answered at 5 %.
    assert 0.5 < kept["coverage"] < 0.71 + 0.02
    assert kept["risk"] < reject.RISK + 0.01
    assert kept["broken"] == 0
    alike = {m: made(skill=0.5) for m in reject.METHODS}
    assert reject.result_of(alike, dict.fromkeys(alike, 0.9), 1.0, Options(quick=True)).reproduced is False


def test_out_of_distribution_images_are_mistakes(root):
    class Sure:
        """Predicts class 0 for every input."""

        def predict(self, x):
            import credibly as cr

            class Source:
                likelihood, count = cr.likelihoods.Categorical(), 1

                def outputs(self, x, start, stop, first_row=0):
                    return torch.tensor([5.0, 0.0, 0.0]).expand(1, len(x), 3)

                def extra(self, start, stop):
                    return {}

                def row_width(self):
                    return 1

            return cr.Predictive(Source(), x)

    found = reject.answers(Sure(), torch.zeros(4, 2), torch.tensor([0, 1, 0, 2]), {"a": torch.zeros(3, 2)})
    assert found.wrong.tolist() == [False, True, False, True, True, True, True]
    assert all(len(u) == 7 for u in found.uncertainty.values())


def test_missing_files_are_named(root, tmp_path):
    with pytest.raises(InputError, match=r"mnist\.npz"):
        find("reject-option").run(Options(root=tmp_path, quick=True))
