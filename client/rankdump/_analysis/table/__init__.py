"""Parquet table of the tensors of a tree: its columns, its files, and SQL over them."""
