"""Posteriors as files that run without credibly: ONNX and torch.export graphs, fewer draws, model cards."""
