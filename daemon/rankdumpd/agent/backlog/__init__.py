"""Packing of files that an agent under pressure stored unpacked: done when the agent has time,
oldest file first.
"""
