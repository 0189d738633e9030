"""Core of the library, used by client, daemon and tools: plan, records, events, status, element
types, statistics and manifests. It needs only numpy and the standard library; the few modules that
access the host say so.
"""
