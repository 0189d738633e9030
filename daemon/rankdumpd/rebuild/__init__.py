"""Rebuild of an agent's ledger from a tree: from its manifests only.

Uses from the agent how a ledger's file is made and what its tables are, and no component.
"""
