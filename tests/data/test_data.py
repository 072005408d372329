"""Data sets: splits and standardisation, toys and their truths, and malformed files."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from credibly.data import (
    EMBEDDED,
    DataSet,
    Toy,
    embedded,
    gap_regression,
    heteroscedastic_regression,
    sharpening_regression,
    star_classification,
    uci,
    uci_names,
    uci_splits,
)
from credibly.errors import InputError
from warm_python import warm_python

SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"
TOYS: list[Callable[..., Toy]] = [
    gap_regression,
    star_classification,
    sharpening_regression,
    heteroscedastic_regression,
]


def assert_standardised(data: DataSet) -> None:
    """Mean 0 and standard deviation 1 of the training columns; constant ones are all 0."""
    for x in [data.x_train, data.y_train] if data.task == "regression" else [data.x_train]:
        x = x.double()
        std = x.std(dim=0, correction=0)
        constant = (x == x[0]).all(dim=0)
        assert x.mean(dim=0).abs().max() < 1e-5
        assert (std[~constant] - 1).abs().max() < 1e-5
        assert (x[:, constant] == 0).all()
        assert not constant.all()


# Data sets of scikit-learn


@pytest.mark.parametrize(
    "name, task, rows, features, classes",
    [
        ("diabetes", "regression", 442, 10, None),
        ("digits", "multiclass", 1797, 64, 10),
        ("breast_cancer", "binary", 569, 30, 2),
        ("wine", "multiclass", 178, 13, 3),
    ],
)
def test_embedded_shapes_types_and_scale(name: str, task: str, rows: int, features: int, classes: int | None) -> None:
    data = embedded(name)
    n_test = len(data.x_test)
    assert (data.name, data.task, data.n_classes, data.n_features) == (name, task, classes, features)
    assert abs(n_test - 0.2 * rows) <= (1 if classes is None else classes)
    assert data.x_train.shape == (rows - n_test, features)
    assert data.x_test.shape == (n_test, features)
    assert data.x_mean.shape == data.x_std.shape == (features,)
    assert len(data.feature_names) == features
    assert all(isinstance(f, str) for f in data.feature_names)
    assert data.description
    assert data.n_hidden is None
    assert {t.dtype for t in (data.x_train, data.x_test, data.x_mean, data.x_std)} == {torch.float32}
    for y, n in ((data.y_train, rows - n_test), (data.y_test, n_test)):
        assert y.shape == ((n, 1) if classes is None else (n,))
        assert y.dtype == (torch.float32 if classes is None else torch.int64)
        if classes is not None:
            assert set(y.tolist()) == set(range(classes))
    if classes is not None:
        assert (data.y_mean, data.y_std) == (0.0, 1.0)
    assert_standardised(data)


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_parts_are_disjoint_cover_all_rows_and_give_back_the_units(name: str) -> None:
    from sklearn import datasets

    raw = datasets.load_diabetes(scaled=False) if name == "diabetes" else getattr(datasets, f"load_{name}")()
    data = embedded(name, seed=3)
    x = torch.cat([data.x_train, data.x_test]) * data.x_std + data.x_mean
    y = torch.cat([data.y_train, data.y_test]) * data.y_std + data.y_mean
    got = torch.column_stack([x, y.float()]).double()
    want = torch.from_numpy(np.column_stack([raw.data, raw.target]))
    scale = data.x_std.new_tensor([*data.x_std, data.y_std]).double()
    distance, row = torch.cdist(got / scale, want / scale, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1)
    assert distance.max() < 1e-4
    assert torch.equal(row.sort().values, torch.arange(len(want)))  # each original row once, so none in both parts


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "wine"])
@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_embedded_is_stratified(name: str, fraction: float) -> None:
    data = embedded(name, test_fraction=fraction, seed=1)
    train, test = data.y_train.bincount(), data.y_test.bincount()
    assert torch.equal(test, torch.tensor([round(fraction * int(n)) for n in train + test]))
    early = data.y_train[:60].bincount(minlength=len(train)) / 60  # the order is independent of the class
    assert (early - train / train.sum()).abs().max() < 0.25
    assert len(data.y_train[:60].unique()) == data.n_classes


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_follows_its_seed_and_not_the_global_one(name: str) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    one = embedded(name, seed=5)
    torch.manual_seed(2)
    np.random.seed(2)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1]
    two, other = embedded(name, seed=5), embedded(name, seed=6)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # type: ignore[arg-type]
    for field in dataclasses.fields(DataSet):
        a, b = getattr(one, field.name), getattr(two, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert not torch.equal(one.x_train, other.x_train)


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("iris", {}, "name must be one of 'diabetes', 'digits', 'breast_cancer', 'wine', got 'iris'"),
        ("wine", {"test_fraction": 0}, "test_fraction must be strictly between 0 and 1, got 0"),
        ("wine", {"test_fraction": 1.0}, "test_fraction must be strictly between 0 and 1, got 1.0"),
        ("wine", {"test_fraction": float("nan")}, "test_fraction must be strictly between 0 and 1, got nan"),
        ("wine", {"test_fraction": "half"}, "test_fraction must be strictly between 0 and 1, got 'half'"),
        ("wine", {"test_fraction": True}, "test_fraction must be strictly between 0 and 1, got True"),
        ("wine", {"test_fraction": 0.001}, "leaves no test row among 59 of one class"),
        ("diabetes", {"test_fraction": 0.9999}, "leaves no training row among 442. "),
        ("wine", {"seed": -1}, "seed must be a non-negative integer .*got -1"),
        ("wine", {"seed": 0.5}, "seed must be a non-negative integer .*got 0.5"),
    ],
)
def test_embedded_rejects_bad_arguments(name: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        embedded(name, **arguments)


def test_import_leaves_sklearn_alone() -> None:
    code = "import sys, credibly.data; assert not {'sklearn', 'pandas', 'matplotlib'} & set(sys.modules)"
    subprocess.run([warm_python(), "-c", code], check=True)


# Toys


@pytest.mark.parametrize("toy", TOYS)
def test_toys_shapes_and_seeds(toy: Callable[..., Toy]) -> None:
    one, two, other = toy(40, seed=4), toy(40, seed=4), toy(40, seed=5)
    for a, b in ((one.x, two.x), (one.y, two.y), (one.grid, two.grid), (one.truth, two.truth)):
        assert torch.equal(a, b)
    assert not torch.equal(one.x, other.x)
    inputs = 2 if toy is star_classification else 1
    assert one.x.shape == (40, inputs)
    assert one.y.shape == ((40,) if one.task == "binary" else (40, 1))
    assert one.y.dtype == (torch.int64 if one.task == "binary" else torch.float32)
    assert one.grid.shape[1] == inputs
    assert one.truth.shape == (len(one.grid), 1)
    assert int(np.prod(one.grid_shape)) == len(one.grid)
    assert {t.dtype for t in (one.x, one.grid, one.truth)} == {torch.float32}
    assert (one.grid.amin(0) < one.x.amin(0) - 0.5).all()
    assert (one.grid.amax(0) > one.x.amax(0) + 0.5).all()
    assert one.name == toy.__name__
    assert one.description


@pytest.mark.parametrize("toy", [gap_regression, sharpening_regression, heteroscedastic_regression])
def test_regression_toys_scatter_around_their_truth(toy: Callable[..., Toy]) -> None:
    data = toy(4000)
    assert data.noise_grid is not None
    x, grid = data.x[:, 0].numpy(), data.grid[:, 0].numpy()
    residual = data.y[:, 0].numpy() - np.interp(x, grid, data.truth[:, 0].numpy())
    z = residual / np.interp(x, grid, data.noise_grid[:, 0].numpy())
    assert abs(z.mean()) < 5 / 4000**0.5
    assert abs(z.std() - 1) < 5 / 8000**0.5 + 0.01  # the interpolation is off by up to 0.001
    if data.noise is not None:
        assert (data.noise_grid == data.noise).all()


@pytest.mark.parametrize("n", [2, 3, 80, 1000])
def test_gap_is_empty_and_both_sides_are_not(n: int) -> None:
    data = gap_regression(n)
    assert data.gap is not None
    low, high = data.gap
    assert not ((data.x > low) & (data.x < high)).any()
    assert int((data.x <= low).sum()) == (n + 1) // 2
    assert int((data.x >= high).sum()) == n // 2
    assert int(((data.grid > low) & (data.grid < high)).sum()) > 20
    assert float(data.grid.min()) < -3
    assert float(data.grid.max()) > 3


def test_noise_is_as_given() -> None:
    quiet, loud = gap_regression(50, noise=1e-6), gap_regression(50, noise=2)
    assert torch.equal(quiet.x, loud.x)
    assert quiet.noise == 1e-6
    torch.testing.assert_close(quiet.y, torch.sin(2 * quiet.x) + 0.3 * quiet.x, rtol=0, atol=1e-5)
    assert (loud.y - quiet.y).std() > 1


def test_sharpening_sets_are_nested() -> None:
    largest = sharpening_regression(1000, seed=2)
    for n in (1, 2, 10, 17, 100):
        data = sharpening_regression(n, seed=2)
        assert torch.equal(data.x, largest.x[:n])
        assert torch.equal(data.y, largest.y[:n])
        assert torch.equal(data.grid, largest.grid)


def test_heteroscedastic_noise_grows() -> None:
    data = heteroscedastic_regression(2000)
    assert data.noise is None
    assert data.noise_grid is not None
    assert (data.noise_grid.diff(dim=0) > 0).all()
    residual = (data.y - torch.sin(2 * data.x) - 0.3 * data.x).abs()
    assert residual[data.x > 1].mean() > 3 * residual[data.x < -1].mean()


@pytest.mark.parametrize("seed", range(5))
def test_star_is_far_and_on_one_side(seed: int) -> None:
    data = star_classification(seed=seed)
    assert data.star is not None
    assert data.star.shape == (1, 2)
    centre = data.x.mean(dim=0)
    to_data = (data.star - data.x).norm(dim=1).min()
    assert (data.star - centre).norm() > 2 * (data.x - centre).norm(dim=1).max()
    assert to_data > torch.cdist(data.x, data.x).max()
    assert data.y.bincount().tolist() == [10, 10]
    # Mirrored: label 0 at (-a, b) for each label 1 at (a, b).
    assert torch.equal(data.x[data.y == 0] * torch.tensor([-1.0, 1.0]), data.x[data.y == 1])
    nearest = (data.grid - data.star).norm(dim=1).argmin()
    assert data.truth[nearest] > 0.99
    assert float(data.grid[:, 1].max()) > float(data.star[0, 1])


def test_star_is_certain_for_map_and_uncertain_for_bayes() -> None:
    """Logistic regression with prior N(0, 1), by importance sampling: MAP above 0.95, Bayes between 0.55 and 0.75."""
    data = star_classification()
    assert data.star is not None
    x, sign = torch.cat([data.x, torch.ones(20, 1)], dim=1).double(), (2 * data.y - 1).double()
    star = torch.cat([data.star, torch.ones(1, 1)], dim=1).double()
    w = torch.zeros(3, dtype=torch.float64)
    for _ in range(30):  # Newton
        p = torch.sigmoid(x @ w)
        hessian = x.T @ (x * (p * (1 - p))[:, None]) + torch.eye(3)
        w = w + torch.linalg.solve(hessian, x.T @ (data.y - p) - w)
    assert torch.sigmoid(star @ w) > 0.95
    draws = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_weight = torch.nn.functional.logsigmoid(draws @ x.T * sign).sum(dim=1)
    bayes = float(log_weight.softmax(0) @ torch.sigmoid(draws @ star[0]))
    assert 0.55 < bayes < 0.75


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("n", [0, -1, 2.0, True, "10"])
def test_toys_refuse_bad_counts(toy: Callable[..., Toy], n: Any) -> None:
    with pytest.raises(InputError, match="n must be .* integer.*, got "):
        toy(n)


@pytest.mark.parametrize("toy", TOYS)
def test_toys_refuse_bad_seeds(toy: Callable[..., Toy]) -> None:
    with pytest.raises(InputError, match="seed must be a non-negative integer .*got "):
        toy(10, seed=-1)


@pytest.mark.parametrize("toy", [gap_regression, sharpening_regression])
@pytest.mark.parametrize("noise", [0, -0.1, float("nan"), float("inf"), "0.1", True])
def test_toys_refuse_bad_noise(toy: Callable[..., Toy], noise: Any) -> None:
    with pytest.raises(InputError, match="noise must be a positive number, got "):
        toy(10, noise=noise)


def test_star_refuses_odd_and_gap_single_counts() -> None:
    with pytest.raises(InputError, match="n must be even, got 7"):
        star_classification(7)
    with pytest.raises(InputError, match="n must be an integer of at least 2, got 1"):
        gap_regression(1)


# UCI files


def arrays(**changes: Any) -> dict[str, Any]:
    """A well-formed file of 12 rows and two splits, with changes; None leaves an array out."""
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (12, 3))
    x[:, 1] = 0.998  # constant, as two columns of naval are
    order = np.stack([rng.permutation(12), rng.permutation(12)]).astype(np.int32)
    made = {
        "X": x,
        "y": rng.normal(100, 20, 12),
        "train_idx": order[:, :9],
        "test_idx": order[:, 9:],
        "n_hidden": np.int32(50),
        **changes,
    }
    return {k: v for k, v in made.items() if v is not None}


def write(folder: pathlib.Path, name: str = "toy", **changes: Any) -> dict[str, Any]:
    made = arrays(**changes)
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{name}.npz", **made)
    return made


@pytest.mark.parametrize("inner", ["uci", "."])
def test_uci_reads_either_folder(tmp_path: pathlib.Path, inner: str) -> None:
    made = write(tmp_path / inner)
    assert uci_names(tmp_path) == ("toy",)
    assert uci_splits(str(tmp_path), "toy") == 2
    for split in (0, 1):
        data = uci(tmp_path, "toy", split)
        assert (data.task, data.n_classes, data.n_features, data.n_hidden) == ("regression", None, 3, 50)
        assert_standardised(data)
        for rows, x, y in (
            (made["train_idx"][split], data.x_train, data.y_train),
            (made["test_idx"][split], data.x_test, data.y_test),
        ):
            assert y.shape == (len(rows), 1)
            np.testing.assert_allclose(x * data.x_std + data.x_mean, made["X"][rows], rtol=1e-5)
            np.testing.assert_allclose(y[:, 0] * data.y_std + data.y_mean, made["y"][rows], rtol=1e-5)
    assert not torch.equal(uci(tmp_path, "toy", 0).x_train, uci(tmp_path, "toy", 1).x_train)


def test_uci_standardises_with_training_rows_only(tmp_path: pathlib.Path) -> None:
    made = write(tmp_path, "one")
    x, y = made["X"].copy(), made["y"].copy()
    x[made["test_idx"][0]] = 1000 + 50 * x[made["test_idx"][0]]
    y[made["test_idx"][0]] -= 1e4
    write(tmp_path, "two", X=x, y=y)
    one, two = uci(tmp_path, "one", 0), uci(tmp_path, "two", 0)
    for field in ("x_train", "y_train", "x_mean", "x_std"):
        assert torch.equal(getattr(one, field), getattr(two, field))
    assert (one.y_mean, one.y_std) == (two.y_mean, two.y_std)
    assert not torch.isclose(one.x_test, two.x_test).any()
    assert not torch.isclose(one.y_test, two.y_test).any()


def test_uci_accepts_integers_and_a_missing_n_hidden(tmp_path: pathlib.Path) -> None:
    write(tmp_path, X=np.arange(36).reshape(12, 3), y=np.arange(12), n_hidden=None)
    data = uci(tmp_path, "toy")
    assert data.n_hidden is None
    assert_standardised(data)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"y": None, "test_idx": None}, r"it has no y, test_idx, only X, train_idx, n_hidden"),
        ({"X": np.ones(12)}, r"X has shape \(12,\) and dtype float64, not 2 axes of numbers"),
        ({"X": np.ones((12, 0))}, r"X has shape \(12, 0\)"),
        ({"X": np.full((12, 3), "a")}, r"X has shape \(12, 3\) and dtype <U1"),
        ({"y": np.ones((12, 1))}, r"y has shape \(12, 1\)"),
        ({"y": np.ones(11)}, "X has 12 rows, y has 11"),
        ({"X": np.array([[np.nan, 1, np.inf]] * 12)}, "X has 24 values that are NaN or infinite"),
        ({"y": np.array([np.nan] + [0.0] * 11)}, "y has 1 values that are NaN or infinite"),
        ({"train_idx": np.arange(9)}, r"train_idx has shape \(9,\)"),
        ({"train_idx": np.arange(9.0)[None]}, "dtype float64, not 2 axes of integers"),
        ({"test_idx": np.zeros((2, 0), dtype=int)}, r"test_idx has shape \(2, 0\)"),
        ({"test_idx": np.array([[9, 10]])}, "train_idx has 2 splits, test_idx has 1"),
        ({"train_idx": [[0, 12], [0, 1]]}, r"train_idx\[0\] runs from 0 to 12, but X has 12 rows"),
        ({"test_idx": [[-1, 2], [0, 1]]}, r"test_idx\[0\] runs from -1 to 2"),
        ({"train_idx": [[0, 1, 1], [0, 1, 2]], "test_idx": [[4], [5]]}, r"train_idx\[0\] holds a row twice"),
        (
            {"train_idx": [[0, 1, 3], [0, 1, 2]], "test_idx": [[3, 1], [5, 6]]},
            "in split 0 2 rows are in both .* the first is 1",
        ),
        ({"n_hidden": np.array([50])}, r"n_hidden has shape \(1,\)"),
    ],
)
def test_uci_refuses_malformed_files(tmp_path: pathlib.Path, changes: dict[str, Any], text: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(InputError, match=f"file of toy is malformed: .*{text}.*Expected:"):
        uci(tmp_path, "toy", 0)


@pytest.mark.parametrize("split", [2, -1, 0.0, True, "0"])
def test_uci_refuses_splits_out_of_range(tmp_path: pathlib.Path, split: Any) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match=f"split must be an integer from 0 to 1 for toy, got {split!r}"):
        uci(tmp_path, "toy", split)


@pytest.mark.parametrize("name", ["tox", "../toy", "toy.npz", "", 3])
def test_uci_reports_where_it_looked_and_what_is_available(tmp_path: pathlib.Path, name: Any) -> None:
    write(tmp_path / "uci")
    write(tmp_path / "uci", "another")
    (tmp_path / "uci" / "broken.npz").write_bytes(b"PK")
    np.savez(tmp_path / "mnist.npz", x=np.ones(3))
    assert uci_names(tmp_path) == ("another", "toy")
    with pytest.raises(InputError) as caught:
        uci(tmp_path, name, 0)
    text = str(caught.value)
    for folder in (tmp_path, tmp_path / "uci"):
        assert str(folder / f"{name}.npz") in text
    assert f"{name!r} not found" in text
    assert "Available: another, toy" in text


def test_uci_missing_or_empty_folder(tmp_path: pathlib.Path) -> None:
    assert uci_names(tmp_path) == ()
    with pytest.raises(InputError, match="Available: no file of this form"):
        uci(tmp_path, "toy", 0)
    (tmp_path / "here").mkdir()
    for call in (uci_names, lambda root: uci(root, "toy", 0), lambda root: uci_splits(root, "toy")):
        with pytest.raises(InputError, match=r"root: there is no folder .*absent.* contains: here"):
            call(tmp_path / "absent")
    with pytest.raises(InputError, match="contains: nothing"):
        uci_names(tmp_path / "absent" / "too")


@pytest.mark.parametrize("cut", ["half", "text", "array", "flipped", "pickle"])
def test_uci_refuses_unreadable_files(tmp_path: pathlib.Path, cut: str) -> None:
    path = tmp_path / "toy.npz"
    write(tmp_path)
    if cut == "half":
        path.write_bytes(path.read_bytes()[:400])
    elif cut == "text":
        path.write_text("X,y\n1,2\n")
    elif cut == "array":
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    elif cut == "flipped":
        content = bytearray(path.read_bytes())
        content[content.find(b"NUMPY") + 150] ^= 255  # inside X: only its checksum shows it
        path.write_bytes(bytes(content))
    else:
        write(tmp_path, X=np.array([[{}]] * 12, dtype=object))
    with pytest.raises(InputError, match=r"toy\.npz cannot be read: .*Download or write the file again"):
        uci(tmp_path, "toy", 0)


@pytest.mark.skipif(not (SHARED / "uci").is_dir(), reason=f"the UCI files are not at {SHARED}")
def test_real_uci_files() -> None:
    shapes = {
        "boston": (506, 13),
        "concrete": (1030, 8),
        "energy": (768, 8),
        "naval": (11934, 16),
        "protein": (45730, 9),
        "wine_red": (1599, 11),
        "yacht": (308, 6),
    }
    names = uci_names(SHARED)
    assert set(shapes) <= set(names)
    assert uci_names(SHARED / "uci") == names
    for name, (rows, features) in shapes.items():
        splits = uci_splits(SHARED, name)
        assert splits == (5 if name == "protein" else 20)
        for split in (0, splits - 1):
            data = uci(SHARED, name, split)
            assert len(data.x_train) + len(data.x_test) == rows
            assert data.n_features == features
            assert data.n_hidden == (100 if name == "protein" else 50)
            assert_standardised(data)
            assert all(torch.isfinite(t).all() for t in (data.x_train, data.x_test, data.y_train, data.y_test))
