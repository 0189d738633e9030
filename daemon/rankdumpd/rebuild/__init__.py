"""An agent's ledger made anew from a tree: what its manifests say, and no more.

Takes from the agent how a ledger's file is made and what its tables are, and no room.
"""
