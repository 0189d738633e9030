"""A daemon that a command or a script brings along, where no service runs one."""

from rankdump.embedded.process import Daemon, find_daemon, serving
from rankdump.embedded.sharing import Lease

__all__ = ["Daemon", "Lease", "find_daemon", "serving"]
