"""Multilayer perceptrons with SiLU, their log density, and conversion between credibly's flat vectors and pytrees.

A flat vector holds, layer by layer, the weight (outputs, inputs) in row-major order and the bias. Trees hold the weight
as (inputs, outputs), as is usual in JAX.
"""

import itertools

import jax
import jax.numpy as jnp


def unflatten(sizes, flat):
    """Convert a flat vector (..., D) to [(weight, bias), ...]."""
    tree, offset, lead = [], 0, flat.shape[:-1]
    for a, b in itertools.pairwise(sizes):
        weight = flat[..., offset : offset + a * b].reshape(*lead, b, a).swapaxes(-1, -2)
        tree.append((weight, flat[..., offset + a * b : offset + a * b + b]))
        offset += a * b + b
    return tree


def flatten(tree):
    """Invert `unflatten`."""
    parts = []
    for weight, bias in tree:
        parts += [weight.swapaxes(-1, -2).reshape(*bias.shape[:-1], -1), bias]
    return jnp.concatenate(parts, -1)


def outputs(tree, x):
    """Return the network's outputs."""
    h = x
    for i, (weight, bias) in enumerate(tree):
        h = h @ weight + bias
        h = jax.nn.silu(h) if i < len(tree) - 1 else h
    return h


def log_prior(case, tree):
    """Return the normal log prior without its constant."""
    return -0.5 / case["prior"] ** 2 * sum(jnp.sum(w**2) + jnp.sum(b**2) for w, b in tree)


def log_likelihood(case, tree, x, y):
    """Return the sum over rows: Gaussian with the case's noise (without constant), or categorical without noise."""
    out = outputs(tree, x)
    if case.get("noise") is None:
        return jnp.take_along_axis(jax.nn.log_softmax(out), y[:, None], 1).sum()
    return -0.5 * jnp.sum(((out - y) / case["noise"]) ** 2)


def data_of(case, arrays):
    """Return x and y of the case on the device."""
    dtype = jnp.int32 if case.get("noise") is None else jnp.float32
    return jnp.asarray(arrays["x"], jnp.float32), jnp.asarray(arrays["y"], dtype)


def log_density_of(case, arrays):
    """Return the log density as a function of a tree."""
    x, y = data_of(case, arrays)
    return lambda tree: log_likelihood(case, tree, x, y) + log_prior(case, tree)


def density(case, arrays):
    """Return the log density (C,) and gradient (C, D) at the points theta (C, D)."""
    function = log_density_of(case, arrays)
    trees = unflatten(case["sizes"], jnp.asarray(arrays["theta"], jnp.float32))
    values, gradients = jax.vmap(jax.value_and_grad(function))(trees)
    return {"log_density": values, "gradient": flatten(gradients)}
