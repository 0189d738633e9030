"""Benchmarks: each measures rankdump and its peer or physical limit in the same run."""
