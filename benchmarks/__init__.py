"""Benchmarks of credibly against its peers and plain PyTorch, one module per question; see README.md."""
