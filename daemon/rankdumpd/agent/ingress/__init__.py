"""The way of frames into the agent: the gRPC service and its streams, the assembly of frames to
records, and the admission and hand-over of records to worker threads.
"""
