"""Fan-in of parameters: the number of inputs that each unit sums over."""

from __future__ import annotations

import math

from torch import nn


def fan_in(module: nn.Module) -> dict[str, int]:
    """Return the number of inputs that each unit sums over, by parameter name; 1 for biases, gains and embeddings."""
    fans = {}
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            # peft looks up the columns of `lora_embedding_A`, like an embedding.
            looked_up = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or prefix.endswith("lora_embedding_A")
            if parameter.ndim < 2 or looked_up:
                fans[full] = 1
            elif is_transposed_linear(part):
                fans[full] = parameter.shape[0]
            elif isinstance(part, nn.modules.conv._ConvTransposeNd):
                fans[full] = math.prod((parameter.shape[0], *parameter.shape[2:])) // part.groups
            else:
                fans[full] = math.prod(parameter.shape[1:])
    return fans


def is_transposed_linear(part: nn.Module) -> bool:
    """Return whether a layer is `Conv1D` of transformers (GPT-2): linear, with a weight of shape (in, out)."""
    return any(kind.__name__ == "Conv1D" for kind in type(part).__mro__) and hasattr(part, "nf")
