"""Charts of a dump for reports: their data, their drawing, and the HTML page of a chart."""
