"""Conversion of CANN's bin files to npy files, or to bare elements, in common tensor formats.
Names, cropping and omissions are those of msaccucmp (Ascend/msprobe). A damaged file is reported
and the others are converted; an output gets its name when it is complete.
"""
