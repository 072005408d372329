"""Samplers against their peers: the same posteriors, the same starting points, the same wall-clock time."""
