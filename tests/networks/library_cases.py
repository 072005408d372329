"""Networks of other libraries for the module table, built from small configurations.

The libraries are imported when a network is built: the table can be written without them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.networks.module_cases import ROWS, case, classification, images, noise, regression, tokens
from tests.networks.plain_cases import NO_LINEAR


def library(name: str) -> Any:
    """Return a library; skip the test without it."""
    return pytest.importorskip(name)


# -- images ------------------------------------------------------------------------------------------------------------
@case("torchvision ResNet (BatchNorm)", refused="batch statistics")
def _():
    return classification(library("torchvision").models.resnet18(num_classes=3), images(3, 32))


@case("torchvision ResNet in evaluation mode, frozen body", options={"random": "fc.*"})
def _():
    models = library("torchvision").models.resnet
    return classification(models.ResNet(models.BasicBlock, [1, 1, 1, 1], num_classes=3).eval(), images(3, 16))


@case("timm ViT", settings={"dropout": {"insert": "blocks.*.mlp.*"}})
def _():
    vit = library("timm").models.vision_transformer.VisionTransformer
    net = vit(img_size=8, patch_size=4, in_chans=2, num_classes=3, embed_dim=8, depth=1, num_heads=2)
    return classification(net, images(2, 8))


@case(
    "timm ViT with gradient checkpointing",
    settings={"dropout": {"insert": "blocks.*.mlp.*"}},
)
def _():
    vit = library("timm").models.vision_transformer.VisionTransformer
    net = vit(img_size=8, patch_size=4, in_chans=2, num_classes=3, embed_dim=8, depth=1, num_heads=2)
    net.set_grad_checkpointing(True)
    return classification(net, images(2, 8))


@case("timm EfficientNet, frozen body", options={"random": "classifier.*"})
def _():
    """Its BatchNorm layers apply an activation, too."""
    net = library("timm").create_model("test_efficientnet", pretrained=False, num_classes=3)
    return classification(net.eval(), images(3, 16))


# -- text --------------------------------------------------------------------------------------------------------------
def text(vocabulary: int = 11) -> dict[str, Tensor]:
    return {"input_ids": tokens(5, vocabulary), "attention_mask": torch.ones(ROWS, 5, dtype=torch.long)}


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@case("BERT (transformers)", settings={"dropout": {"insert": None}})
def _():
    transformers = library("transformers")
    config = transformers.BertConfig(vocab_size=11, num_labels=3, max_position_embeddings=8, **SMALL)
    return classification(transformers.BertForSequenceClassification(config), text())


@case("DistilBERT (transformers)", settings={"dropout": {"insert": None}})
def _():
    transformers = library("transformers")
    config = transformers.DistilBertConfig(
        vocab_size=11, num_labels=3, max_position_embeddings=8, dim=8, n_layers=1, n_heads=2, hidden_dim=8
    )
    return classification(transformers.DistilBertForSequenceClassification(config), text())


@case("RoBERTa (transformers)", settings={"dropout": {"insert": None}})
def _():
    """Its head calls one dropout layer twice."""
    transformers = library("transformers")
    config = transformers.RobertaConfig(vocab_size=11, num_labels=3, max_position_embeddings=8, pad_token_id=0, **SMALL)
    return classification(transformers.RobertaForSequenceClassification(config), text())


@case("GPT-2 with LoRA (peft)", settings={"dropout": {"insert": None}})
def _():
    transformers = library("transformers")
    config = transformers.GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        num_labels=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    lora = library("peft").LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True
    )
    net = library("peft").get_peft_model(transformers.GPT2ForSequenceClassification(config), lora)
    return classification(net, text())


# -- graphs and trainers -----------------------------------------------------------------------------------------------
@case("Graph network (torch-geometric), one graph per row", exceptions=NO_LINEAR)
def _():
    dense = library("torch_geometric").nn.DenseGCNConv

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = dense(2, 4), dense(4, 1)

        def forward(self, nodes, adjacency):
            return self.second(self.first(nodes, adjacency).relu(), adjacency).mean(1)

    return regression(GCN(), (noise(ROWS, 5, 2), (noise(ROWS, 5, 5, seed=3) > 0).float()))


@case("LightningModule")
def _():
    class Lightning(library("lightning").LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x):
            return self.net(x)

    return regression(Lightning())
