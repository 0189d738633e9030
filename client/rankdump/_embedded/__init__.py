"""Embedded daemons: daemons that a command or a job starts for itself on a host where no service
runs one.
"""

from __future__ import annotations

from rankdump._embedded.daemon_lease import DaemonLease, check_daemon_installed, is_daemon_serving

__all__ = ["DaemonLease", "check_daemon_installed", "is_daemon_serving"]
