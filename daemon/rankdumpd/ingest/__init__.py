"""Ingest of dumps that MindSpore or CANN wrote natively: watched, checked, packed and indexed, each
file once.

What was ingested stands in one SQLite file in the tree's hidden folder; a source is removed only
after its commit. Nothing here follows a link, and nothing is written to a source.
"""
