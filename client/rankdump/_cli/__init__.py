"""The `rankdump` command. Only the edge: parses options, asks daemons or reads trees, and
prints.
"""
