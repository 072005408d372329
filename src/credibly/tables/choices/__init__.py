"""Choices by folds of the rows: network, prior, noise, encodings, the length of chains."""
