"""Kernels: loops over the elements of tensors, compiled if the installation has a C compiler.

They compute statistics and fingerprints, and copy between orders of axes. The compiled kernels are
in `native.c` and the files that it includes; `numpy_twin.py` has the same functions in numpy. The
compiled module also writes a small file with one call.
"""
