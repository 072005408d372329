"""Runs of BlackJAX and NumPyro that use up a given time: warm-up, then chunks of draws until the time is up.

A sampler is a pair of functions,

    warm(key, theta) -> carry, gradients        chunk(carry, key) -> carry, (draws, gradients, divergences)

of one chain, or of all chains where they adapt together. They are compiled ahead of time, and compilation is timed
apart. Predictions at the test rows are computed between chunks, outside of the clock.
"""

import time
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.mcmc import adjusted_mclmc_dynamic, mclmc
from flat import log_density_of, predictor

# Compiled functions and their compile seconds: repetitions on the same data share them.
COMPILED = {}
# Quasi-random lengths of ChEES are drawn from a sequence of this many numbers.
LENGTHS = 2**14


class Centre(NamedTuple):
    """The part of a low-rank adaptation's state that its end needs."""

    mu_star: Any


class Kept(NamedTuple):
    """The part of an adaptation iteration that is kept: whole states would fill the memory."""

    steps: Any
    adaptation_state: Any


def _kept(state, info, adaptation_state):
    return Kept(info.num_integration_steps, Centre(getattr(adaptation_state, "mu_star", ())))


def blackjax_nuts(case, function):
    """NUTS after window adaptation of step size and diagonal or low-rank mass."""
    options = {"max_num_doublings": case["depth"], "target_acceptance_rate": case["target"]}
    low_rank = case["mass"] == "low-rank"
    adapt = blackjax.window_adaptation_low_rank if low_rank else blackjax.window_adaptation

    def warm(key, theta):
        algorithm = adapt(blackjax.nuts, function, adaptation_info_fn=_kept, **options)
        (state, parameters), kept = algorithm.run(key, theta, num_steps=case["warmup"])
        # Static settings are added again by `chunk`.
        tuned = {k: v for k, v in parameters.items() if k in ("step_size", "inverse_mass_matrix")}
        return (state, tuned), jnp.sum(kept.steps)

    def chunk(carry, key):
        state, tuned = carry
        kernel = blackjax.nuts(function, max_num_doublings=case["depth"], **tuned)

        def one(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.num_integration_steps, info.is_divergent)

        state, (draws, steps, divergent) = jax.lax.scan(one, state, jax.random.split(key, case["chunk"]))
        return (state, tuned), (draws, jnp.sum(steps), jnp.sum(divergent))

    return warm, chunk


def numpyro_nuts(case, function):
    """NumPyro's NUTS with its own warm-up."""
    from numpyro.infer import NUTS

    kernel = NUTS(
        potential_fn=lambda theta: -function(theta),
        max_tree_depth=case["depth"],
        target_accept_prob=case["target"],
        dense_mass=False,
    )

    def one(state, _):
        state = kernel.sample(state, (), {})
        return state, (state.z, state.num_steps, state.diverging)

    def warm(key, theta):
        state = kernel.init(jax.random.key_data(key), case["warmup"], theta, (), {})
        state, (_, steps, _) = jax.lax.scan(one, state, None, length=case["warmup"])
        return state, jnp.sum(steps)

    def chunk(state, key):
        state, (draws, steps, divergent) = jax.lax.scan(one, state, None, length=case["chunk"])
        return state, (draws, jnp.sum(steps), jnp.sum(divergent))

    return warm, chunk


def blackjax_mclmc(case, function):
    """Unadjusted microcanonical Langevin; every `thin`-th step is a draw, and a step takes two gradients."""
    kernel = mclmc.build_kernel(integrator=mclmc.isokinetic_mclachlan)

    def warm(key, theta):
        first, second = jax.random.split(key)
        state = mclmc.init(position=theta, logdensity_fn=function, rng_key=first)
        state, parameters, steps = blackjax.mclmc_find_L_and_step_size(
            mclmc_kernel=kernel,
            logdensity_fn=function,
            num_steps=case["tuning"],
            state=state,
            rng_key=second,
            diagonal_preconditioning=True,
        )
        return (state, parameters), jnp.asarray(2 * steps)

    def chunk(carry, key):
        state, (length, size, inverse_mass) = carry
        algorithm = blackjax.mclmc(function, L=length, step_size=size, inverse_mass_matrix=inverse_mass)

        def one(state, key):
            state, _ = jax.lax.scan(
                lambda s, k: (algorithm.step(k, s)[0], None), state, jax.random.split(key, case["thin"])
            )
            return state, state.position

        state, draws = jax.lax.scan(one, state, jax.random.split(key, case["chunk"]))
        return (state, carry[1]), (draws, jnp.asarray(2 * case["thin"] * case["chunk"]), jnp.zeros(()))

    return warm, chunk


