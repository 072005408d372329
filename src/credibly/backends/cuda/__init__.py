"""CUDA backend: full HMC trajectories of small networks in one kernel, compiled at run time."""
