"""The studies that compare six methods on small synthetic regressions and clusters."""

import json
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from credibly.cli import app
from credibly.errors import InputError
from studies import MODULES, find, paper_regression, pictures, sharpening
from studies import side_by_side as side
from studies.study import Options

SIX = ("mle", "map", "dropout", "bbb", "ensemble", "hmc")


def written(folder):
    """Check every file a study wrote. Return its results."""
    results = json.loads((folder / "results.json").read_text())
    text = (folder / "README.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\((\w[\w-]*)\.svg\)", text)
    assert shown
    assert {p.name for p in folder.iterdir()} == {
        "index.html",
        "README.md",
        "results.json",
        *(f"{s}.svg" for s in shown),
    }
    for name in shown:
        svg = (folder / f"{name}.svg").read_text()
        assert svg.startswith("<?xml")
        assert len(svg) < 200_000
    page = (folder / "index.html").read_text()
    assert page.count("<svg") >= len(shown)
    assert all(sentence in text for sentence in results["sentences"])
    assert "| :--" in text
    return results


def command(*words):
    return CliRunner().invoke(app, ["study", *map(str, words), "--quick", "--quiet"])


@pytest.mark.parametrize("name", ["gap-regression", "star-classification", "posterior-sharpens"])
def test_a_study_without_files_ends_in_a_page(name, tmp_path):
    done = command(name, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    results = written(tmp_path / "out")
    assert results["study"] == name
    assert results["quick"] is True
    assert results["held"] in (True, False, None)
    by_method = results["numbers"].get("methods") or results["numbers"]["epistemic_deviation"]
    assert tuple(by_method) == SIX
    if name == "star-classification":
        for method, rows in by_method.items():
            assert any(value > 1e-4 for value in rows["epistemic"]) == (method in side.AVERAGES)
            assert all(c == max(p, 1 - p) for c, p in zip(rows["confidence"], rows["probability"]))


# -- the rules


def gap_values(ratio, gain, beyond=1.0):
    flat = {"on_data": [0.1] * 4, "in_gap": [0.1] * 4, "ratio": [1.0] * 4, "coverage": [0.5] * 4}
    base = {m: flat | {"log_density": [0.0] * 4, "log_density_beyond": [0.0] * 4} for m in SIX}
    shifts = np.array([-0.1, 0.0, 0.1, 0.05])
    base["hmc"] = base["hmc"] | {
        "ratio": (ratio + shifts).tolist(),
        "log_density": (gain + shifts).tolist(),
        "log_density_beyond": (beyond + shifts).tolist(),
    }
    return base


@pytest.mark.parametrize(
    "ratio, gain, reproduced", [(5.0, 2.0, True), (1.02, 2.0, False), (5.0, 0.02, False), (0.5, -1, False)]
)
def test_gap_rule(ratio, gain, reproduced):
    sentences, found = pictures.judge_gap(gap_values(ratio, gain))
    assert found is reproduced
    partly = (ratio > 2) != (gain > 1)
    verdict = "Reproduced:" if reproduced else "Not fully reproduced:" if partly else "Not reproduced:"
    assert sentences[0].startswith(verdict)
    assert side.mean_text(gap_values(ratio, gain)["hmc"]["ratio"]) in sentences[0]

    assert "MC-Dropout, Bayes by Backprop" in sentences[2]  # their ratio is 1: not wider


def test_gap_names_the_largest_ratio_and_the_best_predictions():
    values = gap_values(5.0, 2.0, beyond=-3.0)
    values["ensemble"] = values["ensemble"] | {"ratio": [9.0, 9.1, 9.2, 9.0], "log_density": [4.0, 4.1, 4.2, 4.1]}
    sentences, _ = pictures.judge_gap(values)
    assert "the largest is that of deep ensemble" in sentences[1]
    assert "The best predictions in the gap are those of deep ensemble" in sentences[3]
    assert "is not above MAP's" in sentences[4]


def star_values(point, average):
    shifts = np.array([-0.01, 0.0, 0.01])
    values = {m: average if m in side.AVERAGES else point for m in SIX}
    return {
        m: {k: (v + shifts).tolist() for k in ("probability", "confidence", "epistemic")} for m, v in values.items()
    }


@pytest.mark.parametrize(
    "point, average, reproduced", [(0.97, 0.6, True), (0.85, 0.6, False), (0.97, 0.8, False), (0.91, 0.95, False)]
)
def test_star_rule(point, average, reproduced):
    sentences, found = pictures.judge_star(star_values(point, average))
    assert found is reproduced
    assert f"MAP has a confidence of {point:.2f}" in sentences[0]
    assert f"average one of {average:.2f}" in sentences[0]
    assert ("are practically certain" in sentences[2]) == (average >= 0.9)


@pytest.mark.parametrize("power, reproduced", [(-0.5, True), (-0.4, True), (-0.2, False), (-0.8, False), (0.5, False)])
def test_sharpening_rule(power, reproduced):
    sizes = (10, 100, 1000)
    doubt = {m: {n: [0.0, 0.0] for n in sizes} for m in ("mle", "map")}
    doubt |= {m: {n: [n**power, 1.02 * n ** (power - 0.01)] for n in sizes} for m in side.AVERAGES}
    slopes = {m: sharpening.slopes_of(doubt[m]) for m in side.AVERAGES}
    assert slopes["hmc"] == pytest.approx([power, power - 0.01])
    to_map = {10: [0.3, 0.31], 100: [0.2, 0.2], 1000: [0.1, 0.1]}
    sentences, found = sharpening.judge(doubt, slopes, to_map)
    assert found is reproduced
    assert f"N to the power {side.mean_text(slopes['hmc'])}" in sentences[0]
    assert "sharpens towards MAP" in sentences[2]
    backwards = dict(zip(sizes, reversed(to_map.values())))
    assert "does not come closer to MAP" in sharpening.judge(doubt, slopes, backwards)[0][2]


def test_one_repeat_never_counts_as_evidence():
    assert not side.above([100.0], 0.0)
    assert side.above([100.0, 100.1], 0.0)


# -- the paper's set


def paper_file(root, **changes):
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(a, a + 4, 8) for a in (-10, 6, 14)]).astype(np.float32)
    grid = np.linspace(-14, 22, 30).astype(np.float32)
    arrays = {
        "x": x,
        "f": np.stack([x, x**2], 1),
        "y": (0.02 * rng.standard_normal((24, 1)) + x[:, None] / 50).astype(np.float32),
        "x_": grid,
        "f_": np.stack([grid, grid**2], 1),
        "y_": grid[:, None] / 50,
    } | changes
    (root / "hmc_reference").mkdir(parents=True, exist_ok=True)
    np.savez(root / "hmc_reference" / "synth_reg_data.npz", **{k: v for k, v in arrays.items() if v is not None})
    return root


