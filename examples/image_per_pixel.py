"""Denoise small images with aleatoric and epistemic uncertainty per pixel.

    python examples/image_per_pixel.py --out pixels.png          # half a minute
    python examples/image_per_pixel.py --quick --out pixels.png

The images are scikit-learn's handwritten digits, 8 by 8 pixels. Noise is added, four times as strong on the right half
as on the left. A small convolutional network learns the clean image from the noisy one. It outputs a mean and a
log-variance per pixel (`HeteroscedasticGaussian(axis=1)`); the disagreement of a deep ensemble is the epistemic part.
The last row of the figure is a photographic negative, dark strokes on a light background, which is out of distribution.
"""

import argparse

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import credibly as cr


def noisy(clean: torch.Tensor, seed: int) -> torch.Tensor:
    """Add noise with standard deviation 0.1 on the left half and 0.4 on the right to images (N, 8, 8)."""
    std = torch.where(torch.arange(8) < 4, 0.1, 0.4)
    return clean + std * torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))


def main(argv: list[str] | None = None) -> None:
    """Fit an ensemble of per-pixel networks, print both parts of the uncertainty and plot them as maps."""
    parser = argparse.ArgumentParser(description="Per-pixel uncertainty of a denoiser.")
    parser.add_argument("--out", default="image_per_pixel.png", help="output figure (.png, .svg, .pdf)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer images and members, for a quick check")
    args = parser.parse_args(argv)

    digits = load_digits()
    clean = torch.tensor(digits.images, dtype=torch.float32) / 16  # (N, 8, 8), from 0 to 1
    rows = 300 if args.quick else 1200
    train, test = clean[:rows], clean[rows : rows + 200]
    negative = 1 - test
    given, given_negative = noisy(test, 2), noisy(negative, 3)

    torch.manual_seed(args.seed)
    # Two output channels: mean and log-variance of each pixel.
    first, second, last = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((1, 12), (12, 12), (12, 2)))
    net = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), last)
    problem = cr.Problem(
        net,
        data=(noisy(train, 1).unsqueeze(1), train),  # one input channel; one target per pixel
        likelihood=cr.likelihoods.HeteroscedasticGaussian(axis=1),
        prior=cr.priors.Normal(scale=2.0, fan_in=True),
    )
    members, steps = (3, 120) if args.quick else (6, 800)
    posterior = cr.DeepEnsemble(members=members, steps=steps, batch_size=64).fit(problem, seed=args.seed)

    seen, unseen = (posterior.predict(x.unsqueeze(1)) for x in (given, given_negative))
    noise = seen.aleatoric.sqrt().mean((0, 1))  # per column
    before, after, on_negatives = (
        cr.metrics.rmse(*pair) for pair in ((given, test), (seen.mean, test), (unseen.mean, negative))
    )
    print(f"RMSE per pixel: {before:.3f} before, {after:.3f} after; on negatives {on_negatives:.3f}")
    print(f"aleatoric std: left half {noise[:4].mean():.3f}, right half {noise[4:].mean():.3f}")
    epistemic = [p.epistemic.sqrt().mean() for p in (seen, unseen)]
    print(f"epistemic std: digits {epistemic[0]:.3f}, negatives {epistemic[1]:.3f}")
    lower, upper = seen.interval(0.9)
    print(f"90 % intervals cover {cr.metrics.coverage(lower, upper, test):.1%} of the pixels")

    shown = [(test, given, seen, 0), (test, given, seen, 3), (negative, given_negative, unseen, 0)]
    titles = ("clean", "input", "mean", "aleatoric sd", "epistemic sd")
    with cr.plot.style():
        figure, panels = plt.subplots(3, 5, figsize=(10, 6), layout="constrained")
        for panel, title in zip(panels[0], titles):
            panel.set_title(title)
        for row, (truth, x, p, i) in zip(panels, shown):
            for panel, values, title in zip(row, (truth, x, p.mean, p.aleatoric.sqrt(), p.epistemic.sqrt()), titles):
                is_std = title.endswith("sd")
                options = {"cmap": "viridis", "vmax": 0.3} if is_std else {"cmap": "gray", "vmax": 1.0}
                image = panel.imshow(values[i].numpy(), vmin=0, **options)
                panel.set(xticks=[], yticks=[])
                if is_std:
                    figure.colorbar(image, ax=panel, shrink=0.8)
            row[0].set_ylabel("a digit" if p is seen else "a negative")
        figure.savefig(args.out, facecolor="white")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
