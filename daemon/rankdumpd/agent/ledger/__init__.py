"""The ledger of an agent, one SQLite file: committed frames, sessions, the report log and retired
iterations.
"""
