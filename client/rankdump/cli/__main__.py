"""Makes `python -m rankdump.cli` the same as `rankdump`."""

from rankdump.cli.main import main

if __name__ == "__main__":
    main()
