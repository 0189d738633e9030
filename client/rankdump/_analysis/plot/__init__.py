"""Charts of a dump for reports: what they show, their drawing, and the page around one."""
