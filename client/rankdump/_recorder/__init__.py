"""Recorder of a training process: copies or measures what the plan selects, counts it, and passes
it to the transport. Nothing in this package raises into the training job.
"""
