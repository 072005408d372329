"""Draw the pictures of the documentation with the library itself, as SVG files in docs/pictures.

    python docs/pictures.py                        # all of them, in a few minutes
    python docs/pictures.py star gap               # some of them
    python docs/pictures.py --quick --out drawn    # short runs, to check that they can be drawn

The same seed gives the same pictures. They have a transparent background and colours that work on light and dark pages.
"""

import argparse
import functools
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import credibly as cr
from benchmarks import cost_model as cost

mpl.use("svg")
SEED = 0

# Draw every third grid point: the curves look as smooth, in a third of the file size.
EVERY = 3


def hmc(quick: bool, **settings: Any) -> cr.HMC:
    """Return HMC for one hidden layer and little data: short trajectories that keep most of their momentum."""
    length = {"warmup": 30, "draws": 20, "max_steps": 40} if quick else {"warmup": 150, "draws": 120, "thin": 2}
    common = {"chains": 8, "trajectory_length": 0.5, "refresh": 0.3, "jitter": 0.2, "init": "fresh", "compile": False}
    return cr.HMC(**common | length | settings)


def stiff_hmc(quick: bool) -> cr.HMC:
    """Return HMC from MAP fits with truncated trajectories: many points or low noise require small steps."""
    return hmc(quick, init="ensemble", warmup=30 if quick else 60, draws=20 if quick else 60, thin=1, max_steps=100)


def wave_problem(toy: cr.data.Toy, likelihood: cr.likelihoods.Likelihood, outputs: int = 1) -> cr.Problem:
    """Return a problem with one input, 50 hidden units and a prior wide enough for the wave."""
    torch.manual_seed(SEED)
    prior = cr.priors.Normal(scale=3.0, fan_in=True)
    return cr.Problem(cr.zoo.mlp(1, (50,), outputs), data=(toy.x, toy.y), likelihood=likelihood, prior=prior)


def star_problem(toy: cr.data.Toy) -> cr.Problem:
    """Return the two-class problem with the star."""
    torch.manual_seed(SEED)
    return cr.Problem(
        cr.zoo.mlp(2, (50,), 1),
        data=(toy.x, toy.y),
        likelihood=cr.likelihoods.Bernoulli(),
        prior=cr.priors.Normal(scale=2.0, fan_in=True),
    )


