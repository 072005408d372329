"""What the scikit-learn estimators are made of: arrays, encodings, fits, intervals."""
