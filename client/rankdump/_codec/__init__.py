"""Compression of files. This is the only package that imports zstandard."""
