"""Publication of the merged order in the tree of its job: CSV, Parquet, traces,
findings and hints.
"""
