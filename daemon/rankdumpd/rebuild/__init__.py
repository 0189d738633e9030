"""Rebuild of an agent's ledger from the manifests of a tree.

Uses the agent's ledger tables, and none of its components.
"""
