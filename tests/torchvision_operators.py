"""torchvision installed without compiled operators that load beside this torch: importing it needs their declarations.

timm and parts of transformers import torchvision, and none of the tests call its operators.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_declared: torch.library.Library | None = None


def declare() -> None:
    """Declare the operators that the import of torchvision looks up, unless the compiled ones can be loaded."""
    global _declared
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _declared is not None:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        _declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
