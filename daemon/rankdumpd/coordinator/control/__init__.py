"""Control of running jobs: which iteration a change begins with, and which ranks take it."""
