"""Layouts of dump trees: folders, file names, tables, and the tensor formats of Ascend devices.
Pure: no clock, no disk, no network.
"""
