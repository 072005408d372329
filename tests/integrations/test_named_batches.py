"""Batches of transformers: `BatchEncoding` and data collators, streamed and in memory."""

import pytest
import torch
from torch.utils.data import DataLoader

import credibly as cr

transformers = pytest.importorskip("transformers")

LENGTHS = (3, 5, 4, 2, 5, 3)
ROWS = [
    {"input_ids": torch.arange(1, n + 1), "labels": torch.arange(n) % 3, "token_type_ids": torch.zeros(n).long()}
    for n in LENGTHS
]


def network():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForTokenClassification(config).double().eval()


def encoded(rows):
    """What a tokenizer's padding and a collator for tokens return."""
    return transformers.BatchEncoding(cr.data.Pad()(rows))


def test_token_classification_streams_padded_batches():
    """The density of batches padded to their own lengths is that of each sentence by itself."""
    loader = DataLoader(ROWS, batch_size=2, collate_fn=encoded)
    net = network()
    likelihood = cr.likelihoods.Categorical(ignore_index=-100)
    made = cr.Problem(net, cr.data.Stream(loader), likelihood, cr.priors.Normal(1.0), random="classifier.*")
    theta = made.layout.read(made.layout.module).unsqueeze(0)
    want = made.prior.log_prob(theta)
    with torch.no_grad():
        for row in ROWS:
            logits = net(row["input_ids"].unsqueeze(0)).logits[0]
            want = want + torch.log_softmax(logits, -1).gather(1, row["labels"].unsqueeze(1)).sum()
    torch.testing.assert_close(made.log_density(theta), want)
    posterior = cr.MAP(epochs=2).fit(made)
    assert torch.isfinite(posterior.draws).all()


def test_default_collator_gives_the_problem_of_the_tensors():
    rows = [{"input_ids": [1 + i, 2, 3], "label": i % 3} for i in range(6)]
    loader = DataLoader(rows, batch_size=3, collate_fn=transformers.default_data_collator)

    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 3)

        def forward(self, input_ids):
            return self.head(self.embed(input_ids).mean(1))

    made = cr.Problem(Pooled(), loader, cr.likelihoods.Categorical(), cr.priors.Normal(1.0))
    assert made.x.tolist() == [row["input_ids"] for row in rows]
    assert made.y.tolist() == [row["label"] for row in rows]
