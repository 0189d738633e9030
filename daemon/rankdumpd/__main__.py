"""Entry point of `rankdumpd`, with a one-line error when the extra `daemon` is not installed."""

from __future__ import annotations

import signal
import sys

_EXTRA = (
    "click",
    "cryptography",
    "grpc_health",
    "grpc_reflection",
    "inotify_simple",
    "prometheus_client",
    "tomli",
)


_DAEMONS = ("agent", "coordinator", "standalone")


def run() -> None:
    """Run the command line and exit with its status."""
    if sys.argv[1:2] and sys.argv[1] in _DAEMONS:
        # SIGHUP would end the process; only a daemon that has started handles it, as a reload.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        from rankdumpd.main import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(
            f"rankdumpd: module {error.name} is missing; install it with: "
            "pip install 'rankdump[daemon]'\n"
        )
        sys.exit(2)
    main(prog_name="rankdumpd")


if __name__ == "__main__":
    run()
