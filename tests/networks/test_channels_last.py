"""Channels-last images and paired pooling: the same values as in torch's default layout, for any network."""

import subprocess

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credibly as cr
from credibly.core.compilation import compiler_missing
from credibly.forward import Forward
from credibly.networks.channels_last import PairedMaxPool2d, channels_last, find_arrangement, with_paired_pools
from credibly.networks.layout import Layout
from warm_python import warm_python

needs_compiler = pytest.mark.skipif(bool(compiler_missing(torch.device("cpu"))), reason="needs a C++ compiler")


def awkward(*shape: int) -> torch.Tensor:
    """Return small integers, so that most windows have ties, with a few infinities and NaNs."""
    x = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(3)).float()
    x.view(-1)[::17] = -torch.inf
    x.view(-1)[4::11] = torch.nan
    return x


def pooled_and_grad(pool, x):
    leaf = x.clone().requires_grad_()
    out = pool(leaf)
    weights = torch.arange(1.0, out.numel() + 1).reshape(out.shape)
    (gradient,) = torch.autograd.grad(torch.where(out.isfinite(), out, 0.0 * weights), leaf, weights)
    return out.detach(), gradient


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 5, 7), (3, 2, 3, 2), (3, 6, 9)])
def test_pairs_are_bit_for_bit_max_pooling(shape, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # the code for the compiler, run eagerly
    x = awkward(*shape)
    ours, plain = pooled_and_grad(PairedMaxPool2d(), x), pooled_and_grad(nn.MaxPool2d(2), x)
    assert x.isnan().any()
    assert ours[0].isnan().any()
    assert all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(ours, plain))


def test_only_plain_pools_of_two_are_replaced():
    class Own(nn.MaxPool2d):
        pass

    hooked = nn.MaxPool2d(2)
    hooked.register_forward_hook(lambda *_: None)
    others = [
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d((2, 1)),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        nn.AvgPool2d(2),
        Own(2),
        hooked,
    ]
    for pool in others:
        net = nn.Sequential(nn.Conv2d(1, 2, 3), pool)
        assert with_paired_pools(net) is net
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.MaxPool2d((2, 2), (2, 2)))
    replaced = with_paired_pools(net)
    assert [type(m) for m in replaced] == [nn.Conv2d, PairedMaxPool2d, PairedMaxPool2d]
    assert type(net[1]) is nn.MaxPool2d
    assert replaced[0].weight is net[0].weight
    assert replaced[0].bias is net[0].bias


def test_channels_last_moves_nothing_but_the_memory():
    for channels in (1, 3):
        x = torch.randn(4, channels, 5, 6)
        y = channels_last(x)
        assert torch.equal(x, y)
        assert y.stride() == (30 * channels, 1, 6 * channels, channels)
    row = torch.randn(4, 5)
    assert channels_last(row) is row
    assert torch.equal(channels_last(x[:, :1]), x[:, :1])  # a slice, whose rows are not contiguous


NETS = {
    "plain": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6, 3),
    ),
    "stride, padding, dilation": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Conv2d(4, 4, 3, padding="same", dilation=2, padding_mode="circular"),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Flatten(),
        nn.Linear(36, 3),
    ),
    "groups": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, groups=2),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
}


