"""The ledger of an agent, one SQLite file with committed frames, sessions, the report log and
retired iterations.
"""
