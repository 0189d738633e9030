"""Black boxes of ranks: the rings of their latest steps, and the frozen trees that are made from
the rings.
"""
