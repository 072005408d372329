"""Posteriors: draws, Gaussians, dropout masks and Laplace approximations, in memory and on disk."""
