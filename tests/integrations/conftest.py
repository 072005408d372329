"""Tests with networks of other libraries, built from small configurations."""

import importlib.util

import torch

# torchvision may be installed without its compiled operators, of which its import needs the declarations alone.
if importlib.util.find_spec("torchvision") is not None:
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        _operators = torch.library.Library("torchvision", "DEF")
        _operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
