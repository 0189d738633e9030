"""Timeout hints: how near each process group comes to its timeout, and what to set before it
strikes. Pure.

`spread_history` takes in what an iteration came to, `assessment` judges it, `open_waits` judges
what is open now, `rank_warnings` words it for the ranks.
"""
