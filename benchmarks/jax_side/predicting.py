"""NumPyro's Predictive: mean and variance of the network over many draws, one draw at a time."""

import jax
import jax.numpy as jnp
import numpyro
from numpyro.infer import Predictive

from networks import outputs, unflatten


def numpyro_predictive(case, arrays):
    """Return a jitted call that predicts the rows under every draw and reduces over the draws."""
    x = jnp.asarray(arrays["x"], jnp.float32)
    draws = {
        f"{kind}{i}": value
        for i, layer in enumerate(unflatten(case["sizes"], jnp.asarray(arrays["theta"], jnp.float32)))
        for kind, value in zip("wb", layer)
    }

    def model(x):
        tree = []
        for i in range(len(case["sizes"]) - 1):
            a, b = case["sizes"][i : i + 2]
            normal = numpyro.distributions.Normal(0.0, case["prior"])
            weight = numpyro.sample(f"w{i}", normal.expand([a, b]).to_event(2))
            tree.append((weight, numpyro.sample(f"b{i}", normal.expand([b]).to_event(1))))
        numpyro.deterministic("f", outputs(tree, x)[:, 0])

    predictive = Predictive(model, posterior_samples=draws, return_sites=["f"])

    @jax.jit
    def moments(key, x):
        f = predictive(key, x)["f"]
        return f.mean(0), f.var(0)

    def call():
        return moments(jax.random.PRNGKey(0), x)

    mean, variance = call()
    return call, {"mean": [float(v) for v in mean[:5]], "variance": [float(v) for v in variance[:5]]}
