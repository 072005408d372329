"""Real parameters that a forward pass views as complex numbers, which needs pairs of values at even memory offsets.

Parameters are views of a flat vector, where the number of values before them may be odd.
"""

from __future__ import annotations

import torch

from credibly.core.inputs import Inputs, arguments
from credibly.networks.calling import call_with
from credibly.networks.layout import Layout


def viewed_as_complex(layout: Layout, trial: Inputs) -> frozenset[str]:
    """Return the names of parameters whose values need memory of their own, from a trial pass at odd offsets."""
    pairs = [e for e in layout.entries if e.shape[-1:] == (2,) and e.name not in layout.extra]
    if not pairs:
        return frozenset()
    parameters = dict(layout.module.named_parameters())
    odd = {}
    for entry in pairs:
        value = parameters[entry.name].detach().flatten()
        odd[entry.name] = torch.cat([value[:1], value])[1:].view(entry.shape)
    args, kwargs = arguments(trial)
    try:
        with torch.no_grad():
            call_with(layout.module, odd, args, kwargs)
    except RuntimeError as error:
        if "divisible by 2" in str(error):
            return frozenset(odd)
    return frozenset()
