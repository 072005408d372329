"""Accuracy and calibration on real tables: the defaults of credibly beside those of its peers, on the same splits."""
