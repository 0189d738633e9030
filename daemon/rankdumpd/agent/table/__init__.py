"""Writing of the table of statistics while ranks are running, in Parquet, with one file for each
window.
"""
