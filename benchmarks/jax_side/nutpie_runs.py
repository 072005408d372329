"""nutpie on the same density: its Rust sampler calls a gradient that JAX has compiled, a thread per chain.

The sampler runs in the background until the time is up and is then stopped. Its chains do not wait for one another;
draws beyond the shortest chain are dropped.
"""

import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import nutpie
from flat import log_density_of, predictor
from nutpie.compiled_pyfunc import from_pyfunc

# Draws that no budget reaches, and draws whose predictions are computed together.
ENDLESS, BLOCK = 1_000_000, 256
# Draws that are taken even if warm-up used up the time, if that takes at most this many times the budget.
LEAST, LATEST = 20, 10


def nutpie_nuts(case, arrays):
    """Run nutpie's NUTS with the mass adaptation of the case, "diagonal" or "low-rank"."""
    theta = np.asarray(arrays["theta"], np.float64)
    function = log_density_of(case, arrays)
    start = time.perf_counter()
    gradient = jax.jit(jax.value_and_grad(lambda x: function(x.astype(jnp.float32))))
    jax.block_until_ready(gradient(theta[0].astype(np.float32)))
    compile_seconds = time.perf_counter() - start
    iterations = []
    model = _model(gradient, theta, iterations)
    start = time.perf_counter()
    sampler = nutpie.sample(
        model,
        draws=ENDLESS,
        tune=case["warmup"],
        chains=len(theta),
        cores=len(theta),
        seed=case["seed"],
        progress_bar=False,
        blocking=False,
        low_rank_modified_mass_matrix=case["mass"] == "low-rank",
        target_accept=case["target"],
        maxdepth=case["depth"],
    )
    time.sleep(case["budget"])
    needed = case["warmup"] + LEAST
    while sum(count[0] >= needed for count in iterations) < len(theta):
        if time.perf_counter() - start > LATEST * case["budget"]:
            break
        time.sleep(0.1)
    trace = sampler.abort()
    seconds = time.perf_counter() - start
    draws, counts = _draws(trace)
    predict, found = predictor(case, arrays), []
    for first in range(0, draws.shape[1], BLOCK):
        found.append([np.asarray(part) for part in predict(jnp.asarray(draws[:, first : first + BLOCK], jnp.float32))])
    functions, noise = (np.concatenate(parts, 1) for parts in zip(*found))
    info = {"compile": compile_seconds, "seconds": seconds, **counts, "parallel": "a thread per chain"}
    return {"functions": functions, "log_noise": noise}, info


def _model(gradient, theta, iterations):
    """Return nutpie's form of the density; chains start at the given points, in the order in which they ask.

    `iterations` gets a counter per chain, warm-up included, and may get some that nobody uses.
    """
    order, lock = itertools.cycle(theta), threading.Lock()

    def initial(seed):
        with lock:
            return next(order).copy()

    def make_density():
        def density(x, **_):
            value, slope = gradient(x.astype(np.float32))
            return float(value), np.asarray(slope, np.float64)

        return density

    def make_expand(*_):
        count = [0]
        iterations.append(count)

        def expand(x, **_):
            count[0] += 1
            return {"theta": np.asarray(x, np.float64)}

        return expand

    dim = theta.shape[1]
    return from_pyfunc(
        dim, make_density, make_expand, [np.dtype("float64")], [(dim,)], ["theta"], make_initial_point_fn=initial
    )


def _draws(trace):
    """Return the draws (C, n, D) of the shortest chain's length, and counts over warm-up and draws."""
    warm, stats = trace.warmup_sample_stats, trace.sample_stats
    draws = np.asarray(trace.posterior["theta"], np.float64)
    lengths = np.isfinite(draws[..., 0]).sum(1)
    shortest = int(lengths.min()) if lengths.size else 0
    if not shortest:
        raise RuntimeError("nutpie: the time was up before every chain had a draw")
    steps = sum(float(np.nansum(np.asarray(one["n_steps"], np.float64))) for one in (warm, stats))
    divergences = float(np.nansum(np.asarray(stats["diverging"], np.float64)))
    return draws[:, :shortest], {"gradients": steps, "divergences": divergences}
