"""What freezes the black boxes of a whole job: freezes of its agents, which the coordinator hands
to the others, and what it finds itself, as waits past half of their timeout, and outliers among the
ranks.

Each kind of alarm is a pure function that returns values of `JobFreeze`; `JobFreezes` decides which
of them begin a freeze.
"""
