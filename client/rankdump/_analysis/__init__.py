"""Offline analysis of dump trees: reading, comparison, check and repair, conversion of bin files,
and search for overflow records. Needs no daemon.
"""
