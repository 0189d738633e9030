"""State of a coordinator that outlives its process."""
