"""A Bayesian last layer on a network trained in plain PyTorch.

    python examples/pretrained_last_layer.py --out head.png          # under a minute
    python examples/pretrained_last_layer.py --quick --out head.png

The body of the network stays fixed. Only the parameters that match `random="head.*"` get a posterior, here by HMC,
which is fast for this few. Predictions become less confident where the features do not determine the answer; the
trained network itself is not modified.
"""

import argparse

import matplotlib.pyplot as plt
import torch
from torch import nn

import credibly as cr


class Net(nn.Module):
    """Any network whose last layer has a name."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 16), nn.Tanh())
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (N, classes)."""
        return self.head(self.body(x))


def main(argv: list[str] | None = None) -> None:
    """Train a network, sample its head by HMC and compare the two on held-out digits."""
    parser = argparse.ArgumentParser(description="A Bayesian last layer on a network trained in plain PyTorch.")
    parser.add_argument("--out", default="pretrained_last_layer.png", help="output figure (.png, .svg, .pdf)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer draws, for a quick check")
    args = parser.parse_args(argv)

    digits = cr.data.embedded("digits", test_fraction=0.5, seed=args.seed)
    x, y = digits.x_train[:400], digits.y_train[:400]  # few rows, so that uncertainty remains

    # 1. Ordinary training, without credibly.
    torch.manual_seed(args.seed)
    net = Net(digits.n_features, digits.n_classes)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    net.eval()
    trained = {name: value.clone() for name, value in net.state_dict().items()}

    # 2. The same network with a posterior over its head alone.
    problem = cr.Problem(
        net, data=(x, y), likelihood=cr.likelihoods.Categorical(), prior=cr.priors.Normal(scale=1.0), random="head.*"
    )
    draws, warmup = (120, 80) if args.quick else (300, 150)
    posterior = cr.HMC(chains=4, draws=draws, warmup=warmup, init="prior", compile=False).fit(problem, seed=args.seed)
    print(f"{problem.dim} of {sum(p.numel() for p in net.parameters())} parameters are random")
    assert all(torch.equal(value, trained[name]) for name, value in net.state_dict().items())  # `fit` works on a copy

    # 3. Compare on held-out rows.
    with torch.no_grad():
        plain = torch.softmax(net(digits.x_test), -1)
    bayes = posterior.predict(digits.x_test)
    print(f"{'':14} {'accuracy':>9} {'log density':>12} {'ECE':>6}")
    rows = {"as trained": plain, "Bayesian head": bayes.probabilities}
    for name, p in rows.items():
        accuracy, score, ece = (
            metric(p, digits.y_test) for metric in (cr.metrics.accuracy, cr.metrics.log_score, cr.metrics.ece)
        )
        print(f"{name:14} {accuracy:9.1%} {score:12.3f} {ece:6.3f}")
    print(posterior.diagnostics(digits.x_test[:100]).verdict)

    with cr.plot.style():
        figure, panels = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
        for panel, (name, p) in zip(panels, rows.items()):
            cr.plot.reliability(p, digits.y_test, bins=10, ax=panel).set_title(name)
        figure.savefig(args.out, facecolor="white")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
