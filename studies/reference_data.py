"""Data, network and reference of `hmc-reference`, from npz files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from credibly.core.rng import global_stream
from credibly.errors import InputError
from credibly.networks import zoo
from studies.study import Options

Array = npt.NDArray[Any]

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "cnn_lstm": zoo.cnn_lstm,
    "resnet20_frn": zoo.resnet20_frn,
    "lenet": zoo.lenet,
    "mlp": zoo.mlp,
}
# CIFAR-10 as preprocessed for the reference; other images are scaled to [0, 1] and standardised with the training rows.
CIFAR = ((0.49, 0.48, 0.44), 0.2)


def load(options: Options, chosen: dict[str, str]) -> tuple[Tensor, Tensor, Tensor, Array, Array | None]:
    """Return training rows and labels, test rows, and both versions of their reference probabilities."""
    arrays: dict[str, Array] = {}
    for file in chosen["data"].split(","):
        with np.load(options.file(file), allow_pickle=False) as stored:
            arrays |= {key: stored[key] for key in stored.files}
    x, x_test = (images(arrays, part) for part in ("train", "test"))
    if "y_train" not in arrays:
        raise InputError("--set", f"{chosen['data']} has no y_train", "Pass files with x_train, y_train and x_test")
    rows = int(chosen["train_rows"]) or len(x)
    with np.load(options.file(chosen["reference"]), allow_pickle=False) as stored:
        probs, earlier = stored["probs"], stored["probs_earlier"] if "probs_earlier" in stored.files else None
    kept = min(len(probs), len(x_test), int(chosen["test_rows"]) or len(probs))
    if options.quick:
        rows, kept = min(rows, 200), min(kept, 200)
    device = torch.device(options.device)
    inputs, targets = tensors(x[:rows], x_test[:kept])
    labels = torch.from_numpy(arrays["y_train"][:rows].astype(np.int64).reshape(-1))
    other = None if earlier is None else earlier[:kept]
    return inputs.to(device), labels.to(device), targets.to(device), probs[:kept], other


def images(arrays: dict[str, Array], part: str) -> Array:
    """Return the rows of x_train or x_test, also from d_train or d_test: pixel differences that are summed up."""
    if f"x_{part}" in arrays:
        return arrays[f"x_{part}"]
    if f"d_{part}" not in arrays:
        raise InputError(
            "--set", f"data has neither x_{part} nor d_{part}", "Pass files with x_train, y_train and x_test"
        )
    d = np.cumsum(np.cumsum(arrays[f"d_{part}"], axis=2, dtype=np.uint8), axis=3, dtype=np.uint8)
    green = d[:, 0]
    return np.stack([d[:, 1] + green, green, d[:, 2] + green], axis=-1)


def tensors(x: Array, x_test: Array) -> tuple[Tensor, Tensor]:
    """Return token ids as int64, or images (N, channels, H, W), standardised by constants or the training rows."""
    if x.ndim == 2 and x.dtype.kind in "ui":
        return torch.from_numpy(x.astype(np.int64)), torch.from_numpy(x_test.astype(np.int64))
    scaled = [torch.from_numpy(v.astype(np.float32)) / (255 if v.dtype == np.uint8 else 1) for v in (x, x_test)]
    if x.ndim == 3:
        scaled = [v.unsqueeze(1) for v in scaled]
    elif x.ndim == 4 and x.shape[-1] in (1, 3):
        scaled = [v.permute(0, 3, 1, 2) for v in scaled]
    if x.ndim == 4 and scaled[0].shape[1:] == (3, 32, 32):
        centre, scale = torch.tensor(CIFAR[0]).reshape(1, 3, 1, 1), CIFAR[1]
        return (scaled[0] - centre) / scale, (scaled[1] - centre) / scale
    mean, std = scaled[0].mean(), scaled[0].std()
    return (scaled[0] - mean) / std, (scaled[1] - mean) / std


def network(chosen: dict[str, str], x: Tensor, y: Tensor) -> nn.Module:
    """Return the network, for these inputs and classes, with fixed initial weights."""
    if chosen["network"] not in NETWORKS:
        raise InputError("--set network", f"must be one of {', '.join(NETWORKS)}, got {chosen['network']!r}")
    classes = int(y.max()) + 1
    settings: dict[str, Any] = {"activation": chosen["activation"]}
    with global_stream(0, "reference network"):
        if chosen["network"] == "mlp":
            return nn.Sequential(nn.Flatten(), *zoo.mlp(x[0].numel(), 100, classes, chosen["activation"]))
        if chosen["network"] == "cnn_lstm":
            return zoo.cnn_lstm(vocabulary=max(20_000, int(x.max()) + 1), classes=classes, **settings)
        return NETWORKS[chosen["network"]](classes=classes, channels=x.shape[1], **settings)
