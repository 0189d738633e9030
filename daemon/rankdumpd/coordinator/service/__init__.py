"""Coordinator as a component of a process: it collects reports, merges and publishes iterations,
updates hints, and writes the state.
"""
