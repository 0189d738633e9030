"""Runner of one target under atheris, from its corpus: `make fuzz TARGET=npys SECONDS=600`.

What breaks it is left as `build/fuzz/TARGET/found-*`, one input for each place that fails, to be
put into the corpus with its fix; the run continues.
"""

from __future__ import annotations

import hashlib
import logging
import resource
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

# Not to be seen by a checker: only the environment of `make fuzz` has it.
atheris: Any = import_module("atheris")

with atheris.instrument_imports(include=["rankdump", "rankdumpd"]):
    from fuzz.targets import CORPUS, fed

_ROOM_BYTES = 1 << 30
"""More address space than this a decoder of so small inputs must not take."""
_LONGEST_INPUT = 1 << 14
_LONGEST_RUN_S = 10


class _FindingRecorder:
    """Feeds a target, and keeps the first input for each place that fails."""

    def __init__(self, name: str, work: Path) -> None:
        self._name, self._work = name, work
        self._places: set[tuple[type, str, int]] = set()

    def __call__(self, data: bytes) -> None:
        try:
            fed(self._name, data)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = type(error), last.filename, last.lineno or 0
            if place not in self._places:
                self._places.add(place)
                file = self._work / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
                file.write_bytes(data)
                print(f"FOUND {file}", traceback.format_exc(), sep="\n", file=sys.stderr)


def main(name: str, seconds: int) -> None:
    """Fuzz until it breaks, or so long."""
    # What is refused is said, and here by thousands.
    logging.disable()
    work = Path("build/fuzz") / name
    (work / "corpus").mkdir(parents=True, exist_ok=True)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = taken + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    flags = (
        f"-max_total_time={seconds}",
        f"-max_len={_LONGEST_INPUT}",
        f"-timeout={_LONGEST_RUN_S}",
        f"-artifact_prefix={work}/",
        "-print_final_stats=1",
    )
    folders = str(work / "corpus"), str(CORPUS / name)
    atheris.Setup([sys.argv[0], *flags, *folders], _FindingRecorder(name, work))
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
