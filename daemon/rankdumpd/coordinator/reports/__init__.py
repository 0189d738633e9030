"""Reports of agents, read from the wire and collected job by job."""
