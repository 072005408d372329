"""Settings of the server: limits, the token, and the allowed hosts."""

from __future__ import annotations

from dataclasses import dataclass

from credibly.core.checks import check_integer, check_positive, check_probability
from credibly.errors import InputError

# A token shorter than this can be guessed.
LEAST_TOKEN = 16


@dataclass(frozen=True)
class Settings:
    """Settings of the server.

    Attributes:
        token: clients must send it as `Authorization: Bearer TOKEN`; None for no authentication.
        hosts: names that the Host header may have, so that a web page cannot reach a server on this machine by its
            own name (DNS rebinding); () for any.
        max_bytes: maximum size of a request body.
        max_rows: maximum number of rows per request.
        timeout: seconds after which a request fails with an error.
        max_queue: maximum number of rows waiting for a prediction, over all requests to a run.
        batch_rows: requests that wait together are predicted together, up to this many rows.
        risk: default of the `risk` parameter of runs that predict classes; None for no reject option.
        watch: seconds between checks whether a run folder was replaced; 0 to never check.
    """

    token: str | None = None
    hosts: tuple[str, ...] = ()
    max_bytes: int = 16 << 20
    max_rows: int = 10_000
    timeout: float = 30.0
    max_queue: int = 100_000
    batch_rows: int = 1024
    risk: float | None = None
    watch: float = 2.0

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_rows", "max_queue", "batch_rows"):
            check_integer(name, getattr(self, name))
        check_positive("timeout", self.timeout)
        if self.watch != 0:
            check_positive("watch", self.watch, "0 never checks")
        if self.risk is not None:
            check_probability("risk", self.risk)
        if self.token is not None:
            check_token("token", self.token)


def check_token(name: str, token: str) -> None:
    """Raise unless a token is long enough and can be sent in a header. The message does not contain it."""
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        advice = "Generate one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        found = f"must be at least {LEAST_TOKEN} ASCII characters without spaces, got {len(token)} characters"
        raise InputError(name, found, advice)
