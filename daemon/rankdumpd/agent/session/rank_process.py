"""How the process of a rank ended: its exit code or signal, read from a process descriptor.

Only a parent gets this from wait(2), and ranks are not children of their agent. Since Linux 6.15 a
pidfd that was opened before the end tells it to other processes too, once the parent has waited
(pidfd.h, PIDFD_GET_INFO with PIDFD_INFO_EXIT). On older kernels it remains unknown how a process
ended.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct

from rankdumpd.agent.records import FileDescriptor

_INFO_BYTES = 64
"""Size of struct pidfd_info, version 0: two 64-bit numbers and 12 of 32 bits, the last one the
status.
"""
_GET_INFO = (3 << 30) | (_INFO_BYTES << 16) | (0xFF << 8) | 11
"""The ioctl number _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)."""
_INFO_EXIT = 1 << 3
_STATUS_OFFSET = 60


def open_process(pid: int) -> FileDescriptor | None:
    """Return a descriptor of a process of this host; None where there is no such process."""
    try:
        return FileDescriptor(os.pidfd_open(pid))
    except (OSError, AttributeError, OverflowError, ValueError):
        return None


def has_process_ended(process: FileDescriptor) -> bool:
    """Return whether a process has ended; its descriptor becomes readable then (pidfd_open(2))."""
    poll = select.poll()
    poll.register(process.number, select.POLLIN)
    return bool(poll.poll(0))


def is_process_here(pid: int, host: str) -> bool:
    """Return whether a process of that number runs on this host; False for those of other hosts."""
    process = open_process(pid) if host == socket.gethostname() else None
    return process is not None and not has_process_ended(process)


def read_process_end(process: FileDescriptor) -> str:
    """Return how a process ended, as `format_process_end` does; empty while that is not known."""
    info = bytearray(_INFO_BYTES)
    struct.pack_into("<Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(process.number, _GET_INFO, info)
    except OSError:
        return ""
    (known,) = struct.unpack_from("<Q", info, 0)
    if not known & _INFO_EXIT:
        return ""
    (status,) = struct.unpack_from("<i", info, _STATUS_OFFSET)
    return format_process_end(os.waitstatus_to_exitcode(status))


def format_process_end(code: int) -> str:
    """Return the name of a signal for a negative code, else the exit code in words.

    >>> format_process_end(-6), format_process_end(1)
    ('SIGABRT', 'exit code 1')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
