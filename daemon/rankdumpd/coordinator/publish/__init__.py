"""Publication of the merged order into the tree of its job: CSV, Parquet, traces, findings and
hints.
"""
