"""The examples run at small size and produce correct output."""

import re
import runpy
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "examples"
NAMES = sorted(p.stem for p in FOLDER.glob("*.py"))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example as its docstring describes, check its figure and return what it printed."""
    import matplotlib.pyplot as plt

    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def go(name):
        picture = tmp_path / "picture.png"
        monkeypatch.setattr("sys.argv", [f"{name}.py", "--quick", "--out", str(picture)])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        pixels = plt.imread(picture)[..., :3]
        assert min(pixels.shape[:2]) > 300
        assert (pixels < 0.9).any(-1).mean() > 0.002  # not blank
        printed = capsys.readouterr().out
        assert printed.rstrip().endswith(f"wrote {picture}")
        return printed

    yield go
    plt.close("all")
    torch.set_num_threads(before)


def numbers(text):
    return [float(n.rstrip("%")) for n in re.findall(r"-?\d+\.\d+%?", text)]


def row(printed, name):
    """Return the numbers in the line that starts with a name."""
    return numbers(next(line for line in printed.splitlines() if line.startswith(name)).removeprefix(name))


def test_there_are_five():
    assert len(NAMES) == 5


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_shows_how_to_run_it(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert f"\n    python examples/{name}.py --out " in text.split('"""')[1]
    assert f"\n    python examples/{name}.py --quick --out " in text.split('"""')[1]


def test_regression_with_a_gap(run):
    printed = run("regression_with_a_gap")
    assert row(printed, "MLE") == row(printed, "MAP") == [0.0, 0.0]
    for name in ("deep ensemble", "HMC"):
        on_data, in_gap = row(printed, name)
        assert in_gap > 2 * on_data > 0


def test_classify_and_know_when_not_to(run):
    printed = run("classify_and_know_when_not_to")
    assert "359 test rows, 71 of them" in printed
    for name in ("one network (MAP)", "deep ensemble"):
        right, auroc, error, kept = row(printed, name)
        assert right > 95
        assert 0.9 < auroc <= 1
        assert error > 100 * 71 / 359  # every unseen digit is one
        assert kept < 5
    assert row(printed, "deep ensemble")[1] > row(printed, "one network (MAP)")[1]


def test_image_per_pixel(run):
    printed = run("image_per_pixel")
    before, after, negatives = row(printed, "RMSE per pixel")
    assert after < 0.7 * before < negatives
    left, right = row(printed, "aleatoric std")
    assert right > 1.4 * left  # the noise there is four times as strong
    known, unknown = row(printed, "epistemic std")
    assert unknown > 1.5 * known
    assert 85 < row(printed, "90 % intervals cover")[0] < 97


def test_pretrained_last_layer(run):
    printed = run("pretrained_last_layer")
    assert "170 of 5370 parameters are random" in printed  # 16 by 10 and 10, of 64-64-16-10
    plain, bayes = row(printed, "as trained"), row(printed, "Bayesian head")
    assert min(plain[0], bayes[0]) > 90
    assert bayes[1] > plain[1]  # log density
    assert re.search("the chains agree (closely )?about the predictions", printed)


def test_sample_a_density(run):
    printed = run("sample_a_density")
    mean, variance = row(printed, "mean"), row(printed, "variance")
    # An effective size of about 250 leaves a mean within 0.2 standard deviations; squares of them vary more.
    assert abs(mean[0] - mean[1]) < 0.2
    assert abs(mean[2] - mean[3]) < 0.3
    assert variance[1] == 1
    assert variance[3] == 2.25
    assert 0.6 < variance[0] < 1.5
    assert 1.1 < variance[2] < 4
    assert row(printed, "R-hat, worst")[0] < 1.05
    assert re.search(r"divergences +0\n", printed)
