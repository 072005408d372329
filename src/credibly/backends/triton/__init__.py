"""Triton kernels for residual units with filter response normalisation."""
