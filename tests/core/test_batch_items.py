"""Batches and rows as people have them: pairs, dicts, dataclasses, named tuples, lists of rows, ragged sequences."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import credibly as cr
from conftest import mlp, randn
from credibly.core.batch_items import split_item

X, Y = randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
MASK = torch.ones(6, 2)
Named = namedtuple("Named", ["labels", "a", "b"])


@dataclass
class Item:
    inputs: Tensor
    label: Tensor


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 3)

    def forward(self, x=None, mask=None):
        return self.body(x * mask)


def classes(net, data):
    return cr.Problem(net, data, cr.likelihoods.Categorical(), cr.priors.Normal(1.0))


class Wrapped(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return self.make(i)


ROWS = {
    "pair": lambda i: (X[i], Y[i]),
    "list": lambda i: [X[i], Y[i]],
    "dict": lambda i: {"labels": Y[i], "inputs": X[i]},
    "dataclass": lambda i: Item(X[i], Y[i]),
    "named tuple": lambda i: namedtuple("Row", ["y", "x"])(Y[i], X[i]),
}


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("streamed", [False, True])
def test_every_form_of_a_row_gives_the_same_problem(form, streamed):
    net = mlp(2, 4, 3)
    data = Wrapped(ROWS[form])
    made = classes(net, cr.data.Stream(data) if streamed else data)
    want = classes(net, (X, Y))
    theta = randn(2, want.dim)
    torch.testing.assert_close(made.log_density(theta), want.log_density(theta))


def test_a_list_of_rows_is_a_data_set_and_a_pair_stays_a_pair():
    net = mlp(2, 4, 3)
    rows = [{"inputs": x, "label": y} for x, y in zip(X, Y, strict=True)]
    assert torch.equal(classes(net, rows).x, X)
    assert torch.equal(classes(net, rows[:2]).x, X[:2])
    pairs = classes(net, list(zip(X, Y, strict=True)))
    assert torch.equal(pairs.x, X)
    assert torch.equal(pairs.y, Y)
    assert classes(TwoInputs(), ({"x": X, "mask": MASK}, Y)).n == 6


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_several_inputs_of_a_mapping_are_keyword_arguments(kind):
    loader = DataLoader(range(6), batch_size=3, collate_fn=lambda i: kind(mask=MASK[i], x=X[i], labels=Y[i]))
    made, want = classes(TwoInputs(), loader), classes(TwoInputs(), ({"x": X, "mask": MASK}, Y))
    theta = randn(1, want.dim)
    assert torch.equal(made.log_density(theta), want.log_density(theta))


def test_named_tuples_have_their_target_by_name_and_arguments_in_order():
    x, y = split_item(Named(Y, X, MASK))
    assert y is Y
    assert x == (X, MASK)
    plain = namedtuple("Plain", ["first", "second"])
    assert split_item(plain(X, Y)) == (X, Y)


def test_targets_with_other_names_are_named_by_the_user():
    loader = DataLoader(range(6), batch_size=3, collate_fn=lambda i: {"x": X[i], "species": Y[i]})
    with pytest.raises(cr.InputError, match=r"its items have 'x', 'species'.*target="):
        classes(mlp(2, 4, 3), loader)
    stream = cr.data.Stream(loader, target="species")
    assert torch.equal(classes(mlp(2, 4, 3), cr.data.in_memory(stream)).y, Y)
    with pytest.raises(cr.InputError, match="and no 'kind'"):
        cr.data.Stream(loader, target="kind")
    with pytest.raises(cr.InputError, match="its items hold only 'y'"):
        split_item({"y": Y})


# -- rows of Python lists

TOKENS = [[1, 2, 3, 0], [4, 5, 0, 0], [1, 1, 1, 1], [2, 3, 0, 0], [5, 4, 3, 2], [1, 0, 0, 0]]
LISTS = [
    {"input_ids": ids, "attention_mask": [int(i > 0) for i in ids], "label": int(y)}
    for ids, y in zip(TOKENS, Y, strict=True)
]


class HuggingFace:
    """What credibly uses of a `datasets.Dataset`, which is no torch Dataset and has a shape."""

    shape = (6, 3)

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return LISTS[i]


class Items(Dataset):
    """Pairs whose inputs are a list."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return TOKENS[i], int(Y[i])


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.head((self.embed(input_ids) * mask.unsqueeze(-1)).sum(1))


