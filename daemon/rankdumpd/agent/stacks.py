"""Where calls of APIs came from, to the stack file of their rank: valid after every addition."""

from __future__ import annotations

import contextlib
import os
import re

from rankdump.contract.exchange import CallStacks
from rankdump.contract.layout.api_stacks import entry, is_module, key_in, key_of
from rankdump.contract.layout.place import Place
from rankdumpd.agent.tree import Tree

_CLOSES = b"\n}"
# The end of an entry whose stack has lines, or of one that has none.
_ENTRY_END = re.compile(rb'\n    (?:\]|"[^\n]*": \[\])(?=,?(?:\n|\Z))')
_LOOK_BACK_BYTES = 1 << 16


class StackFile:
    """The stack file of one session's rank; not for several threads.

    Its closing brace is written over, and the file is never read as a whole but for the keys that
    are there: once by each process, and for what may have been added before a crash.
    """

    def __init__(self, tree: Tree, place: Place, framework: str) -> None:
        self._tree, self._place, self._framework = tree, place, framework
        self._modules: set[str] | None = None
        """Keys of modules that are there: those come again with every call."""

    def add(self, stacks: CallStacks, *, again: bool) -> None:
        """Add calls that are not there; with `again` each may have been added before.

        After an OSError none of them is there.
        """
        keys = [key_of(self._framework, name) for name in stacks.calls]
        had = self._had(set(keys), again=again)
        entries: list[str] = []
        for key, place in zip(keys, stacks.stacks, strict=True):
            if key not in had:
                had.add(key)
                entries.append(entry(key, stacks.texts[place]))
        if entries:
            data = ",\n".join(entries).encode()
            self._tree.change(
                self._place.folder, self._place.name, lambda file: self._extend(file, data)
            )
        self._modules = {key for key in had if is_module(key)}

    def _had(self, keys: set[str], *, again: bool) -> set[str]:
        """Return the keys of modules that are there, and those of `keys` where that can be."""
        if self._modules is not None and not again:
            return set(self._modules)
        folder, name = self._place.folder, self._place.name
        if not self._tree.has(folder, name):
            return set()
        # The first line of an entry says nothing where a crash left no more of it.
        self._tree.change(folder, name, _mend)
        there = map(key_in, self._tree.each_line(folder, name))
        return {key for key in there if is_module(key) or (again and key in keys)}

    def _extend(self, file: int, data: bytes) -> None:
        end = _end_of_entries(file)
        whole = b"".join((b",\n" if end else b"{\n", data, _CLOSES))
        try:
            _write_at(file, whole, end)
        except BaseException:
            with contextlib.suppress(OSError):
                _mend(file)
            raise


def _mend(file: int) -> None:
    end = _end_of_entries(file)
    _write_at(file, _CLOSES if end else b"", end)


def _write_at(file: int, data: bytes, start: int) -> None:
    left, at = memoryview(data), start
    while left:
        count = os.pwrite(file, left, at)
        left, at = left[count:], at + count
    os.ftruncate(file, at)


def _end_of_entries(file: int) -> int:
    """Return where the last whole entry ends; 0 when there is none."""
    size = os.fstat(file).st_size
    tail = os.pread(file, len(_CLOSES) + 6, max(0, size - len(_CLOSES) - 6))
    if tail.endswith(b"\n    ]" + _CLOSES):
        return size - len(_CLOSES)
    reach = _LOOK_BACK_BYTES
    while True:
        start = max(0, size - reach)
        ends = [found.end() for found in _ENTRY_END.finditer(os.pread(file, size - start, start))]
        if ends or not start:
            return start + ends[-1] if ends else 0
        reach *= 2
