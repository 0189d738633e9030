"""People who look at pages of one server at once, half of whom read a few bytes a second.

`python -m bench.page_viewers PORT COOKIE PATH...` runs all of them until its standard input ends,
then prints how many pages the fast ones were given. `watched` runs that beside a measurement.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

FAST, SLOW = 25, 25
_SLOW_BYTES = 4
_SLOW_PAUSE_S = 1.0
_START_TIMEOUT_S = 120.0
_NICE = 19
"""Viewers are on hosts of their own, so they are not to take what the job needs of this one."""


@contextmanager
def watched(port: int, cookie: str, paths: Sequence[str]) -> Generator[list[int], None, None]:
    """Have pages looked at for as long as the block takes.

    The yielded list has the number of pages afterwards; RuntimeError when a viewer failed.
    """
    command = [sys.executable, "-m", "bench.page_viewers", str(port), cookie, *paths]
    pages: list[int] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # each fast viewer has been given a page
        yield pages
        said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"viewers of pages ended with {process.returncode}")
    pages.append(int(said))


class PageViewers:
    """All of them, each in a thread."""

    def __init__(self, port: int, cookie: str, paths: Sequence[str]) -> None:
        self._port, self._cookie, self._paths = port, cookie, paths
        self._over = threading.Event()
        self._started = threading.Barrier(FAST + 1)
        self._pages = [0] * FAST
        self._error = ""

    def run(self) -> int:
        """Look at pages until standard input ends; return how many."""
        jobs = [(self._read_fast, number) for number in range(FAST)]
        jobs += [(self._read_slowly, number) for number in range(SLOW)]
        threads = [threading.Thread(target=job, args=(n,), daemon=True) for job, n in jobs]
        for thread in threads:
            thread.start()
        self._started.wait(_START_TIMEOUT_S)
        print(flush=True)
        begun = sum(self._pages)
        sys.stdin.read()
        self._over.set()
        seen = sum(self._pages) - begun
        for thread in threads:
            thread.join()
        if self._error:
            sys.exit(self._error)
        return seen

    def _read_fast(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        first = number * len(self._paths) // FAST
        for path in itertools.chain(self._paths[first:], itertools.cycle(self._paths)):
            try:
                connection.request("GET", path, headers={"cookie": self._cookie})
                answer = connection.getresponse()
                answer.read()
            except ConnectionError:  # it was idle for as long as the server keeps one
                connection.close()
                continue
            if answer.status != 200:
                self._error = f"{path}: {answer.status}"
            if not self._pages[number]:
                self._started.wait(_START_TIMEOUT_S)
            self._pages[number] += 1
            if self._over.is_set():
                return

    def _read_slowly(self, number: int) -> None:
        path = self._paths[number % len(self._paths)]
        request = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\ncookie: {self._cookie}"
        while not self._over.is_set():
            with socket.socket() as connection, contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                connection.connect(("127.0.0.1", self._port))
                connection.sendall(f"{request}\r\n\r\n".encode())
                # Until the server closes the connection: that is its right.
                while connection.recv(_SLOW_BYTES) and not self._over.wait(_SLOW_PAUSE_S):
                    pass


def main() -> None:
    """Run all viewers."""
    os.nice(_NICE)
    port, cookie, *paths = sys.argv[1:]
    print(PageViewers(int(port), cookie, paths).run())


if __name__ == "__main__":
    main()
