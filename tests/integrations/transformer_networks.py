"""Small transformers of Hugging Face and timm, with random weights, and rows for them."""

import pytest
import torch

WORDS, LENGTH, CLASSES = 40, 6, 3


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def bert(**settings):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.BertConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=CLASSES, **sizes, **settings
    )
    return seeded(lambda: transformers.BertForSequenceClassification(config).eval())


def gpt2(**settings):
    transformers = pytest.importorskip("transformers")
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=LENGTH, num_labels=CLASSES, **tokens, **settings
    )
    return seeded(lambda: transformers.GPT2ForSequenceClassification(config).eval())


def distilbert(**settings):
    transformers = pytest.importorskip("transformers")
    sizes = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12}
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=CLASSES, **sizes, **settings
    )
    return seeded(lambda: transformers.DistilBertForSequenceClassification(config).eval())


def vit(**settings):
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    return seeded(lambda: timm.create_model("vit_tiny_patch16_224", **sizes, **settings).eval())


def tokens(rows, seed=0):
    """Token ids and the attention mask of sentences of different lengths, padded at the end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (rows, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def images(rows, seed=0):
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def labels(rows, seed=0):
    return torch.randint(0, CLASSES, (rows,), generator=torch.Generator().manual_seed(seed + 1))