def forward_and_plain(make, channels=1):
    torch.manual_seed(0)
    net = make()
    if channels > 1:
        first = net[0]
        net[0] = nn.Conv2d(channels, first.out_channels, 3, first.stride, first.padding)
    x = torch.randn(5, channels, 12, 12)
    layout = Layout(net)
    forward = Forward(layout, "auto", x[:1])
    assert forward.channels_last
    theta = layout.read(layout.module).repeat(2, 1) + 0.1 * torch.randn(2, layout.dim)
    weights = torch.randn(2, 5, 3)

    def ours(theta, x):
        return (forward(theta, x) * weights).sum()

    def plain(theta, x):
        return (torch.stack([layout.call(t, x) for t in theta]) * weights).sum()

    return ours, plain, theta, x


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", list(NETS))
def test_outputs_and_gradients_are_those_of_the_plain_network(name, channels):
    ours, plain, theta, x = forward_and_plain(NETS[name], channels)
    found, expected = torch.func.grad(ours)(theta, x), torch.func.grad(plain)(theta, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert expected.abs().max() > 1


@needs_compiler
@pytest.mark.nightly
def test_the_compiled_gradient_is_that_of_the_plain_network():
    ours, plain, theta, x = forward_and_plain(NETS["plain"])
    torch._dynamo.reset()
    found = torch.compile(torch.func.grad(ours), dynamic=False)(theta, x)
    torch.testing.assert_close(found, torch.func.grad(plain)(theta, x), rtol=1e-4, atol=1e-4)


class Viewed(nn.Module):
    """Flattening by view, which needs channels first in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4 * 25, 3)

    def forward(self, x):
        h = F.max_pool2d(self.conv(x).relu(), 2)
        return self.out(h.view(len(h), -1))


def test_a_network_that_flattens_by_view_is_left_unchanged():
    net, x, y = Viewed(), torch.randn(6, 1, 12, 12), torch.randint(3, (6,))
    assert not find_arrangement(net, x[:1], x.device, x.dtype).channels_last
    problem = cr.Problem(net, data=(x, y), likelihood=cr.likelihoods.Categorical(), prior=cr.priors.Normal(1.0))
    assert not problem.forward.channels_last
    with torch.no_grad():
        assert torch.equal(problem.forward(problem.layout.read(net).unsqueeze(0), x)[0], net(x))


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_estimators_with_noise_on_layers_use_it_too(estimator):
    x, y = torch.randn(8, 1, 12, 12), torch.randint(3, (8,))
    fits = []
    for ordered in (True, False):
        torch.manual_seed(0)
        problem = cr.Problem(
            NETS["plain"](), data=(x, y), likelihood=cr.likelihoods.Categorical(), prior=cr.priors.Normal(1.0)
        )
        problem.forward.channels_last = ordered
        method = cr.BayesByBackprop(steps=3, batch_size=4, estimator=estimator, optimiser="sgd")
        fits.append(method.fit(problem, progress=False).phi)
    torch.testing.assert_close(*fits, rtol=1e-4, atol=1e-5)


GROUP_NORM_FITS = """
import torch, credibly as cr
from torch import nn
from torch.nn import functional as F

class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gain, self.head = nn.Conv2d(2, 4, 3), nn.Parameter(torch.ones(4)), nn.Linear(144, 3)

    def forward(self, x):
        return self.head(F.group_norm(self.conv(x), 2, self.gain).flatten(1))

def network(norm):
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(144, 3))

x, y = torch.randn(6, 2, 8, 8), torch.arange(6) % 3
last = network(nn.GroupNorm(2, 4)).to(memory_format=torch.channels_last)
cases = [
    (network(nn.GroupNorm(2, 4)), x, "*"),
    (cr.replace_batchnorm(network(nn.BatchNorm2d(4)), "group"), x, "*"),
    (Functional(), x, "*"),
    (last, x.contiguous(memory_format=torch.channels_last), "1.*"),
    (network(nn.GroupNorm(2, 4)).double(), x.double().contiguous(memory_format=torch.channels_last), "1.*"),
]
for net, images, random in cases:
    problem = cr.Problem(
        net, data=(images, y), likelihood=cr.likelihoods.Categorical(), prior=cr.priors.Normal(), random=random
    )
    for method in (cr.Laplace(steps=2), cr.MAP(steps=2)):
        mean = method.fit(problem, progress=False).predict(images).mean
        assert bool(mean.isfinite().all())
print("done")
"""


def test_group_normalisation_does_not_end_the_process():
    """torch's gradient of group_norm crashes on channels-last images that need no gradient themselves."""
    done = subprocess.run([warm_python(), "-c", GROUP_NORM_FITS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_only_networks_with_group_normalisation_keep_the_default_layout():
    x, y = torch.randn(6, 1, 8, 8), torch.arange(6) % 3

    def forward(norm):
        net = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(144, 3))
        return cr.Problem(net, data=(x, y), likelihood=cr.likelihoods.Categorical(), prior=cr.priors.Normal()).forward

    assert forward(nn.Identity()).channels_last
    assert not forward(nn.Identity()).group_norm
    assert not forward(nn.GroupNorm(2, 4)).channels_last
