"""Input columns: roles, statistics of the training rows, encodings as network inputs, warnings."""
