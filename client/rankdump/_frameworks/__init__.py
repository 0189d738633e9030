"""Adapters of frameworks: each adapter observes the models of one framework and passes tensors and
events to a recorder. An adapter imports only the framework that the job already uses, and never
raises into the training job.
"""
