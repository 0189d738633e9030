"""The coordinator of a job: gathers what ranks executed, merges it into one order, publishes it."""
