"""The average of a softmax over independent Gaussian noise on its logits, by quadrature.

A softmax is the probability that a logit with Gumbel noise added is the largest (the Gumbel-max trick). With further
noise s_k e_k the K variables stay independent, so the average over all K noises is an integral over one dimension,

    p_k = E_e softmax(f + s e)_k = int F_k'(t) prod_{j != k} F_j(t) dt,

where F_j(t) = E_e exp(-exp(f_j + s_j e - t)) is the distribution function of the j-th noisy logit. Both integrals are
of smooth functions that vanish at either end, for which equally spaced nodes converge exponentially. All classes are
treated alike, so permuting them permutes the probabilities, and without noise the result is the softmax itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The largest noisy logit is within these limits: its Gaussian part within 2.2 standard deviations (more for many
# classes, one of which may be further out), its Gumbel part from -1.8 to 5. Wider ranges need more nodes, narrower ones
# cut off tails.
DEVIATIONS = 2.2
BELOW, ABOVE = 1.8, 5.0
# exp(-exp(50)) is zero in any dtype, and exp(50) not yet infinite.
LARGEST_EXPONENT = 50.0
# Values in memory at a time if no autograd graph needs all of them: as many as fit into the caches, or fill a GPU.
BLOCK_VALUES = {"cpu": 2**20, "cuda": 2**26}


def noisy_log_softmax(logits: Tensor, scale: Tensor, nodes: int) -> Tensor:
    """Return log E_e softmax(logits + scale * e) over the last axis, for independent standard normal e.

    Args:
        logits, scale: (..., K).
        nodes: nodes of both integrals; the work is nodes^2 exponentials per value.
    """
    values = BLOCK_VALUES.get(logits.device.type, BLOCK_VALUES["cpu"])
    rows = max(1, values // (nodes**2 * logits.shape[-1]))
    flat_logits, flat_scale = (t.reshape(-1, t.shape[-1]) for t in (logits, scale))
    if len(flat_logits) <= rows or torch.compiler.is_compiling():
        return _block(logits, scale, nodes)
    blocks = zip(flat_logits.split(rows), flat_scale.split(rows))
    return torch.cat([_block(f, s, nodes) for f, s in blocks]).reshape(logits.shape)


def _block(f: Tensor, s: Tensor, nodes: int) -> Tensor:
    noise, weight = _gaussian_nodes(nodes, f)
    farthest = math.sqrt(DEVIATIONS**2 + 2 * math.log(f.shape[-1]))
    low = (f - DEVIATIONS * s).amax(-1, keepdim=True) - BELOW
    # The largest of several Gumbel variables is further up by the log of their number.
    several = torch.logsumexp(f, -1, keepdim=True) - f.amax(-1, keepdim=True)
    high = (f + farthest * s).amax(-1, keepdim=True) + several + ABOVE
    middle = (torch.arange(nodes, dtype=f.dtype, device=f.device) + 0.5) / nodes
    t = low + (high - low) * middle.reshape(-1, *(1,) * f.ndim)
    # The largest exponent of each class, split so that a class far below t does not underflow.
    top = f - t + s * noise[-1]
    shift = top.clamp(max=0.0)
    exponent = (top - shift).unsqueeze(-1) + s.unsqueeze(-1) * (noise - noise[-1])
    rate = torch.exp(exponent.clamp(max=LARGEST_EXPONENT))
    below = torch.exp(-rate * torch.exp(shift).unsqueeze(-1))
    log_cdf = torch.log(below @ weight)
    log_density = torch.log(((rate * below) @ weight).clamp_min(torch.finfo(f.dtype).tiny)) + shift
    integrand = log_cdf.sum(-1, keepdim=True) - log_cdf + log_density
    return torch.log_softmax(torch.logsumexp(integrand, 0), -1)


def _gaussian_nodes(nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return equally spaced nodes and weights of a standard normal, with mean 0 and variance 1."""
    e = torch.arange(nodes, dtype=like.dtype, device=like.device) - (nodes - 1) / 2
    # The range and the spacing then cause errors of the same order.
    e = e * (2 * math.sqrt(nodes) / max(nodes - 1, 1))
    weight = torch.softmax(-0.5 * e.square(), 0)
    if nodes > 1:
        e = e / (weight * e.square()).sum().sqrt()
    return e, weight
