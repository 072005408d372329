"""The house rules: which way imports run, what `import credibly` may load, how long a file may grow."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import credibly as cr
from warm_python import warm_python

SOURCE = Path(cr.__file__).parent

# Packages and root modules from the lowest to the highest: imports only run downwards. A dotted entry places one
# subpackage by itself. What is not listed fails the test: say where it belongs.
ORDER = (
    "errors", "runtime", "core", "distributed", "backends.triton", "networks", "gaussians", "priors", "likelihoods",
    "backends", "forward", "frozen", "problem", "peft", "predictive", "metrics", "diagnostics", "conformal", "storage",
    "curvature", "posterior", "inference", "methods", "integrations", "data", "plot", "comparing", "decide",
    "continual", "active", "tables.cells", "tables.files", "tables", "export", "report", "demo", "web", "cli",
    "__main__",
)  # fmt: skip


def module_name(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("credibly", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def internal_imports(path):
    """(line, module) of every import of the package's own modules, anywhere in the file, also under TYPE_CHECKING."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "credibly"]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if (node.module or "").split(".")[0] == "credibly":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [(node.lineno, name if name in MODULES else node.module) for name in names]
    return [(line, name) for line, name in found if name != "credibly"]


IMPORTS = {name: internal_imports(path) for name, path in MODULES.items() if name != "credibly"}


def room(module):
    """The entry of ORDER that a module belongs to."""
    parts = module.split(".")[1:]
    dotted = ".".join(parts[:2])
    return dotted if dotted in ORDER else parts[0]


def test_imports_run_one_way():
    wrong = []
    for name, imports in IMPORTS.items():
        for line, other in imports:
            here, there = room(name), room(other)
            if here != there and ORDER.index(there) >= ORDER.index(here):
                wrong.append(f"{name}:{line} imports {other}")
    assert sorted(set(wrong)) == []


def test_every_module_has_its_place():
    assert {room(name) for name in IMPORTS} == set(ORDER)


def test_no_import_cycles_between_modules():
    """Also none inside a package, and none hidden behind TYPE_CHECKING or inside a function."""
    graph = {name: sorted({other for _, other in imports if other in IMPORTS}) for name, imports in IMPORTS.items()}
    state, cycles = {}, []

    def visit(name, trail):
        state[name] = "open"
        for other in graph[name]:
            if state.get(other) == "open":
                cycles.append(" -> ".join([*trail[trail.index(other) :], other]))
            elif other not in state:
                visit(other, [*trail, other])
        state[name] = "done"

    for name in graph:
        if name not in state:
            visit(name, [name])
    assert cycles == []


def package(module):
    """The top-level package or root module of credibly that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def is_private(name):
    """Whether a name is private to credibly.

    Those of every nn.Module are torch's, also where credibly has a namesake.
    """
    return name.startswith("_") and not name.startswith("__") and not hasattr(torch.nn.Module(), name)


def private_definitions(tree):
    """Underscore names that a module defines.

    Functions, classes, variables, fields and attributes set on self or cls.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and on_self(node):
            yield node.attr


def private_uses(tree):
    """(line, name) of underscore attributes of others than self and cls, and of underscore names imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not on_self(node):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "credibly":
            yield from ((node.lineno, alias.name) for alias in node.names)


def on_self(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_access_across_packages(trees):
    """("module: name", line) wherever a package of credibly uses a private name that only other packages of it define.

    Private names that credibly does not define belong to torch and other libraries.
    """
    owners = {}
    for module, tree in trees.items():
        for name in filter(is_private, private_definitions(tree)):
            owners.setdefault(name, set()).add(package(module))
    return [
        (f"{module}: {name}", line)
        for module, tree in trees.items()
        for line, name in private_uses(tree)
        if is_private(name) and name in owners and package(module) not in owners[name]
    ]


def test_private_names_stay_within_their_package():
    found = private_access_across_packages({name: ast.parse(path.read_text()) for name, path in MODULES.items()})
    assert found == []


def test_private_access_across_packages_is_found():
    owner = """
_limit = 3
class Owner:
    def __init__(self): self._state = 0
    def _step(self): return self._state
"""
    user = """
from credibly.one.owner import Owner, _limit
import torch
class User(Owner):
    def run(self, other): return other._state + other._step() + self._step() + torch._C.size + other.__len__()
"""
    trees = {"credibly.one.owner": ast.parse(owner), "credibly.two.user": ast.parse(user)}
    found = private_access_across_packages(trees)
    assert found == [("credibly.two.user: _limit", 2)] + [("credibly.two.user: " + n, 5) for n in ("_state", "_step")]
    assert private_access_across_packages({**trees, "credibly.two.user": ast.parse("import credibly")}) == []
    trees["credibly.one.user"] = trees.pop("credibly.two.user")
    assert private_access_across_packages(trees) == []


def test_import_loads_nothing_heavy():
    code = (
        "import sys, credibly as cr; cr.Problem, cr.METHODS, cr.load, cr.likelihoods, cr.metrics, cr.data;"
        " print(' '.join(sorted(m for m in sys.modules if '.' not in m)))"
    )
    loaded = set(subprocess.run([warm_python(), "-c", code], capture_output=True, text=True, check=True).stdout.split())
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
