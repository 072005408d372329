"""Gaussians over the flat parameter vector: precision structures and variational families."""
