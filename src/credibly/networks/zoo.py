"""Networks of the papers, and common plain ones: no batch statistics, smooth activations by default.

`resnet20_frn`, `cnn_lstm` and `lenet` are those of Izmailov et al. (2021), "What Are Bayesian Neural Network Posteriors
Really Like?", and of the competition that followed it, as defined in their code (google-research/bnn_hmc). Images are
(N, channels, height, width). Initial values are torch's defaults for each layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credibly.core.checks import check_choice, check_integer, is_real
from credibly.errors import InputError
from credibly.networks.fused_unit import Unit
from credibly.networks.normalisation import FilterResponseNorm

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "mish": nn.Mish,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
}


def mlp(inputs: int, hidden: int | Sequence[int] = (50,), outputs: int = 1, activation: str = "silu") -> nn.Sequential:
    """Return a multilayer perceptron, (N, inputs) -> (N, outputs), with an activation after each layer but the last.

    `hidden` holds the widths; () gives a linear model.
    """
    if not isinstance(hidden, (int, list, tuple)):
        raise InputError("hidden", f"must be a width or a list of widths, such as (50, 50), got {hidden!r}")
    widths = (hidden,) if isinstance(hidden, int) else tuple(hidden)
    check_integer("inputs", inputs)
    for width in widths:
        check_integer("hidden", width)
    check_integer("outputs", outputs)
    sizes = [inputs, *widths, outputs]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), _activation(activation)]
    return nn.Sequential(*layers[:-1])


def lenet(classes: int = 10, channels: int = 1, activation: str = "silu") -> nn.Sequential:
    """Return the LeNet-5 of the competition for 28 x 28 images, (N, channels, 28, 28) -> (N, classes).

    Three 5 x 5 convolutions of 6, 16 and 120 filters, each followed by overlapping max-pooling (3 x 3, stride 2), and
    two linear layers. Its HMC reference on DermaMNIST was made with activation="relu", channels=3, classes=7.
    """
    check_integer("classes", classes)
    check_integer("channels", channels)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise((channels, 6, 16, 120)):
        layers += [nn.Conv2d(a, b, 5, padding=2), _activation(activation), nn.MaxPool2d(3, 2)]  # sides 28, 13, 6, 2
    last = [nn.Linear(120 * 2 * 2, 84), _activation(activation), nn.Linear(84, classes)]
    return nn.Sequential(*layers, nn.Flatten(), *last)


def resnet20_frn(
    classes: int = 10, channels: int = 3, activation: str = "silu", width: int = 16, *, threshold: bool = True
) -> ResNet20FRN:
    """Return a ResNet-20 with Filter Response Normalization, 274,042 parameters for 10 classes; see `ResNet20FRN`."""
    return ResNet20FRN(classes, channels, activation, width, threshold=threshold)


def cnn_lstm(
    vocabulary: int = 20_000,
    embedding: int = 128,
    filters: int = 64,
    kernel: int = 5,
    pool: int = 4,
    hidden: int = 128,
    classes: int = 2,
    activation: str = "silu",
    *,
    forget_bias: float = 1.0,
) -> CNNLSTM:
    """Return the network for IMDB, with 2,700,098 parameters; see `CNNLSTM`."""
    return CNNLSTM(vocabulary, embedding, filters, kernel, pool, hidden, classes, activation, forget_bias=forget_bias)


class ResNet20FRN(nn.Module):
    """ResNet-20 with Filter Response Normalization instead of BatchNorm: (N, channels, H, W) -> (N, classes).

    A stem, three stages of three residual blocks with `width`, 2 `width` and 4 `width` filters, global average pooling
    and a linear layer. Each convolution has a bias and is followed by a normalisation. Where a stage halves the image,
    the shortcut is a 1 x 1 convolution with its own normalisation. Strided convolutions pad as in TensorFlow and JAX
    ("same"): an even side gets its one row of zeros at the end.

    Args:
        classes, channels, width: numbers of classes, input channels and filters of the first stage.
        activation: a name of `ACTIVATIONS`.
        threshold: whether the normalisation ends in max(y, tau) with a learned tau, as in the paper's code, before the
            smooth activation. Without it the network is smooth and has 784 parameters fewer.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        activation: str = "silu",
        width: int = 16,
        *,
        threshold: bool = True,
    ) -> None:
        super().__init__()
        for name, value in {"classes": classes, "channels": channels, "width": width}.items():
            check_integer(name, value)
        self.classes, self.channels, self.width = classes, channels, width
        self.activation, self.threshold = activation, bool(threshold)
        self.stem = Unit(channels, width, 3, 1, self.threshold)
        self.act = _activation(activation)
        blocks, before = [], width
        for stage, position in itertools.product(range(3), range(3)):
            filters = width * 2**stage
            halves = stage > 0 and position == 0
            blocks.append(_Block(before, filters, halves, activation, self.threshold))
            before = filters
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels, H, W) to (N, classes)."""
        x = self.blocks(self.stem(x, self.act))
        out: Tensor = self.head(x.mean((2, 3)))
        return out

    def reset_parameters(self) -> None:
        """Reinitialise every layer; the normalisations are reset to gamma 1, beta 0, tau 0."""
        for part in self.modules():
            if isinstance(part, (FilterResponseNorm, nn.Conv2d, nn.Linear)):
                part.reset_parameters()


class _Block(nn.Module):
    """act(shortcut(x) + unit(act(unit(x)))); the shortcut is the identity unless the block halves the image."""

    def __init__(self, inputs: int, filters: int, halves: bool, activation: str, threshold: bool) -> None:
        super().__init__()
        stride = 2 if halves else 1
        self.first = Unit(inputs, filters, 3, stride, threshold)
        self.second = Unit(filters, filters, 3, 1, threshold)
        self.shortcut = Unit(inputs, filters, 1, stride, threshold) if halves else nn.Identity()
        self.act = _activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, self.act), self.act, self.shortcut(x))
        return out


class UnrolledLSTM(nn.Module):
    """An LSTM layer unrolled into plain operations, so that it can be batched over parameters and compiled.

        i, f, g, o = W_ih x_t + W_hh h_(t-1) + b
        c_t = sig(f + forget_bias) c_(t-1) + sig(i) tanh(g)
        h_t = sig(o) tanh(c_t)

    The four gates are in this order along the first axis of weight_ih (4H, F), weight_hh (4H, H) and bias (4H,), as in
    `nn.LSTM`. That has two biases, of which only the sum matters: with bias = bias_ih_l0 + bias_hh_l0 and forget_bias 0
    the outputs are equal. The initial state is zero.

    Args:
        inputs: F, features per step.
        hidden: H, size of the state.
        forget_bias: a constant added to the forget gate; with 1 an untrained layer remembers.
        sequence: whether to return every state (N, T, H) or only the last (N, H).
    """

    def __init__(self, inputs: int, hidden: int, *, forget_bias: float = 0.0, sequence: bool = True) -> None:
        super().__init__()
        check_integer("inputs", inputs)
        check_integer("hidden", hidden)
        if not is_real(forget_bias):
            raise InputError("forget_bias", f"must be a finite number, got {forget_bias!r}")
        self.inputs, self.hidden, self.sequence = inputs, hidden, bool(sequence)
        self.forget_bias = float(forget_bias)
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values uniformly within 1 / sqrt(H), as in nn.LSTM."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.hidden**-0.5), self.hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, F) to (N, T, H) or (N, H)."""
        if x.dim() != 3 or x.shape[1] < 1 or x.shape[2] != self.inputs:
            raise InputError("x", f"must have shape (N, T, {self.inputs}) with T >= 1, got {tuple(x.shape)}")
        bias: Tensor = self.bias
        if self.forget_bias:
            i, f, g, o = bias.chunk(4)
            bias = torch.cat([i, f + self.forget_bias, g, o])
        # The input terms do not depend on the state: one product for all steps, time first, so that the rows of a step
        # are contiguous.
        first, *rest = F.linear(x.transpose(0, 1), self.weight_ih, bias).unbind(0)
        i, f, g, o = first.chunk(4, -1)
        cell = i.sigmoid() * g.tanh()
        states = [o.sigmoid() * cell.tanh()]
        recurrent = self.weight_hh.mT
        for step in rest:
            i, f, g, o = torch.addmm(step, states[-1], recurrent).chunk(4, -1)
            cell = torch.addcmul(i.sigmoid() * g.tanh(), f.sigmoid(), cell)
            states.append(o.sigmoid() * cell.tanh())
        return torch.stack(states, 1) if self.sequence else states[-1]

    def extra_repr(self) -> str:
        """Return the arguments, for print(net)."""
        return f"{self.inputs}, {self.hidden}, forget_bias={self.forget_bias}, sequence={self.sequence}"


