"""Make torchvision importable where its compiled operations are missing. Import this before transformers or timm."""

import importlib.util
import sys

import torch

KEPT: list[torch.library.Library] = []


def prepare_torchvision():
    """Make torchvision importable where its compiled operations are missing: transformers and timm import it."""
    if importlib.util.find_spec("torchvision") is None or "torchvision" in sys.modules:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)


prepare_torchvision()
