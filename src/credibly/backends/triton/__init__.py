"""Triton kernels for the units of a residual network."""
