"""Writing of the table of statistics while the ranks go on: Parquet, one file for each window."""
