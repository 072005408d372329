"""Residual units: the plain layers against their definition, and the GPU kernels, interpreted on a CPU."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

from conftest import randn
from credibly.core.autodiff import first_order, grad_and_aux
from credibly.networks.fused_unit import Unit, fuses
from credibly.networks.zoo import resnet20_frn


def version(name):
    return tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])


NO_TRITON = importlib.util.find_spec("triton") is None
OLD = not NO_TRITON and version("triton") < (3, 7) and version("numpy") >= (2, 4)

# (channels, filters, side, kernel, stride, activation, other, threshold): those of a ResNet-20, on small images.
CASES = [
    (3, 16, 8, 3, 1, True, False, True),
    (16, 16, 8, 3, 1, True, True, True),
    (16, 32, 8, 3, 2, True, False, True),
    (16, 32, 8, 1, 2, False, False, False),
    (64, 64, 4, 3, 1, True, True, False),
]
# In a separate process: Triton decides at import whether to interpret.
SCRIPT = """
import json, sys
import torch
from torch import nn
from credibly.networks.fused_unit import FusedUnit, Unit

apart = []
for channels, filters, side, kernel, stride, act, other, threshold in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    unit = Unit(channels, filters, kernel, stride, threshold)
    for parameter in unit.norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(5, channels, side, side).requires_grad_(channels >= 16)
    add = torch.randn(5, filters, side // stride, side // stride).requires_grad_() if other else None
    wanted = unit(x, nn.SiLU() if act else None, add)
    conv, norm = unit.conv, unit.norm
    found = FusedUnit.apply(
        x, conv.weight, conv.bias, norm.weight, norm.bias, norm.tau, add, stride, norm.eps, act, False
    )
    leaves = {"x": x, "other": add, **dict(unit.named_parameters())}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    slope = torch.randn_like(wanted)
    pairs = {"output": (found, wanted)}
    gradients = [torch.autograd.grad(output, leaves.values(), slope) for output in (found, wanted)]
    for name, a, b in zip(leaves, *gradients):
        pairs[name] = (a, b)
    apart.append({name: float(((a - b).norm() / b.norm()).detach()) for name, (a, b) in pairs.items()})
print(json.dumps(apart))
"""


@pytest.mark.skipif(NO_TRITON, reason="needs triton")
@pytest.mark.skipif(OLD, reason="the interpreter of this triton cannot read numbers of this numpy")
def test_kernels_equal_the_plain_layers():
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(CASES)]
    reported = subprocess.run(
        words, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert reported.returncode == 0, reported.stderr[-2000:]
    for case, apart in zip(CASES, json.loads(reported.stdout)):
        # The interpreter multiplies in float32. A weight's gradient rounds both factors to TF32, on average 2^-12 lower
        # each.
        assert apart.pop("conv.weight") < 2**-11, case
        assert max(apart.values()) < 3e-6, (case, apart)


@pytest.mark.parametrize("side", [7, 8])
@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (1, 2)])
def test_the_plain_unit_matches_its_definition(kernel, stride, side):
    torch.manual_seed(0)
    unit = Unit(3, 4, kernel, stride, True).double()
    x = randn(2, 3, side, side, dtype=torch.float64).requires_grad_()
    after = -(-side // stride)
    other = randn(2, 4, after, after, dtype=torch.float64).requires_grad_()
    lacking = max(0, (after - 1) * stride + kernel - side)  # as in TensorFlow, the odd one is at the end
    edges = (lacking // 2, lacking - lacking // 2) * 2
    z = F.conv2d(F.pad(x, edges), unit.conv.weight, unit.conv.bias, stride)
    normed = z / (z.square().mean((2, 3), keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(unit(x, nn.SiLU(), other), F.silu(normed.clamp_min(0) + other), atol=1e-12)
    assert torch.allclose(unit(x), normed.clamp_min(0), atol=1e-12)
    assert torch.autograd.gradcheck(lambda a, b: unit(a, nn.SiLU(), b), (x, other), atol=1e-6)


def test_kernels_are_for_first_derivatives_in_eager_code():
    seen = []

    def function(t):
        seen.append(first_order())
        return t.square().sum(), None

    point = torch.ones(3)
    function(point)
    grad_and_aux(function, point)
    vmap(lambda t: function(t)[0])(point.unsqueeze(0))
    grad_and_aux(lambda t: (vmap(lambda s: function(s)[0])(t.unsqueeze(0)).sum(), None), point)
    assert seen == [False, True, False, False]
    assert not first_order()


def test_no_kernels_on_a_cpu():
    x = randn(2, 3, 32, 32)
    assert not fuses(resnet20_frn(), x)
    assert not fuses(nn.Linear(3, 2), x)
