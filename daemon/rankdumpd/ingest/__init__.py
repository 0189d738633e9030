"""Takes over trees that MindSpore or CANN wrote natively: watched, checked, packed, indexed, once.

What was taken stands in one SQLite file in the tree's hidden folder; a source is removed only
behind its commit. Nothing here follows a link, and nothing is written to a source.
"""
