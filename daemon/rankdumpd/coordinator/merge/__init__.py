"""Merge of the events that the ranks of a job executed in one iteration into one order. Pure: no
clock, no I/O.
"""
