"""Where those who write to a tree say so: each with a shared lock (flock) on one file in it.

Who wants it alone, to mend it, takes the same lock for itself.
"""

FOLDER = ".rankdump"
"""What stands in it is no dump; beside the file are claims on folders, and the state of ingests."""
LOCK_FILE = "agent.lock"
"""Empty: who holds it is the kernel's to say."""
