"""Run folders: a round trip is bit-for-bit identical, and damaged or foreign folders are rejected."""

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    Poisson,
    StudentT,
)
from credibly.posterior import loading, saving
from credibly.storage.run_folder import checksum
from warm_python import warm_python

SOURCE = Path(cr.__file__).parent


def fitted(likelihood=None, outputs=1, y=None, **kwargs):
    x = randn(12, 3)
    y = randn(12, seed=1) if y is None else y
    problem = cr.Problem(
        mlp(3, 4, outputs),
        data=(x, y),
        likelihood=likelihood or Gaussian(),
        prior=cr.priors.Normal(0.5, fan_in=True),
        **kwargs,
    )
    return cr.DeepEnsemble(members=3, steps=20, batch_size=5).fit(problem, seed=0)


@pytest.mark.parametrize(
    "likelihood, outputs, y",
    [
        (Gaussian(), 1, None),
        (Gaussian(0.1 + 0.2), 1, None),
        (Gaussian((0.1, 1 / 3)), 2, randn(12, 2)),
        (Gaussian(per_target=True, scale_prior=cr.priors.StudentT(3.0, 0.5)), 2, randn(12, 2)),
        (StudentT(df=3.3), 1, None),
        (HeteroscedasticGaussian(), 2, None),
        (HeteroscedasticStudentT(df=5.0), 2, None),
        (Bernoulli(), 1, torch.arange(12) % 2),
        (Categorical(), 3, torch.arange(12) % 3),
        (cr.likelihoods.HeteroscedasticCategorical(samples=8), 6, torch.arange(12) % 3),
        (Poisson(), 1, torch.arange(12)),
    ],
    ids=lambda v: type(v).__name__ if hasattr(v, "support") else None,
)
def test_predictions_come_back_bit_for_bit(tmp_path, likelihood, outputs, y):
    posterior = fitted(likelihood, outputs, y)
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 4, outputs, seed=5))
    x = randn(40, 3, seed=9)
    a, b = posterior.predict(x), loaded.predict(x)
    assert torch.equal(loaded.draws, posterior.draws)
    assert loaded.likelihood == posterior.likelihood
    assert loaded.record == posterior.record
    for name in ("mean", "variance", "aleatoric", "epistemic"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    assert torch.equal(a.sample(3), b.sample(3))
    if a.likelihood.ordered:
        assert torch.equal(a.interval(0.9)[0], b.interval(0.9)[0])


def test_another_process_gets_identical_predictions(tmp_path):
    posterior = fitted()
    posterior.save(tmp_path / "run")
    x = randn(7, 3, seed=9)
    code = (
        "import sys, torch, credibly as cr\n"
        "from torch import nn\n"
        "torch.set_num_threads(1)\n"
        "net = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1))\n"
        "x = torch.randn(7, 3, generator=torch.Generator().manual_seed(9))\n"
        "print(cr.load(sys.argv[1], net).predict(x).mean.double().numpy().tobytes().hex())\n"
    )
    out = subprocess.run([warm_python(), "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == posterior.predict(x).mean.double().numpy().tobytes().hex()


def test_buffers_tuples_and_looped_networks_come_back(tmp_path):
    class Net(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(4, 1)
            self.register_buffer("shift", torch.tensor(shift))

        def forward(self, series, number):
            return self.head(torch.cat([self.lstm(series)[0][:, -1], number], -1)) + self.shift

    x, y = (randn(6, 4, 2), randn(6, 1)), randn(6, seed=1)
    problem = cr.Problem(Net(1.5), data=(x, y), likelihood=Gaussian(0.3), prior=cr.priors.Normal())
    posterior = cr.DeepEnsemble(members=2, steps=3).fit(problem, seed=0)
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", Net(-7.0))
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)


def test_shards_are_joined_in_order(tmp_path, monkeypatch):
    posterior = fitted()
    many = cr.DrawsPosterior(posterior.model, randn(2, 25, posterior.layout.dim), posterior.record)
    monkeypatch.setattr(saving, "SHARD_BYTES", 3 * 2 * 4 * posterior.layout.dim)
    many.save(tmp_path / "run")
    assert len(list((tmp_path / "run").glob("draws-*.safetensors"))) == 9
    assert torch.equal(cr.load(tmp_path / "run", mlp(3, 4, 1)).draws, many.draws)


def test_the_manifest_records_how_the_posterior_came_about(tmp_path):
    posterior = fitted(temperature=0.5)
    posterior.save(tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    record = manifest["record"]
    assert record["method"] == "ensemble"
    assert record["settings"]["members"] == 3
    assert record["seed"] == 0
    assert record["n"] == 12
    assert len(record["fingerprint"]) == 32
    assert record["tempering"] == {"likelihood": 0.5, "prior": 0.5}
    assert record["prior"]["kind"] == "priors.Normal"
    assert set(manifest["versions"]) == {"credibly", "torch", "numpy", "python"}
    assert all(len(f["sha256"]) == 64 for f in manifest["files"].values())


@pytest.mark.parametrize(
    "damage", ["truncated", "flipped", "missing", "manifest cut", "foreign", "version", "outside", "kind", "likelihood"]
)
def test_damaged_and_foreign_folders_are_rejected_with_a_reason(tmp_path, damage):
    fitted().save(tmp_path / "run")
    run, net = tmp_path / "run", mlp(3, 4, 1)
    shard, manifest = run / "draws-00000.safetensors", run / "manifest.json"
    facts = json.loads(manifest.read_text())
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-7])
    elif damage == "flipped":
        content = bytearray(shard.read_bytes())
        content[-3] ^= 1
        shard.write_bytes(bytes(content))
    elif damage == "missing":
        shard.unlink()
    elif damage == "manifest cut":
        manifest.write_text(manifest.read_text()[:200])
    elif damage == "foreign":
        manifest.write_text('{"name": "something else"}')
    else:
        if damage == "version":
            facts["format_version"] = 99
        elif damage == "outside":
            facts["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
        elif damage == "kind":
            facts["kind"] = "os.system"
        else:
            facts["likelihood"]["kind"] = "Popen"
        # By somebody who knows how to compute the checksum.
        manifest.write_text(json.dumps({**facts, "checksum": checksum(facts)}))
    reasons = {
        "truncated": "truncated or was modified",
        "flipped": "checksum",
        "missing": "is missing",
        "manifest cut": "truncated or was modified",
        "foreign": "not a run folder",
        "version": "format 99",
        "outside": "outside the folder",
        "kind": "altered",
        "likelihood": "does not know",
    }
    with pytest.raises(cr.StoreError, match=reasons[damage]):
        cr.load(run, net)


def test_only_the_posterior_classes_of_the_package_can_be_loaded():
    assert {kind: posterior.__name__ for kind, posterior in loading.POSTERIORS.items()} == {
        "draws": "DrawsPosterior",
        "density": "DensityPosterior",
        "gaussian": "GaussianPosterior",
        "dropout": "DropoutPosterior",
        "laplace": "LaplacePosterior",
        "calibrated": "CalibratedPosterior",
    }
    with pytest.raises(TypeError, match=r"Other\.kind is 'draws', which DrawsPosterior has already"):
        type("Other", (cr.DrawsPosterior,), {"kind": "draws"})


def test_not_a_folder_and_not_a_run(tmp_path):
    with pytest.raises(cr.StoreError, match="there is no folder"):
        cr.load(tmp_path / "nowhere", mlp(3, 4, 1))
    with pytest.raises(cr.StoreError, match="not a run folder"):
        cr.load(tmp_path, mlp(3, 4, 1))


def test_a_network_of_another_shape_is_rejected(tmp_path):
    fitted().save(tmp_path / "run")
    with pytest.raises(cr.StoreError, match=r"net: 0.weight has shape \(5, 3\), the stored run has \(4, 3\)"):
        cr.load(tmp_path / "run", mlp(3, 5, 1))
    with pytest.raises(cr.StoreError, match=r"4.weight"):
        cr.load(tmp_path / "run", mlp(3, 4, 1, 1))
    with pytest.raises(cr.StoreError, match="float64"):
        cr.load(tmp_path / "run", mlp(3, 4, 1, dtype=torch.float64))


def test_an_existing_folder_is_kept_without_overwrite(tmp_path):
    posterior = fitted()
    posterior.save(tmp_path / "run")
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    with pytest.raises(cr.StoreError, match="already exists"):
        posterior.save(tmp_path / "run")
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before
    posterior.save(tmp_path / "run", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(cr.StoreError, match="not a run folder, so it is not overwritten"):
        posterior.save(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    posterior = fitted()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        posterior.save(tmp_path / "run")
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    posterior.save(tmp_path / "run")
    monkeypatch.setattr(saving, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        posterior.save(tmp_path / "run", overwrite=True)
    assert torch.equal(cr.load(tmp_path / "run", mlp(3, 4, 1)).draws, posterior.draws)  # the old run is still intact


def test_nothing_in_the_package_can_execute_what_it_reads():
    """No pickle, no torch.load, no eval, in the syntax tree of any module."""
    modules, names = (
        {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"},
        {"eval", "exec", "compile", "__import__"},
    )
    offences = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported = [(node.module or "").split(".")[0]]
            offences += [f"{path.name}:{node.lineno} imports {m}" for m in imported if m in modules]
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name) and node.func.id in names:
                    offences.append(f"{path.name}:{node.lineno} calls {node.func.id}")
                attribute = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
                if attribute and (node.func.value.id, node.func.attr) in {
                    ("torch", "load"),
                    ("torch", "save"),
                    ("joblib", "load"),
                }:
                    offences.append(f"{path.name}:{node.lineno} calls {node.func.value.id}.{node.func.attr}")
                if any(
                    k.arg == "allow_pickle" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                    for k in node.keywords
                ):
                    offences.append(f"{path.name}:{node.lineno} allows pickle")
    assert offences == []
    assert len(list(SOURCE.rglob("*.py"))) > 20  # the scan saw the package
