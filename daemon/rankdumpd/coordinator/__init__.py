"""Coordinator of a job: collects the reports of all agents, merges the events of each iteration
into one execution order, publishes the order, and gives hints about timeouts.
"""
