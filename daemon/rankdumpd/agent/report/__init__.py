"""Reports of an agent to its coordinator, which are read from the report log in the ledger."""
