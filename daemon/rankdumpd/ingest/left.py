"""What could not be taken, each said once; what is only being written is said at the end."""

from __future__ import annotations

from collections.abc import Callable

from rankdumpd.agent.values import Stamp
from rankdumpd.ingest.values import Left, Why

_BAD = (Why.DAMAGED, Why.FAILED, Why.WRITTEN)


class LeftBehind:
    """The files that are left for now, by path."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._left: dict[str, Left] = {}

    def __len__(self) -> int:
        return len(self._left)

    def note(self, left: Left) -> None:
        """Remember a file; one that is gone, or has to wait, is none."""
        if left.why not in _BAD:
            self.forget(left.path)
        elif self._left.get(left.path) != left:
            self._left[left.path] = left
            if left.why is not Why.WRITTEN:
                self._say(f"{left.path}: {left.text}")

    def forget(self, path: str) -> None:
        """It was taken, or is gone."""
        self._left.pop(path, None)

    def damaged(self, path: str, stamp: Stamp) -> bool:
        """Return whether exactly this file was found to be damaged."""
        left = self._left.get(path)
        return left is not None and left.why is Why.DAMAGED and left.stamp == stamp

    def to_retry(self) -> list[str]:
        """Return what may go better now."""
        return [path for path, left in self._left.items() if left.why is not Why.DAMAGED]

    def close(self, there: Callable[[str], bool]) -> None:
        """Forget what is gone meanwhile, and say what is still being written."""
        for path, left in list(self._left.items()):
            if not there(path):
                self.forget(path)
            elif left.why is Why.WRITTEN:
                self._say(f"{path}: {left.text}")
