"""Adapters of frameworks: each observes the models of one framework and hands tensors and events to
a recorder. Each adapter imports the framework that is already there, never another one; an
adapter never raises into the training job.
"""
