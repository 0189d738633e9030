"""Coordinator as a component of a process: reports, then merge and hints, then publication, then
the state.
"""
