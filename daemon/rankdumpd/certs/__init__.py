"""Private certificate authority in a folder, for sites without one."""
