"""Networks of the papers, and the plain ones every study needs: no batch statistics, smooth activations by default.

`resnet20_frn`, `cnn_lstm` and `lenet` are those of Izmailov et al. (2021), "What Are Bayesian Neural Network Posteriors
Really Like?", and of the competition that followed it, as their published code (google-research/bnn_hmc) defines them.
Images are (N, channels, height, width). Initial values are torch's own for each layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    """Linear layers with an activation after each but the last: (N, inputs) -> (N, outputs).

    `hidden` holds the widths; () gives the linear model.
    """
    if not isinstance(hidden, (int, list, tuple)):
        raise InputError("hidden", f"found {hidden!r}", "Pass one width, or a list of them, such as (50, 50)")
    widths = (hidden,) if isinstance(hidden, int) else tuple(hidden)
    sizes = [_count("inputs", inputs), *(_count("hidden", w) for w in widths), _count("outputs", outputs)]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), _activation(activation)]
    return nn.Sequential(*layers[:-1])


def lenet(classes: int = 10, channels: int = 1, activation: str = "silu") -> nn.Sequential:
    """The LeNet-5 of the competition for 28 x 28 images, (N, channels, 28, 28) -> (N, classes).

    Three 5 x 5 convolutions of 6, 16 and 120 filters, each followed by overlapping max-pooling (3 x 3, stride 2), and two
    linear layers. Its HMC reference on DermaMNIST was made with activation="relu", channels=3, classes=7.
    """
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise((_count("channels", channels), 6, 16, 120)):
        layers += [nn.Conv2d(a, b, 5, padding=2), _activation(activation), nn.MaxPool2d(3, 2)]  # sides 28, 13, 6, 2
    last = [nn.Linear(120 * 2 * 2, 84), _activation(activation), nn.Linear(84, _count("classes", classes))]
    return nn.Sequential(*layers, nn.Flatten(), *last)


def resnet20_frn(
    classes: int = 10, channels: int = 3, activation: str = "silu", width: int = 16, *, threshold: bool = True
) -> ResNet20FRN:
    """ResNet-20 with Filter Response Normalization, 274,042 parameters for 10 classes; see `ResNet20FRN`."""
    return ResNet20FRN(classes, channels, activation, width, threshold=threshold)


def cnn_lstm(
    vocabulary: int = 20_000, embedding: int = 128, filters: int = 64, kernel: int = 5, pool: int = 4, hidden: int = 128,
    classes: int = 2, activation: str = "silu", *, forget_bias: float = 1.0,
) -> CNNLSTM:  # fmt: skip
    """The network for IMDB: embedding, convolution, max-pooling, LSTM, linear; 2,700,098 parameters; see `CNNLSTM`."""
    return CNNLSTM(vocabulary, embedding, filters, kernel, pool, hidden, classes, activation, forget_bias=forget_bias)


class ResNet20FRN(nn.Module):
    """ResNet-20 for images, with Filter Response Normalization in place of BatchNorm: (N, channels, H, W) -> (N, classes).

    A stem, three stages of three residual blocks with `width`, 2 and 4 times as many filters, the mean over all places, a
    linear layer. Each convolution has a bias and is followed by its normalisation. Where a stage halves the image, the
    shortcut is a 1 x 1 convolution with a normalisation of its own. Strided convolutions pad as TensorFlow and JAX do
    ("same"): an even side gets its one row of zeros at the end.

    Args:
        classes, channels, width: sizes.
        activation: a name of `ACTIVATIONS`.
        threshold: whether the normalisation ends in max(y, tau) with a learned tau, as the paper's code has it, before the
            smooth activation. Without it the network is smooth, with 784 parameters fewer.
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
        self.classes, self.channels = _count("classes", classes), _count("channels", channels)
        self.width, self.activation, self.threshold = _count("width", width), activation, bool(threshold)
        self.stem = Unit(channels, width, 3, 1, self.threshold)
        self.act = _activation(activation)
        blocks, before = [], width
        for stage, place in itertools.product(range(3), range(3)):
            filters = width * 2**stage
            halves = stage > 0 and place == 0
            blocks.append(_Block(before, filters, halves, activation, self.threshold))
            before = filters
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> (N, classes)."""
        x = self.blocks(self.stem(x, self.act))
        out: Tensor = self.head(x.mean((2, 3)))
        return out

    def reset_parameters(self) -> None:
        """Fresh values for every layer; the normalisations go back to gamma 1, beta 0, tau 0."""
        for part in self.modules():
            if isinstance(part, FilterResponseNorm):
                for value, parameter in ((1.0, part.weight), (0.0, part.bias), (0.0, part.tau)):
                    if parameter is not None:
                        nn.init.constant_(parameter, value)
            elif isinstance(part, (nn.Conv2d, nn.Linear)):
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
    """An LSTM layer in plain operations, one step after another, so that it can be batched over parameters and compiled.

        i, f, g, o = W_ih x_t + W_hh h_(t-1) + b,   c_t = sig(f + forget_bias) c_(t-1) + sig(i) tanh(g),   h_t = sig(o) tanh(c_t)

    The four gates lie in this order along the first axis of weight_ih (4H, F), weight_hh (4H, H) and bias (4H,), as in
    `nn.LSTM`, which has two biases where only their sum matters: with bias = bias_ih_l0 + bias_hh_l0 and forget_bias 0 the
    outputs are equal. The state starts at zero.

    Args:
        inputs: F, values a step.
        hidden: H, values of the state.
        forget_bias: a constant added to the forget gate; with 1 a fresh layer remembers.
        sequence: whether to return every state (N, T, H) or only the last (N, H).
    """

    def __init__(self, inputs: int, hidden: int, *, forget_bias: float = 0.0, sequence: bool = True) -> None:
        super().__init__()
        self.inputs, self.hidden, self.sequence = _count("inputs", inputs), _count("hidden", hidden), bool(sequence)
        if isinstance(forget_bias, bool) or not isinstance(forget_bias, (int, float)) or not math.isfinite(forget_bias):
            raise InputError("forget_bias", f"found {forget_bias!r}", "Pass a number, such as 1.0")
        self.forget_bias = float(forget_bias)
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(H), as in nn.LSTM."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.hidden**-0.5), self.hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, F) -> (N, T, H) or (N, H)."""
        if x.dim() != 3 or x.shape[1] < 1 or x.shape[2] != self.inputs:
            raise InputError("x", f"has shape {tuple(x.shape)}", f"Pass (N, T, {self.inputs}) with T from 1 up")
        bias: Tensor = self.bias
        if self.forget_bias:
            i, f, g, o = bias.chunk(4)
            bias = torch.cat([i, f + self.forget_bias, g, o])
        # What comes from the inputs does not wait for the state: one product for all steps, time first, so that a step's
        # rows lie together.
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
        """The arguments, for print(net)."""
        return f"{self.inputs}, {self.hidden}, forget_bias={self.forget_bias}, sequence={self.sequence}"


