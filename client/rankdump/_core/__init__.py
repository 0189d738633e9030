"""Core of the library, used by client, daemon and tools: plan, records, events, status, element
types, statistics and manifests. Needs numpy and the standard library only; the few modules that
touch the host say so.
"""
