"""Whole runs from warm-up to the last draw: NUTS by BlackJAX and NumPyro, MCLMC by BlackJAX.

Compilation happens ahead of time and is timed separately. NUTS chains run on one device each, so that none waits for
the trees of another; MCLMC chains, whose steps all cost the same, run under `vmap`. Draws are returned as credibly's
flat vectors (chain, draw, D).
"""

import time

import blackjax
import jax
import jax.numpy as jnp

from networks import flatten, log_density_of, unflatten

COMPILED = {}  # compiled runs and their compile seconds, by kind and lengths; a process has one data set


def _timed(kind, case, make, arguments, *, parallel):
    """Compile `make` over the chains unless cached and run it; return the results and both durations."""
    key = (kind, case["warmup"], case["draws"], case.get("thin"))
    if key not in COMPILED:
        start = time.perf_counter()
        compiled = (jax.pmap(make) if parallel else jax.jit(jax.vmap(make))).lower(*arguments).compile()
        COMPILED[key] = compiled, time.perf_counter() - start
    compiled, compile_seconds = COMPILED[key]
    start = time.perf_counter()
    results = jax.block_until_ready(compiled(*arguments))
    return results, {"compile": compile_seconds, "seconds": time.perf_counter() - start}


def _arguments(case, arrays, make_key):
    theta = jnp.asarray(arrays["theta"], jnp.float32)
    keys = jax.random.split(make_key(case["seed"]), len(theta))
    return keys, unflatten(case["sizes"], theta)


def _parallel(arrays):
    return jax.local_device_count() >= len(arrays["theta"])


def blackjax_nuts(case, arrays):
    """Run window adaptation of step size and diagonal mass, then NUTS."""
    function = log_density_of(case, arrays)

    def chain(key, position):
        first, second = jax.random.split(key)
        warmup = blackjax.window_adaptation(blackjax.nuts, function, max_num_doublings=case["depth"])
        (state, parameters), _ = warmup.run(first, position, num_steps=case["warmup"])
        kernel = blackjax.nuts(function, **{"max_num_doublings": case["depth"], **parameters})

        def one(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.num_integration_steps)

        return jax.lax.scan(one, state, jax.random.split(second, case["draws"]))[1]

    (draws, steps), info = _timed(
        "blackjax_nuts", case, chain, _arguments(case, arrays, jax.random.key), parallel=_parallel(arrays)
    )
    return {"draws": flatten(draws)}, {**info, "steps": float(steps.mean())}


def numpyro_nuts(case, arrays):
    """Run NumPyro's NUTS kernel with its own warm-up."""
    from numpyro.infer import NUTS

    function = log_density_of(case, arrays)

    def chain(key, position):
        kernel = NUTS(potential_fn=lambda tree: -function(tree), max_tree_depth=case["depth"])
        state = kernel.init(key, case["warmup"], position, (), {})

        def one(state, _):
            state = kernel.sample(state, (), {})
            return state, (state.z, state.num_steps)

        state, _ = jax.lax.scan(lambda s, _: (kernel.sample(s, (), {}), None), state, None, length=case["warmup"])
        return jax.lax.scan(one, state, None, length=case["draws"])[1]

    (draws, steps), info = _timed(
        "numpyro_nuts", case, chain, _arguments(case, arrays, jax.random.PRNGKey), parallel=_parallel(arrays)
    )
    return {"draws": flatten(draws)}, {**info, "steps": float(steps.mean())}


def blackjax_mclmc(case, arrays):
    """Run unadjusted microcanonical Langevin: tune length and step size, then keep every `thin`-th step."""
    function = log_density_of(case, arrays)

    def chain(key, position):
        first, second, third = jax.random.split(key, 3)
        state = blackjax.mcmc.mclmc.init(position=position, logdensity_fn=function, rng_key=first)
        kernel = blackjax.mcmc.mclmc.build_kernel(integrator=blackjax.mcmc.mclmc.isokinetic_mclachlan)
        state, parameters, _ = blackjax.mclmc_find_L_and_step_size(
            mclmc_kernel=kernel,
            logdensity_fn=function,
            num_steps=case["warmup"],
            state=state,
            rng_key=second,
            diagonal_preconditioning=True,
        )
        algorithm = blackjax.mclmc(
            function,
            L=parameters.L,
            step_size=parameters.step_size,
            inverse_mass_matrix=parameters.inverse_mass_matrix,
        )

        def one(state, key):
            def inner(state, key):
                return algorithm.step(key, state)[0], None

            state, _ = jax.lax.scan(inner, state, jax.random.split(key, case["thin"]))
            return state, state.position

        return jax.lax.scan(one, state, jax.random.split(third, case["draws"]))[1]

    draws, info = _timed("blackjax_mclmc", case, chain, _arguments(case, arrays, jax.random.key), parallel=False)
    return {"draws": flatten(draws)}, {**info, "steps": 2.0 * case["thin"]}
