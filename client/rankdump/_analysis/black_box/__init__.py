"""Reader of frozen trees: the records of a freeze, and the first report about a fault that is made
from them.
"""
