"""A daemon that a command or a script brings along, where no service runs one."""

from rankdump.embedded.process import find_daemon, serving
from rankdump.embedded.sharing import Lease

__all__ = ["Lease", "find_daemon", "serving"]
