"""Tables: CSV and Parquet files in, predictions with their uncertainty out."""