LIST_FORMS = {
    "list": (LISTS, True),
    "data set": (HuggingFace(), True),
    "loader": (DataLoader(LISTS, batch_size=4), True),
    "pairs": (Items(), False),
    "pairs in a loader": (DataLoader(Items(), batch_size=4), False),
}


@pytest.mark.parametrize("form", LIST_FORMS)
def test_lists_of_numbers_in_rows_are_arrays(form):
    data, masked = LIST_FORMS[form]
    x = {"input_ids": torch.tensor(TOKENS), "attention_mask": (torch.tensor(TOKENS) > 0).long()}
    x = x if masked else x["input_ids"]
    made, want = classes(Pooled(), data), classes(Pooled(), (x, Y))
    theta = randn(2, want.dim)
    assert torch.equal(made.log_density(theta), want.log_density(theta))
    streamed = classes(Pooled(), cr.data.Stream(data))
    torch.testing.assert_close(streamed.log_density(theta), want.log_density(theta))
    posterior = cr.MAP(steps=2).fit(made)
    torch.testing.assert_close(posterior.predict(data).mean, posterior.predict(x).mean)
    assert torch.equal(posterior.predict(data).targets, Y)


def test_predictions_take_rows_without_targets():
    posterior = cr.MAP(steps=2).fit(classes(Pooled(), LISTS))
    rows = [{key: value for key, value in row.items() if key != "label"} for row in LISTS[:2]]
    torch.testing.assert_close(posterior.predict(rows).mean, posterior.predict(LISTS).mean[:2])


def test_lists_of_different_lengths_and_of_text_are_refused():
    with pytest.raises(cr.InputError, match=r"its rows differ in shape.*credibly.data.Pad\(\)"):
        classes(Pooled(), [{"input_ids": s.tolist(), "label": 0} for s in SEQUENCES])
    with pytest.raises(cr.InputError, match=r"x\[0\]: holds values of dtype <U.*Encode text"):
        classes(Pooled(), [{"input_ids": ["a", "b"], "label": 0}] * 3)
    padded = DataLoader([{"input_ids": s.tolist(), "label": 0} for s in SEQUENCES], collate_fn=cr.data.Pad())
    assert cr.data.Stream(padded).n == 4


# -- ragged sequences

SEQUENCES = [torch.arange(1, n + 1) for n in (2, 4, 3, 1)]
TAGS = [s % 3 for s in SEQUENCES]


