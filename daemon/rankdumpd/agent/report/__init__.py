"""Reports of an agent to its coordinator, from the report log of the ledger."""
