"""The machinery that methods share: target densities, kernels, adaptation, training and sampling."""
