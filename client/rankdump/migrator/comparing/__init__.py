"""`api_dump_compare`: two dumps of API calls side by side, with troubleshooter's rows and numbers.

Reads what releases 1.0.13 to 1.0.18 wrote, and what `api_dump_start` of rankdump wrote. For
rounded numbers, the place where two runs part, and an exit code there is `rankdump diff`.
"""

from rankdump.migrator.comparing.compare import api_dump_compare

__all__ = ["api_dump_compare"]
