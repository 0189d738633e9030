"""Agent of several processes: one address, with ranks distributed over workers."""
