"""NUTS by BlackJAX and NumPyro on the posteriors of posteriordb, in float64.

The densities are the functions of `benchmarks/posteriordb/models`, which need numpy alone: here their arrays are JAX's,
there torch's. Chains run under `vmap`; what is counted are each chain's own steps.
"""

import sys
from pathlib import Path

import blackjax
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.posteriordb.models import POSTERIORS  # noqa: E402


class JaxArrays:
    """The functions of arrays that the models use; those not defined here have the same name in jax.numpy."""

    def __getattr__(self, name):
        """Return the function of jax.numpy."""
        return getattr(jnp, name)

    def array(self, value):
        return jnp.asarray(np.asarray(value), jnp.float64)

    def log_sum_exp(self, value, axis):
        return jax.nn.logsumexp(value, axis)

    def log_sigmoid(self, value):
        return jax.nn.log_sigmoid(value)

    def cholesky(self, value):
        return jnp.linalg.cholesky(value)

    def solve_lower(self, factor, vector):
        return jax.scipy.linalg.solve_triangular(factor, vector, lower=True)

    def scan(self, step, state, inputs):
        def one(state, value):
            state = step(state, value)
            return state, state

        return jax.lax.scan(one, state, jnp.asarray(inputs))[1]


def _model(case, arrays):
    data = {k.removeprefix("data_"): v for k, v in arrays.items() if k.startswith("data_")}
    return POSTERIORS[case["posterior"]](JaxArrays(), data)


def density(case, arrays):
    """Return log density and gradient at the points theta."""
    value, gradient = jax.vmap(jax.value_and_grad(_model(case, arrays).log_prob))(jnp.asarray(arrays["theta"]))
    return {"log_density": value, "gradient": gradient}


def posterior_nuts(case, arrays):
    """Run NUTS of the library named in the case, with its own warm-up, from the points theta; keep every thin-th draw.

    Returns the parameters (chain, draw, P), steps (chain, draw) between draws, and divergences (chain, draw).
    """
    model = _model(case, arrays)
    chain = {"blackjax": _blackjax, "numpyro": _numpyro}[case["library"]](model.log_prob, case)
    theta = jnp.asarray(arrays["theta"])
    keys = jax.random.split(jax.random.key(case["seed"]), len(theta))
    if case["library"] == "numpyro":
        keys = jax.random.split(jax.random.PRNGKey(case["seed"]), len(theta))
    draws, steps, divergent, warmup = jax.jit(jax.vmap(chain))(keys, theta)
    found = {"draws": model.constrain(draws), "steps": steps, "divergent": divergent, "warmup_steps": warmup}
    return found, {}


def _thinned(one, state, keys, thin):
    """Scan over keys (draw, thin); return the positions of every thin-th state, and sums of steps and divergences."""

    def several(state, some):
        state, (position, steps, divergent) = jax.lax.scan(one, state, some)
        return state, (position[-1], steps.sum(), divergent.sum())

    return jax.lax.scan(several, state, keys)[1]


def _blackjax(log_prob, case):
    def chain(key, position):
        first, second = jax.random.split(key)
        warmup = blackjax.window_adaptation(blackjax.nuts, log_prob, target_acceptance_rate=case["target_accept"])
        (state, parameters), info = warmup.run(first, position, num_steps=case["warmup"])
        kernel = blackjax.nuts(log_prob, **parameters)

        def one(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.num_integration_steps, info.is_divergent)

        keys = jax.random.split(second, (case["draws"], case["thin"]))
        return *_thinned(one, state, keys, case["thin"]), info.info.num_integration_steps.sum()

    return chain


def _numpyro(log_prob, case):
    from numpyro.infer import NUTS

    def chain(key, position):
        kernel = NUTS(potential_fn=lambda w: -log_prob(w), target_accept_prob=case["target_accept"])
        state = kernel.init(key, case["warmup"], position, (), {})

        def one(state, _):
            state = kernel.sample(state, (), {})
            return state, (state.z, state.num_steps, state.diverging)

        state, (_, before, _) = jax.lax.scan(one, state, None, length=case["warmup"])
        return *_thinned(one, state, jnp.zeros((case["draws"], case["thin"])), case["thin"]), before.sum()

    return chain
