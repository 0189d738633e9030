"""Kernels: loops over the elements of tensors, compiled where the installation has a C compiler.

Statistics, fingerprints, and copies between orders of axes. `native.c` and what it includes are the
compiled ones, `numpy_twin.py` has the same functions without them. The compiled ones also write a
small file by one call.
"""