class CNNLSTM(nn.Module):
    """Embedding, 1-D convolution, activation, max-pooling, LSTM, and a linear layer on its last state.

    Maps integer tokens (N, T) from 0 to vocabulary - 1, T = 100 for IMDB, to (N, classes).

    Args:
        vocabulary, embedding: number of tokens, and size of their embedding.
        filters, kernel: number of filters and kernel size of the convolution, which has no padding.
        pool: steps that max-pooling merges; 1 for no pooling, which leaves a smooth network.
        hidden: size of the LSTM's state.
        classes: number of outputs.
        activation: a name of `ACTIVATIONS`. The HMC reference on IMDB was made with "relu".
        forget_bias: added to the LSTM's forget gate; 1 in the paper's code (Haiku's default).
    """

    def __init__(
        self,
        vocabulary: int = 20_000,
        embedding: int = 128,
        filters: int = 64,
        kernel: int = 5,
        pool: int = 4,
        hidden: int = 128,
        classes: int = 2,
        activation: str = "silu",
        *,
        forget_bias: float = 1.0,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "embedding": embedding, "filters": filters, "kernel": kernel, "pool": pool}
        for name, value in {**sizes, "hidden": hidden, "classes": classes}.items():
            check_integer(name, value)
        self.vocabulary, self.embedding, self.filters, self.kernel = vocabulary, embedding, filters, kernel
        self.pool, self.hidden, self.classes, self.activation = pool, hidden, classes, activation
        self.forget_bias = forget_bias
        self.embed = nn.Embedding(vocabulary, embedding)
        self.conv = nn.Conv1d(embedding, filters, kernel)
        self.act = _activation(activation)
        self.max = nn.MaxPool1d(pool) if pool > 1 else nn.Identity()
        self.lstm = UnrolledLSTM(filters, hidden, forget_bias=forget_bias, sequence=False)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (N, T) to (N, classes)."""
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            found = f"must hold integer tokens of shape (N, T), got {tokens.dtype} of shape {tuple(tokens.shape)}"
            raise InputError("x", found, f"Tokens are 0 to {self.vocabulary - 1}")
        least = self.kernel + self.pool - 1
        if tokens.shape[1] < least:
            raise InputError("x", f"must have at least {least} tokens per row, got {tokens.shape[1]}", "Pad the rows")
        x = self.embed(tokens.long()).transpose(1, 2)
        x = self.max(self.act(self.conv(x)))
        out: Tensor = self.head(self.lstm(x.transpose(1, 2)))
        return out


def _activation(name: str) -> nn.Module:
    check_choice("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]()
