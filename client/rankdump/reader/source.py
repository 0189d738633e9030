"""Which operators came from a line of the script, and which files are theirs.

The lines are those that the `.ir` files of a tree recorded, or its stack files; the tensors are
found by the operators' names, which MindSpore numbers anew between its graph and its dump
(mindspore-observed.md 2.7).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from rankdump.contract.errors import DamagedError
from rankdump.contract.key import sanitised
from rankdump.contract.layout import api_tree
from rankdump.contract.layout import mindspore_sync as layout
from rankdump.contract.layout.profile import PROFILES
from rankdump.reader.calls import calls
from rankdump.reader.entry import Entry
from rankdump.reader.figures import Figures
from rankdump.reader.ir import Frame, IrOperator, operators

_GRAPH_FILE = re.compile(r".*_graph_([0-9]{1,9})\.ir")
_PLACE = re.compile(r"(.+):([0-9]{1,9})")
_NUMBER = re.compile(r"-op[0-9]+(?:_[0-9]+)?$")
_Question: TypeAlias = "Callable[[Frame, Frame | None], bool]"
"""Whether a place is meant, given the one that it called."""


@dataclass(frozen=True, slots=True)
class GraphFile:
    """One `.ir` file of a tree, or the stack file of a dump of APIs."""

    path: Path
    rank: int
    graph: int


@dataclass(frozen=True, slots=True)
class Origin:
    """One operator of one graph, and where it came from."""

    rank: int
    graph: int
    op_type: str
    op_name: str
    """Full scope name, as the graph has it."""
    frame: Frame
    """The innermost place of its stack that was asked for."""
    tensors: tuple[Entry | Figures, ...]
    """Its files, or its rows where no files are; empty for an operator that was not dumped."""
    exact: bool = True
    """Whether they carry the very name; without this another number of the same scope."""


def graph_files(root: Path, ranks: tuple[int, ...]) -> list[GraphFile]:
    """Return the files of these ranks that say where operators came from, by rank and graph."""
    found = [
        GraphFile(path, rank, int(number[1]))
        for rank in ranks
        for path in (root / layout.rank_folder(rank) / layout.GRAPH_FOLDER).glob("*.ir")
        if (number := _GRAPH_FILE.fullmatch(path.name)) and path.is_file()
    ]
    found += [
        GraphFile(path, rank, 0)
        for rank in ranks
        for framework in api_tree.FRAMEWORKS
        for path in ((root / api_tree.rank_folder(rank)) / api_tree.ApiFiles(framework).stacks,)
        if path.is_file()
    ]
    return sorted(found, key=lambda file: (file.rank, file.graph))


def called_from(file: GraphFile) -> Iterator[IrOperator]:
    """Yield the operators of a file with their stacks; DamagedError when it cannot be read."""
    yield from calls(file.path) if file.path.suffix == ".json" else operators(file.path)


class Search:
    """Answers one question over the graphs of a tree; names what it could not read."""

    def __init__(self, question: str, tensors: Iterable[Entry | Figures]) -> None:
        """The question is `file:line`, or a piece of the line's text."""
        self.problems: list[str] = []
        self.files: set[str] = set()
        """Source files that the graphs name."""
        self._question = question
        self._by_place: defaultdict[tuple[int, int], list[Entry | Figures]] = defaultdict(list)
        for tensor in tensors:
            self._by_place[tensor.key.rank, tensor.key.graph].append(tensor)

    def origins(self, graphs: list[GraphFile]) -> list[Origin]:
        """Return the operators in the order of the graphs.

        What looks like a place and is found nowhere is searched as text: code has colons too.
        """
        place = _PLACE.fullmatch(self._question.strip())
        found = self._matching(graphs, _at(place[1], int(place[2]))) if place else []
        return found or self._matching(graphs, _with(self._question))

    def _matching(self, graphs: list[GraphFile], asked: _Question) -> list[Origin]:
        self.problems.clear()
        found: list[Origin] = []
        for file in graphs:
            index = _Index(self._by_place[file.rank, file.graph])
            for operator in self._operators(file):
                self.files.update(frame.file for frame in operator.frames)
                frame = _innermost(operator.frames, asked)
                if frame is not None:
                    tensors, exact = index.tensors_of(operator.op_name)
                    names = operator.op_type, operator.op_name
                    found.append(Origin(file.rank, file.graph, *names, frame, tensors, exact))
        return found

    def _operators(self, file: GraphFile) -> Iterator[IrOperator]:
        try:
            yield from called_from(file)
        except DamagedError as error:
            self.problems.append(str(error))


class _Index:
    """Tensors by the names that an operator can have in them."""

    def __init__(self, tensors: list[Entry | Figures]) -> None:
        self._exact: defaultdict[str, list[Entry | Figures]] = defaultdict(list)
        self._scopes: defaultdict[str, list[Entry | Figures]] = defaultdict(list)
        for tensor in tensors:
            if tensor.op_type != layout.PARAMETER:
                for name in {tensor.op_name, tensor.key.op_name}:
                    self._exact[name].append(tensor)
                self._scopes[_NUMBER.sub("", tensor.key.op_name)].append(tensor)

    def tensors_of(self, op_name: str) -> tuple[tuple[Entry | Figures, ...], bool]:
        """Return an operator's tensors, and whether they carry its very name."""
        spelt = {layout.spelt("", op_name, profile) for profile in PROFILES.values()}
        for name in (op_name, *sorted(spelt, key=len, reverse=True)):
            if name in self._exact:
                return tuple(self._exact[name]), True
        # Never by a short name: without its number every MatMul has the same one.
        others = self._scopes.get(_NUMBER.sub("", sanitised(op_name)), [])
        return tuple(others), not others


def _innermost(frames: tuple[Frame, ...], asked: _Question) -> Frame | None:
    """Return the last place of a stack that was asked for."""
    inner: Frame | None = None
    for frame in reversed(frames):
        if asked(frame, inner):
            return frame
        inner = frame
    return None


def _at(file: str, line: int) -> _Question:
    same = _same_file(file)

    def asked(frame: Frame, inner: Frame | None) -> bool:
        if not frame.line <= line <= frame.last_line or not same(frame.file):
            return False
        # A function is recorded with all its lines, and the line in it that was run after it.
        return frame.line == line or inner is None or not frame.holds(inner)

    return asked


def _same_file(wanted: str) -> Callable[[str], bool]:
    """Return a test whether one of two paths ends in the other, whole names compared.

    Both may be absolute: a container's path is the tail of its host's.
    """
    parts = _parts(wanted)

    @cache
    def same(recorded: str) -> bool:
        others = _parts(recorded)
        common = min(len(parts), len(others))
        return common > 0 and parts[-common:] == others[-common:]

    return same


def _parts(path: str) -> tuple[str, ...]:
    return PurePosixPath(path.lstrip("/")).parts


def _with(text: str) -> _Question:
    wanted = " ".join(text.split())

    def asked(frame: Frame, inner: Frame | None) -> bool:
        return bool(wanted) and wanted in " ".join(frame.code.split())

    return asked
