"""Limits of an agent: the byte budget of its queue, the space on its disks and of its dumps, and
the decision whether a record is stored.
"""