class Tagger(nn.Module):
    """A class per token; padding contributes nothing to the other tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, attention_mask):
        h = self.embed(x) * attention_mask.unsqueeze(-1)
        return self.head(torch.tanh(self.mix(h.sum(1, keepdim=True)) + h))


def tagger(data, **kwargs):
    net = Tagger().double()
    for i, p in enumerate(net.parameters()):
        p.data = randn(*p.shape, seed=i, dtype=torch.float64)
    return cr.Problem(net, data, cr.likelihoods.Categorical(ignore_index=-100), cr.priors.Normal(1.0), **kwargs)


@pytest.mark.parametrize("length", [None, 6])
def test_padded_sequences_have_the_density_of_each_sequence_by_itself(length):
    loader = DataLoader(list(zip(SEQUENCES, TAGS, strict=True)), batch_size=2, collate_fn=cr.data.Pad(length))
    made = tagger(cr.data.Stream(loader) if length is None else loader)
    theta = made.layout.read(made.layout.module).unsqueeze(0)
    want = made.prior.log_prob(theta)
    for x, y in zip(SEQUENCES, TAGS, strict=True):
        logits = made.layout.module(x.unsqueeze(0), torch.ones(1, len(x)))[0]
        want = want + torch.log_softmax(logits, -1).gather(1, y.unsqueeze(1)).sum()
    torch.testing.assert_close(made.log_density(theta), want)


def test_pad_makes_masks_and_pads_targets():
    batch = cr.data.Pad(value=7)(list(zip(SEQUENCES, TAGS, strict=True)))
    assert batch["x"][3].tolist() == [1, 7, 7, 7]
    assert batch["attention_mask"].sum(1).tolist() == [2, 4, 3, 1]
    assert batch["labels"][0].tolist() == [1, 2, -100, -100]
    named = cr.data.Pad()([{"input_ids": [1, 2, 3], "label": 1}, {"input_ids": [4], "label": 0}])
    assert named["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert named["labels"].tolist() == [1, 0]
    with pytest.raises(cr.InputError, match="length must be at least 4, the longest sequence, got 3"):
        cr.data.Pad(3)(list(zip(SEQUENCES, TAGS, strict=True)))


def test_ragged_rows_and_batches_are_refused_with_the_way_out():
    pairs = Wrapped(lambda i: (SEQUENCES[i % 4], Y[i]))
    with pytest.raises(cr.InputError, match=r"its rows differ in shape.*credibly.data.Pad\(\)"):
        classes(mlp(2, 4, 3), pairs)
    loader = DataLoader(list(zip(SEQUENCES, TAGS, strict=True)), batch_size=2, collate_fn=cr.data.Pad())
    with pytest.raises(cr.InputError, match=r"its rows have shape \(3,\) in one batch and \(4,\) in another"):
        tagger(loader)


def test_predictions_at_batches_padded_to_different_lengths_are_refused():
    loader = DataLoader(list(zip(SEQUENCES, TAGS, strict=True)), batch_size=2, collate_fn=cr.data.Pad())
    predictive = cr.MAP(steps=1).fit(tagger(cr.data.Stream(loader)), seed=0).predict(loader)
    with pytest.raises(cr.InputError, match=r"outputs of shape \(4, 3\) in one batch and \(3, 3\) in another. Pad all"):
        _ = predictive.mean
    with pytest.raises(cr.InputError, match=r"targets of shape \(4,\) in one batch and \(3,\) in another. Pad all"):
        _ = predictive.targets


# -- several inputs per row


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(1, 3)

    def forward(self, x, z):
        return self.first(x) + self.second(z)


Z = randn(6, 1, seed=1)


@pytest.mark.parametrize("batch", [4, 2])
@pytest.mark.parametrize("row", [lambda i: ((X[i], Z[i]), Y[i]), lambda i: ([X[i], Z[i]], Y[i])], ids=["tuple", "list"])
def test_rows_of_several_inputs_and_a_target_are_read_streamed_and_predicted(row, batch):
    """torch's collation makes lists of tuples; a batch of two rows with two inputs is not a list of rows."""
    net, loader = Pairs(), DataLoader(Wrapped(row), batch_size=batch)
    want = classes(net, ((X, Z), Y))
    theta = randn(2, want.dim)
    for data in (loader, cr.data.Stream(loader), Wrapped(row)):
        torch.testing.assert_close(classes(net, data).log_density(theta), want.log_density(theta))
    posterior = cr.MAP(steps=2).fit(want, seed=0, progress=False)
    for data in (loader, Wrapped(row)):
        predictive = posterior.predict(data)
        torch.testing.assert_close(predictive.mean, posterior.predict((X, Z)).mean)
        assert torch.equal(predictive.targets, Y)


def test_a_list_of_inputs_is_refused_with_the_form_to_use():
    with pytest.raises(cr.InputError, match=r"list of arrays of different shapes: \(6, 2\), \(6, 1\). .* a tuple"):
        classes(Pairs(), ([X, Z], Y))
