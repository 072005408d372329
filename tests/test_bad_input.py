"""Bad input raises a clear error before any work: the parameter, the constraint, the value received, the way out."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Ordinal, Poisson, Quantiles

X, Y = randn(8, 3), randn(8, seed=1)
LABELS = torch.arange(8) % 3
RAGGED = torch.nested.nested_tensor([X[:3], X[:2]], layout=torch.jagged)


def poke(tensor, value, *index):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def build(net=None, data=(X, Y), likelihood=None, prior=None, **kwargs):
    return cr.Problem(
        net or mlp(3, 4, 1), data=data, likelihood=likelihood or Gaussian(), prior=prior or cr.priors.Normal(), **kwargs
    )


class Empty(Dataset):
    def __len__(self):
        return 0

    def __getitem__(self, i):
        raise IndexError


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 1))

    def forward(self, x):
        return (x @ self.w).sum()


class Odd(Scalar):
    def forward(self, x):
        return {"answer": x @ self.w}


MIXED = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1).double())
NORMED = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

CASES = {
    "NaN in x": (
        {"data": (poke(X, math.nan, 2, 1), Y)},
        r"x: has 1 values that are NaN or infinite, the first at \[2, 1\]\. Drop or impute",
    ),
    "infinity in x": ({"data": (poke(X, math.inf, 0, 0), Y)}, "x: has 1 values that are NaN or infinite"),
    "NaN in a numpy array": ({"data": (poke(X, math.nan, 2, 1).numpy(), Y)}, "x: has 1 values"),
    "NaN in y": (
        {"data": (X, poke(Y, math.nan, 5))},
        r"y: has 1 values that are NaN or infinite, the first at \[5, 0\]",
    ),
    "infinity in y": ({"data": (X, poke(Y, -math.inf, 5))}, "y: has 1 values"),
    "lengths differ": ({"data": (X, Y[:7])}, "y: has 7 rows, x has 8"),
    "inputs of a tuple differ": ({"data": ((X, X[:5]), Y)}, r"x\[1\]: has 5 rows, x\[0\] has 8"),
    "several inputs in a list": ({"data": ([X, X], Y)}, r"y: has 8 rows, x has 2.*are a tuple \(x1, x2\), not a list"),
    "None among the inputs": (
        {"data": ({"a": X, "mask": None}, Y)},
        r"x\['mask'\]: is None. Pass one array here; leave",
    ),
    "nested inputs": ({"data": ((X, {"a": X}), Y)}, r"x\[1\]: is a dict inside another structure"),
    "sparse x": ({"data": (X.to_sparse(), Y)}, r"x: has the layout torch.sparse_coo. Make it dense: x.to_dense\(\)"),
    "ragged x": ({"data": (RAGGED, Y)}, r"x: is a nested tensor. Pad the rows, x.to_padded_tensor\(0\)"),
    "labels out of range": (
        {"net": mlp(3, 4, 2), "data": (X, LABELS), "likelihood": Categorical()},
        "y: has labels from 0 to 2.*labels are 0 to 1",
    ),
    "negative label": (
        {"net": mlp(3, 4, 3), "data": (X, LABELS - 1), "likelihood": Categorical()},
        "y: has labels from -1 to 1",
    ),
    "labels not integers": (
        {"net": mlp(3, 4, 3), "data": (X, LABELS + 0.5), "likelihood": Categorical()},
        "not integers, such as 0.5",
    ),
    "NaN label": (
        {"net": mlp(3, 4, 3), "data": (X, poke(LABELS.float(), math.nan, 1)), "likelihood": Categorical()},
        "not integers, such as nan",
    ),
    "binary label 2": ({"data": (X, LABELS), "likelihood": Bernoulli()}, "y: has values other than 0 and 1"),
    "negative count": ({"data": (X, LABELS - 1), "likelihood": Poisson()}, "y: has values that are not counts"),
    "output width": ({"net": mlp(3, 4, 2)}, r"net: its output has shape \(rows, 2\)"),
    "odd head": (
        {"net": mlp(3, 4, 3), "likelihood": HeteroscedasticGaussian()},
        "net: its output has 3 values per row. HeteroscedasticGaussian needs 2",
    ),
    "one class": ({"likelihood": Categorical(), "data": (X, LABELS)}, "two or more classes"),
    "empty set": ({"data": (X[:0], Y[:0])}, "x: has no rows"),
    "empty data set": ({"data": Empty()}, "data: has no rows"),
    "no parameters": ({"net": nn.Sequential(nn.ReLU())}, "net: has no parameters"),
    "not a module": ({"net": lambda x: x}, "net must be a torch.nn.Module, got function"),
    "pattern without match": (
        {"random": "head.*"},
        r"random: pattern 'head\.\*' matches no parameter. The names are 0.weight, 0.bias",
    ),
    "prior pattern without match": (
        {"prior": {"head.*": cr.priors.Normal(), "*": cr.priors.Normal()}},
        "prior: pattern",
    ),
    "BatchNorm": ({"net": NORMED}, "net: .*replace_batchnorm"),
    "lazy": ({"net": nn.LazyLinear(1)}, "net: has lazy parameters"),
    "temperature 0": ({"temperature": 0.0}, "temperature must be a positive number, got 0"),
    "temperature negative": ({"temperature": cr.Tempering}, "temperature must be a positive number, got <class"),
    "two dtypes": ({"net": MIXED}, "cannot take rows.*Its parameters are in .*torch.float32.*torch.float64.*dtype="),
    "dtype mismatch": (
        {"data": (X.double(), Y)},
        "x: is torch.float64, the network torch.float32. Convert one of them, or pass dtype=",
    ),
    "wrong columns": ({"data": (X[:, :2], Y)}, r"x: the network cannot take rows of x \(2,\) float32"),
    "integers": ({"data": (X.long(), Y)}, r"x: the network cannot take rows of x \(3,\) int64"),
    "text": ({"data": (np.array([["a", "b", "c"]] * 8), Y)}, "x: holds values of dtype <U1. Encode text"),
    "text column": (
        {"data": (pd.DataFrame({"a": ["x"] * 8, "b": 1.0, "c": 2.0}), Y)},
        "x: holds values of dtype object. Encode text",
    ),
    "not a pair": ({"data": X}, r"data must be a pair \(x, y\), a torch Dataset or a DataLoader, got Tensor"),
    "no targets": ({"data": TensorDataset(X)}, "data: its items are not pairs"),
    "no inputs": ({"data": ((), Y)}, "x: holds no tensor"),
    "scalar y": ({"data": (X, 3.0)}, "y: has no rows, x has 8"),
    "scalar output": ({"net": Scalar()}, r"net: returned shape \(\) for 2 rows"),
    "no tensor out": ({"net": Odd()}, "net: its forward returned dict"),
    "likelihood by name": (
        {"likelihood": "gaussian"},
        "likelihood must be a Likelihood, got 'gaussian'. credibly.likelihoods has",
    ),
    "prior by name": ({"prior": "normal"}, "prior: str for .* has no method"),
    "plan": ({"plan": "fast"}, "plan must be one of 'auto', 'batched', 'looped', got 'fast'"),
    "micro_batch": ({"micro_batch": 0}, "micro_batch must be a positive integer, got 0. None chooses it by memory"),
    "micro_batch by name": ({"micro_batch": "auto"}, "micro_batch must be a positive integer, got 'auto'"),
    "fraction of a micro_batch": ({"micro_batch": 2.5}, "micro_batch must be a positive integer, got 2.5"),
    "class of priors": (
        {"prior": cr.priors.Normal},
        r"prior must be a prior, got the class Normal for '\*'. Pass an instance, such as Normal\(\)",
    ),
    "class of hierarchical priors": ({"prior": {"*": cr.priors.Hierarchical}}, "got the class Hierarchical for"),
    "no such device": (
        {"device": "gpu"},
        r"device must be a device of this machine \(cpu.*\), got 'gpu'. Leave it out",
    ),
    "a device too many": ({"device": "cuda:99"}, "device must be a device of this machine .*, got 'cuda:99'"),
    "integer dtype": (
        {"dtype": torch.int64},
        "dtype must be one of torch.float64, .*, got torch.int64. Or pass its name",
    ),
    "unknown dtype": ({"dtype": "float128"}, "dtype must be one of torch.float64, .*, got 'float128'"),
    "no patterns": ({"random": []}, r"random must be a pattern of names or several of them, got \[\]. Such as random="),
    "number of patterns": ({"random": 5}, "random must be a pattern of names or several of them, got 5"),
    "patterns of numbers": ({"random": [5]}, r"random must be a pattern of names or several of them, got \[5\]"),
    "NaN among ordered labels": (
        {"data": (X, poke(LABELS.float(), math.nan, 2)), "likelihood": Ordinal()},
        "y: has values that are not integers, such as nan. Labels are integers from 0",
    ),
    "infinite ordered label": (
        {"data": (X, poke(LABELS.float(), math.inf, 2)), "likelihood": Ordinal()},
        "y: has values that are not integers, such as inf",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_any_work(case):
    kwargs, message = CASES[case]
    with pytest.raises(cr.InputError, match=message):
        build(**kwargs)


def test_device_mismatch():
    with pytest.raises(cr.InputError, match="x: is on meta, the network on cpu. Move one of them, or pass device="):
        build(data=(X.to("meta"), Y))


TABLE = pd.DataFrame(X.numpy(), columns=["a", "b", "c"])
FLAGS = [True, False] * 4
TABLES = {
    "bool and float": TABLE.assign(b=FLAGS),
    "bool and integer": TABLE.assign(a=range(8), b=FLAGS, c=range(8)),
    "nullable": TABLE.assign(a=pd.array(range(8), dtype="Int64"), b=pd.array(FLAGS, dtype="boolean")),
    "nullable floats": TABLE.astype("Float64"),
    "dummies": pd.get_dummies(TABLE[["a", "b"]].assign(k=["p"] * 8)),
}


@pytest.mark.parametrize("form", TABLES)
def test_tables_of_numeric_and_boolean_columns_are_arrays(form):
    table = TABLES[form]
    want = np.stack([table[name].to_numpy(dtype=float) for name in table], 1).astype(np.float32)
    made = build(data=(table, pd.Series(Y.numpy()).astype("Float32")))
    assert torch.equal(made.x, torch.from_numpy(want))
    assert torch.equal(made.y[:, 0], Y)


def test_nullable_integers_stay_integers():
    made = build(mlp(3, 4, 3), (X, pd.Series(LABELS.numpy(), dtype="Int64")), Categorical())
    assert torch.equal(made.y, LABELS)
    with pytest.raises(cr.InputError, match=r"network cannot take rows of x \(2,\) int64"):
        build(data=(pd.DataFrame({"a": range(8), "b": range(8)}, dtype="Int64"), Y))


@pytest.mark.parametrize("dtype", ["Int64", "Float64", "boolean"])
def test_missing_values_of_tables_are_refused(dtype):
    column = pd.array([1, None, 0, 1, 1, 1, 0, 1], dtype=dtype)
    for table in (TABLE.assign(b=column), TABLE.assign(a=column, b=FLAGS)):
        with pytest.raises(cr.InputError, match="x: has (missing|1) values.*Drop or impute those rows"):
            build(data=(table, Y))
    with pytest.raises(cr.InputError, match="y: has (missing|1) values"):
        build(data=(X, pd.Series(column)))


@pytest.mark.parametrize("dtype", [">f4", ">f8", "<f4", np.longdouble, np.float16])
def test_arrays_of_dtypes_that_torch_lacks_are_converted(dtype):
    made = build(data=(X.numpy().astype(dtype), Y.numpy().astype(dtype)))
    torch.testing.assert_close(made.x, X, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(made.y[:, 0], Y, rtol=1e-3, atol=1e-3)
    labels = LABELS.numpy().astype(">i4")
    assert torch.equal(build(mlp(3, 4, 3), (X, labels), Categorical()).y, LABELS)


def test_asking_for_a_dtype_converts_everything():
    problem = build(data=(X.double(), Y), dtype=torch.float64)
    assert problem.x.dtype == problem.y.dtype == problem.layout.dtype == torch.float64
    assert build(dtype="float64").layout.dtype == build(dtype="double", device="cpu").layout.dtype == torch.float64


@pytest.mark.parametrize("levels", [0.5, "0.5", None, ["a"], [0.1, None], [], [0.9, 0.1]], ids=str)
def test_bad_levels(levels):
    with pytest.raises(
        cr.InputError, match=r"levels must be increasing numbers between 0 and 1, got .*\(0.5,\) for one"
    ):
        Quantiles(levels)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 4),
    y_rows=st.integers(0, 4),
    columns=st.integers(1, 4),
    targets=st.sampled_from([(), (1,), (2,)]),
    x_dtype=st.sampled_from([np.float32, np.float64, np.int64, np.bool_, object]),
    bad=st.sampled_from([None, math.nan, math.inf]),
)
def test_any_arrays_give_a_problem_or_a_named_error(rows, y_rows, columns, targets, x_dtype, bad):
    """Any arrays give either a finite density or an InputError that names x, y or net."""
    x, y = np.ones((rows, columns)), np.zeros((y_rows, *targets))
    if bad is not None and x.size:
        x.flat[0] = bad
    try:
        with np.errstate(invalid="ignore"):
            x = x.astype(x_dtype) if bad is None or x_dtype in (np.float32, np.float64) else x
        problem, refusal = build(net=mlp(3, 4, 1), data=(x, y)), None
    except cr.InputError as error:
        problem, refusal = None, error
    if refusal is not None:
        assert refusal.argument.split("[")[0] in ("x", "y", "net")
        assert str(refusal).startswith(refusal.argument)
        assert refusal.advice
        return
    assert rows == y_rows >= 1
    assert columns == 3
    assert targets in ((), (1,))
    assert bad is None
    assert bool(torch.isfinite(problem.log_density(torch.zeros(2, problem.dim))).all())


@pytest.mark.parametrize(
    "y", [["a"] * 8, np.array(["a"] * 8), pd.Series(["a"] * 8), pd.Series(["a"] * 8, dtype=object)]
)
def test_targets_of_text_are_refused_by_predictions(y):
    predictive = cr.MAP(steps=2).fit(build()).predict(X)
    for read in (predictive.log_prob, predictive.cdf, lambda y: cr.evaluate(predictive, y)):
        with pytest.raises(cr.InputError, match="y: holds values of dtype .*Encode text"):
            read(y)


def test_targets_of_predictions_may_be_lists():
    predictive = cr.MAP(steps=2).fit(build()).predict(X)
    assert torch.equal(predictive.log_prob(Y.tolist()), predictive.log_prob(Y))
    assert cr.evaluate(predictive, Y.tolist()) == cr.evaluate(predictive, Y)


def test_a_wrong_theta_is_refused():
    problem = build()
    with pytest.raises(cr.InputError, match=r"theta must have shape \(chains, 22\), got \(2, 3\)"):
        problem.log_density(torch.zeros(2, 3))


def test_numbers_for_a_network_of_one_input_are_refused_by_predict():
    column = build(net=mlp(1, 4, 1), data=(X[:, :1], Y))
    message = r"x: has rows of shape \(\), the fit had \(1,\). Pass x.unsqueeze\(1\)"
    for method in (cr.MAP(steps=2, compile=False), cr.MCDropout(steps=2, insert="*", compile=False)):
        posterior = method.fit(column, seed=0)
        with pytest.raises(cr.InputError, match=message):
            posterior.predict(X[:, 0])
        assert posterior.predict(X[:, 0].unsqueeze(1)).mean.shape == (8,)
    # Rows of several inputs are tried on the network.
    with pytest.raises(cr.InputError, match=r"x: the network cannot take rows of x \(\) float32"):
        cr.MAP(steps=2, compile=False).fit(build(), seed=0).predict(X[0])


def test_layers_that_act_on_the_last_axis_take_any_number_of_axes():
    posterior = cr.MAP(steps=2, compile=False).fit(
        build(net=nn.Linear(3, 3), likelihood=Categorical(), data=(X, LABELS))
    )
    expected = posterior.predict(X).mean
    assert torch.allclose(posterior.predict(X.reshape(2, 4, 3)).mean.reshape(8, 3), expected)


def test_predict_takes_sequences_of_other_lengths_than_the_fit():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            return self.layer(x.unsqueeze(-1)).mean(1)

    posterior = cr.MAP(steps=2, compile=False).fit(build(net=Pooled()), seed=0)
    assert posterior.predict(torch.ones(4, 7)).mean.shape == (4,)
