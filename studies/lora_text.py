"""Reviews as token ids, a small GPT-2 trained on them as a language model, and LoRA adapters of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from credibly.core.rng import global_stream, stream
from credibly.errors import InputError
from studies.study import Options

FILE = "imdb_100.npz"
LENGTH, PADDING, START, UNKNOWN, FIRST_WORD = 100, 0, 1, 2, 4
FAR = {"shuffled": "shuffled words", "random": "random words"}
RANK, ALPHA, LORA_DROPOUT = 8, 16, 0.1

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """Sizes of the language model, its training, and the labelled sets.

    Attributes:
        words: token ids kept; rarer words become unknown.
        width, layers, heads: of the transformer.
        texts, epochs: of the language model's training, which uses no labels.
        rows: labelled reviews; a fifth of them is for validation.
        test: test reviews.
        far: out-of-distribution texts of each kind.
    """

    words: int = 8_000
    width: int = 128
    layers: int = 3
    heads: int = 4
    texts: int = 25_000
    epochs: int = 15
    rows: int = 640
    test: int = 2_500
    far: int = 1_000


QUICK = Size(300, 16, 2, 2, 200, 2, 40, 60, 30)


@dataclass(frozen=True)
class Reviews:
    """The reviews of one seed: rows to train on, to choose settings by, to test on, and out-of-distribution texts."""

    train: tuple[Batch, Tensor]
    validation: tuple[Batch, Tensor]
    test: tuple[Batch, Tensor]
    far: dict[str, Batch]


def libraries() -> tuple[Any, Any]:
    """Import transformers and peft. Raise with the command that installs them."""
    try:
        import peft
        import transformers
    except ImportError as error:
        advice = "Install them: pip install transformers peft"
        raise InputError("lora-calibration", f"needs transformers and peft ({error})", advice) from error
    # transformers warns that attention masks are missing, see `batch_of`.
    quiet: Any = transformers.logging.set_verbosity_error
    quiet()
    return transformers, peft


def batch_of(ids: Tensor) -> Batch:
    """Return a batch of token ids.

    Without an attention mask: attention is causal, padding is at the end, and the classifier reads the last word.
    """
    return {"input_ids": ids}


def texts(options: Options, part: str, words: int) -> tuple[Tensor, Tensor]:
    """Return token ids (N, 100), padded at the end, and labels of the training or the test part of the file."""
    with np.load(options.file(FILE), allow_pickle=False) as archive:
        ids = torch.from_numpy(archive[f"x_{part}"].astype(np.int64))
        labels = torch.from_numpy(archive[f"y_{part}"].astype(np.int64))
    ids[ids >= words] = UNKNOWN
    order = (ids == PADDING).long().argsort(dim=1, stable=True)
    return ids.gather(1, order), labels


def reviews(options: Options, size: Size, seed: int) -> Reviews:
    """Return the rows that a seed selects. Labelled rows come from the training part, test rows from the test part."""
    x, y = texts(options, "train", size.words)
    x_test, y_test = texts(options, "test", size.words)
    chosen = torch.randperm(len(x), generator=stream(seed, "labelled reviews"))[: size.rows]
    held_out = size.rows // 5
    train, validation = chosen[held_out:], chosen[:held_out]
    order = torch.randperm(len(x_test), generator=stream(seed, "test reviews"))
    test, others = x_test[order[: size.test]], x_test[order[size.test : size.test + size.far]]
    far = {"shuffled": shuffled(others, seed), "random": random_words(others, x, seed)}
    return Reviews(
        (batch_of(x[train]), y[train]),
        (batch_of(x[validation]), y[validation]),
        (batch_of(test), y_test[order[: size.test]]),
        {name: batch_of(ids) for name, ids in far.items()},
    )


def shuffled(ids: Tensor, seed: int) -> Tensor:
    """Return the words of every text in random order; padding stays at the end."""
    noise = torch.rand(ids.shape, generator=stream(seed, "shuffled words"))
    return ids.gather(1, (noise + 2.0 * (ids == PADDING)).argsort(1))


def random_words(ids: Tensor, corpus: Tensor, seed: int) -> Tensor:
    """Return texts of the same lengths whose words are drawn independently, by their frequency in the corpus."""
    counts = torch.bincount(corpus.flatten()).double()
    counts[PADDING] = 0
    drawn = torch.multinomial(counts, ids.numel(), replacement=True, generator=stream(seed, "random words"))
    return torch.where(ids == PADDING, ids, drawn.reshape(ids.shape))


def config_of(size: Size, **settings: Any) -> Any:
    """Return the configuration of the transformer."""
    transformers, _ = libraries()
    tokens = {"pad_token_id": PADDING, "bos_token_id": START, "eos_token_id": START}
    shape = {"n_embd": size.width, "n_layer": size.layers, "n_head": size.heads, "n_positions": LENGTH}
    return transformers.GPT2Config(vocab_size=size.words, use_cache=False, **tokens, **shape, **settings)


def pretrained(options: Options, size: Size, path: Path | None = None) -> dict[str, Tensor]:
    """Return the weights of the transformer trained to predict the next word. They are kept in `path` if given."""
    if path is not None and path.is_file():
        return load_file(path)
    transformers, _ = libraries()
    with global_stream(options.seed, "language model"):
        model = transformers.GPT2LMHeadModel(config_of(size)).to(options.device)
        ids = texts(options, "train", size.words)[0][: size.texts].to(options.device)
        batch = min(128, len(ids))
        steps = size.epochs * (len(ids) // batch)
        optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda t: rate(t, steps))
        model.train()
        generator = stream(options.seed, "language model batches")
        for step in range(steps):
            position = step % (len(ids) // batch)
            if position == 0:
                order = torch.randperm(len(ids), generator=generator).to(ids.device)
            rows = ids[order[position * batch : (position + 1) * batch]]
            loss = next_word_loss(model, rows)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            if step % 100 == 0:
                options.report(f"language model, {step:,} of {steps:,} steps", 0, 1)
    state = {name: value.detach().cpu().contiguous().clone() for name, value in model.transformer.state_dict().items()}
    if path is not None:
        save_file(state, path)
    return state


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a rise over a twentieth of the steps, then a cosine."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def next_word_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the mean negative log probability of the words after the first."""
    logits = model(**batch_of(ids)).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PADDING)


def with_adapter(state: dict[str, Tensor], size: Size, seed: int) -> nn.Module:
    """Return a classifier of reviews with a new LoRA adapter on the attention layers, and a new head."""
    transformers, peft = libraries()
    with global_stream(seed, "adapter"):
        model = transformers.GPT2ForSequenceClassification(config_of(size, num_labels=2))
        model.transformer.load_state_dict(state)
        lora = peft.LoraConfig(
            task_type="SEQ_CLS",
            r=RANK,
            lora_alpha=ALPHA,
            lora_dropout=LORA_DROPOUT,
            target_modules=["c_attn"],
            fan_in_fan_out=True,
        )
        net: nn.Module = peft.get_peft_model(model, lora)
    return net
