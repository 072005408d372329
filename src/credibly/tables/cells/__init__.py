"""Cells of a table: text as numbers, dates and missing values, by conventions decided once."""
