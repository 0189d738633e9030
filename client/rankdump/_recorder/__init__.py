"""Recorder of a training process: copies or measures the tensors that the plan selects, counts
them, and passes them to the transport. No error of this package reaches the training job.
"""
