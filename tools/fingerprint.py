"""Hash fixed-seed results of the public API, to prove that a refactoring changes none of them.

    python tools/fingerprint.py record before.json --runs runs   hash everything, keep run folders
    python tools/fingerprint.py record after.json                the same with the code as it is now
    python tools/fingerprint.py compare before.json after.json   print what differs, exit 1 if any
    python tools/fingerprint.py load runs loaded.json            use run folders written earlier
    python tools/fingerprint.py compare --common before.json loaded.json

PYTHONPATH chooses the version of credibly. Each part runs in a process of its own, because its
environment decides between plain, compiled and native code. An entry that cannot be computed holds the type of its
error. Neither wording nor anything that depends on the clock is hashed.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import credibly as cr

PARTS = ("api", "native", "plain", "compiled", "world", "resume", "uses", "cli")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ENVIRONMENT |= {"COLUMNS": "250", "TERMINAL_WIDTH": "250"}  # so that no line of help is folded
SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
LIMIT = 900  # seconds that a part may take
SMALL = {  # settings of short runs
    **dict.fromkeys(("mle", "map", "bbb", "laplace"), "steps=30 batch_size=16"),
    "ensemble": "steps=30 batch_size=16 members=3",
    "dropout": "steps=30 batch_size=16 insert='*' rate=0.1",
    "swag": "steps=30 batch_size=16 rank=3 iterates=5 every=4",
    "hmc": "chains=2 draws=8 warmup=25 max_steps=16 start_steps=30",
    "sgld": "chains=2 draws=8 warmup=20 thin=3 batch_size=16 start_steps=30",
    "sghmc": "chains=2 draws=8 warmup=20 thin=3 batch_size=16 start_steps=30",
}
ALL = ", ".join(SMALL)
CASES = {  # lines of problems, their methods and the settings that differ from the small ones
    "native": f"""
        regression classes cold: {ALL}
        double: ensemble, ensemble anchored=True, hmc, sgld, sghmc
        wide: map, hmc, sgld, sghmc, sghmc schedule='cyclical' cycles=2
        tempered: ensemble, bbb, hmc, sghmc
        last-layer: map, bbb, laplace, hmc
        priors: map, bbb, hmc
        varying-noise: map, ensemble, hmc, sghmc
        yes-or-no: map, laplace, hmc
        heavy-tails counts noisy-classes: map
        density: hmc init='prior' warmup=60, sghmc init='prior' step_size=0.05 batch_size=None
        regression: map optimiser='sgd' lr=0.002 clip_norm=0.5 validation=0.2
        regression: ensemble bootstrap=True, ensemble validation=0.3 patience=2 lr=0.1
        regression: bbb family='low-rank' rank=2, bbb family='full-rank'
        regression: bbb estimator='flipout' kl_weights='geometric'
        regression: bbb estimator='local' samples=2 kl_warmup=5
        regression: bbb estimator='weights' members=2 learn_prior_scale=True
        regression: dropout rate=(0.05,0.3) tau=(2.0,10.0), dropout concrete=True
        regression: dropout rate=(0.05,0.3) tau='held-out', dropout rate={{'0':0.0,'*':0.2}}
        regression: laplace structure='full', laplace structure='diag'
        regression: laplace tune='evidence' refits=1
        classes: laplace structure='full' random='2.*'
        regression: swag init='network' sgd_lr=0.001
        regression: hmc mass='diagonal' warmup=60
        regression: hmc trajectory_length='tuned' warmup=60 init='prior'
        regression: hmc pooled=False refresh=0.4 integrator='minimum-error'
        regression: hmc draw_dtype='float16' mass='prior' thin=2 init='map'
        regression: sgld schedule='cyclical' cycles=2, sghmc preconditioner='rmsprop'
        regression: sgld preconditioner='rmsprop' schedule='polynomial'""",
    "plain": f"""
        regression classes: {ALL}
        wide: sgld, sghmc
        convolutions: ensemble, dropout, bbb, bbb estimator='flipout', laplace, hmc, sghmc
        lstm: ensemble, bbb
        looped pieces half: ensemble
        residual: ensemble members=2 steps=2
        lstm looped residual: hmc draws=3 warmup=2 step_size=0.02 trajectory_length=0.1
        pieces half: hmc draws=3 warmup=2 step_size=0.02 trajectory_length=0.1""",
    "compiled": f"""
        regression: {ALL}
        classes: hmc""",
    "world": """
        regression: map, ensemble, hmc, sgld, sghmc
        double: hmc chains=1 draws=3 warmup=2 step_size=0.01 trajectory_length=0.05""",
    "resume": """
        regression: hmc draws=300 thin=40 init='prior', hmc draws=200 init='prior' compile=False
        regression: sghmc draws=1500 thin=200 init='prior'
        regression: sghmc draws=250 thin=20 init='prior' compile=False
        wide: sgld draws=500 thin=200 init='prior'
        density: hmc draws=3000 warmup=60 init='prior' compile=False""",
}
NOT_NATIVE = ("density", "last-layer", "priors")  # problems that the C++ does not take
FITS = {  # run folders of the command line: target, method, settings
    "real": ("price", "hmc", "draws=10 warmup=20 chains=2 thin=1 start_steps=30"),
    "labels": ("kind", "ensemble", "steps=60 members=3"),
    "stopped": ("price", "hmc", "draws=400 warmup=30 chains=2 thin=80 start_steps=30"),
}


# -- problems and methods --------------------------------------------------------------------------
class LastStep(nn.Module):
    """An LSTM whose last output goes through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, steps, 2) to (rows, 1)."""
        return self.head(self.lstm(x)[0][:, -1])


def problem_of(kind: str) -> tuple[Any, Any, Any]:
    """Build a problem by its name: the problem, and inputs and targets that it has not seen."""
    if kind == "density":
        bent = lambda w: -0.5 * w[0] ** 2 - 0.5 * (w[1] - 0.5 * w[0] ** 2) ** 2  # noqa: E731
        return cr.Density(bent, 2, name="bent"), None, None
    torch.manual_seed(3)
    x, images, noise = torch.randn(110, 4), torch.randn(110, 1, 6, 6), 0.2 * torch.randn(110)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + noise
    labels = (y > -0.5).long() + (y > 0.5).long()
    sequences, images = x.reshape(110, 2, 2), images + x[:, :1, None, None]
    zoo, like, priors, mlp = cr.zoo, cr.likelihoods, cr.priors, cr.zoo.mlp(4, 16, 1)
    shallow = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    mixed = {"0.*": priors.Laplace(0.5), "2.weight": priors.ScaleMixture(), "*": priors.StudentT()}
    varied = {"priors": mixed}.get(kind, priors.Normal(1.0))
    net, inputs, targets, likelihood = {
        "classes": (zoo.mlp(4, 16, 3), x, labels, like.Categorical()),
        "double": (zoo.mlp(4, (8, 6), 1, "tanh").double(), x, y, like.Gaussian(scale=0.3)),
        "wide": (zoo.mlp(4, (64, 40), 1, "relu"), x, y, like.Gaussian()),
        "varying-noise": (zoo.mlp(4, 16, 2), x, y, like.HeteroscedasticGaussian()),
        "heavy-tails": (mlp, x, y, like.StudentT(df=5.0)),
        "yes-or-no": (mlp, x, (labels > 0).float(), like.Bernoulli()),
        "counts": (mlp, x, 3.0 * labels, like.Poisson()),
        "noisy-classes": (zoo.mlp(4, 16, 6), x, labels, like.HeteroscedasticCategorical()),
        "convolutions": (shallow, images, labels, like.Categorical()),
        "residual": (zoo.resnet20_frn(3, 1, width=2), images, labels, like.Categorical()),
        "lstm": (LastStep(), sequences, y, like.Gaussian()),
    }.get(kind, (mlp, x, y, like.Gaussian()))
    more: dict[str, Any] = {
        "double": {"dtype": torch.float64},
        "cold": {"temperature": 0.5},
        "tempered": {"temperature": cr.Tempering(likelihood=0.5)},
        "last-layer": {"random": "2.*"},
        "looped": {"plan": "looped"},
        "pieces": {"micro_batch": 13},
        "half": {"precision": "bf16"},
    }.get(kind, {})
    known = (inputs[:60], targets[:60])
    return cr.Problem(net, known, likelihood, varied, **more), inputs[60:], targets[60:]


def settings_of(text: str) -> dict[str, Any]:
    """Read settings such as "draws=8 init='prior'"."""
    return {word.split("=")[0]: ast.literal_eval(word.split("=")[1]) for word in text.split()}


def method_of(name: str, text: str = "", part: str = "") -> Any:
    """Build a method with its short settings and the given ones, on the code path that a part covers."""
    path = {"plain": "compile=False", "compiled": "compile=True"}.get(part, "")
    return cr.METHODS[name](**settings_of(f"{SMALL[name]} {path} {text}"))


# -- hashes ----------------------------------------------------------------------------------------
def plain(value: Any) -> Any:
    """Convert values that JSON cannot hold; tensors become hashes of their bytes."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor):
        raise TypeError(f"no hash for {type(value).__name__}")
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]


