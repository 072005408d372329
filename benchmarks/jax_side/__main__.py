"""The JAX peers as partners to be timed: reads requests as JSON lines, answers with seconds. Started by `benchmarks.jax_client`.

It lives in an environment of its own (jax, blackjax, numpyro), apart from torch, so it imports nothing of this project. Arrays
travel as npz files. Requests:

    {"build": KIND, "name": NAME, "arrays": PATH, ...}     makes a contestant and calls it once: seconds, compilation among them
    {"run": NAME, "calls": N}                              seconds of N calls
    {"sample": KIND, "arrays": PATH, "out": PATH, ...}     a whole run, draws to a file: seconds of compiling and of running
    {"density": ..., "arrays": PATH, "out": PATH, ...}     log density and gradient at the given points, to be compared
"""

import json
import os
import sys
import time

_threads = os.environ.get("BENCHMARK_THREADS")
if _threads and hasattr(os, "sched_setaffinity"):  # XLA takes as many threads as the process may use cores
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(_threads)])

import importlib  # noqa: E402
import importlib.metadata  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402

# Each kind of work, and the module that has a function of that name.
MODULES = {
    "blackjax_hmc": "steps", "numpyro_hmc": "steps", "jax_hmc": "steps", "blackjax_sgld": "steps", "blackjax_sghmc": "steps",
    "numpyro_predictive": "predicting", "resnet_gradient": "resnet",
    "blackjax_nuts": "runs", "numpyro_nuts": "runs", "blackjax_mclmc": "runs",
}  # fmt: skip


def versions():
    """Name to version of the peers that are installed here."""
    found = {"jax": jax.__version__, "device": jax.devices()[0].platform}
    for name in ("blackjax", "numpyro"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def answer(asked, contestants):
    """The answer to one request."""
    arrays = dict(np.load(asked["arrays"], allow_pickle=False)) if "arrays" in asked else {}
    began = time.perf_counter()
    if "build" in asked:
        make = getattr(importlib.import_module(MODULES[asked["build"]]), asked["build"])
        began = time.perf_counter()  # loading a library is not its work
        call, told = make(asked, arrays)
        jax.block_until_ready(call())
        contestants[asked["name"]] = call
        return {"seconds": time.perf_counter() - began, **told}
    if "run" in asked:
        call, result = contestants[asked["run"]], None
        for _ in range(asked["calls"]):
            result = call()
        jax.block_until_ready(result)
        return {"seconds": time.perf_counter() - began}
    if "sample" in asked:
        make = getattr(importlib.import_module(MODULES[asked["sample"]]), asked["sample"])
        results, told = make(asked, arrays)
        np.savez(asked["out"], **{k: np.asarray(v) for k, v in results.items()})
        return told
    if "density" in asked:
        networks = importlib.import_module(asked["density"])
        values = networks.density(asked, arrays)
        np.savez(asked["out"], **{k: np.asarray(v) for k, v in values.items()})
        return {}
    raise ValueError(f"an unknown request: {sorted(asked)}")


def main():
    """Answers until there are no more requests; an error is an answer too, so that the other side can go on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    print(json.dumps(versions()), file=answers, flush=True)
    contestants = {}
    for line in sys.stdin:
        try:
            found = answer(json.loads(line), contestants)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
