"""Conversion of CANN's bin files to npy files, or to files with elements only, in common tensor
formats. Names, cropping and omissions are those of msaccucmp (Ascend/msprobe). A damaged file is
reported, and all others are converted; an output file gets its name when it is complete.
"""
