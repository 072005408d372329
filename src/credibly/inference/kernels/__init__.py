"""Pure steps on flat tensors: state in, state out; no files, no progress, no tasks."""
