"""Whole HMC trajectories of small networks as one CUDA kernel, compiled at run time."""
