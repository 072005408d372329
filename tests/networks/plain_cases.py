"""Networks of plain torch for the module table: layers, architectures and idioms of forward passes."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

import credibly as cr
from tests.networks.module_cases import (
    QUICK,
    ROWS,
    WORKS,
    case,
    classification,
    images,
    noise,
    regression,
    rows,
    tokens,
)

# What MCDropout refuses: a mask needs one position in the forward pass, whose first axis is the rows.
TWICE = {"dropout": "is used more than once in a forward pass"}
NO_ROWS = {"dropout": "needs inputs of shape (rows, features, ...)"}
NO_LINEAR = {"dropout": "matches no Linear or convolution layer"}


def small(inputs: int = 3, outputs: int = 1, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


class Wrapped(nn.Module):
    """Apply a function to an inner network and the inputs."""

    def __init__(self, net, function):
        super().__init__()
        self.net, self.function = net, function

    def forward(self, *x):
        return self.function(self.net, *x)


# -- architectures -----------------------------------------------------------------------------------------------------
@case("MLP")
def _():
    return regression(small())


@case("MLP with dropout", settings={"dropout": {"insert": None}})
def _():
    return regression(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(4, 1)))


@case("CNN")
def _():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3))
    return classification(net, images())


class Residual(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        h = self.stem(x)
        out = self.block(h)
        out += h
        return self.head(F.relu_(out).mean((2, 3)))


@case("ResNet block with GroupNorm, in-place addition")
def _():
    return classification(Residual(nn.GroupNorm(2, 4)), images())


@case("ResNet block with BatchNorm", refused="batch statistics")
def _():
    return classification(Residual(nn.BatchNorm2d(4)), images())


@case(
    "ResNet block with BatchNorm, trained, in evaluation mode",
    exceptions={**dict.fromkeys(QUICK, "batch statistics that would change"), "laplace": WORKS},
    settings={"laplace": {"start": "network"}},
    note='Laplace with `start="network"`.',
)
def _():
    return classification(Residual(nn.BatchNorm2d(4)).eval(), images())


@case("ResNet block with BatchNorm, frozen body", options={"random": "head.*"})
def _():
    return classification(Residual(nn.BatchNorm2d(4)).eval(), images())


class UNet(nn.Module):
    def __init__(self, classes=2):
        super().__init__()
        self.down, self.mid = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(3, 3, 2, stride=2), nn.Conv2d(6, classes, 1)

    def forward(self, x):
        a = F.relu(self.down(x))
        b = self.up(F.relu(self.mid(F.max_pool2d(a, 2))))
        return self.out(torch.cat([a, b], 1))


def pixels():
    return (images(1, 8)[:, 0] > 0).long()


@case("U-Net, pixels as targets")
def _():
    return UNet(), images(), pixels(), cr.likelihoods.Categorical(axis=1)


@case("U-Net without axis=1", refused="Pass axis=1 to the likelihood")
def _():
    return UNet(), images(), pixels(), cr.likelihoods.Categorical()


@case("Temporal convolutions (Conv1d)")
def _():
    net = nn.Sequential(
        nn.Conv1d(2, 3, 3, padding=2), nn.ReLU(), nn.Conv1d(3, 3, 3, dilation=2), nn.Flatten(), nn.LazyLinear(1)
    )
    net(noise(1, 2, 8))
    return regression(net, noise(ROWS, 2, 8))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cell = kind(2, 4, batch_first=True, **options)
        self.attention = nn.Linear(8, 1) if options.get("bidirectional") else None
        self.head = nn.Linear(8 if options.get("bidirectional") else 4, 1)

    def forward(self, x):
        states, _ = self.cell(x)
        if self.attention is None:
            return self.head(states[:, -1])
        return self.head((states * self.attention(states).softmax(1)).sum(1))


@case("LSTM")
def _():
    return regression(Recurrent(nn.LSTM), noise(ROWS, 5, 2))


@case("GRU")
def _():
    return regression(Recurrent(nn.GRU), noise(ROWS, 5, 2))


@case("Bidirectional LSTM with attention")
def _():
    return regression(Recurrent(nn.LSTM, bidirectional=True), noise(ROWS, 5, 2))


@case("LSTM cell in a loop")
def _():
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTMCell(2, 4), nn.Linear(4, 1)

        def forward(self, x):
            state = None
            for step in x.unbind(1):
                state = self.cell(step, state)
            return self.head(state[0])

    return regression(Cells(), noise(ROWS, 5, 2))


@case("Packed sequences (lengths as second input)")
def _():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.cell(packed)[1][-1])

    return regression(Packed(), (noise(ROWS, 5, 2), torch.tensor([5, 4, 3, 5, 2, 1])))


@case("Transformer encoder")
def _():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
            self.embed, self.encoder = nn.Embedding(7, 4), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.encoder(self.embed(x)).mean(1))

    return classification(Encoder(), tokens())


@case("Transformer encoder with a padding mask", settings={"dropout": {"insert": None}})
def _():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
            self.embed, self.encoder = nn.Embedding(7, 4, padding_idx=0), nn.TransformerEncoder(layer, 1)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.encoder(self.embed(x), src_key_padding_mask=x == 0)[:, -1])

    x = tokens().clamp_min(1)
    x[::2, :2] = 0
    return classification(Padded(), x)


@case("Embedding with padding_idx, averaged without a mask")
def _():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.embed(x).mean(1))

    return classification(Averaged(), tokens())


@case("Dropout layer called twice", settings={"dropout": {"insert": None}})
def _():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            x = self.drop(torch.tanh(self.first(x)))
            return self.head(self.drop(torch.tanh(self.second(x))))

    return regression(Shared())


@case("Head in float32 on a body in bfloat16")
def _():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    net[0].bfloat16()
    return regression(net)


@case("Softmax at the end, for Categorical", refused="probabilities, and logits are expected")
def _():
    return classification(nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)), noise(ROWS, 3))


@case("Deep sets")
def _():
    class DeepSets(nn.Module):
        def __init__(self):
            super().__init__()
            self.phi, self.rho = small(2, 4), small(4, 1)

        def forward(self, x):
            return self.rho(self.phi(x).sum(1))

    return regression(DeepSets(), noise(ROWS, 5, 2))


@case("Graph convolution (dense adjacency per row)")
def _():
    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 1)

        def forward(self, nodes, adjacency):
            h = F.relu(adjacency @ self.first(nodes))
            return self.second(adjacency @ h).mean(1)

    return regression(GCN(), (noise(ROWS, 5, 2), noise(ROWS, 5, 5, seed=3).softmax(-1)))


@case("KAN-like (learned splines)", exceptions=NO_LINEAR)
def _():
    class KAN(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("grid", torch.linspace(-2, 2, 5))
            self.inner, self.outer = nn.Parameter(torch.randn(4, 3, 5)), nn.Parameter(torch.randn(1, 4, 5))

        def forward(self, x):
            for weight in (self.inner, self.outer):
                basis = torch.exp(-(x.unsqueeze(-1) - self.grid).square())
                x = torch.einsum("nif,oif->no", basis, weight)
            return x

    return regression(KAN())


@case("Quantile heads (ModuleList)")
def _():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])

        def forward(self, x):
            h = self.body(x).tanh()
            return torch.cat([head(h) for head in self.heads], -1)

    x, y = rows()
    return Heads(), x, torch.stack([y - 1, y, y + 1], -1), cr.likelihoods.Gaussian(1.0)


# -- inputs and outputs ------------------------------------------------------------------------------------------------
@case("Siamese, two inputs", exceptions=TWICE)
def _():
    net = Wrapped(small(3, 4), lambda net, a, b: (net(a) - net(b)).square().sum(-1, keepdim=True))
    return regression(net, (noise(ROWS, 3), noise(ROWS, 3, seed=4)))


@case("Inputs by name (dict)")
def _():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.age, self.words, self.head = nn.Linear(2, 4), nn.Embedding(7, 4), nn.Linear(4, 1)

        def forward(self, age, words):
            return self.head(self.age(age) + self.words(words).mean(1))

    return regression(Named(), {"age": noise(ROWS, 2), "words": tokens()})


@case("Tuple output (first is used)")
def _():
    return regression(Wrapped(small(), lambda net, x: (net(x), x)))


@case("Dict output", refused="its forward returned dict")
def _():
    return regression(Wrapped(small(), lambda net, x: {"mean": net(x), "hidden": x}))


@case("No output (None)", refused="its forward returned NoneType")
def _():
    return regression(Wrapped(small(), lambda net, x: None))


@case("Output without a row axis", refused="The first axis of its output must be the rows")
def _():
    return regression(Wrapped(small(), lambda net, x: net(x).mean()))


@case("Embedding bag")
def _():
    return regression(nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 1)), tokens())


@case("Sparse embedding", note="Gradients are dense.")
def _():
    net = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(20, 1))
    return regression(net, tokens())


@case("Sparse embedding bag", note="Gradients are dense.")
def _():
    return regression(nn.Sequential(nn.EmbeddingBag(7, 4, sparse=True), nn.Linear(4, 1)), tokens())


@case("Max-norm embedding", refused="edits its weight in every forward pass")
def _():
    return regression(nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(20, 1)), tokens())


# -- weights -----------------------------------------------------------------------------------------------------------
@case("Weight norm (parametrization)")
def _():
    net = small()
    parametrizations.weight_norm(net[0])
    return regression(net)


@case("Weight norm (hooks, old style)")
def _():
    net = small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        net[0] = weight_norm(net[0])
    net(noise(2, 3))
    return regression(net)


@case("Spectral norm (parametrization)")
def _():
    net = small()
    parametrizations.spectral_norm(net[0])
    return regression(net)


@case("Spectral norm (hooks, old style)")
def _():
    net = small()
    nn.utils.spectral_norm(net[0])
    net(noise(2, 3))
    return regression(net)


@case("Tied weights")
def _():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(self.mix(self.embed(x).mean(1)).tanh())

    return Tied(), tokens(), tokens()[:, 0], cr.likelihoods.Categorical()


@case("Hypernetwork (weights by another network)")
def _():
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.base = nn.Linear(2, 3), nn.Linear(3, 3)

        def forward(self, x, context):
            return (self.base(x).tanh() * self.net(context)).sum(-1, keepdim=True)

    return regression(Hyper(), (noise(ROWS, 3), noise(ROWS, 2, seed=5)))


@case("Hypernetwork (torch.func.functional_call)", exceptions=NO_ROWS)
def _():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.code, self.made = nn.Parameter(torch.randn(2)), nn.Linear(2, 12)
            self.main = [nn.Linear(3, 3)]

        def forward(self, x):
            weight, bias = self.made(self.code).split([9, 3])
            made = {"weight": weight.view(3, 3), "bias": bias}
            return torch.func.functional_call(self.main[0], made, (x,)).sum(-1, keepdim=True)

    return regression(Functional())


@case("Complex parameters", refused="is complex")
def _():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 1, dtype=torch.cfloat))

        def forward(self, x):
            return (x.to(torch.cfloat) @ self.weight).abs()

    return regression(Complex())


@case("Complex arithmetic, real parameters")
def _():
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.head = nn.Parameter(torch.ones(3)), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(torch.fft.irfft(torch.fft.rfft(x, n=4) * self.gain, n=4))

    return regression(Fourier())


def quantised(net: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    return made


@case("Quantised body, random head")
def _():
    return regression(nn.Sequential(quantised(small(outputs=2)), nn.Linear(2, 1)))


@case("Quantised layers after random ones", refused="the quantised layer")
def _():
    return regression(nn.Sequential(nn.Linear(3, 3), quantised(small())))


@case("Meta tensors", refused="on the meta device")
def _():
    return regression(small().to("meta"))


# -- forward passes ----------------------------------------------------------------------------------------------------
@case("PINN (autograd.grad in forward)")
def _():
    class PINN(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small(1)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                u = self.net(x)
                return u + torch.autograd.grad(u.sum(), x, create_graph=True)[0]

    return regression(PINN(), noise(ROWS, 1))


@case("PINN (autograd.grad in forward, without enable_grad)")
def _():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small(1)

        def forward(self, x):
            x = x.clone().requires_grad_(True)
            u = self.net(x)
            return u + torch.autograd.grad(u.sum(), x, create_graph=True)[0]

    return regression(Plain(), noise(ROWS, 1))


@case("PINN (torch.func.grad in forward)", exceptions=TWICE)
def _():
    class PINN(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small(1)

        def forward(self, x):
            u = lambda t: self.net(t).sum()  # noqa: E731
            return self.net(x) + torch.func.grad(u)(x)

    return regression(PINN(), noise(ROWS, 1))


@case("Mixture of experts (soft)")
def _():
    class Soft(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(3, 2), nn.ModuleList([small(), small()])

        def forward(self, x):
            return (torch.cat([e(x) for e in self.experts], -1) * self.gate(x).softmax(-1)).sum(-1, keepdim=True)

    return regression(Soft())


@case("Mixture of experts (rows routed by index)", exceptions=NO_ROWS)
def _():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(3, 2), nn.ModuleList([small(), small()])

        def forward(self, x):
            score = self.gate(x).softmax(-1)
            best, out = score.argmax(-1), x.new_zeros(len(x), 1)
            for number, expert in enumerate(self.experts):
                chosen = (best == number).nonzero().squeeze(-1)
                if len(chosen):
                    out = out.index_add(0, chosen, expert(x[chosen]) * score[chosen, number : number + 1])
            return out

    return regression(Routed())


@case("Control flow on x")
def _():
    def forward(net, x):
        return net(x) if bool(x.abs().max() > 100) else net(x) + 1

    return regression(Wrapped(small(), forward))


@case("Control flow on weights")
def _():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 1)

        def forward(self, x):
            scale = 0.5 if float(self.net.weight.detach().norm()) > 3 else 1.0
            return scale * self.net(x)

    return regression(Norm())


@case("Output shape that depends on the data", refused="The first axis of its output must be the rows")
def _():
    return regression(Wrapped(small(), lambda net, x: net(x[x[:, 0] > 0])))


@case("ODE (loop of steps)", exceptions=TWICE)
def _():
    class ODE(nn.Module):
        def __init__(self):
            super().__init__()
            self.field, self.head = small(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            for _ in range(4):
                x = x + 0.25 * self.field(x)
            return self.head(x)

    return regression(ODE())


@case("Normalising flow (coupling)")
def _():
    class Coupling(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.scale, self.head = small(2, 2), small(2, 2), nn.Linear(4, 1)

        def forward(self, x):
            a, b = x.chunk(2, -1)
            return self.head(torch.cat([a, b * self.scale(a).exp() + self.shift(a)], -1))

    return regression(Coupling(), noise(ROWS, 4))


@case("Activation checkpointing", refused="its forward calls torch.utils.checkpoint")
def _():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = small(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    return regression(Checkpointed())


@case("Activation checkpointing (reentrant)", refused="its forward calls torch.utils.checkpoint")
def _():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = small(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            with warnings.catch_warnings():
                # It warns that no gradient reaches the body.
                warnings.simplefilter("ignore")
                return self.head(checkpoint(self.body, x, use_reentrant=True))

    return regression(Checkpointed())


class InPlace(nn.Module):
    def __init__(self, edit):
        super().__init__()
        self.first, self.second, self.edit = nn.Linear(3, 4), nn.Linear(4, 1), edit

    def forward(self, x):
        h = self.first(x)
        self.edit(h)
        return self.second(h)


@case("In-place edit of a tensor that the gradient needs", refused="edits a tensor in place that its gradient needs")
def _():
    class Editing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.first(x).exp()
            h += self.second(h)
            return h.sum(-1, keepdim=True)

    return regression(Editing())


@case("In-place operations after a layer")
def _():
    def edit(h):
        h.mul_(0.5).add_(1.0)
        h[:, 0] = 0.0

    return regression(InPlace(edit))


@case("In-place ReLU after a layer (functional)")
def _():
    return regression(InPlace(lambda h: F.relu(h, inplace=True)))


@case("Buffer reassigned in forward", refused="its forward changes the buffer")
def _():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return self.net(x) * (1 + 1e-3 * self.seen)

    return regression(Counting())


@case("Buffer edited in forward", refused="its forward changes the buffer")
def _():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            h = self.net[1](self.net[0](x))
            self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
            return self.net[2](h - self.mean)

    return regression(Running())


@case("Activations kept on the module", note="Values that forward stores on the module are kept.")
def _():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()

        def forward(self, x):
            self.hidden = self.net[0](x)
            return self.net[2](self.net[1](self.hidden))

    return regression(Keeping())


@case("No gradient (output detached)", refused="its output has no gradient")
def _():
    return regression(Wrapped(small(), lambda net, x: net(x).detach()))


@case("Straight-through rounding (argmax, no gradient)", refused="its output has no gradient")
def _():
    return regression(Wrapped(small(3, 4), lambda net, x: net(x).argmax(-1, keepdim=True).float()))


# -- wrappers ----------------------------------------------------------------------------------------------------------
@case("ScriptModule (torch.jit.script)", refused="is a ScriptModule")
def _():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return regression(torch.jit.script(small()))


@case("Traced module (torch.jit.trace)", refused="is a ScriptModule")
def _():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return regression(torch.jit.trace(small(), noise(2, 3)))


@case("DataParallel", note="The module inside is used.")
def _():
    return regression(nn.DataParallel(small()))


@case("torch.compile", note="The module inside is used.")
def _():
    return regression(torch.compile(small()))


@case("torch.fx graph module")
def _():
    return regression(torch.fx.symbolic_trace(small()))


@case("Exported program (torch.export)", refused="comes from torch.export")
def _():
    return regression(torch.export.export(small(), (noise(2, 3),)).module())
