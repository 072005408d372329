"""BlackJAX's HMC as a partner to be timed: reads cases as JSON lines, answers with seconds. Run by `benchmarks.hmc`.

It lives in an environment of its own (jax, blackjax), apart from torch, so it imports nothing of this project.
"""

import itertools
import json
import sys
import time

import blackjax
import jax
import jax.numpy as jnp
import numpy as np


def build(case):
    """A function that runs some iterations of HMC for all chains and the state to call it with."""
    sizes, rows, chains, steps = case["sizes"], case["rows"], case["chains"], case["steps"]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, sizes[0])), jnp.float32)
    classes = sizes[-1] > 1
    y = (
        jnp.asarray(rng.integers(0, sizes[-1], rows))
        if classes
        else jnp.asarray(rng.normal(size=(rows, 1)), jnp.float32)
    )

    def network(parameters):
        h = x
        for i, (weight, bias) in enumerate(parameters):
            h = h @ weight + bias
            h = jax.nn.silu(h) if i < len(parameters) - 1 else h
        return h

    def log_density(parameters):
        out = network(parameters)
        if classes:  # noqa: SIM108
            fit = jnp.take_along_axis(jax.nn.log_softmax(out), y[:, None], 1).sum()
        else:
            fit = -0.5 * jnp.sum(((out - y) / 0.5) ** 2)
        return fit - 0.5 * sum(jnp.sum(w**2) + jnp.sum(b**2) for w, b in parameters)

    keys = jax.random.split(jax.random.key(0), chains)

    def start(key):
        pairs = zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:])
        return [(0.1 * jax.random.normal(k, (a, b)), jnp.zeros(b)) for k, a, b in pairs]

    positions = jax.vmap(start)(keys)
    dim = sum(a * b + b for a, b in itertools.pairwise(sizes))
    kernel = blackjax.hmc(log_density, case["step_size"], jnp.ones(dim), steps)
    states = jax.vmap(kernel.init)(positions)

    @jax.jit
    def some(key, states):
        def one(states, key):
            states, info = jax.vmap(kernel.step)(jax.random.split(key, chains), states)
            return states, info.acceptance_rate.mean()

        return jax.lax.scan(one, states, jax.random.split(key, case["iterations"]))

    return some, states


def main():
    """Answers {"build": case} with the seconds of the first call, {"run": n} with those of n further calls."""
    print(json.dumps({"jax": jax.__version__, "blackjax": blackjax.__version__}), flush=True)
    some = states = None
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        if "build" in asked:
            some, states = build(asked["build"])
        for i in range(asked.get("run", 1)):
            states, rate = some(jax.random.key(i), states)
        jax.block_until_ready(states)
        print(json.dumps({"seconds": time.perf_counter() - began, "acceptance": float(rate.mean())}), flush=True)


if __name__ == "__main__":
    main()
