"""Interfaces of other tools: the life cycle of CANN's dump calls, and troubleshooter's API dumps
with their comparison. They are built on sessions, which do not depend on this package.
"""
