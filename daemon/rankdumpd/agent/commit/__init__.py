"""Commits of received frames: one thread enters batches of frames in the ledger, then applies the
metadata frames of each session and acknowledges.
"""