def blackjax_adjusted_mclmc(case, function):
    """Microcanonical Langevin with a Metropolis correction and random trajectory lengths.

    The adaptation begins with the step size and mass that the unadjusted sampler finds in as many steps. From its own
    first guess, a step of sqrt(D)/5, it would shrink the steps of trajectories of a fixed length on these posteriors,
    to hundreds of thousands of steps each.
    """
    unadjusted, _ = blackjax_mclmc(case, function)
    kernel = adjusted_mclmc_dynamic.build_kernel(
        integration_steps_fn=adjusted_mclmc_dynamic.make_random_trajectory_length_fn(True)
    )

    def warm(key, theta):
        before, first, second = jax.random.split(key, 3)
        (reached, guess), gradients = unadjusted(before, theta)
        state = adjusted_mclmc_dynamic.init(reached.position, function, first)
        state, parameters, steps = blackjax.adjusted_mclmc_find_L_and_step_size(
            mclmc_kernel=kernel,
            logdensity_fn=function,
            num_steps=case["tuning"],
            state=state,
            rng_key=second,
            target=case["target"],
            diagonal_preconditioning=True,
            target_num_integration_steps=case["steps"],
            params=guess,
        )
        return (state, parameters), gradients + 2 * steps

    def chunk(carry, key):
        state, (length, size, inverse_mass) = carry

        def step(state, key):
            state, info = kernel(
                key,
                state,
                function,
                step_size=size,
                inverse_mass_matrix=inverse_mass,
                integration_steps_params=(length / size,),
            )
            return state, (info.num_integration_steps, info.is_divergent)

        def one(state, key):
            state, counts = jax.lax.scan(step, state, jax.random.split(key, case["thin"]))
            return state, (state.position, *counts)

        state, (draws, steps, divergent) = jax.lax.scan(one, state, jax.random.split(key, case["chunk"]))
        return (state, carry[1]), (draws, 2 * jnp.sum(steps), jnp.sum(divergent))

    return warm, chunk


def blackjax_chees(case, function):
    """ChEES-HMC: all chains share a step size, a trajectory length and, if asked for, a diagonal mass."""
    import optax

    chains, static = case["chains"], {}

    def warm(key, theta):
        algorithm = blackjax.chees_adaptation(
            function,
            chains,
            target_acceptance_rate=case["target"],
            mass_matrix_estimation=case["mass"],
            max_leapfrog_steps=case["max_steps"],
            adaptation_info_fn=_kept,
        )
        optimiser = optax.adam(case["learning_rate"], b1=0.0, b2=0.95)
        (states, parameters), kept = algorithm.run(
            key, theta, case["first_step"], optimiser, case["warmup"], max_sampling_steps=LENGTHS
        )
        static.update({k: parameters.pop(k) for k in ("next_random_arg_fn", "integration_steps_fn")})
        return (states, parameters), jnp.sum(kept.steps)

    def chunk(carry, key):
        states, tuned = carry
        kernel = blackjax.dynamic_hmc(function, **static, **tuned)

        def one(states, key):
            states, info = jax.vmap(kernel.step)(jax.random.split(key, chains), states)
            return states, (states.position, info.num_integration_steps, info.is_divergent)

        states, (draws, steps, divergent) = jax.lax.scan(one, states, jax.random.split(key, case["chunk"]))
        return (states, tuned), (draws.swapaxes(0, 1), jnp.sum(steps), jnp.sum(divergent))

    return warm, chunk


