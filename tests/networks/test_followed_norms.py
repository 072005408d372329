"""BatchNorm layers with an activation of their own."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from credibly.networks.normalisation import replace_batchnorm
from tests.networks.test_normalisation import BYS, generator, scrambled


class WithActivation(nn.BatchNorm2d):
    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.act = nn.PReLU()

    def forward(self, input: Tensor) -> Tensor:
        return self.act(super().forward(input))


def test_a_layer_with_its_own_activation_keeps_it_and_every_name() -> None:
    """As timm's BatchNormAct2d: the normalisation, and then its children."""
    layer = scrambled(WithActivation(8)).eval()
    x = 3 + 2 * torch.randn(5, 8, 3, 4, generator=generator(1))
    for by in BYS:
        new = replace_batchnorm(layer, by)
        assert [name for name, _ in new.named_parameters()] == ["weight", "bias", "act.weight"]
        normalised = copy.deepcopy(new)
        normalised.act = nn.Identity()
        torch.testing.assert_close(new(x), layer.act(normalised(x)))
    torch.testing.assert_close(replace_batchnorm(layer, "frozen").train()(x), layer(x), rtol=1e-5, atol=1e-5)
