"""The agent of one host: receives tensors from local ranks, writes the dump tree and reports to the
coordinator of each job.

The packages depend on each other in one direction: storage and ledger on the values in `records`,
session on storage and ledger, report on ledger and session, shm on session, limits on session and
shm, commit on report and limits, retention and backlog on ledger, limits and session, ingress on
commit and shm. `service` constructs the agent from them.
"""
