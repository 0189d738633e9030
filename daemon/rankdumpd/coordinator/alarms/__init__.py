"""Causes that freeze the black boxes of a whole job: freezes of its agents, which the coordinator
relays to the other agents, and causes that the coordinator finds itself, such as waits past half of
their timeout, and outliers among the ranks.

Each kind of alarm is a pure function that returns values of `JobFreeze`; `JobFreezes` decides which
of them begin a freeze.
"""