class CNNLSTM(nn.Module):
    """Embedding, 1-D convolution, activation, max-pooling, LSTM, and a linear layer on its last state.

    Takes whole-number tokens (N, T) from 0 to vocabulary - 1, T = 100 for IMDB, and gives (N, classes).

    Args:
        vocabulary, embedding: tokens, and values that stand for each.
        filters, kernel: of the convolution, which has no padding.
        pool: steps that max-pooling makes one of; 1 for none, which leaves a smooth network.
        hidden: values of the LSTM's state.
        classes: outputs.
        activation: a name of `ACTIVATIONS`. The HMC reference on IMDB was made with "relu".
        forget_bias: added to the LSTM's forget gate; 1 in the paper's code (it is Haiku's).
    """

    def __init__(
        self, vocabulary: int = 20_000, embedding: int = 128, filters: int = 64, kernel: int = 5, pool: int = 4,
        hidden: int = 128, classes: int = 2, activation: str = "silu", *, forget_bias: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vocabulary, self.embedding = _count("vocabulary", vocabulary), _count("embedding", embedding)
        self.filters, self.kernel, self.pool = (
            _count("filters", filters),
            _count("kernel", kernel),
            _count("pool", pool),
        )
        self.hidden, self.classes, self.activation = _count("hidden", hidden), _count("classes", classes), activation
        self.forget_bias = forget_bias
        self.embed = nn.Embedding(vocabulary, embedding)
        self.conv = nn.Conv1d(embedding, filters, kernel)
        self.act = _activation(activation)
        self.max = nn.MaxPool1d(pool) if pool > 1 else nn.Identity()
        self.lstm = UnrolledLSTM(filters, hidden, forget_bias=forget_bias, sequence=False)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) -> (N, classes)."""
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise InputError(
                "x",
                f"found {tokens.dtype} of shape {tuple(tokens.shape)}",
                f"Pass whole-number tokens (N, T) from 0 to {self.vocabulary - 1}",
            )
        least = self.kernel + self.pool - 1
        if tokens.shape[1] < least:
            raise InputError("x", f"has rows of {tokens.shape[1]} tokens", f"Pad them to {least} or more")
        x = self.embed(tokens.long()).transpose(1, 2)
        x = self.max(self.act(self.conv(x)))
        out: Tensor = self.head(self.lstm(x.transpose(1, 2)))
        return out


def _activation(name: str) -> nn.Module:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise InputError("activation", f"found {name!r}", f"Pass one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


def _count(argument: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(argument, f"found {value!r}", "Pass a whole number from 1 up")
    return value
