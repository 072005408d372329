"""The UCI regression benchmark, read from a folder of npz files with the standard splits."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from pathlib import Path

import numpy as np

from credibly.data.sets import Array, DataSet, standardised
from credibly.errors import InputError

# What numpy raises for a file that is not an npz, is truncated or is corrupt.
_UNREADABLE = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
_UCI_KEYS = ("X", "y", "train_idx", "test_idx")


def uci_names(root: str | Path) -> tuple[str, ...]:
    """Return the data sets in root/uci or root: the npz files with X, y, train_idx and test_idx."""
    found = set()
    for folder in _folders(root):
        for path in folder.glob("*.npz"):
            try:
                with zipfile.ZipFile(path) as archive:
                    if {f"{key}.npy" for key in _UCI_KEYS} <= set(archive.namelist()):
                        found.add(path.stem)
            except _UNREADABLE:
                # Not of this form; uci() reports why when called with the name.
                continue
    return tuple(sorted(found))


def uci_splits(root: str | Path, name: str) -> int:
    """Return the number of train-test splits of a data set."""
    return len(_read_uci(root, name)["train_idx"])


def uci(root: str | Path, name: str, split: int = 0) -> DataSet:
    """Return one split of a UCI data set, standardised with the training rows of that split.

    Args:
        root: the folder that holds uci/<name>.npz or <name>.npz, with the arrays X (N, P), y (N,), train_idx and
            test_idx (splits, rows; into the rows of X) and optionally n_hidden.
        name: the data set, one of uci_names(root).
        split: from 0 to uci_splits(root, name) - 1.
    """
    arrays = _read_uci(root, name)
    splits = len(arrays["train_idx"])
    if isinstance(split, bool) or not isinstance(split, (int, np.integer)) or not 0 <= split < splits:
        raise InputError("split", f"must be an integer from 0 to {splits - 1} for {name}, got {split!r}")
    x, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)
    train, test = arrays["train_idx"][split], arrays["test_idx"][split]
    for key, index in (("train_idx", train), ("test_idx", test)):
        if index.min() < 0 or index.max() >= len(x):
            _malformed(name, f"{key}[{split}] runs from {index.min()} to {index.max()}, but X has {len(x)} rows")
        if len(np.unique(index)) < len(index):
            _malformed(name, f"{key}[{split}] holds a row twice")
    both = np.intersect1d(train, test)
    if len(both):
        _malformed(
            name, f"in split {split} {len(both)} rows are in both train_idx and test_idx, the first is {both[0]}"
        )
    about = {
        "name": name,
        "description": f"UCI {name}, split {split} of {splits}",
        "feature_names": tuple(f"x{i}" for i in range(x.shape[1])),
        "n_hidden": int(arrays["n_hidden"]) if "n_hidden" in arrays else None,
    }
    return standardised("regression", x, y, train, test, n_classes=None, **about)


def _read_uci(root: str | Path, name: str) -> dict[str, Array]:
    """Read the arrays of one file. Check everything that does not depend on the split."""
    paths = [folder / f"{name}.npz" for folder in _folders(root)]
    # The stem differs for a name like "../x".
    path = next((p for p in paths if p.stem == name and p.is_file()), None)
    if path is None:
        there = ", ".join(uci_names(root)) or "no file of this form"
        found = f"{name!r} not found; looked for {' and '.join(map(str, paths))}"
        raise InputError("name", found, f"Available: {there}")
    try:
        # np.load alone would also accept a file with a single bare array.
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as archive:
            keys = list(archive.files)
            arrays = {key: archive[key] for key in (*_UCI_KEYS, "n_hidden") if key in keys}
    except _UNREADABLE as error:
        raise InputError("name", f"{path} cannot be read: {error}", "Download or write the file again") from error
    missing = [key for key in _UCI_KEYS if key not in arrays]
    if missing:
        _malformed(name, f"it has no {', '.join(missing)}, only {', '.join(keys) or 'nothing'}")
    forms = {"X": (2, "fiu"), "y": (1, "fiu"), "train_idx": (2, "iu"), "test_idx": (2, "iu"), "n_hidden": (0, "iu")}
    for key, array in arrays.items():
        axes, kinds = forms[key]
        if array.ndim != axes or array.dtype.kind not in kinds or not array.size:
            what = "integers" if kinds == "iu" else "numbers"
            _malformed(name, f"{key} has shape {array.shape} and dtype {array.dtype}, not {axes} axes of {what}")
        bad = int((~np.isfinite(array)).sum())
        if bad:
            _malformed(name, f"{key} has {bad} values that are NaN or infinite")
    for one, other, what in (("X", "y", "rows"), ("train_idx", "test_idx", "splits")):
        if len(arrays[one]) != len(arrays[other]):
            _malformed(name, f"{one} has {len(arrays[one])} {what}, {other} has {len(arrays[other])}")
    return arrays


def _folders(root: str | Path) -> list[Path]:
    """Return the folders to look in."""
    path = Path(root)
    if not path.is_dir():
        around = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        found = f"there is no folder {path} (looked for {path / 'uci'} and {path})"
        raise InputError("root", found, f"{path.parent} contains: {', '.join(around[:20]) or 'nothing'}")
    return [folder for folder in (path / "uci", path) if folder.is_dir()]


def _malformed(name: str, reason: str) -> None:
    """Raise for a file of the wrong form."""
    form = "X (N, P), y (N,), train_idx and test_idx (splits, rows), n_hidden; all finite, train and test rows disjoint"
    raise InputError("name", f"the file of {name} is malformed: {reason}", f"Expected: {form}")
