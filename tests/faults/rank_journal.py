"""Journal of a rank in a file that survives its death, and its reader."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from faults.values import RankLife

_NUMBER = struct.Struct("<Q")
NOT_CLOSED = {"tensors": 1, "outstanding": 1}
"""What a rank kept that did not come to closing its session."""


class RankJournal:
    """Lines, each written atomically, and the highest acknowledged number beside them."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._lines = os.open(path, flags | os.O_APPEND, 0o600)
        self._number = os.open(path.with_suffix(".acknowledged"), flags, 0o600)

    def say(self, **fields: Any) -> None:
        """Add a line."""
        os.write(self._lines, (json.dumps(fields) + "\n").encode())

    def acknowledged(self, number: int) -> None:
        """Note the highest number that is safe."""
        os.pwrite(self._number, _NUMBER.pack(number), 0)


def read(path: Path) -> RankLife | None:
    """Return what a journal says; None where its process did not come to opening a session."""
    said: dict[str, Any] = {"left": NOT_CLOSED}
    ended: dict[int, int] = {}
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        if "ended" in fields:
            ended[fields["ended"]] = fields["expected"]
        said |= fields
    if "session_id" not in said:
        return None
    number = path.with_suffix(".acknowledged").read_bytes()
    return RankLife(
        rank=said["rank"],
        life=said["life"],
        session_id=said["session_id"],
        root=said["root"],
        begun=said.get("begun", -1),
        ended=ended,
        closed=not said["left"]["tensors"] and not said["left"]["outstanding"],
        left=said["left"],
        acknowledged=_NUMBER.unpack(number)[0] if number else 0,
    )
