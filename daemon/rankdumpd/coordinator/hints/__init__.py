"""Timeout hints: how near the waits of each process group come to its timeout, and which settings
to raise before the job fails. Pure.

`spread_history` keeps the spreads of merged iterations, `assessment` compares them with the limits
of `timeout_limits`, `open_waits` compares calls that are still open, and `rank_warnings` formats
the warnings that ranks print.
"""
