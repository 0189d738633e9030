"""The gRPC service and its streams, the assembly of frames into records, and the admission of
records, which are queued for worker threads.
"""
