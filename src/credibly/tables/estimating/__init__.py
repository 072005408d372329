"""Building blocks of the scikit-learn estimators: arrays, encodings, fits, intervals."""
