"""Compares two dumps: what is paired, how far it is apart, and where it starts."""
