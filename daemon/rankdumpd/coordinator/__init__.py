"""Coordinator of a job: collects the reports of all agents, merges each iteration into one
execution order, publishes it, and hints at timeouts.
"""
