"""Networks whose random parameters come late, in the ways that people write them."""

import torch
from torch import nn
from torch.nn import functional as F

from conftest import randn

X = randn(30, 4)


class Residual(nn.Module):
    """Functional code between layers, residual connections, and a head of two branches."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 8)
        self.fc1, self.fc2, self.skip = nn.Linear(8, 5), nn.Linear(5, 1), nn.Linear(8, 1)

    def forward(self, x):
        h = F.relu(self.a(x))
        h = h + torch.tanh(self.b(h))
        return self.fc2(F.silu(self.fc1(h))) + self.skip(h)


class Functional(nn.Module):
    """Random and frozen parameters that belong to the network itself."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.offset, self.weight = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(1, 8))
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(torch.relu(self.mix(self.body(x) + self.offset)), self.weight)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(1, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x):
        return self.fc(self.lstm(x.unsqueeze(-1))[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.c.weight = self.b.weight

    def forward(self, x):
        return self.out(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lin, self.mid = nn.Embedding(5, 6), nn.Linear(4, 6), nn.Linear(6, 6)
        self.head = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x, ids):
        return (self.head(self.mid(torch.tanh(self.table(ids).mean(1) + self.lin(x)))), "more")


class Branches(nn.Module):
    """Which layer runs depends on the values of the rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.fc((self.a if float(x.sum()) > 0 else self.b)(x))


def stack():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


NETWORKS = {
    "last layer": (stack, X, "4.*", "Sequential"),
    "two layers": (stack, X, ("2.*", "4.*"), "Sequential"),
    "a layer between": (stack, X, "2.*", "Sequential"),
    "residual": (Residual, X, ("fc*", "skip*"), "Replay"),
    "one branch": (Residual, X, "fc1.*", "Replay"),
    "functional": (Functional, X, "weight", "Replay"),
    "recurrent": (Recurrent, X, "fc.*", "Sequential"),
    "tied": (Tied, X, "c.*", "Replay"),
    "after tied": (Tied, X, "out.*", "Sequential"),
    "keywords": (Keywords, {"x": X, "ids": torch.arange(60).reshape(30, 2) % 5}, "head.*", "Sequential"),
    "branches": (Branches, X, "fc.*", "Sequential"),
}
