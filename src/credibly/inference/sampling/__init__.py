"""Running chains: starts, noise, trajectories, the loop, recording and resume."""
