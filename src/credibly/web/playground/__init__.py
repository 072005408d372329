"""The playground: a page on which every method fits data that the user draws, and the engine behind it."""
