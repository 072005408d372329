"""Handwritten digits with two classes left out of training: the classifier rejects what it should not decide.

    python examples/classify_and_know_when_not_to.py --out reject.png          # under a minute
    python examples/classify_and_know_when_not_to.py --quick --out reject.png

A network learns the digits 0 to 7 and is then tested on 8s and 9s as well. It has to predict one of its eight classes,
so every 8 and 9 is an error unless it abstains. The rows with the highest uncertainty are rejected, to be decided by a
person.
"""

import argparse

import matplotlib.pyplot as plt
import torch

import credibly as cr

KNOWN = 8  # classes 0 .. 7 are learned, the others appear at test time only


def main(argv: list[str] | None = None) -> None:
    """Fit one network and an ensemble, compare how well each detects unseen classes, and plot the result."""
    parser = argparse.ArgumentParser(description="Digits with two classes left out, and a reject option.")
    parser.add_argument("--out", default="classify_and_know_when_not_to.png", help="output figure (.png, .svg, .pdf)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="short training, for a quick check")
    args = parser.parse_args(argv)

    digits = cr.data.embedded("digits", seed=args.seed)
    seen = digits.y_train < KNOWN
    x_train, y_train = digits.x_train[seen], digits.y_train[seen]
    new = digits.y_test >= KNOWN  # rows of classes that the network has never seen

    torch.manual_seed(args.seed)
    net = cr.zoo.mlp(digits.n_features, (100,), KNOWN)
    problem = cr.Problem(
        net,
        data=(x_train, y_train),
        likelihood=cr.likelihoods.Categorical(),
        prior=cr.priors.Normal(scale=1.5, fan_in=True),
    )
    steps = 300 if args.quick else 2000
    methods = {
        "one network (MAP)": cr.MAP(steps=steps),
        "deep ensemble": cr.DeepEnsemble(members=10, anchored=True, init="prior", steps=steps),
    }

    coverage = 0.7  # reject three rows of ten
    print(f"{len(new)} test rows, {int(new.sum())} of them of unseen classes")
    print(f"{'':18} {'accuracy, seen':>14} {'AUROC unseen':>13} {'error, all':>11} {f'error, {coverage:.0%} kept':>16}")
    with cr.plot.style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
        for name, method in methods.items():
            p = method.fit(problem, seed=args.seed).predict(digits.x_test)
            wrong = (p.probabilities.argmax(-1) != digits.y_test).float()
            uncertainty = p.ood_score("total")
            auroc = cr.metrics.auroc(uncertainty[~new], uncertainty[new])
            keep = uncertainty <= uncertainty.quantile(coverage)
            accuracy, error, error_kept = 1 - wrong[~new].mean(), wrong.mean(), wrong[keep].mean()
            print(f"{name:18} {accuracy:14.1%} {auroc:13.3f} {error:11.1%} {error_kept:16.1%}")
            cr.plot.risk_coverage(cr.metrics.risk_coverage(uncertainty, wrong), label=name, ax=left)
        left.set(xlabel="fraction of rows kept", ylabel="error rate", title="reject the least certain")
        bins = torch.linspace(0, float(uncertainty.max()), 30)
        right.hist(uncertainty[~new], bins, alpha=0.7, label="digits 0 to 7")
        right.hist(uncertainty[new], bins, alpha=0.7, label="8 and 9, never seen")
        right.set(xlabel="predictive entropy (nats)", ylabel="rows", title="deep ensemble")
        right.legend()
        figure.savefig(args.out, facecolor="white")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
