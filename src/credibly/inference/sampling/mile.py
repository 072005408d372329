"""The sampler of MILE: MCLMC whose record marks the chains as local posteriors, which the verdict then judges."""

from __future__ import annotations

from typing import Any

from credibly.inference.sampling.mclmc import MCLMCSampler


class MILESampler(MCLMCSampler):
    """MCLMC from the members of an ensemble."""

    def history(self) -> dict[str, Any]:
        """Return the values of MCLMC, with every chain marked as a separate local posterior."""
        return {**super().history(), "local": True}
