"""Packing of files that an agent under pressure stored unpacked: when it has time, oldest first."""
