"""Exported graphs against `predict`, run by onnxruntime."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from scipy import stats
from torch import nn

import credibly as cr
from credibly.export.files import TOLERANCE, onnx_session
from credibly.export.quantiles import graph_quantiles
from credibly.export.tails import graph_normal, standard_cdf
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.model import Model
from credibly.storage.record import Record

L = cr.likelihoods


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.layer(x).mean(1))


def mlp(outputs=1):
    return nn.Sequential(nn.Linear(2, 5), nn.SiLU(), nn.Linear(5, outputs))


def problem(net, likelihood, shape=(2,)):
    """A problem with targets of the kind that the likelihood takes."""
    torch.manual_seed(0)
    x = torch.randn(12, *shape)
    y = x.flatten(1).sum(1)
    if likelihood.support != "real":
        y = (y > 0).to(torch.int64 if isinstance(likelihood, L.Categorical) else torch.float32)
    return cr.Problem(net, data=(x, y), likelihood=likelihood, prior=cr.priors.Normal(1.0))


def drawn(net, likelihood, shape=(2,), draws=6):
    """A posterior with draws around random weights, without a fit."""
    torch.manual_seed(1)
    known = problem(net, likelihood, shape)
    theta = 0.5 * torch.randn(2, draws // 2, known.layout.dim)
    return DrawsPosterior(Model.of(known), theta, Record(method="draws", n=12))


def run_file(path, **inputs):
    session = onnx_session(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs)))


def assert_same(found, predictive, names):
    for name in names:
        expected = predictive.quantile(float(name[9:])) if name.startswith("quantile") else getattr(predictive, name)
        np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A regression network with learned noise, as a file."""
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    posterior = drawn(mlp(), L.Gaussian())
    return posterior, path, posterior.export(path, levels=(0.001, 0.5, 0.95))


@pytest.mark.parametrize("rows", [1, 7])
def test_regression_with_quantiles(exported, rows):
    posterior, path, record = exported
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(rows))
    found = run_file(path, x=x.numpy())
    assert list(found) == list(record.outputs)
    assert_same(found, posterior.predict(x), record.outputs)
    np.testing.assert_allclose(found["aleatoric"] + found["epistemic"], found["variance"], rtol=1e-5)


def test_loading_a_file_is_silent(exported, capfd):
    """Unlike `onnx_session`, a user's session shows the warnings of onnxruntime, such as one per unused constant."""
    onnxruntime.InferenceSession(exported[1], providers=["CPUExecutionProvider"])
    assert capfd.readouterr().err == ""


def test_a_point_estimate_is_no_average(tmp_path):
    posterior = cr.MAP(steps=2).fit(problem(mlp(), L.Gaussian()), seed=0)
    written = posterior.export(tmp_path / "model.onnx")
    assert written.notes == ("There is one set of weights, so no model average.",)


def test_the_file_says_what_it_is_and_nothing_of_this_machine(exported):
    _, path, record = exported
    model = onnx.load(path)
    onnx.checker.check_model(model)
    facts = json.loads({entry.key: entry.value for entry in model.metadata_props}["credibly_export"])
    assert facts["method"] == "draws"
    assert facts["draws"] == record.draws == 6
    assert facts["notes"] == ["The model average is over all 6 stored draws."]
    content = path.read_bytes()
    assert b"site-packages" not in content
    assert b"/credibly/" not in content
    assert max(record.difference.values()) <= TOLERANCE
    assert record.bytes == len(content) < 10**5


@pytest.mark.parametrize(
    "net, likelihood, shape, levels",
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), L.Categorical(), (1, 4, 4), None),
        (Recurrent(), L.Gaussian(0.3), (4, 3), ()),
        (Block(), L.Categorical(), (3, 4), None),
    ],
    ids=["convolutional", "recurrent", "transformer block"],
)
def test_networks(tmp_path, net, likelihood, shape, levels):
    posterior = drawn(net, likelihood, shape)
    record = posterior.export(tmp_path / "model.onnx", levels=levels)
    assert record.inputs == ("x",)
    for rows in (1, 7):
        x = torch.randn(rows, *shape)
        assert_same(run_file(record.path, x=x.numpy()), posterior.predict(x), record.outputs)


METHODS = {
    "gaussian": (cr.BayesByBackprop(steps=3), L.Gaussian(0.3), {"draws": 9}),
    "dropout": (cr.MCDropout(insert="*", rate=0.2, steps=3), L.Bernoulli(), {"passes": 9}),
    "laplace": (cr.Laplace(steps=3), L.Gaussian(0.3), {"draws": 9, "joint": True}),
}


@pytest.mark.parametrize("name", METHODS)
def test_posteriors_that_are_sampled(tmp_path, name):
    method, likelihood, settings = METHODS[name]
    posterior = method.fit(problem(mlp(), likelihood), seed=0, progress=False)
    record = posterior.export(tmp_path / "model.onnx", levels=(), draws=9, seed=4)
    assert "9" in record.notes[0]
    assert "seed 4" in record.notes[0]
    x = torch.randn(7, 2)
    assert_same(run_file(record.path, x=x.numpy()), posterior.predict(x, seed=4, **settings), record.outputs)


def test_torch_export_holds_the_same_outputs(tmp_path):
    posterior = drawn(mlp(2), L.HeteroscedasticGaussian())
    record = posterior.export(tmp_path / "model.pt2", levels=())
    assert record.outputs == ("mean", "variance", "aleatoric", "epistemic")
    assert max(record.difference.values()) < 1e-5
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]


