"""Steps of samplers, many in one jitted scan: HMC by BlackJAX, NumPyro and by hand, SGLD and SGHMC by BlackJAX.

Every function returns a call that continues from the state of the last one, and a dict to report. Several chains run
under `vmap`.
"""

import jax
import jax.numpy as jnp

from networks import data_of, log_density_of, log_likelihood, log_prior, unflatten


def starts(case, arrays):
    """Return the initial trees, and whether they have a chain axis."""
    theta = jnp.asarray(arrays["theta"], jnp.float32)
    many = len(theta) > 1
    return unflatten(case["sizes"], theta if many else theta[0]), many


def resumable(iterate, states):
    """Return a call that keeps the states between calls and uses a new key each time."""
    carry = {"states": states, "calls": 0}

    def call():
        carry["states"], info = iterate(jax.random.key(carry["calls"]), carry["states"])
        carry["calls"] += 1
        return carry["states"], info

    return call


def blackjax_hmc(case, arrays):
    """Build BlackJAX's HMC with a fixed step size and number of steps."""
    import blackjax

    chains = len(arrays["theta"])
    positions, many = starts(case, arrays)
    kernel = blackjax.hmc(
        log_density_of(case, arrays), case["step_size"], jnp.ones(arrays["theta"].shape[1]), case["steps"]
    )
    states = jax.vmap(kernel.init)(positions) if many else kernel.init(positions)

    @jax.jit
    def iterate(key, states):
        def one(states, key):
            if many:
                states, info = jax.vmap(kernel.step)(jax.random.split(key, chains), states)
            else:
                states, info = kernel.step(key, states)
            return states, info.acceptance_rate.mean()

        return jax.lax.scan(one, states, jax.random.split(key, case["iterations"]))

    return resumable(iterate, states), {}


def jax_hmc(case, arrays):
    """Build a hand-written HMC: a scan over iterations of a scan over leapfrog steps, chains under `vmap`."""
    positions, many = starts(case, arrays)
    function, size = log_density_of(case, arrays), case["step_size"]
    value_and_gradient = jax.value_and_grad(function)

    def one_chain(state, key):
        position, value, gradient = state
        first, second = jax.random.split(key)
        leaves, tree = jax.tree.flatten(position)
        keys = jax.random.split(first, len(leaves))
        momentum = tree.unflatten([jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves)])

        def kinetic(m):
            return 0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(m))

        def step(carry, _):
            q, m, _, g = carry
            m = jax.tree.map(lambda a, b: a + 0.5 * size * b, m, g)
            q = jax.tree.map(lambda a, b: a + size * b, q, m)
            v, g = value_and_gradient(q)
            return (q, jax.tree.map(lambda a, b: a + 0.5 * size * b, m, g), v, g), None

        (q, m, v, g), _ = jax.lax.scan(step, (position, momentum, value, gradient), None, length=case["steps"])
        acceptance = jnp.minimum(1.0, jnp.exp(v - value - kinetic(m) + kinetic(momentum)))
        accept = jax.random.uniform(second) < acceptance
        return jax.tree.map(lambda a, b: jnp.where(accept, a, b), (q, v, g), state), acceptance

    def init(position):
        return position, *value_and_gradient(position)

    @jax.jit
    def iterate(key, states):
        def one(states, key):
            if many:
                states, acceptance = jax.vmap(one_chain)(states, jax.random.split(key, len(arrays["theta"])))
            else:
                states, acceptance = one_chain(states, key)
            return states, acceptance.mean()

        return jax.lax.scan(one, states, jax.random.split(key, case["iterations"]))

    return resumable(iterate, jax.vmap(init)(positions) if many else init(positions)), {}


def numpyro_hmc(case, arrays):
    """Build NumPyro's HMC kernel with the same settings, without adaptation."""
    from numpyro.infer import HMC

    chains = len(arrays["theta"])
    positions, many = starts(case, arrays)
    function = log_density_of(case, arrays)
    kernel = HMC(
        potential_fn=lambda tree: -function(tree),
        step_size=case["step_size"],
        num_steps=case["steps"],
        trajectory_length=None,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        dense_mass=False,
    )
    keys = jax.random.PRNGKey(0)
    states = kernel.init(jax.random.split(keys, chains) if many else keys, 0, positions, (), {})

    @jax.jit
    def iterate(key, states):
        def one(states, _):
            states = kernel.sample(states, (), {})
            return states, states.accept_prob.mean()

        return jax.lax.scan(one, states, None, length=case["iterations"])

    return resumable(iterate, states), {}


def _minibatches(case, arrays):
    """Return a function from a key to a random minibatch, and one that estimates the log density's gradient from it."""
    x, y = data_of(case, arrays)
    n, batch = len(x), case["batch"]

    def draw(key):
        rows = jax.random.randint(key, (batch,), 0, n)
        return x[rows], y[rows]

    def estimate(tree, minibatch):
        def value(tree):
            return n / batch * log_likelihood(case, tree, *minibatch) + log_prior(case, tree)

        return jax.grad(value)(tree)

    return draw, estimate


def _stochastic(case, arrays, move):
    """Build a scan of `move(key, tree, minibatch)` over vectorised chains, each with its own minibatches."""
    chains = len(arrays["theta"])
    positions, many = starts(case, arrays)
    draw, _ = _minibatches(case, arrays)

    def one_chain(key, tree):
        for_rows, for_noise = jax.random.split(key)
        return move(for_noise, tree, draw(for_rows))

    @jax.jit
    def iterate(key, states):
        def one(states, key):
            if many:
                return jax.vmap(one_chain)(jax.random.split(key, chains), states), None
            return one_chain(key, states), None

        return jax.lax.scan(one, states, jax.random.split(key, case["iterations"]))

    return resumable(iterate, positions), {}


def blackjax_sgld(case, arrays):
    """Build BlackJAX's SGLD."""
    import blackjax

    algorithm = blackjax.sgld(_minibatches(case, arrays)[1])
    return _stochastic(case, arrays, lambda key, tree, rows: algorithm.step(key, tree, rows, case["step_size"]))


def blackjax_sghmc(case, arrays):
    """Build BlackJAX's SGHMC: `inner` steps per minibatch after resampling the momentum."""
    import blackjax

    algorithm = blackjax.sghmc(_minibatches(case, arrays)[1], case["inner"])
    return _stochastic(case, arrays, lambda key, tree, rows: algorithm.step(key, tree, rows, case["step_size"]))
