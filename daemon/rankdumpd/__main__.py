"""Makes `python -m rankdumpd` the command `rankdumpd`."""

from __future__ import annotations

from rankdumpd.main import main

if __name__ == "__main__":
    main(prog_name="rankdumpd")
