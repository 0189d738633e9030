"""Ingest of dumps that MindSpore or CANN wrote natively: each file is checked, packed and indexed
once.

Ingested files are recorded in an SQLite file in the tree's hidden folder. A source file is removed
only after the commit of its copy. The ingest follows no links and writes to no source file.
"""
