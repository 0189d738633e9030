"""Entry point of `python -m rankdump`, the same as the command `rankdump`."""

from __future__ import annotations

from rankdump._cli.main import main

if __name__ == "__main__":
    main()
