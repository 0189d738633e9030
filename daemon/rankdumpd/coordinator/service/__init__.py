"""Coordinator as a component of a process: takes reports, merges and publishes iterations,
updates hints, and writes the state.
"""
