"""The layers that a blueprint can hold, and the valid values of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from credibly.core.specs import kind_name
from credibly.networks.normalisation import FilterResponseNorm, FrozenBatchNorm
from credibly.networks.tabular import PeriodicEmbedding
from credibly.networks.zoo import CNNLSTM, ResNet20FRN, UnrolledLSTM

# The valid values of an argument: a test, and a description for messages.
Kind = tuple[Callable[[Any], bool], str]
Arguments = dict[str, Kind]


def _is_int(v: Any) -> bool:
    return type(v) is int and abs(v) < 2**53


def _is_number(v: Any) -> bool:
    return _is_int(v) or (type(v) is float and math.isfinite(v))


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, list) and 0 < len(v) <= 8 and all(test(i) for i in v)


def _or(kind: Kind, other: Kind) -> Kind:
    return (lambda v: kind[0](v) or other[0](v)), f"{kind[1]} or {other[1]}"


def _one_of(*words: str) -> Kind:
    return (lambda v: isinstance(v, str) and v in words), f"one of {', '.join(words)}"


def _each(arguments: Arguments, *layers: type[nn.Module]) -> dict[type[nn.Module], Arguments]:
    return dict.fromkeys(layers, arguments)


_FLAG: Kind = ((lambda v: type(v) is bool), "true or false")
_INT: Kind = (_is_int, "an integer")
_COUNT: Kind = ((lambda v: _is_int(v) and v > 0), "a positive integer")
_NUMBER: Kind = (_is_number, "a finite number")
_STRING: Kind = ((lambda v: isinstance(v, str)), "a string")
_NONE: Kind = ((lambda v: v is None), "null")
_INTS: Kind = (_list_of(_is_int), "a list of integers")
_INDICES: Kind = ((lambda v: isinstance(v, list) and bool(v) and all(map(_is_int, v))), "a list of indices")
_SIZE = _or(_INT, _INTS)
_NUMBERS = _or(_NUMBER, (_list_of(_is_number), "a list of them"))
_OUTPUT = _or(_SIZE, (_list_of(lambda v: v is None or _is_int(v)), "a list of integers and nulls"))
_PADDING = _or(_SIZE, _one_of("same", "valid"))
_PADDED = _one_of("zeros", "reflect", "replicate", "circular")
_RESIZE = _one_of("nearest", "linear", "bilinear", "bicubic", "trilinear", "nearest-exact")

_INPLACE = {"inplace": _FLAG}
_WINDOW = {"kernel_size": _SIZE, "stride": _SIZE}
_CONV = {"in_channels": _COUNT, "out_channels": _COUNT, **_WINDOW, "dilation": _SIZE, "groups": _COUNT, "bias": _FLAG}
_STRAIGHT = {**_CONV, "padding": _PADDING, "padding_mode": _PADDED}
_TRANSPOSED = {**_CONV, "padding": _SIZE, "output_padding": _SIZE, "padding_mode": _one_of("zeros")}
_MAX = {**_WINDOW, "padding": _SIZE, "dilation": _SIZE, "ceil_mode": _FLAG}
_AVERAGE = {**_WINDOW, "padding": _SIZE, "ceil_mode": _FLAG, "count_include_pad": _FLAG}
_AVERAGE_OVER = {**_AVERAGE, "divisor_override": _or(_COUNT, _NONE)}
_POWER = {"norm_type": _NUMBER, "kernel_size": _SIZE, "stride": _or(_SIZE, _NONE), "ceil_mode": _FLAG}
_INSTANCE = {"num_features": _COUNT, "eps": _NUMBER, "momentum": _NUMBER, "affine": _FLAG}
_SHAPED = {"normalized_shape": _INTS, "elementwise_affine": _FLAG}

# Each layer by its exact type, with its arguments. These are also the names of its attributes.
TABLE: dict[type[nn.Module], Arguments] = {
    nn.Identity: {},
    nn.Linear: {"in_features": _COUNT, "out_features": _COUNT, "bias": _FLAG},
    nn.Bilinear: {"in1_features": _COUNT, "in2_features": _COUNT, "out_features": _COUNT, "bias": _FLAG},
    nn.Embedding: {
        "num_embeddings": _COUNT, "embedding_dim": _COUNT, "padding_idx": _or(_INT, _NONE),
        "max_norm": _or(_NUMBER, _NONE), "norm_type": _NUMBER, "scale_grad_by_freq": _FLAG, "sparse": _FLAG,
    },
    **_each(_STRAIGHT, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    **_each(_TRANSPOSED, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    **_each(_MAX, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    nn.AvgPool1d: _AVERAGE,
    **_each(_AVERAGE_OVER, nn.AvgPool2d, nn.AvgPool3d),
    **_each(_POWER, nn.LPPool1d, nn.LPPool2d, nn.LPPool3d),
    **_each({"output_size": _OUTPUT}, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    **_each({"output_size": _OUTPUT}, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    **_each({"p": _NUMBER, **_INPLACE}, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    **_each({"p": _NUMBER, **_INPLACE}, nn.AlphaDropout, nn.FeatureAlphaDropout),
    nn.Flatten: {"start_dim": _INT, "end_dim": _INT},
    nn.Unflatten: {"dim": _INT, "unflattened_size": _INTS},
    **_each({"padding": _SIZE}, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    **_each({"padding": _SIZE, "value": _NUMBER}, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    **_each({"padding": _SIZE}, nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    **_each({"padding": _SIZE}, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    **_each({"padding": _SIZE}, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    nn.PixelShuffle: {"upscale_factor": _COUNT},
    nn.PixelUnshuffle: {"downscale_factor": _COUNT},
    nn.Upsample: {
        "size": _or(_SIZE, _NONE), "scale_factor": _or(_NUMBERS, _NONE), "mode": _RESIZE,
        "align_corners": _or(_FLAG, _NONE), "recompute_scale_factor": _or(_FLAG, _NONE),
    },
    nn.LayerNorm: {**_SHAPED, "eps": _NUMBER, "bias": _FLAG},
    nn.RMSNorm: {**_SHAPED, "eps": _or(_NUMBER, _NONE)},
    nn.GroupNorm: {"num_groups": _COUNT, "num_channels": _COUNT, "eps": _NUMBER, "affine": _FLAG},
    nn.LocalResponseNorm: {"size": _COUNT, "alpha": _NUMBER, "beta": _NUMBER, "k": _NUMBER},
    **_each(_INSTANCE, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    **_each(_INPLACE, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Mish, nn.Hardsigmoid, nn.Hardswish),
    **_each({"alpha": _NUMBER, **_INPLACE}, nn.ELU, nn.CELU),
    **_each({}, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Softsign, nn.Softmax2d),
    **_each({"dim": _or(_INT, _NONE)}, nn.Softmax, nn.LogSoftmax, nn.Softmin),
    **_each({"lambd": _NUMBER}, nn.Softshrink, nn.Hardshrink),
    nn.GLU: {"dim": _INT},
    nn.GELU: {"approximate": _one_of("none", "tanh")},
    nn.LeakyReLU: {"negative_slope": _NUMBER, **_INPLACE},
    nn.RReLU: {"lower": _NUMBER, "upper": _NUMBER, **_INPLACE},
    nn.PReLU: {"num_parameters": _COUNT, "init": _NUMBER},
    nn.Softplus: {"beta": _NUMBER, "threshold": _NUMBER},
    nn.Hardtanh: {"min_val": _NUMBER, "max_val": _NUMBER, **_INPLACE},
    nn.Threshold: {"threshold": _NUMBER, "value": _NUMBER, **_INPLACE},
    FilterResponseNorm: {"num_features": _COUNT, "eps": _NUMBER, "affine": _FLAG, "threshold": _FLAG},
    FrozenBatchNorm: {"num_features": _COUNT, "eps": _NUMBER, "affine": _FLAG, "channel_axis": _INT},
    PeriodicEmbedding: {
        "inputs": _COUNT, "columns": _INDICES, "frequencies": _COUNT, "width": _COUNT, "scale": _NUMBER,
        "limit": _NUMBER,
    },
    UnrolledLSTM: {"inputs": _COUNT, "hidden": _COUNT, "forget_bias": _NUMBER, "sequence": _FLAG},
    ResNet20FRN: {"classes": _COUNT, "channels": _COUNT, "activation": _STRING, "width": _COUNT, "threshold": _FLAG},
    CNNLSTM: {
        **dict.fromkeys(("vocabulary", "embedding", "filters", "kernel", "pool", "hidden", "classes"), _COUNT),
        "activation": _STRING, "forget_bias": _NUMBER,
    },
}  # fmt: skip

# Arguments that are not attributes of the layer: they are true if the given parameter exists.
SHOWN_BY: dict[tuple[type[nn.Module], str], str] = {
    **{(kind, "bias"): "bias" for kind, arguments in TABLE.items() if "bias" in arguments},
    (FilterResponseNorm, "affine"): "weight",
    (FilterResponseNorm, "threshold"): "tau",
    (FrozenBatchNorm, "affine"): "weight",
}


def layer_kind(cls: type[nn.Module]) -> str:
    """Return the name of a layer in a blueprint, such as "nn.Linear" or "norms.FilterResponseNorm"."""
    return f"nn.{cls.__name__}" if cls.__module__.startswith("torch.") else kind_name(cls)


LAYERS = {layer_kind(cls): cls for cls in TABLE}
