"""A regression network with SiLU and a learned noise scale, and its log density, on credibly's flat vectors.

A flat vector holds, layer by layer, the weight (outputs, inputs) in row-major order and the bias, and last the log of
the noise scale. The prior is Normal with a location and a standard deviation per coordinate:

    log p(theta | D) = sum_i log N(y_i; f(x_i, w), e^(2 s)) + sum_j log N(theta_j; loc_j, scale_j^2),  theta = (w, s)
"""

import itertools

import jax
import jax.numpy as jnp

# Matrix products in float32 as in float32: on a GPU the default rounds inputs to 10 bits, which is another density.
jax.config.update("jax_default_matmul_precision", "float32")


def outputs(sizes, theta, x):
    """Return the network's outputs (N,) for one flat vector."""
    h, offset, last = x, 0, len(sizes) - 2
    for layer, (a, b) in enumerate(itertools.pairwise(sizes)):
        weight = theta[offset : offset + a * b].reshape(b, a)
        h = h @ weight.T + theta[offset + a * b : offset + a * b + b]
        h = jax.nn.silu(h) if layer < last else h
        offset += a * b + b
    return h[:, 0]


def log_density_of(case, arrays):
    """Return the log density as a function of a flat vector, without the constants."""
    x, y = (jnp.asarray(arrays[name], jnp.float32) for name in ("x", "y"))
    loc, scale = (jnp.asarray(arrays[name], jnp.float32) for name in ("loc", "scale"))
    y = y.reshape(-1)

    def log_density(theta):
        log_noise = theta[-1]
        squares = jnp.sum((outputs(case["sizes"], theta, x) - y) ** 2)
        likelihood = -0.5 * squares * jnp.exp(-2 * log_noise) - len(y) * log_noise
        return likelihood - 0.5 * jnp.sum(((theta - loc) / scale) ** 2)

    return log_density


def predictor(case, arrays):
    """Return a jitted function of draws (C, n, D): predictions at `x_test` (C, n, R) and log noise scales (C, n)."""
    x = jnp.asarray(arrays["x_test"], jnp.float32)

    @jax.jit
    def predict(draws):
        flat = draws.reshape(-1, draws.shape[-1])
        values = jax.vmap(lambda theta: outputs(case["sizes"], theta, x))(flat)
        return values.reshape(*draws.shape[:2], -1), draws[..., -1]

    return predict


def density(case, arrays):
    """Return the log density (C,) and gradient (C, D) at the points theta (C, D)."""
    function = log_density_of(case, arrays)
    theta = jnp.asarray(arrays["theta"], jnp.float32)
    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(function)))(theta)
    return {"log_density": values, "gradient": gradients}