def panels(columns: int, rows: int = 1, *, size: tuple[float, float], shared: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes in reading order."""
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False).flat)
    return figure, axes


def finish(figure: Figure, axes: list[Axes], columns: int = 6) -> Figure:
    """Keep labels on the outside only, and add one legend below all panels."""
    for axis in axes:
        axis.label_outer()
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    return figure


def gap(quick: bool) -> Figure:
    """Draw regression with a gap: four methods, one problem."""
    toy = cr.data.gap_regression(seed=SEED)
    problem = wave_problem(toy, cr.likelihoods.Gaussian(scale=toy.noise))
    steps = 200 if quick else 3000
    methods = {
        "MLE: one line": cr.MLE(steps=steps),
        "MAP: one line": cr.MAP(steps=steps),
        "deep ensemble, anchored": cr.DeepEnsemble(members=10, anchored=True, init="prior", steps=steps),
        "HMC: draws of the posterior": hmc(quick),
    }
    figure, axes = panels(2, 2, size=(8.4, 6.2))
    for axis, (name, method) in zip(axes, methods.items()):
        p = method.fit(problem, seed=SEED).predict(toy.grid[::EVERY])
        cr.plot.bands(p, toy.grid[::EVERY], data=(toy.x, toy.y), truth=toy.truth[::EVERY], legend=False, ax=axis)
        axis.set(title=name, ylim=(-4, 4))
    return finish(figure, axes)


def star(quick: bool) -> Figure:
    """Draw two clusters and a far-away star, for MAP and HMC."""
    toy = cr.data.star_classification(seed=SEED)
    problem = star_problem(toy)
    figure, axes = panels(2, size=(8.4, 4.4))
    for axis, (name, method) in zip(axes, {"MAP": cr.MAP(steps=200 if quick else 3000), "HMC": hmc(quick)}.items()):
        predict = method.fit(problem, seed=SEED).predict
        cr.plot.decision(predict, toy.grid, data=(toy.x, toy.y), marks=toy.star, colorbar=axis is axes[-1], ax=axis)
        axis.set_title(name)
    return finish(figure, axes, columns=2)


def sharpening(quick: bool) -> Figure:
    """Draw the posterior for increasing amounts of data."""
    figure, axes = panels(2, 2, size=(8.4, 6.2))
    for axis, n in zip(axes, (2, 10, 100, 1000)):
        toy = cr.data.sharpening_regression(n, seed=SEED)
        problem = wave_problem(toy, cr.likelihoods.Gaussian(scale=toy.noise))
        grid = toy.grid[::EVERY]
        p = stiff_hmc(quick).fit(problem, seed=SEED).predict(grid)
        seen = (toy.x[:100], toy.y[:100])
        cr.plot.bands(p, grid, data=seen, truth=toy.truth[::EVERY], legend=False, ax=axis)
        axis.set(title=f"{n:,} points" + (" (100 shown)" if n > 100 else ""), ylim=(-4, 4))
    return finish(figure, axes)


def kinds(quick: bool) -> Figure:
    """Draw a fit with noise that grows with x, and the two parts of its uncertainty."""
    toy = cr.data.heteroscedastic_regression(200, seed=SEED)
    problem = wave_problem(toy, cr.likelihoods.HeteroscedasticGaussian(), outputs=2)
    grid = toy.grid[::EVERY]
    p = stiff_hmc(quick).fit(problem, seed=SEED).predict(grid)
    figure, (left, right) = panels(2, size=(8.4, 3.9), shared=False)
    cr.plot.bands(p, grid, data=(toy.x, toy.y), truth=toy.truth[::EVERY], ax=left)
    left.set(title="fit", ylim=(-4, 5))
    left.get_legend().remove()
    left.legend(loc="upper left", ncols=2)
    at = grid.flatten()
    right.axvspan(-2, 2, color=cr.plot.INK, alpha=0.15, linewidth=0, label="range of the data")
    right.plot(at, p.aleatoric.sqrt().flatten(), label="aleatoric: noise")
    right.plot(at, p.epistemic.sqrt().flatten(), label="epistemic: what the model does not know")
    right.plot(at, toy.noise_grid[::EVERY].flatten(), color=cr.plot.INK, linestyle=":", label="true noise")
    right.set(title="aleatoric and epistemic", xlabel="x", ylabel="standard deviation of y", ylim=(0, 2.2))
    right.legend(loc="upper left")
    return figure


def guarantee(quick: bool) -> Figure:
    """Draw the intervals of an overconfident fit, and the same ones calibrated."""
    train, more, new = (cr.data.heteroscedastic_regression(n, seed=SEED + i) for i, n in enumerate((60, 200, 4000)))
    problem = wave_problem(train, cr.likelihoods.HeteroscedasticGaussian(), outputs=2)
    posterior = cr.MLE(steps=200 if quick else 5000).fit(problem, seed=SEED)
    calibrated = posterior.calibrate(more.x, more.y)
    inside = train.grid.flatten().abs() <= 2
    grid, truth = train.grid[inside][::EVERY], train.truth[inside][::EVERY]
    figure, axes = panels(2, size=(8.4, 4.2))
    parts = {"maximum likelihood": (posterior, train), "calibrated with 200 rows": (calibrated, more)}
    for axis, (name, (own, shown)) in zip(axes, parts.items()):
        lower, upper = own.predict(new.x).interval(0.9)
        measured = float(((lower <= new.y) & (new.y <= upper)).double().mean())
        cr.plot.bands(
            own.predict(grid), grid, levels=(0.9,), data=(shown.x, shown.y), truth=truth, legend=False, ax=axis
        )
        axis.set(title=f"{name}\npromised 90 %, measured {100 * measured:.0f} %", ylim=(-3, 3))
    return finish(figure, axes)


def ood(quick: bool) -> Figure:
    """Draw scores of an ensemble trained on digits 0 to 7, and its error if uncertain rows are referred."""
    digits, known = cr.data.embedded("digits", seed=SEED), 8
    seen, new = digits.y_train < known, digits.y_test >= known
    torch.manual_seed(SEED)
    problem = cr.Problem(
        cr.zoo.mlp(digits.n_features, (100,), known),
        data=(digits.x_train[seen], digits.y_train[seen]),
        likelihood=cr.likelihoods.Categorical(),
        prior=cr.priors.Normal(scale=1.5, fan_in=True),
    )
    ensemble = cr.DeepEnsemble(members=10, anchored=True, init="prior", steps=100 if quick else 2000)
    p = ensemble.fit(problem, seed=SEED).predict(digits.x_test)
    figure, axes = panels(3, size=(9.6, 3.6), shared=False)
    for axis, kind in zip(axes, ("total", "epistemic")):
        score = p.ood_score(kind)
        bins = torch.linspace(0, float(score.quantile(0.99)), 25)  # without the few outliers
        for rows, label, look in ((~new, "digits 0 to 7", {}), (new, "8 and 9, never seen", {"hatch": "///"})):
            axis.hist(score[rows], bins, alpha=0.7, label=label, **look)
        auroc = cr.metrics.auroc(score[~new], score[new])
        axis.set(title=f"{kind}, AUROC {auroc:.2f}", xlabel=f"{kind} uncertainty (nats)", ylabel="rows")
        axis.legend()
    wrong = (p.probabilities.argmax(-1) != digits.y_test).float()
    cr.plot.risk_coverage(cr.metrics.risk_coverage(p.ood_score(), wrong), label="ensemble", ax=axes[2])
    axes[2].get_legend().remove()
    axes[2].set(title="refer the least certain", xlabel="fraction of rows kept", ylabel="error rate of those rows")
    return figure


def scale(quick: bool) -> Figure:
    """Draw the time of a leapfrog step of one chain of ResNet-20-FRN by the cost model, and GPU utilisation."""
    places = [2**k for k in range(13)]
    figure, (left, right) = panels(2, size=(8.4, 3.6), shared=False)
    for precision, line in (("tf32", "-"), ("bf16", "--")):
        machine = cost.h200(precision)
        steps = [cost.leapfrog_seconds(machine, cost.RESNET20, mesh=(1, p)) for p in places]
        left.plot(places, [s.seconds for s in steps], line, color="C0", label=f"step, {precision}")
        left.plot(places, [s.compute for s in steps], line, color="C1", label=f"arithmetic, {precision}")
        used = [100 * steps[0].seconds / (p * s.seconds) for p, s in zip(places, steps)]
        right.plot(places, used, line, color="C0", label=precision)
    left.plot(places[1:], [s.communication for s in steps[1:]], ":", color="C2", label="all-reduce")
    left.axhline(steps[0].launch, color=cr.plot.INK, linewidth=0.8, label="launches (assumed)")
    left.set(
        xscale="log",
        yscale="log",
        xlabel="GPUs sharing the rows",
        ylabel="seconds",
        title="one chain, 40,960 images",
    )
    left.legend(fontsize="small")
    right.set(
        xscale="log",
        ylim=(0, 105),
        xlabel="GPUs sharing the rows",
        ylabel="utilisation (%)",
        title="utilisation of each GPU",
    )
    right.legend()
    return figure


def method(name: str, quick: bool) -> Figure:
    """Draw one method on the problems of `gap` and `star`, with its settings in the demo."""
    fit = cr.METHODS[name](**cr.METHODS[name].demo_settings(quick)).fit
    figure, (left, right) = panels(2, size=(8.4, 3.6), shared=False)
    toy = cr.data.gap_regression(seed=SEED)
    p = fit(wave_problem(toy, cr.likelihoods.Gaussian(scale=toy.noise)), seed=SEED).predict(toy.grid[::EVERY])
    cr.plot.bands(p, toy.grid[::EVERY], data=(toy.x, toy.y), truth=toy.truth[::EVERY], legend=False, ax=left)
    left.set(title="a gap in the data", ylim=(-4, 4))
    toy = cr.data.star_classification(seed=SEED)
    predict = fit(star_problem(toy), seed=SEED).predict
    cr.plot.decision(predict, toy.grid, data=(toy.x, toy.y), marks=toy.star, ax=right)
    right.set_title("a far-away star")
    return figure


PICTURES: dict[str, Callable[[bool], Figure]] = {
    f.__name__: f for f in (gap, star, sharpening, kinds, guarantee, ood, scale)
}
# The same two problems for every method, shown on its page and in the gallery.
GALLERY = {f"method-{name}": functools.partial(method, name) for name in cr.METHODS}


def draw(name: str, folder: Path, *, quick: bool = False) -> Path:
    """Draw one picture, write it and return its path. The same figure gives the same file."""
    path, text = folder / f"{name}.svg", io.StringIO()
    with cr.plot.style(), mpl.rc_context({"svg.hashsalt": name, "image.composite_image": True}):
        figure = (PICTURES | GALLERY)[name](quick)
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator")), dpi=110)
    # A hundredth of a point is finer than any screen; six decimals only make the file larger.
    short = re.sub(r'\bd="[^"]*"', lambda d: re.sub(r"(\.\d\d)\d+", r"\1", d[0]), text.getvalue())
    path.write_text("\n".join(line.rstrip() for line in short.splitlines()) + "\n")
    return path


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(PICTURES | GALLERY)}; default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in args.names or PICTURES | GALLERY:
        path = draw(name, args.out, quick=args.quick)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
