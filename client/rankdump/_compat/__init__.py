"""Interfaces of other tools: the life cycle of CANN's dump calls, and troubleshooter's API dumps
with their comparison. Built on sessions, which do not depend on this package.
"""
