"""Process that packs files at idle priority. It gets two descriptors for each file, one to read and
one to write, and knows no paths.

This is not a thread of the agent: while a thread of idle priority waits for a core, it may hold the
interpreter's lock, for which all other threads wait. The process ends with its agent, because the
agent's end of the channel closes then; what the process still writes goes to a file that has no
name any more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from functools import partial

from rankdump._codec.file_codec import get_codec
from rankdump._codec.zstd_frames import (
    STORED_HEAD_BYTES,
    is_stored_frame,
    iterate_stored_blocks,
    read_stored_size,
)
from rankdump.errors import CorruptedError
from rankdumpd.server import machine

_CODEC = "zstd"
_MAX_MESSAGE_BYTES = 4096


class PackProcess:
    """The pack process and the channel to it; for one thread, except for `close`."""

    def __init__(self, *, is_idle: bool) -> None:
        """Start the process; OSError where that fails. With `is_idle` it runs only on cores that
        are otherwise idle.
        """
        self.is_idle = is_idle
        self.has_failed = False
        """Whether the process does not answer any more."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, *(["idle"] if is_idle else [])]
        try:
            with theirs:
                # A separate session, so that signals from a terminal reach only the agent, and
                # because some kernels schedule each session at its own priority.
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    cwd="/",  # `-m` looks for modules here first
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise

    def pack(self, source: int, target: int) -> int:
        """Pack one open file into another; return the number of bytes that were written.

        CorruptedError when the file is not a stored frame, OSError when a disk or the process
        fails.
        """
        answer = b""
        with contextlib.suppress(OSError):
            socket.send_fds(self._channel, [b"pack"], [source, target])
            answer = self._channel.recv(_MAX_MESSAGE_BYTES)
        if not answer:
            self.has_failed = True
            raise OSError(errno.EAGAIN, "the process that packs files has ended")
        found = json.loads(answer)
        if "bytes" in found:
            return int(found["bytes"])
        if "number" in found:
            raise OSError(found["number"], found["error"])
        raise CorruptedError(found["error"])

    def close(self) -> None:
        """End the process; a call of `pack` in another thread fails then. May be repeated."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()


def pack_stored_file(source: int, target: int) -> int:
    """Pack an open file that is a stored frame into another; return the number of bytes written.

    CorruptedError when the file is not a stored frame, or was damaged since it was written.
    """
    size = os.fstat(source).st_size
    start = os.pread(source, STORED_HEAD_BYTES, 0)
    if not is_stored_frame(start):
        raise CorruptedError("not a file that was stored unpacked")
    blocks = iterate_stored_blocks(partial(_read_at, source), size)
    written = 0
    for packed in get_codec(_CODEC).encode_blocks(blocks, read_stored_size(start)):
        rest = memoryview(packed)
        while len(rest):
            rest = rest[os.write(target, rest) :]
        written += len(packed)
    return written


def _read_at(source: int, at: int, count: int) -> bytes:
    return os.pread(source, count, at)


def _serve(channel: socket.socket) -> None:
    """Pack files until the other end of the channel is closed."""
    while True:
        _, descriptors, _, _ = socket.recv_fds(channel, _MAX_MESSAGE_BYTES, 2)
        if len(descriptors) != 2:
            return
        try:
            answer: dict[str, object] = {"bytes": pack_stored_file(*descriptors)}
        except CorruptedError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": error.strerror or str(error), "number": error.errno or 0}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(json.dumps(answer).encode())


def main() -> None:
    """Serve the channel that is passed as standard input."""
    if "idle" in sys.argv[1:]:
        machine.become_idle()
    else:
        machine.lower_session_priority(os.getpriority(os.PRIO_PROCESS, 0))
    with socket.socket(fileno=0) as channel, contextlib.suppress(BrokenPipeError):
        _serve(channel)


if __name__ == "__main__":
    main()
