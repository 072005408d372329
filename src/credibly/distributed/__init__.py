"""The processes of a run: how they find each other, share chains and rows, and fail together."""
