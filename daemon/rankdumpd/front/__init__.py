"""The front of an agent of several processes: one address, ranks shared out to workers."""
