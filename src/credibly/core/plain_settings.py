"""Settings as plain Python values, whatever numbers they are given as: their description in a run folder is JSON."""

from __future__ import annotations

import functools
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor


class PlainSettings:
    """Base of frozen dataclasses that takes numpy numbers and tensors or arrays without axes as Python numbers.

    The fields are converted before the `__post_init__` of a subclass checks them, so `Gaussian(y.std())` has a float as
    its scale, and `HMC(chains=np.int64(4))` an int. A dtype of torch becomes its name.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check = cls.__dict__.get("__post_init__")
        if check is None:
            return

        @functools.wraps(check)
        def converted(self: PlainSettings, *init: Any) -> None:
            PlainSettings.__post_init__(self)
            check(self, *init)

        cls.__post_init__ = converted  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            settled = plain(value)
            if settled is not value:
                object.__setattr__(self, name, settled)


def plain(value: Any) -> Any:
    """Return numbers as int, float or bool, also in tuples, lists and dicts; anything else unchanged."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) or (isinstance(value, (np.ndarray, Tensor)) and value.ndim == 0):
        number = value.item()
        return number if isinstance(number, (bool, int, float)) else value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value) in (tuple, list):
        settled = [plain(each) for each in value]
        return value if all(a is b for a, b in zip(settled, value)) else type(value)(settled)
    if type(value) is dict:
        pairs = {key: plain(each) for key, each in value.items()}
        return value if all(pairs[key] is each for key, each in value.items()) else pairs
    return value
