"""The problem of a resumed run: rebuilt from the folder, passed again, or refused with what differs."""

import logging

import pytest
import torch
from stopped_runs import StoppedRuns, begin, density, make, manifest_of, quick, same, tidy
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.inference import run_files
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson, StudentT
from credibly.priors.elementwise import Laplace, Normal
from credibly.storage import run_folder
from credibly.storage.run_folder import LOCK


def conv():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1))


class Own(nn.Module):
    """A network that a folder cannot describe."""

    def __init__(self, seed=0):
        super().__init__()
        self.net = mlp(3, 4, 1, seed=seed)
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x):
        return self.net(x) + self.shift


class OwnPrior(Normal):
    """A prior of the user's own class."""


def images(channels, y):
    return lambda likelihood: cr.Problem(conv(), (randn(6, channels, 4, 4), y), likelihood, Normal())


OTHERS = {
    "data": (lambda: make(y=randn(20, seed=9)), r"the data differ"),
    "rows": (lambda: make(rows=19), r"rows is 19, in the folder 20"),
    "prior": (lambda: make(prior=Normal(2.0)), r'prior is .*"scale": 2.0.*, in the folder .*"scale": 1.0'),
    "likelihood": (lambda: make(likelihood=Gaussian(0.4)), r"likelihood is .*0.4.*, in the folder .*0.5"),
    "temperature": (lambda: make(temperature=0.5), r"temperature is .*0.5.*, in the folder .*1.0"),
    "shape": (lambda: make(net=mlp(3, 5, 1)), r"net: 0.weight has shape \(5, 3\), the stored run has \(4, 3\)"),
    "depth": (lambda: make(net=mlp(3, 4, 4, 1)), r"net: 2.weight has shape"),
    "dtype": (lambda: make(dtype=torch.float64), r"dtype is \"torch.float64\", in the folder \"torch.float32\""),
    "random": (lambda: make(random="2.*"), r"net: its tensors have other roles"),
    "activation": (lambda: make(net=mlp(3, 4, 1, activation=nn.Tanh)), r"the network computes a different function"),
    "micro_batch": (lambda: make(micro_batch=7), r"micro_batch is 7, in the folder null"),
    "plan": (lambda: make(plan="looped"), r"plan is \"looped\", in the folder \"batched\""),
    "precision": (lambda: make(precision="bf16"), r"precision is \"bf16\", in the folder null"),
    "density": (density, r"the folder holds a run on a network, this problem is a plain density"),
}


