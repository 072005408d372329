"""The full-batch gradient of ResNet-20-FRN in JAX: micro-batches in a jitted scan, tf32 or bf16 activations.

Parameters arrive as one flat vector with names and shapes (outputs, inputs, height, width). Images are channels-last
here, which is the fast layout for XLA's convolutions on a GPU.
"""

import math

import jax
import jax.numpy as jnp


def unflatten(names, flat):
    """Return arrays by name; filters as (height, width, inputs, outputs), linear weights as (inputs, outputs)."""
    tree, offset = {}, 0
    for name, shape in names:
        value = flat[offset : offset + math.prod(shape)].reshape(shape)
        offset += math.prod(shape)
        if len(shape) == 4:
            value = value.transpose(2, 3, 1, 0)
        elif len(shape) == 2:
            value = value.T
        tree[name] = value
    return tree


def flatten(names, tree):
    """Invert `unflatten`."""
    parts = []
    for name, shape in names:
        value = tree[name]
        if len(shape) == 4:
            value = value.transpose(3, 2, 0, 1)
        elif len(shape) == 2:
            value = value.T
        parts.append(value.reshape(-1))
    return jnp.concatenate(parts)


def unit(tree, name, x, stride):
    """Apply a convolution with same padding, filter response normalisation in float32, and its threshold."""
    weight = tree[f"{name}.conv.weight"].astype(x.dtype)
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, weight, (stride, stride), "SAME", dimension_numbers=layout)
    y = (y + tree[f"{name}.conv.bias"].astype(x.dtype)).astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y**2, (1, 2), keepdims=True) + 1e-6)
    y = y * tree[f"{name}.norm.weight"] + tree[f"{name}.norm.bias"]
    return jnp.maximum(y, tree[f"{name}.norm.tau"]).astype(x.dtype)


def log_likelihood(tree, x, y, dtype):
    """Return the log likelihood summed over images (N, H, W, channels)."""
    h = jax.nn.silu(unit(tree, "stem", x.astype(dtype), 1))
    for block in range(9):
        name = f"blocks.{block}"
        stride = 2 if f"{name}.shortcut.conv.weight" in tree else 1
        inner = unit(tree, f"{name}.second", jax.nn.silu(unit(tree, f"{name}.first", h, stride)), 1)
        h = jax.nn.silu((unit(tree, f"{name}.shortcut", h, stride) if stride == 2 else h) + inner)
    out = h.astype(jnp.float32).mean((1, 2)) @ tree["head.weight"] + tree["head.bias"]
    return jnp.take_along_axis(jax.nn.log_softmax(out), y[:, None], 1).sum()


def prepare(case, arrays):
    """Return the images in micro-batches, the labels, and the parameters."""
    rows = case["micro_batch"]
    x = jnp.asarray(arrays["x"], jnp.float32).transpose(0, 2, 3, 1)
    y = jnp.asarray(arrays["y"], jnp.int32)
    count = len(x) // rows
    if count * rows != len(x):
        raise ValueError(f"{len(x)} images do not divide into micro-batches of {rows}")
    tree = unflatten(case["names"], jnp.asarray(arrays["theta"], jnp.float32)[0])
    return x.reshape(count, rows, *x.shape[1:]), y.reshape(count, rows), tree


def gradient_of(case):
    """Return a jitted function (tree, images, labels) -> gradient."""
    dtype = jnp.bfloat16 if case["precision"] == "bf16" else jnp.float32
    one = jax.grad(lambda tree, x, y: log_likelihood(tree, x, y, dtype))

    @jax.jit
    def whole(tree, x, y):
        def add(total, rows):
            return jax.tree.map(jnp.add, total, one(tree, *rows)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, tree), (x, y))[0]

    return whole


def resnet_gradient(case, arrays):
    """Return a call that computes the gradient over all images."""
    jax.config.update("jax_default_matmul_precision", "tensorfloat32")
    x, y, tree = prepare(case, arrays)
    whole = gradient_of(case)
    return lambda: whole(tree, x, y), {}


def density(case, arrays):
    """Return the gradient at theta, to be checked."""
    x, y, tree = prepare(case, arrays)
    return {"gradient": flatten(case["names"], gradient_of(case)(tree, x, y))}
