"""Foundations: argument checks, inputs, random streams, specs, autodiff, compilation, threads, progress."""