TOGETHER = ("blackjax_chees",)
SAMPLERS = {
    one.__name__: one for one in (blackjax_nuts, numpyro_nuts, blackjax_mclmc, blackjax_adjusted_mclmc, blackjax_chees)
}


def budgeted(case, arrays):
    """Run the sampler `kind` of the case for `budget` seconds; return predictions, counts and durations."""
    theta, key = jnp.asarray(arrays["theta"], jnp.float32), jax.random.key(case["seed"])
    layout = Layout(len(theta), case["kind"] in TOGETHER, case.get("parallel"))
    warm_key, key = jax.random.split(key)
    programs, compile_seconds = _compiled(case, arrays, layout, warm_key, theta)
    seconds, (carry, gradients) = _clock(lambda: programs[0](layout.keys(warm_key), layout.split(theta)))
    warmup_seconds, total, divergences = seconds, float(jnp.sum(gradients)), 0.0
    predict, functions, noise = predictor(case, arrays), [], []
    while seconds < case["budget"] or not functions:
        key, chunk_key = jax.random.split(key)
        spent, (carry, (draws, gradients, divergent)) = _clock(
            lambda carry=carry, k=chunk_key: programs[1](carry, layout.keys(k))
        )
        seconds, total = seconds + spent, total + float(jnp.sum(gradients))
        divergences += float(jnp.sum(divergent))
        for block, parts in zip(predict(layout.join(draws)), (functions, noise)):
            parts.append(np.asarray(block))
    info = {"compile": compile_seconds, "warmup_seconds": warmup_seconds, "seconds": seconds}
    info |= {"gradients": total, "divergences": divergences, "parallel": layout.name}
    return {"functions": np.concatenate(functions, 1), "log_noise": np.concatenate(noise, 1)}, info


class Layout:
    """How chains are run: together, vectorised, or spread over devices, one or several per device."""

    def __init__(self, chains, together, parallel):
        devices = jax.local_device_count()
        self.chains, self.together = chains, together
        spread = parallel != "vmap" and not together and devices > 1 and chains % devices == 0
        self.devices = devices if spread else 1
        self.each = chains // self.devices
        self.name = "together" if together else f"pmap over {devices} devices" if spread else "vmap"

    def wrap(self, function):
        """Return the function of all chains."""
        if self.together:
            return jax.jit(function)
        if self.devices == 1:
            return jax.jit(jax.vmap(function))
        return jax.pmap(jax.vmap(function) if self.each > 1 else function)

    def split(self, values):
        """Return values (C, ...) in the shape that the wrapped function takes."""
        if self.together or self.devices == 1:
            return values
        return values if self.each == 1 else values.reshape(self.devices, self.each, *values.shape[1:])

    def join(self, values):
        """Invert `split`, for draws."""
        return values.reshape(self.chains, *values.shape[-2:])

    def keys(self, key):
        """Return a key per chain, or one for all that run together."""
        return key if self.together else self.split(jax.random.split(key, self.chains))


def _compiled(case, arrays, layout, key, theta):
    """Return the compiled warm-up and chunk, and the seconds that compiling took."""
    name = repr(sorted((k, v) for k, v in case.items() if k not in ("seed", "budget", "arrays", "out")))
    data = tuple(float(np.sum(arrays[k], dtype=np.float64)) for k in ("x", "y", "x_test"))
    if (name, data) not in COMPILED:
        start = time.perf_counter()
        warm, chunk = SAMPLERS[case["kind"]](case, log_density_of(case, arrays))
        arguments = layout.keys(key), layout.split(theta)
        first = layout.wrap(warm).lower(*arguments).compile()
        carry, _ = jax.eval_shape(layout.wrap(warm), *arguments)
        second = layout.wrap(chunk).lower(carry, layout.keys(key)).compile()
        COMPILED[name, data] = (first, second), time.perf_counter() - start
    return COMPILED[name, data]


def _clock(call):
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result
