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
    with pytest.raises(cr.InputError, match="its items hold 'y' alone"):
        split_item({"y": Y})


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
