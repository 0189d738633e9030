"""Rebuild of an agent's ledger from a tree: what its manifests say, and no more.

Uses from the agent how a ledger's file is made and what its tables are, and no component.
"""
