"""The house rules: which way imports run, what `import credibly` may load, how long a file may grow."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import credibly as cr

SOURCE = Path(cr.__file__).parent

# Lower floors never import from higher ones. A module that is not listed fails the test: say where it lives.
FLOORS = [
    {"errors", "progress", "compiling", "gradients", "adapt", "unit_kernels"},
    {"precisions", "rendezvous"},
    {"world"},
    {
        "block_precisions",
        "cost",
        "plain_density",
        "rng",
        "specs",
        "inputs",
        "priors",
        "norms",
        "families",
        "run_folder",
        "stored_draws",
    },
    {"layout", "likelihoods", "data", "images", "information", "masks", "fused_unit"},
    {"gaussian_prior", "zoo"},
    {"flat_prior", "layer_table", "stacked", "quantiles", "metrics", "convergence", "verdict", "arviz_export"},
    {"native"},
    {"blueprint", "forward", "predictive", "plot_style"},
    {"problem", "evaluation", "plot_predictive", "plot_table", "diagnostics", "units"},
    {"curvature", "kernels", "posterior", "plot_chains", "target"},
    {"gaussian_posterior", "dropout_posterior", "linearised", "manifest", "plot"},
    {"laplace_posterior"},
    {"store", "comparing", "decide"},
    {"methods", "coresets"},
    {"active", "continual", "demo", "resuming", "recipe"},
    {"tuning"},
    {"estimators", "tables"},
    {"report"},
    {"studies"},
    {"cli"},
    {"__main__"},
]
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}


def internal_imports(path):
    """(line, room) of every import of the package's own modules, anywhere in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "credibly"
                else [node.module or ""]
            )
        found += [(node.lineno, m.split(".")[1]) for m in modules if m.startswith("credibly.")]
    return found


def test_imports_run_one_way():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).with_suffix("").parts[0]
        if room == "__init__":
            continue
        for line, other in internal_imports(path):
            late = room == "posterior" and other == "store"  # Posterior.save reaches up, inside the method
            if other != room and other in FLOOR and FLOOR[other] >= FLOOR[room] and not late:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {other}")
    assert wrong == []


def test_every_module_has_a_floor():
    rooms = {
        p.stem if p.is_file() else p.name
        for p in SOURCE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").is_file()
    }
    assert rooms - {"__init__"} == set(FLOOR)


def test_import_loads_nothing_heavy():
    code = (
        "import sys, credibly as cr; cr.Problem, cr.METHODS, cr.load, cr.likelihoods, cr.metrics, cr.data;"
        " print(' '.join(sorted(m for m in sys.modules if '.' not in m)))"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "torch" in loaded
    assert not loaded & {
        "sklearn",
        "scipy",
        "pandas",
        "matplotlib",
        "torchmetrics",
        "typer",
        "rich",
        "jinja2",
        "arviz",
        "arviz_stats",
        "pyarrow",
    }


def test_core_works_with_torch_numpy_and_safetensors_alone(tmp_path):
    """With everything else made impossible to import, the five lines still run: fit, predict, save, load."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        refused = "sklearn scipy pandas matplotlib torchmetrics typer rich jinja2 arviz arviz_stats pyarrow".split()
        if name.split(".")[0] in refused:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch, credibly as cr
x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.SiLU(), torch.nn.Linear(4, 1))
problem = cr.Problem(net, data=(x, x.sum(1)), likelihood=cr.likelihoods.Gaussian(), prior=cr.priors.Normal())
posterior = cr.DeepEnsemble(members=2, steps=20).fit(problem, seed=0)
p = posterior.predict(x)
p.mean, p.variance, p.aleatoric, p.epistemic, p.interval(0.9), p.log_prob(x.sum(1)), p.sample(10)
posterior.save(sys.argv[1] + "/run")
assert torch.equal(cr.load(sys.argv[1] + "/run", net).predict(x).mean, p.mean)
print("done")
"""
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert out.stdout.strip() == "done", out.stderr


def test_public_names_are_there():
    for name in cr.__all__:
        assert getattr(cr, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cr.nothing


def test_no_public_name_is_that_of_a_module_unless_it_is_the_module():
    """An import of the module would put it in the place of the function."""
    modules = {p.stem for p in SOURCE.glob("*.py")} | {p.parent.name for p in SOURCE.glob("*/__init__.py")}
    assert {n for n in cr.__all__ if n in modules and not isinstance(getattr(cr, n), types.ModuleType)} == set()


def test_files_stay_readable():
    too_long = {str(p.relative_to(SOURCE)): n for p in SOURCE.rglob("*.py") if (n := p.read_text().count("\n")) > 350}
    assert too_long == {}
