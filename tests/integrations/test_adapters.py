"""LoRA adapters of peft on a bfloat16 GPT-2: only the trainable float32 parameters are random."""

import pytest
import torch

import credibly as cr
from methods.test_methods import QUICK

transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")

pytestmark = pytest.mark.filterwarnings("ignore")
X = {
    "input_ids": torch.randint(1, 50, (12, 6), generator=torch.Generator().manual_seed(0)),
    "attention_mask": torch.ones(12, 6, dtype=torch.int64),
}
Y = torch.arange(12) % 2
SHORT = {"steps": 4, "every": 1, "iterates": 3, "draws": 2, "warmup": 20}


def adapted(dropout=0.0, task="FEATURE_EXTRACTION"):
    torch.manual_seed(0)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, num_labels=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **rates,
    )  # fmt: skip
    base = transformers.GPT2ForSequenceClassification(config).bfloat16()
    if dropout:
        for block in base.transformer.h:
            # Applied functionally, and in training mode alone.
            block.attn.attn_dropout = torch.nn.Identity()
    lora = peft.LoraConfig(task_type=task, r=2, target_modules=["c_attn"])
    return peft.get_peft_model(base, lora)


def problem(net):
    return cr.Problem(net, (X, Y), cr.likelihoods.Categorical(), cr.priors.Normal())


def test_the_adapter_alone_is_random():
    found = problem(adapted())
    assert found.dim == 2 * 2 * (16 + 48)
    assert all("lora_" in entry.name for entry in found.layout.entries)
    assert found.layout.dtype == torch.float32


def test_a_classification_head_is_random_too():
    # peft trains `score` next to the adapter, in the dtype of the base.
    found = problem(adapted(task="SEQ_CLS"))
    assert found.dim == 2 * 2 * (16 + 48) + 2 * 16
    assert {entry.dtype for entry in found.layout.entries} == {torch.float32, torch.bfloat16}
    assert found.layout.dtype == torch.float32


@pytest.mark.parametrize("method", [cr.MAP(steps=3), cr.Laplace(steps=3)])
def test_a_head_in_float32_needs_no_autocast(method):
    net = adapted(task="SEQ_CLS")
    net.base_model.model.score.float()
    posterior = method.fit(problem(net), seed=0, progress=False)
    assert posterior.predict(X).mean.dtype == torch.float32
    with torch.no_grad():
        assert posterior.module()(**X).logits.dtype == torch.float32


# The table of networks, too, fits an adapter by every method.
SLOW = ("swag", "nuts", "chees", "mclmc", "tempering", "mile")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly if n in SLOW else ()) for n in cr.METHODS])
def test_every_method_fits_the_adapter(name):
    settings = {key: SHORT.get(key, value) for key, value in QUICK[name].items()}
    own = {
        "dropout": {"insert": None, "rate": 0.1},
        "hmc": {"trajectory_length": 0.02, "max_steps": 3},
        "nuts": {"max_depth": 2},
        "chees": {"max_steps": 2},
        "mclmc": {"warmup": 40, "max_steps": 2},
        "tempering": {"trajectory_length": 0.02, "max_steps": 3},
        "mile": {"warmup": 40, "max_steps": 2, "start_steps": 4},
    }
    settings |= own.get(name, {})
    posterior = cr.METHODS[name](**settings).fit(problem(adapted(0.1 if name == "dropout" else 0.0)), seed=0)
    assert bool(torch.isfinite(posterior.predict(X).log_prob(Y)).all())
