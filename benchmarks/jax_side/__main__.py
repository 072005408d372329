"""Server of the JAX peers: reads requests as JSON lines, responds with seconds. Started by `benchmarks.jax_client`.

It runs in its own environment (jax, blackjax, numpyro) without torch, so it imports nothing of this project but the
densities of posteriordb, which need numpy alone. Arrays travel as npz files. Requests:

    {"build": KIND, "name": NAME, "arrays": PATH, ...}  build an implementation, call it once: seconds with compilation
    {"run": NAME, "calls": N}                           seconds of N calls
    {"sample": KIND, "arrays": PATH, "out": PATH, ...}  a whole run, draws to a file: compile and run seconds
    {"density": ..., "arrays": PATH, "out": PATH, ...}  log density and gradient at the given points
"""

import json
import os
import sys
import time

_threads = os.environ.get("BENCHMARK_THREADS")
if _threads and hasattr(os, "sched_setaffinity"):  # XLA starts one thread per core of the process
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(_threads)])

# Packages that this interpreter lacks; they come after its own.
sys.path += [folder for folder in os.environ.get("BENCHMARK_WHEELS", "").split(os.pathsep) if folder]

import importlib  # noqa: E402
import importlib.metadata  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402

# Kind of work -> the module with a function of that name.
MODULES = {
    "blackjax_hmc": "steps",
    "numpyro_hmc": "steps",
    "jax_hmc": "steps",
    "blackjax_sgld": "steps",
    "blackjax_sghmc": "steps",
    "numpyro_predictive": "predicting",
    "resnet_gradient": "resnet",
    "blackjax_nuts": "runs",
    "numpyro_nuts": "runs",
    "blackjax_mclmc": "runs",
    "budgeted": "budgeted",
    "nutpie_nuts": "nutpie_runs",
    "bde_regressor": "bde_runs",
    "posterior_nuts": "posteriors",
}


def versions():
    """Return the version of each installed peer by name."""
    found = {"jax": jax.__version__, "device": jax.devices()[0].platform}
    for name in ("blackjax", "numpyro", "nutpie", "sklearn-contrib-bde"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def respond(request, implementations):
    """Return the response to one request."""
    arrays = dict(np.load(request["arrays"], allow_pickle=False)) if "arrays" in request else {}
    start = time.perf_counter()
    if "build" in request:
        make = getattr(importlib.import_module(MODULES[request["build"]]), request["build"])
        start = time.perf_counter()  # the import is not timed
        call, info = make(request, arrays)
        jax.block_until_ready(call())
        implementations[request["name"]] = call
        return {"seconds": time.perf_counter() - start, **info}
    if "run" in request:
        call, result = implementations[request["run"]], None
        for _ in range(request["calls"]):
            result = call()
        jax.block_until_ready(result)
        return {"seconds": time.perf_counter() - start}
    if "sample" in request:
        make = getattr(importlib.import_module(MODULES[request["sample"]]), request["sample"])
        results, info = make(request, arrays)
        np.savez(request["out"], **{k: np.asarray(v) for k, v in results.items()})
        return info
    if "density" in request:
        networks = importlib.import_module(request["density"])
        values = networks.density(request, arrays)
        np.savez(request["out"], **{k: np.asarray(v) for k, v in values.items()})
        return {}
    raise ValueError(f"unknown request: {sorted(request)}")


def main():
    """Respond until there are no more requests. An error is a response too, so that the client can continue."""
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not be read as a response
    print(json.dumps(versions()), file=responses, flush=True)
    implementations = {}
    for line in sys.stdin:
        try:
            response = respond(json.loads(line), implementations)
        except Exception as error:
            response = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(response), file=responses, flush=True)


if __name__ == "__main__":
    main()