def numbers(value: Any) -> Any:
    """Return the numbers of a record, except durations; its wording may change."""
    if isinstance(value, Mapping):
        return {key: numbers(part) for key, part in value.items() if key != "seconds"}
    if isinstance(value, (list, tuple)):
        return [numbers(part) for part in value]
    return None if isinstance(value, str) else value


class Book:
    """The entries of one part, and the run folders that it writes or, with `load`, reads."""

    def __init__(self, part: str, runs: Path, load: bool) -> None:
        self.part, self.runs, self.load, self.scratch = part, runs, load, os.environ["SCRATCH"]
        self.entries: dict[str, str] = {}

    def note(self, name: str, compute: Callable[[], Any]) -> None:
        """Record the hash of what a function returns, or the type of its error."""
        try:
            text = json.dumps(compute(), sort_keys=True, default=plain)
            found = hashlib.sha256(text.encode()).hexdigest()
        except (Exception, KeyboardInterrupt) as error:
            found = f"error: {type(error).__name__}"
            print(f"{self.part}/{name}: {found}: {error}", file=sys.stderr)
        self.entries[f"{self.part}/{name}"] = found

    def note_posterior(self, name: str, posterior: Any, x: Any, y: Any) -> None:
        """Record draws of the weights and, where there is a network, all of a prediction."""
        self.note(f"{name}/weights", lambda: posterior.sample(5, seed=1))
        if x is None:
            return
        p = posterior.predict(x)
        for figure in ("mean", "variance", "total", "aleatoric", "epistemic"):
            self.note(f"{name}/{figure}", lambda figure=figure: getattr(p, figure))
        interval = p.interval if p.likelihood.ordered else p.prediction_set
        self.note(f"{name}/interval", lambda: interval(0.9))
        self.note(f"{name}/log_prob", lambda: p.log_prob(y))
        self.note(f"{name}/samples", lambda: p.sample(3, seed=2))
        if self.part == "native" and x.ndim == 2:  # enough rows for the C++ backend
            many = posterior.predict(x.repeat(2**18 // (p.draws * len(x)) + 1, 1))
            self.note(f"{name}/many-rows", lambda: [many.mean, many.variance])


# -- fits ------------------------------------------------------------------------------------------
def note_fits(book: Book) -> None:
    """Record all fits of a part."""
    for line in CASES[book.part].strip().splitlines():
        problems, fits = line.split(": ")
        for kind, fit in itertools.product(problems.split(), fits.split(", ")):
            name = f"{kind}/{fit}"
            book.note(name, lambda name=name: note_fit(book, *re.split("[/ ]", name, maxsplit=2)))


def note_fit(book: Book, kind: str, method: str, settings: str = "") -> list[Any]:
    """Fit a problem and record the posterior, or load the run folder of an earlier fit."""
    name = f"{kind}/{method} {settings}".strip()
    folder = book.runs / book.part / name
    problem, x, y = problem_of(kind)
    fitter = method_of(method, settings, book.part)
    if book.part == "resume":
        if not book.load:
            stop(folder, lambda: fitter.fit(problem, seed=7, out=folder, progress=False))
        folder = Path(shutil.copytree(folder, Path(book.scratch) / name))
        described = kind != "density" and "compile" not in settings  # other problems must be passed
        posterior = cr.resume(folder, None if described else problem, progress=False)
    elif book.load:
        net = problem.layout.module if kind in ("lstm", "residual") else None
        posterior = cr.load(folder, net)
    elif book.part in ("plain", "world"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        posterior = fitter.fit(problem, seed=7, out=folder, progress=False)
    else:
        posterior = fitter.fit(problem, seed=7, progress=False)
        posterior.save(folder)
    record = posterior.record
    if book.part in ("native", "compiled") and "native" in record.history:
        native = kind not in NOT_NATIVE and "preconditioner" not in settings
        expected = (True, False) if book.part == "compiled" else (native, native)
        if (record.history["compiled"], record.history["native"]) != expected:
            raise RuntimeError(f"the fit took another path: {record.history}")
    files = sorted(folder.glob("*.safetensors"))
    book.note(f"{name}/stored", lambda: [(path.name, load_file(path)) for path in files])
    book.note_posterior(name, posterior, x, y)
    return [record.method, record.fingerprint, record.status, numbers(record.history)]


def stop(folder: Path, fit: Callable[[], Any]) -> None:
    """Begin a fit and stop it part-way by Ctrl-C."""
    threading.Thread(target=interrupt, args=(folder, os.getpid()), daemon=True).start()
    try:
        fit()
    except cr.Interrupted:
        return
    raise RuntimeError("the run ended before it was stopped")


def interrupt(folder: Path, process: int) -> None:
    """Send Ctrl-C to a process soon after its run folder has a manifest."""
    limit = time.monotonic() + 60
    while not (folder / "manifest.json").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    time.sleep(0.8)  # the first iterations may take long
    os.kill(process, signal.SIGINT)


# -- public names ----------------------------------------------------------------------------------
def shown(value: Any) -> str:
    """Format a default value without memory addresses and module names."""
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def signature_of(value: Any) -> Any:
    """Return names, kinds and defaults of the parameters, or None if there is no signature."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    return [(p.name, p.kind.name, shown(p.default)) for p in parameters]


def ours(value: Any, home: str = "credibly") -> bool:
    """Return whether a class or function was defined in a module or below it."""
    return f"{getattr(value, '__module__', '')}.".startswith(f"{home}.")


def note_name(book: Book, name: str, value: Any) -> None:
    """Record a public name: its signature and, for a class, its fields and public members."""
    book.note(name, lambda: [type(value).__name__, signature_of(value)])
    if not isinstance(value, type):
        return
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        book.note(f"{name}/fields", lambda: [(f.name, shown(f.default), f.kw_only) for f in fields])
    members = {member for kind in value.__mro__ if ours(kind) for member in vars(kind)}
    if value in cr.METHODS.values():
        members &= {"fit", "name", "from_trained"}
    for member in sorted(m for m in members if not m.startswith("_")):
        taken = inspect.getattr_static(value, member)
        book.note(f"{name}.{member}", lambda taken=taken: signature_of(taken))


def note_api(book: Book) -> None:
    """Record the public names, and those of the public modules."""
    book.note("__all__", lambda: sorted(cr.__all__))
    book.note("METHODS", lambda: [(name, kind.__name__) for name, kind in cr.METHODS.items()])
    for name in cr.__all__:
        value = getattr(cr, name)
        if not inspect.ismodule(value):
            note_name(book, name, value)
            continue
        own = [key for key, one in vars(value).items() if ours(one, value.__name__)]
        for key in getattr(value, "__all__", [key for key in own if not key.startswith("_")]):
            note_name(book, f"{name}.{key}", getattr(value, key))


# -- uses of posteriors ----------------------------------------------------------------------------
def note_uses(book: Book) -> None:
    """Record metrics, comparisons, decisions, posteriors as priors, estimators."""
    (problem, x, y), (labelled, _, labels) = problem_of("regression"), problem_of("classes")
    names = ("laplace", "bbb", "swag", "hmc")
    fits = {name: method_of(name).fit(problem, seed=7) for name in names}
    p, c = fits["hmc"].predict(x), method_of("hmc").fit(labelled, seed=7).predict(x)
    models = {name: (posterior, problem) for name, posterior in fits.items()}
    seen = dataclasses.replace(fits["hmc"].diagnostics(x), verdict="")
    likelihood, net, tasks = problem.likelihood, problem.layout.module, [(x, y), (x[20:], y[20:])]
    rest = (method_of("bbb", "batch_size=4"), net, likelihood, cr.priors.Normal())
    found = {
        "evaluate": lambda: [cr.evaluate(p, y), cr.evaluate(c, labels)],
        "evaluation.compare": lambda: cr.evaluation.compare(p, fits["bbb"].predict(x)),
        "metrics": lambda: cr.metrics.calibration(c.probabilities, labels),
        "compare_models": lambda: [one.figures for one in cr.compare_models(models).models],
        "diagnostics": lambda: seen,
        "continual": lambda: cr.continual.learn(tasks, *rest, coreset=4).posterior.sample(3),
        "active": lambda: [cr.active.bald(p), cr.active.batch_bald(c, 5, labellings=50)],
        "decide": lambda: [cr.decide.reject(c, cost=0.2), cr.decide.expected_improvement(p, 0.5)],
        "thompson": lambda: cr.decide.thompson(fits["hmc"], x, 4),
        "information": lambda: cr.information.mutual_information_of_draws(c.functions()),
        "data": lambda: [cr.data.gap_regression().y, cr.data.embedded("diabetes").x_train],
    }
    for name, compute in found.items():
        book.note(name, compute)
    for name, posterior in fits.items():

        def later(posterior: Any = posterior) -> Tensor:
            following = cr.Problem(net, (x, y), likelihood, posterior.as_prior())
            return method_of("map").fit(following, seed=7).draws

        book.note(f"as_prior/{name}", later)
    for name in ("ensemble", "laplace", "hmc"):

        def estimated(name: str = name) -> list[Any]:
            taken = {"method": name, "hidden": 8, "settings": settings_of(SMALL[name])}
            real = cr.BayesianRegressor(**taken).fit(x.numpy(), y.numpy())
            chosen = cr.BayesianClassifier(**taken).fit(x.numpy(), labels.numpy())
            return [real.predict_interval(x.numpy()), chosen.predict_proba(x.numpy())]

        book.note(f"estimators/{name}", estimated)


# -- the command line ------------------------------------------------------------------------------
def credibly(folder: Path, words: str) -> str:
    """Run a command and return its output."""
    command = [sys.executable, "-m", "credibly", *words.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-1500:]}")
    return done.stdout


def write_tables(folder: Path) -> None:
    """Write tables to fit and to predict: numbers, categories (one of them new), gaps."""
    draw = np.random.default_rng(11)
    for name, count, other in (("train", 120, "green"), ("new", 40, "pink")):
        lines = ["size,age,colour,price,kind"]
        for i in range(count):
            size, age, colour = draw.normal(), draw.integers(1, 90), draw.choice(["red", other])
            price = 3 * size + 0.1 * age + 2 * (colour == "red") + draw.normal()
            kind = ("low", "mid", "high")[int(price > 3) + int(price > 7)]
            first, third = "" if i % 13 == 4 else f"{size:.4f}", "" if i % 17 == 2 else colour
            lines.append(f"{first},{age},{third},{price:.4f},{kind}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def keys_of(value: Any, path: str = "") -> list[str]:
    """List the paths of all values in JSON."""
    if isinstance(value, list):
        return sorted({name for part in value for name in keys_of(part, f"{path}[]")})
    if isinstance(value, dict):
        return sorted({n for key, part in value.items() for n in keys_of(part, f"{path}.{key}")})
    return [path]


def note_json(book: Book, name: str, folder: Path, words: str, values: str) -> None:
    """Record the keys of the JSON that a command prints, and some of its values."""
    found: dict[str, Any] = {}
    book.note(name, lambda: found.update(json.loads(credibly(folder, f"{words} --json"))))
    book.note(f"{name}/keys", lambda: keys_of(found))
    for value in values.split():
        book.note(f"{name}/{value}", lambda value=value: numbers(found[value]))


def note_table(book: Book, folder: Path, run: str) -> None:
    """Fit a table, or take the run folder of an earlier fit; resume, predict and evaluate it."""
    target, method, settings = FITS[run]
    words = f"fit train.csv --target {target} --method {method} --hidden 8 --out {run}"
    words += "".join(f" --set {setting}" for setting in settings.split())
    kept, out = book.runs / "cli" / run, folder / f"{run}.csv"
    if book.load:
        shutil.copytree(kept, folder / run)
    elif run == "stopped":
        command = [sys.executable, "-m", "credibly", *words.split(), "--quiet"]
        with subprocess.Popen(command, cwd=folder, **SILENT) as process:
            interrupt(folder / run / "posterior", process.pid)
        book.note(f"{run}/exit", lambda: process.returncode)
    else:
        note_json(book, f"{run}/fit", folder, words, "rows held_out parameters figures baseline")
    if not book.load:
        shutil.copytree(folder / run, kept)
    if run == "stopped":
        note_json(book, f"{run}/resume", folder, f"resume {run}", "figures diagnostics")
    predict = f"predict {run} new.csv --out {out.name} --quiet"
    book.note(f"{run}/predict", lambda: credibly(folder, predict))
    book.note(f"{run}/columns", lambda: out.read_text().splitlines()[0])
    book.note(f"{run}/predictions", out.read_text)
    note_json(book, f"{run}/evaluate", folder, f"evaluate {run} new.csv", "rows figures baseline")


def note_cli(book: Book) -> None:
    """Record fits, predictions and comparisons of a table, and the words of the command line."""
    folder = Path(book.scratch)
    write_tables(folder)
    for run in FITS:
        book.note(run, lambda run=run: note_table(book, folder, run))
    if book.load:
        return
    words = "compare train.csv --target kind --methods map,laplace --hidden 8 --out all"
    words += " --set map.steps=30 --set laplace.steps=30"
    note_json(book, "compare", folder, words, "rows methods baseline")
    listed = lambda: json.loads(credibly(folder, "methods --json"))  # noqa: E731
    book.note("methods", lambda: [row["name"] for row in listed()])
    verbs = re.findall(r"^│ ([a-z]+) ", credibly(folder, "--help").split("Commands")[1], re.M)
    book.note("verbs", lambda: sorted(verbs))
    for verb in ["", *verbs]:
        book.note(f"options/{verb}", lambda verb=verb: options_of(credibly(folder, f"{verb} -h")))


def options_of(page: str) -> list[str]:
    """List the names of options on a page of help: those at the beginning of a line."""
    lines = re.findall(r"^│ [ *]{0,4}((?:--?[a-z][a-z-]*[ ,]+)+)", page, re.M)
    return sorted({name for line in lines for name in line.replace(",", " ").split()})


# -- parts and commands ----------------------------------------------------------------------------
def run_parts(out: Path, runs: Path, load: bool) -> None:
    """Run each part in a process of its own and write all entries."""
    print(f"credibly in {Path(cr.__file__).parent}", file=sys.stderr)
    entries: dict[str, str] = {}
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CREDIBLY_")}
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for part in [part for part in PARTS if not (load and part in ("api", "uses"))]:
        with tempfile.TemporaryDirectory() as scratch:
            began, written = time.monotonic(), Path(scratch) / "entries.json"
            words = [sys.executable, *(two if part == "world" and not load else []), __file__]
            words += ["part", part, str(written), str(runs.absolute()), "load" if load else "fit"]
            own = {**clean, **ENVIRONMENT, "SCRATCH": scratch}
            own |= {"CREDIBLY_NATIVE": "0"} if part in ("plain", "compiled") else {}
            try:
                subprocess.run(words, env=own, check=True, timeout=LIMIT)
                found = json.loads(written.read_text())
            except (subprocess.SubprocessError, OSError) as error:
                found = {part: f"error: {type(error).__name__}"}
        entries |= found
        print(f"{part}: {len(found)} entries, {time.monotonic() - began:.0f} s", file=sys.stderr)
    out.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    failed = sum(value.startswith("error") for value in entries.values())
    print(f"{len(entries)} entries, {failed} of them errors")


def run_part(part: str, out: Path, runs: Path, load: bool) -> None:
    """Compute the entries of one part, in a process whose environment is that of the part."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have turned off
    book = Book(part, runs, load)
    work = {"api": note_api, "uses": note_uses, "cli": note_cli}.get(part, note_fits)
    book.note("whole", lambda: work(book))  # an error on the way keeps the entries before it
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(book.entries))


def compare(first: Path, second: Path, common: bool) -> int:
    """Print the entries that differ or are missing, and return the exit code."""
    one, two = (json.loads(path.read_text()) for path in (first, second))
    names = sorted(one.keys() & two.keys() if common else one.keys() | two.keys())
    bad = [name for name in names if one.get(name) != two.get(name)]
    for name in bad:
        print(f"{name}: {one.get(name, 'missing')[:40]} / {two.get(name, 'missing')[:40]}")
    print(f"{len(bad)} of {len(names)} differ" if bad else f"{len(names)} hashes equal")
    return int(bool(bad))


def main() -> int:
    """Run the command."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("verb", choices=("record", "load", "compare", "part"))
    parser.add_argument("words", nargs="+", metavar="path")
    parser.add_argument("--runs", type=Path, help="record: folder to keep the run folders in")
    parser.add_argument("--common", action="store_true", help="compare: ignore missing entries")
    given = parser.parse_args()
    paths = [Path(word) for word in given.words]
    if given.runs and given.runs.exists():
        parser.error(f"{given.runs} exists already")
    if given.verb == "compare":
        return compare(*paths, given.common)
    if given.verb == "part":
        run_part(given.words[0], paths[1], paths[2], given.words[3] == "load")
    elif given.verb == "load":
        run_parts(paths[1], paths[0], load=True)
    else:
        with tempfile.TemporaryDirectory() as place:
            run_parts(paths[0], given.runs or Path(place), load=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
