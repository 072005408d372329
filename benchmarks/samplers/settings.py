"""The samplers of the benchmark and their settings: the one table to edit.

Every sampler uses the whole time budget, so `draws` is only the size of a round of ours, and `chunk` the draws that a
peer takes between two checks of the clock. Peers have the adaptation that their documentation recommends, and variants
where one setting does not suit all posteriors; the results page compares with the best variant of each. Everything is
in float32.
"""

from __future__ import annotations

from typing import Any

import credibly as cr

# Name -> name of the method in METHODS and its settings; "auto" is what `credibly fit --method auto` would choose.
OURS: dict[str, dict[str, Any]] = {
    "hmc": {"method": "hmc", "compile": True},
    "hmc-tuned": {"method": "hmc", "trajectory_length": "tuned", "compile": True},
    "hmc-diagonal": {"method": "hmc", "mass": "diagonal", "compile": True},
    "hmc-auto": {"method": "auto", "compile": True},
    "nuts": {"method": "nuts", "compile": True},
    "nuts-diagonal": {"method": "nuts", "mass": "diagonal", "compile": True},
    "chees": {"method": "chees", "compile": True},
    "mclmc": {"method": "mclmc", "compile": True},
    "mclmc-adjusted": {"method": "mclmc", "adjusted": True, "compile": True},
}

_NUTS: dict[str, Any] = {"depth": 10, "target": 0.8, "mass": "diagonal", "chunk": 20}
_CHEES: dict[str, Any] = {
    "kind": "blackjax_chees",
    "warmup": 500,
    "target": 0.651,
    "mass": "diagonal",
    # As in the paper on ChEES.
    "learning_rate": 0.025,
    "first_step": 0.01,
    "max_steps": 1000,
    "chunk": 20,
}
_ADJUSTED: dict[str, Any] = {"kind": "blackjax_adjusted_mclmc", "tuning": 20_000, "target": 0.9, "chunk": 50}

# Name -> kind of sampler on the JAX side and its settings. `tuning` of MCLMC is the number of steps of which the
# library takes its usual fractions for adaptation. nutpie's warm-up is its default of 400.
PEERS: dict[str, dict[str, Any]] = {
    "blackjax-nuts": {"kind": "blackjax_nuts", "warmup": 500, **_NUTS},
    "blackjax-nuts-short": {"kind": "blackjax_nuts", "warmup": 150, **_NUTS},
    "blackjax-nuts-low-rank": {"kind": "blackjax_nuts", "warmup": 500, **_NUTS, "mass": "low-rank"},
    "blackjax-chees": _CHEES,
    "blackjax-chees-identity": {**_CHEES, "mass": None},
    "blackjax-mclmc": {"kind": "blackjax_mclmc", "tuning": 30_000, "thin": 20, "chunk": 50},
    "blackjax-mclmc-adjusted": {**_ADJUSTED, "steps": 2.0, "thin": 10},
    "blackjax-mclmc-adjusted-long": {**_ADJUSTED, "tuning": 5_000, "steps": 16.0, "thin": 2},
    "numpyro-nuts": {"kind": "numpyro_nuts", "warmup": 500, **_NUTS},
    "numpyro-nuts-short": {"kind": "numpyro_nuts", "warmup": 150, **_NUTS},
    "nutpie": {"kind": "nutpie_nuts", "warmup": 400, **_NUTS},
    "nutpie-low-rank": {"kind": "nutpie_nuts", "warmup": 400, **_NUTS, "mass": "low-rank"},
    # The lengths are those of its documentation, which a time budget does not change.
    "bde": {"kind": "bde_regressor", "epochs": 200, "patience": 10, "warmup": 5000, "draws": 2000, "thin": 2},
}

# Changes on a GPU, where chains are vectorised and NUTS waits in every iteration for the deepest tree of all chains.
ON_GPU: dict[str, dict[str, Any]] = {
    "blackjax-nuts": {"warmup": 200, "chunk": 5},
    "blackjax-nuts-short": {"warmup": 100, "chunk": 5},
    "blackjax-nuts-low-rank": {"warmup": 200, "chunk": 5},
    "numpyro-nuts": {"warmup": 200, "chunk": 5},
    "numpyro-nuts-short": {"warmup": 100, "chunk": 5},
    "blackjax-mclmc": {"chunk": 20},
    "blackjax-mclmc-adjusted": {"chunk": 20},
    "blackjax-mclmc-adjusted-long": {"chunk": 20},
}
# Left out on a GPU, and why.
NOT_ON_GPU = {"nutpie": "a CPU sampler with a thread per chain", "nutpie-low-rank": "a CPU sampler"}

# Samplers whose density differs from the others': only log-likelihood and seconds are comparable.
OTHER_DENSITY = ("bde",)
# Samplers without a Metropolis correction: ESS does not detect their bias.
UNADJUSTED = ("mclmc", "blackjax-mclmc")
# A peer's library, by the first part of its name.
LIBRARIES = {"blackjax": "blackjax", "numpyro": "numpyro", "nutpie": "nutpie", "bde": "sklearn-contrib-bde"}
# Lengths for a smoke test.
QUICK_OURS: dict[str, dict[str, Any]] = {
    "hmc": {"warmup": 60, "draws": 10, "max_steps": 10},
    "auto": {"warmup": 60, "draws": 10, "max_steps": 10},
    "nuts": {"warmup": 60, "draws": 10, "max_depth": 4},
    "chees": {"warmup": 60, "draws": 10},
    "mclmc": {"warmup": 60, "draws": 10, "max_steps": 5},
}
QUICK_PEERS: dict[str, dict[str, Any]] = {
    "blackjax_nuts": {"warmup": 60, "depth": 4, "chunk": 5},
    "numpyro_nuts": {"warmup": 60, "depth": 4, "chunk": 5},
    "nutpie_nuts": {"warmup": 20, "depth": 4},
    "blackjax_chees": {"warmup": 60, "max_steps": 20, "chunk": 5},
    "blackjax_mclmc": {"tuning": 400, "thin": 2, "chunk": 10},
    "blackjax_adjusted_mclmc": {"tuning": 400, "thin": 2, "chunk": 10},
    "bde_regressor": {"epochs": 5, "warmup": 50, "draws": 20},
}


def ours(names: list[str] | None, quick: bool = False) -> dict[str, dict[str, Any]]:
    """Return the named samplers of ours, by default those whose method exists."""
    known = {k: v for k, v in OURS.items() if v["method"] in ("auto", *cr.METHODS)}
    found = _chosen(known, names, "ours")
    return {k: {**v, **QUICK_OURS[v["method"]]} for k, v in found.items()} if quick else found


def peers(names: list[str] | None, device: str = "cpu", quick: bool = False) -> dict[str, dict[str, Any]]:
    """Return the named peers with their settings on this kind of device, by default all that run there."""
    known = PEERS if device == "cpu" else {k: v for k, v in PEERS.items() if k not in NOT_ON_GPU}
    found = _chosen(known, names, "peers")
    if device != "cpu":
        found = {k: {**v, **ON_GPU.get(k, {})} for k, v in found.items()}
    return {k: {**v, **QUICK_PEERS[v["kind"]]} for k, v in found.items()} if quick else found


def library(peer: str) -> str:
    """Return the distribution that a peer comes from."""
    return LIBRARIES[peer.split("-")[0]]


def _chosen(known: dict[str, dict[str, Any]], names: list[str] | None, what: str) -> dict[str, dict[str, Any]]:
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise SystemExit(f"--{what} must be among {', '.join(known)}, got {', '.join(unknown)}")
    return known if names is None else {name: known[name] for name in names}