class TestProblems(StoppedRuns):
    """The problem rebuilt from the folder alone is the original one."""

    @pytest.mark.parametrize(
        "problem",
        [
            lambda: make(likelihood=Gaussian()),
            lambda: make(likelihood=Gaussian((0.1, 0.7)), net=mlp(3, 4, 2), y=randn(20, 2)),
            lambda: make(likelihood=Gaussian(per_target=True), net=mlp(3, 4, 2), y=randn(20, 2)),
            lambda: make(likelihood=Gaussian(0.3), y=randn(20, 1)),
            lambda: make(likelihood=StudentT(df=3.5)),
            lambda: make(likelihood=HeteroscedasticGaussian(), net=mlp(3, 4, 2)),
            lambda: make(likelihood=Bernoulli(), y=torch.arange(20) % 2),
            lambda: make(likelihood=Categorical(), net=mlp(3, 4, 3), y=torch.arange(20) % 3),
            lambda: make(likelihood=Poisson(), y=torch.arange(20) % 4),
            lambda: images(1, randn(6, 2, 4, 4))(Gaussian(0.5, axis=1)),
            lambda: images(1, torch.arange(96).reshape(6, 4, 4) % 2)(Categorical(axis=1)),
            lambda: make(prior={"*.weight": Normal(0.5, fan_in=True), "*": Laplace(2.0)}),
            lambda: make(temperature=cr.Tempering(0.5, 2.0)),
            lambda: make(random="2.*"),
            lambda: make(net=mlp(3, 4, 1, dtype=torch.float64), y=randn(20, dtype=torch.float64), dtype=torch.float64),
            lambda: make(micro_batch=7),
            lambda: make(plan="looped"),
            lambda: make(precision="bf16"),
            lambda: make(net=nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))),
            lambda: make(net=nn.Linear(3, 1)),
        ],
    )
    def test_from_the_folder_alone(self, tmp_path, tight, crash, problem):
        method = quick(draws=2, step_size=0.01, trajectory_length=0.02, init="network")
        for after in (1, 3):
            one = problem()
            known = method.fit(one, seed=1)
            path = tmp_path / str(after)
            begin(method, one, path, crash, after)
            if after == 1:  # as if stopped before the first checkpoint: the network's initial weights are needed
                manifest = manifest_of(path)
                del manifest["files"][manifest.pop("state")]
                run_folder.write_manifest(path, manifest)
            same(cr.resume(path), known)
            tidy(path)

    def test_problems_that_a_folder_cannot_describe_must_be_passed(self, tmp_path, tight, crash, monkeypatch):
        command = "`credibly resume .* --problem your_script.py:problem`"
        how = rf"Pass the problem: credibly.resume\('.*', problem\), or {command}"
        cases = {
            "net": (make(net=Own()), "the folder does not describe the network"),
            "density": (density(), "is a run on a plain density, which a folder cannot describe"),
            "prior": (make(prior=OwnPrior(1.0)), "likelihood or prior of .* are not credibly's own"),
        }
        for name, (problem, reason) in cases.items():
            known = quick().fit(problem, seed=1)
            begin(quick(), problem, tmp_path / name, crash, 3)
            with pytest.raises(cr.StoreError, match=f"{reason}.*{how}"):
                cr.resume(tmp_path / name)
            assert not (tmp_path / name / LOCK).exists()
            same(cr.resume(tmp_path / name, problem), known)
        monkeypatch.setattr(run_files, "KEPT_DATA", 100)
        begin(quick(), make(), tmp_path / "large", crash, 3)
        with pytest.raises(cr.StoreError, match=f"the data of .* were too large to be stored in it.*{how}"):
            cr.resume(tmp_path / "large")
        assert "data.safetensors" not in manifest_of(tmp_path / "large")["files"]
        same(cr.resume(tmp_path / "large", make()), quick().fit(make(), seed=1))

    @pytest.mark.parametrize("name", OTHERS)
    def test_another_problem_is_refused_with_what_differs(self, tmp_path, tight, crash, name):
        path = tmp_path / "run"
        begin(quick(), make(), path, crash, 3)
        before = {p.name: p.read_bytes() for p in path.iterdir()}
        other, reason = OTHERS[name]
        with pytest.raises(cr.StoreError, match=f"path: '.*run' was started with another problem: {reason}"):
            cr.resume(path, other())
        assert {p.name: p.read_bytes() for p in path.iterdir()} == before

    @pytest.mark.parametrize(
        "other, reason",
        [
            (lambda: density(name="other"), "the name of the density is 'other', in the folder 'banana'"),
            (lambda: density(dim=3), "the dim of the density is 3, in the folder 2"),
            (lambda: density(scale=2.0), "the scale of the density differs"),
            (lambda: density(power=3.0), "the density has different values at the same points"),
            (lambda: density(dtype=torch.float32), "dtype is torch.float32, in the folder torch.float64"),
            (make, "the folder holds a run on a plain density, this problem has a network"),
        ],
    )
    def test_another_density(self, tmp_path, tight, crash, other, reason):
        begin(quick(), density(), tmp_path / "run", crash, 3)
        with pytest.raises(cr.StoreError, match=reason):
            cr.resume(tmp_path / "run", other())

    def test_other_fixed_values(self, tmp_path, tight, crash):
        begin(quick(), make(net=Own()), tmp_path / "buffer", crash, 3)
        net = Own()
        net.shift += 1
        with pytest.raises(cr.StoreError, match="the network computes a different function|the values of shift"):
            cr.resume(tmp_path / "buffer", make(net=net))
        begin(quick(), make(random="2.*"), tmp_path / "fixed", crash, 3)
        with pytest.raises(cr.StoreError, match="another problem"):
            cr.resume(tmp_path / "fixed", make(random="2.*", seed=4))
        net = mlp(3, 4, 1)
        with torch.no_grad():
            net[0].weight[0, 0] *= 1 + 1e-6
        with pytest.raises(cr.StoreError, match="the values of 0.weight, which is not random, differ"):
            cr.resume(tmp_path / "fixed", make(random="2.*", net=net))
        same(cr.resume(tmp_path / "fixed", make(random="2.*")), quick().fit(make(random="2.*"), seed=1))

    def test_a_prior_of_the_users_class_is_recognised(self, tmp_path, tight, crash):
        begin(quick(), make(prior=OwnPrior(1.0)), tmp_path / "run", crash, 3)
        with pytest.raises(cr.StoreError, match="prior is .*3.0.*, in the folder .*1.0"):
            cr.resume(tmp_path / "run", make(prior=OwnPrior(3.0)))
        cr.resume(tmp_path / "run", make(prior=OwnPrior(1.0)))

    def test_an_object_that_is_no_problem(self, tmp_path, tight, crash):
        begin(quick(), make(), tmp_path / "run", crash, 3)
        with pytest.raises(
            cr.InputError, match="problem must be a credibly.Problem or a credibly.Density, got Sequential"
        ):
            cr.resume(tmp_path / "run", mlp(3, 4, 1))

    def test_another_torch_or_device_is_logged(self, tmp_path, tight, crash, caplog):
        begin(quick(), make(), tmp_path / "run", crash, 3)
        with caplog.at_level(logging.WARNING, "credibly"):
            manifest = manifest_of(tmp_path / "run")
            manifest["arithmetic"] |= {"torch": "1.0", "threads": 64}
            run_folder.write_manifest(tmp_path / "run", manifest)
            cr.resume(tmp_path / "run")
        assert f"started with torch 1.0 and resumes with {torch.__version__}" in caplog.text
        assert "started with threads 64 and resumes with 1" in caplog.text
        begin(quick(), make(), tmp_path / "other", crash, 3)
        manifest = manifest_of(tmp_path / "other")
        manifest["arithmetic"]["device"] = "cuda:7"
        run_folder.write_manifest(tmp_path / "other", manifest)
        with pytest.raises(cr.StoreError, match="was started on cuda:7, which is not available"):
            cr.resume(tmp_path / "other")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "credibly"):
            same(cr.resume(tmp_path / "other", make()), quick().fit(make(), seed=1))
        assert "started with device cuda:7 and resumes with cpu" in caplog.text
