"""What a tree says of iterations that were removed from it: a line each, beside its manifests.

`rank_N/.dump_metadata/retired.jsonl`, an object a line, added before the first file goes. A line
may stand there twice. Pure.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rankdump.contract.errors import DamagedError

RETIRED_FILE = "retired.jsonl"


@dataclass(frozen=True, slots=True)
class Retired:
    """A rank's part of an iteration that was removed because of its age, or for room."""

    job_id: str
    session_id: str
    rank: int
    iteration: int
    at_us: int
    """When that began, since the epoch."""
    why: str
    """`age` or `size`."""

    def to_line(self) -> str:
        """Return its line, without an end."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> Retired:
        """Read a line back; DamagedError when it is anything else."""
        try:
            body: dict[str, Any] = json.loads(line)
            texts = [body[name] for name in ("job_id", "session_id", "why")]
            numbers = [body[name] for name in ("rank", "iteration", "at_us")]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a name is no text")
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise TypeError("a number is none")
            return Retired(texts[0], texts[1], *numbers, why=texts[2])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedError(f"a line of {RETIRED_FILE} cannot be read: {error}") from None
