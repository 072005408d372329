"""The likelihood of a run folder: from its description, or passed again if the folder cannot store its code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from credibly.core.specs import from_spec, kinds_of
from credibly.errors import StoreError
from credibly.likelihoods import LIKELIHOODS, Likelihood
from credibly.priors.elementwise import PRIORS


def stored_likelihood(spec: Mapping[str, Any], given: Likelihood | None) -> Likelihood:
    """Return the likelihood as it was bound in the run; `given` is the caller's, for user-defined code.

    Nothing in a folder is executed, so a function or class from outside credibly has to be passed again.
    """
    if given is not None:
        return given.restored(spec)
    known = kinds_of(*LIKELIHOODS.values(), *PRIORS.values())
    unknown = [own for own in _kinds(spec) if own["kind"] not in known]
    if unknown:
        kind = unknown[0]["kind"]
        name = f"from_distribution({unknown[0]['make']})" if "make" in unknown[0] else repr(kind)
        raise StoreError(
            f"likelihood: the run was made with {name}, whose code this version does not know and a folder does not "
            "hold. Pass likelihood= with the likelihood of the fit"
        )
    found: Likelihood = from_spec(spec, known)
    return found


def _kinds(spec: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every description of a class in a description."""
    if isinstance(spec, list):
        for item in spec:
            yield from _kinds(item)
    elif isinstance(spec, Mapping):
        if "kind" in spec:
            yield spec
        for value in spec.values():
            yield from _kinds(value)
