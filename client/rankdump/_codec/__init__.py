"""Compression of files. The only package that imports zstandard."""