@pytest.mark.parametrize(
    "likelihood",
    [L.Gaussian(0.05), L.StudentT(0.4, df=3.0), L.HeteroscedasticGaussian(), L.HeteroscedasticStudentT()],
    ids=["separated", "heavy tails", "heteroscedastic", "both"],
)
def test_quantiles_of_mixtures(likelihood):
    """Also where the components are forty standard deviations apart, and far out in the tails."""
    torch.manual_seed(3)
    locations = torch.cat([torch.randn(5, 4, 1) * 0.01, 2 + torch.randn(8, 4, 1) * 0.01])
    output = torch.cat([locations, torch.randn(13, 4, 1)], -1)
    output = output if likelihood.outputs_per_target == 2 else locations
    levels = [0.001, 0.2, 0.5, 0.99]
    found = graph_quantiles(likelihood, [(output, {})], levels)[:, 0]
    reached = likelihood.cdf(output.double().unsqueeze(1), found.unsqueeze(0).double(), {}).mean(0)
    expected = torch.tensor(levels, dtype=torch.float64).reshape(-1, 1, 1).expand_as(reached)
    torch.testing.assert_close(reached, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("df", [0.7, 3.0, 4.0, 30.5])
def test_tails_have_all_their_digits(df):
    z = torch.tensor([-30.0, -8.0, -1.0, -1e-3, 0.0, 0.5, 6.0], dtype=torch.float64)
    normal, student = standard_cdf(L.Gaussian(1.0)), standard_cdf(L.StudentT(1.0, df=df))
    np.testing.assert_allclose(normal(z), stats.norm.cdf(z), rtol=1e-9)
    np.testing.assert_allclose(student(z), stats.t.cdf(z, df), rtol=1e-9)
    infinite = torch.tensor([-torch.inf, -200.0, *z, torch.inf], dtype=torch.float64)
    np.testing.assert_allclose(graph_normal().log_cdf(infinite), stats.norm.logcdf(infinite), rtol=1e-8, atol=1e-15)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"levels": (0.5, 1.0)}, "levels must be strictly between 0 and 1, got 1.0"),
        ({"levels": (0.5, 0.5)}, "levels must be different"),
        ({"draws": 7}, "draws must be at most 6"),
        ({"draws": 0}, "draws must be a positive integer"),
        ({"path": "model.pkl"}, "path must end in .onnx or .pt2"),
        ({"path": "missing/model.onnx"}, "no such folder"),
        ({"path": "old.onnx"}, "exists"),
    ],
)
def test_bad_input_is_refused_before_any_work(tmp_path, settings, message):
    (tmp_path / "old.onnx").write_bytes(b"old")
    settings = {"path": "model.onnx", **settings}
    with pytest.raises(cr.InputError, match=message):
        drawn(mlp(), L.Gaussian(0.3)).export(tmp_path / settings.pop("path"), **settings)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


class Unsteady(nn.Module):
    """A network whose forward depends on values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if float(y.detach().abs().max()) > 1e6 else y


@pytest.mark.parametrize(
    "make, settings, message",
    [
        (lambda: drawn(Unsteady(), L.Gaussian(0.3)), {}, "cannot trace.*Remove what depends on values"),
        (lambda: drawn(mlp(), L.Poisson()), {"levels": (0.5,)}, "quantiles of Poisson outcomes cannot be exported"),
        (lambda: drawn(mlp(), L.Gaussian(0.3)).calibrate(torch.randn(20, 2), torch.randn(20)), {}, "is calibrated"),
    ],
    ids=["values", "counts", "calibrated"],
)
def test_what_cannot_be_exported_is_refused_with_words(tmp_path, make, settings, message):
    with pytest.raises(cr.InputError, match=message):
        make().export(tmp_path / "model.onnx", **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_differs_from_predict_is_not_kept(tmp_path, monkeypatch):
    posterior = drawn(mlp(), L.Bernoulli())
    (tmp_path / "model.pt2").write_bytes(b"old")
    monkeypatch.setattr("credibly.export.graph.summarise", lambda *given: (torch.zeros(3, 2), *[torch.zeros(3)] * 3))
    with pytest.raises(cr.InputError, match="differs from predict.*Nothing was written"):
        posterior.export(tmp_path / "model.pt2", overwrite=True)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


def test_a_graph_of_nan_is_not_kept(tmp_path, monkeypatch):
    nan = torch.full((3,), torch.nan)
    monkeypatch.setattr("credibly.export.graph.summarise", lambda *given: (torch.full((3, 2), torch.nan), *[nan] * 3))
    with pytest.raises(cr.InputError, match=r"differs from predict by inf"):
        drawn(mlp(), L.Bernoulli()).export(tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_the_saved_program_is_what_is_compared(tmp_path, monkeypatch):
    one, other = drawn(mlp(), L.Gaussian(0.5)), drawn(mlp(), L.Gaussian(5.0))
    other.export(tmp_path / "other.pt2")
    content = (tmp_path / "other.pt2").read_bytes()
    monkeypatch.setattr(torch.export, "save", lambda program, path: path.write_bytes(content))
    with pytest.raises(cr.InputError, match="differs from predict"):
        one.export(tmp_path / "model.pt2")
    assert [file.name for file in tmp_path.iterdir()] == ["other.pt2"]


def test_a_graph_that_onnxruntime_cannot_run_is_refused_with_words(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(cr.InputError, match="onnxruntime cannot run the exported graph"):
        onnx_session(tmp_path / "model.onnx")
