"""Recorder of a training process: what the plan selects is copied or measured, counted, and handed
to the transport. Nothing in this package raises into the training job.
"""
