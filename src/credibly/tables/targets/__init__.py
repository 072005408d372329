"""Target columns: which task they are, the scale they are fitted on, their metrics."""
