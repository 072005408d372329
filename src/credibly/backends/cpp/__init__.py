"""C++ backend for small networks on a CPU: trajectories, steps and predictions that stay in the caches."""
