"""The `rankdump` command. This package only parses options, calls daemons or readers of trees, and
prints.
"""
