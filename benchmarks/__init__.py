"""Benchmarks: credibly against plain torch, one module a question. Run as `python -m benchmarks.NAME`; see README.md."""
