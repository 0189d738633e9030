"""Private certificate authority in a folder, for people who have none."""
