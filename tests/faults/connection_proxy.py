"""Byte proxy between sockets of two folders: cuts, delays or swallows connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_PIECE_BYTES = 1 << 16
_LOOK_S = 0.05


class ConnectionProxy:
    """Listens in its folder under the names of the sockets of the other folder."""

    def __init__(self, folder: Path, target: Path, names: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._target = target
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._delay_s = 0.0
        self._hole = False
        self._over = threading.Event()
        self._listeners = [self._listen(folder / name) for name in names]
        self._threads = [
            self._spawn(self._accept, listener, name)
            for listener, name in zip(self._listeners, names, strict=True)
        ]

    @property
    def connections(self) -> int:
        """How many there are now."""
        with self._lock:
            return len(self._pairs)

    def cut(self) -> int:
        """Cut every connection; return how many there were."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        return len(pairs)

    def delay(self, seconds: float) -> None:
        """Hold back every piece for so long."""
        self._delay_s = seconds

    def hole(self, open_: bool) -> None:
        """Swallow all bytes without closing the connection."""
        self._hole = open_

    def close(self) -> None:
        """Cut everything and stop listening."""
        self._over.set()
        self.hole(False)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _listen(self, path: Path) -> socket.socket:
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(64)
        return listener

    def _spawn(self, run: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, daemon=True, name="rig-proxy")
        thread.start()
        return thread

    def _accept(self, listener: socket.socket, name: str) -> None:
        while not self._over.is_set():
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(str(self._target / name))
            except OSError:
                near.close()
                far.close()
                continue
            pair = (near, far)
            with self._lock:
                self._pairs.add(pair)
            left = [2]
            self._spawn(self._pump, near, far, pair, left)
            self._spawn(self._pump, far, near, pair, left)

    def _pump(
        self,
        source: socket.socket,
        target: socket.socket,
        pair: tuple[socket.socket, socket.socket],
        left: list[int],
    ) -> None:
        try:
            while data := source.recv(_PIECE_BYTES):
                while self._hole and not self._over.is_set():
                    time.sleep(_LOOK_S)
                if self._delay_s:
                    time.sleep(self._delay_s)
                target.sendall(data)
        except OSError:
            pass
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left[0] -= 1
            if left[0]:
                return
            self._pairs.discard(pair)
        for end in pair:
            end.close()