def test_the_papers_data_set_is_read_and_divided_into_regions(tmp_path):
    points = paper_regression.read(Options(root=paper_file(tmp_path)))
    assert points.features.shape == (24, 2)
    assert torch.allclose(points.features[:, 0] * 30, points.x)
    both = points.on_data.int() + points.between.int() + points.beyond.int()
    assert (both == 1).all()
    assert points.grid[points.between].min() > -6
    assert points.grid[points.beyond].abs().max() == 22
    with pytest.raises(InputError, match="has no y_"):
        paper_regression.read(Options(root=paper_file(tmp_path, y_=None)))


def test_synthetic_regression_ends_in_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_regression, "WIDTHS", (8, 8, 8))
    done = command("synthetic-regression", "--root", paper_file(tmp_path / "data"), "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    numbers = written(tmp_path / "out")["numbers"]
    assert list(numbers["methods"]) == list(paper_regression.METHODS)
    assert numbers["methods"]["map"]["between"] == [0.0, 0.0]
    assert all(0 <= d <= 1 for m in numbers["methods"].values() for d in m.get("distance", []))


def paper_values(between, distance):
    row = {"on_data": [0.01] * 3, "between": [0.02] * 3, "beyond": [0.05] * 3, "rmse": [0.1] * 3}
    found = {
        m: row | {"distance": (distance + np.array([-0.01, 0, 0.01])).tolist()} for m in paper_regression.METHODS[:-1]
    }
    return found | {"hmc": row | {"between": (between + np.array([-0.001, 0, 0.001])).tolist()}}


@pytest.mark.parametrize("between, distance, reproduced", [(0.1, 0.5, True), (0.1, 0.11, False), (0.005, 0.5, False)])
def test_synthetic_rule(between, distance, reproduced):
    sentences, found = paper_regression.judge(paper_values(between, distance), floor=0.1)
    assert found is reproduced
    assert ("cannot be distinguished from it" in sentences[0]) == (distance < 0.2)
    assert side.mean_text([b / 0.01 for b in (between - 0.001, between, between + 0.001)], 1) in sentences[0]


def test_missing_files_are_named(tmp_path):
    done = command("synthetic-regression", "--root", tmp_path, "--out", tmp_path / "out")
    assert done.exit_code != 0
    assert "synth_reg_data.npz" in done.output
    assert not (tmp_path / "out").exists()
    done = command("synthetic-regression", "--out", tmp_path / "out")
    assert "--root" in done.output


def test_every_name_here_is_listed():
    for name in ("gap-regression", "star-classification", "posterior-sharpens", "synthetic-regression"):
        assert name in MODULES
        assert find(name).name == name
