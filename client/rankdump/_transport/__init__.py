"""Transport from a training process to its agent: numbered frames through shared memory or over one
gRPC stream, resent until they are acknowledged.
"""
