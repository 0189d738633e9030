"""Ingest of dumps that MindSpore or CANN wrote natively: watched, checked, packed and indexed, each
file once.

Ingested files are recorded in an SQLite file in the tree's hidden folder; a source is removed only
after its commit. Nothing here follows links, and nothing is written to a source.
"""
