"""Source lines of operators, read from the `.ir` files of a tree or from the stack files of an API
dump, and the tensors of the operators that a line created. Only one operator at a time is in memory
while a file is read; lines that are not needed are skipped.

Supports the `.ir` files of the agent and of MindSpore 2.0 to 2.7. Tensors are found by the names of
their operators, because MindSpore renumbers operators between its graph and its dump.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, cast

from rankdump._analysis.reader.file_errors import named_errors, noted_errors
from rankdump._analysis.reader.foreign_dumps import (
    ForeignReader,
    find_foreign_reader,
    get_foreign_reader,
    read_foreign_stacks,
)
from rankdump._analysis.reader.tree import Entry, Figures
from rankdump._core.record import sanitize_name
from rankdump._layout import api_tree
from rankdump._layout import tree_paths as layout
from rankdump._layout.api_files import parse_source_line, parse_stack_key
from rankdump._layout.api_tree import ApiCall, parse_call_name
from rankdump._layout.profile import PROFILES
from rankdump._layout.statistic_tables import clean_table_field
from rankdump.errors import CorruptedError

_NODE_LINE = re.compile(r"\s*%\d+\([^)]*\) = (?:PrimFunc_)?([^\s(]+)\(")
_SCOPE_NAME_LINE = re.compile(r"\s*# Fullname with scope: \((.*)\)\s*")
# MindSpore 2.7 adds the last line and the columns; if a line has many operators, also a remark.
_FRAME_LINE = re.compile(
    r"\s*# (?:inlined:)?In file (?P<file>.+?):(?P<first>[0-9]{1,9})(?:~(?P<last>[0-9]{1,9}))?"
    r"(?:, [0-9]+~[0-9]+)?/(?P<code>.*?)/(?:<~~.*)?\s*"
)
_MAX_FRAME_CHARACTERS = 4096
"""Longest line that is searched for a frame, because the expression backtracks, which takes long in
longer lines.
"""

_GRAPH_FILE_NAME = re.compile(r".*_graph_([0-9]{1,9})\.ir")
_FILE_AND_LINE = re.compile(r"(.+):([0-9]{1,9})")
_OPERATOR_NUMBER = re.compile(r"-op[0-9]+(?:_[0-9]+)?$")
_FramePredicate: TypeAlias = "Callable[[Frame, Frame | None], bool]"
"""Test of a frame, given the frame that it has called."""
_GraphName: TypeAlias = "tuple[int, int, str]"
"""Rank, graph and name of an operator."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of the call stack of an operator."""

    file: str
    line: int
    last_line: int
    """Last line of a statement or function; else equal to `line`."""
    code: str
    """Text of the first line, stripped; empty if it is not known."""

    def holds(self, other: Frame) -> bool:
        """Return whether the lines of another frame are a smaller part of the lines of
        this frame.
        """
        mine, its = (self.line, self.last_line), (other.line, other.last_line)
        return self.file == other.file and mine[0] <= its[0] and its[1] <= mine[1] and mine != its


@dataclass(frozen=True, slots=True)
class IrOperator:
    """One operator of a graph with its call stack."""

    op_type: str
    op_name: str
    """Full scope name of the operator."""
    frames: tuple[Frame, ...]
    """Call stack, outermost frame first; a gradient has the frames of its operator."""


def read_ir_operators(path: Path) -> Iterator[IrOperator]:
    """Yield the operators of an `.ir` file in order; CorruptedError when it cannot be read."""
    with named_errors(path), path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from parse_ir_operators(file)


def parse_ir_operators(lines: Iterable[str]) -> Iterator[IrOperator]:
    """Yield the operators in the lines of an `.ir` file."""
    op_type, op_name, frames = "", "", list[Frame]()
    for line in lines:
        node = _NODE_LINE.match(line)
        if node:
            if op_name:
                yield IrOperator(op_type, op_name, tuple(frames))
            op_type, op_name, frames = node[1], "", []
        elif "# In file " in line or "# inlined:In file " in line:
            frame = _FRAME_LINE.fullmatch(line) if len(line) <= _MAX_FRAME_CHARACTERS else None
            if frame:
                frames.append(_parse_frame(frame))
        elif op_type and not op_name:
            name = _SCOPE_NAME_LINE.fullmatch(line)
            op_name = name[1] if name else ""
    if op_name:
        yield IrOperator(op_type, op_name, tuple(frames))


def _parse_frame(found: re.Match[str]) -> Frame:
    first = int(found["first"])
    last = int(found["last"] or first)
    return Frame(found["file"], first, max(first, last), found["code"].strip())


def read_stack_operators(path: Path) -> Iterator[IrOperator]:
    """Yield the calls of a stack file in order; CorruptedError when it is not a stack file."""
    with named_errors(path):
        try:
            body: object = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CorruptedError(f"not a stack file: {error}") from None
        if not isinstance(body, dict):
            raise CorruptedError("not a stack file: the content is not a JSON object")
    for key, lines in cast("dict[str, object]", body).items():
        op_name = parse_stack_key(key)
        if op_name:
            call = parse_call_name(op_name)
            yield IrOperator(call.op_type if call else op_name, op_name, _parse_frames(lines))


def find_backward_name(op_name: str) -> str:
    """Return the name of the backward call; empty unless `op_name` is the name of a forward API
    call.
    """
    call = parse_call_name(op_name)
    if call is None or call.direction != "forward":
        return ""
    return ApiCall(call.kind, call.api, call.number, "backward").name


def _parse_frames(lines: object) -> tuple[Frame, ...]:
    """Return the frames of a stack, outermost first; lines without a frame are skipped."""
    texts = cast("list[Any]", lines) if isinstance(lines, list) else []
    found = [parse_source_line(text) for text in reversed(texts) if isinstance(text, str)]
    return tuple(Frame(at.file, at.line, at.line, at.code) for at in found if at is not None)


@dataclass(frozen=True, slots=True)
class GraphFile:
    """One file with source lines: an `.ir` file of a tree, or the stack file of an API dump or of
    another tool.
    """

    path: Path
    rank: int
    graph: int
    tool: str = ""
    """Name of the other tool; empty for our files."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One operator of one graph, with the source line that created it."""

    rank: int
    graph: int
    op_type: str
    op_name: str
    """Full scope name of the operator as the graph has it."""
    frame: Frame
    """The innermost frame of the operator's stack that matches the question."""
    tensors: tuple[Entry | Figures, ...]
    """Files of the operator's tensors; if there are none, their rows; empty for an operator that
    was not dumped.
    """
    exact: bool = True
    """Whether the tensors have exactly the operator's name; if not, another number in the same
    scope.
    """


def graph_files(root: Path, ranks: tuple[int, ...], tool: str | None = None) -> list[GraphFile]:
    """Return the files with source lines of these ranks, sorted by rank and graph.

    `tool` is the tool of the tree, if that is known, because finding it out requires reading some
    files.
    """
    if tool:
        return _find_foreign_stacks(root, ranks, get_foreign_reader(tool))
    found = [
        GraphFile(path, rank, int(number[1]))
        for rank in ranks
        for path in (root / layout.make_rank_folder(rank) / layout.GRAPH_FOLDER).glob("*.ir")
        if (number := _GRAPH_FILE_NAME.fullmatch(path.name)) and path.is_file()
    ]
    found += [
        GraphFile(path, rank, 0)
        for rank in ranks
        for framework in api_tree.API_FRAMEWORKS
        for path in (
            (root / api_tree.make_api_rank_folder(rank))
            / api_tree.ApiFileNames(framework).stack_file,
        )
        if path.is_file()
    ]
    if not found and tool is None:
        foreign = find_foreign_reader(root)
        return [] if foreign is None else _find_foreign_stacks(root, ranks, foreign)
    return sorted(found, key=lambda file: (file.rank, file.graph))


def _find_foreign_stacks(
    root: Path, ranks: tuple[int, ...], foreign: ForeignReader
) -> list[GraphFile]:
    stacks = foreign.find_stacks(root) if foreign.find_stacks is not None else []
    found = [GraphFile(path, at.rank, 0, foreign.tool) for path, at in stacks if at.rank in ranks]
    return sorted(found, key=lambda file: file.rank)


def read_operators(file: GraphFile) -> Iterator[IrOperator]:
    """Yield the operators of a file with their stacks; CorruptedError when it cannot be read."""
    if file.tool:
        for op_type, op_name, lines in read_foreign_stacks(file.path, file.tool):
            frames = (Frame(at.file, at.line, at.line, at.code) for at in lines)
            yield IrOperator(op_type, op_name, tuple(frames))
        return
    yield from (
        read_stack_operators(file.path)
        if file.path.suffix == ".json"
        else read_ir_operators(file.path)
    )


class Search:
    """Search for the operators that a source line created; `problems` lists files that cannot be
    read.
    """

    def __init__(self, question: str, tensors: TensorSource) -> None:
        """The question is `file:line`, or a part of the line's text.

        `tensors` contains all tensors that may be found, or is a function that returns the tensors
        of some operators.
        """
        self.problems: list[str] = []
        self.files: set[str] = set()
        """Source files that the graphs name."""
        self._question = question
        self._tensors = tensors

    def origins(self, graphs: list[GraphFile]) -> list[Origin]:
        """Return the operators that match, in the order of the graphs.

        If a question `file:line` matches nothing, it is searched as text, because code may contain
        colons.
        """
        place = _FILE_AND_LINE.fullmatch(self._question.strip())
        found = self._matching(graphs, _frame_at_line(place[1], int(place[2]))) if place else []
        found = found or self._matching(graphs, _frame_with_text(self._question))
        names = OperatorNames(operator.op_name for _, operator, _ in found)
        tensors = self._tensors(names) if callable(self._tensors) else self._tensors
        index = _TensorNameIndex(tensors if found else (), names)
        return [
            Origin(
                *(file.rank, file.graph, operator.op_type, operator.op_name, frame),
                *index.tensors_of(file, operator.op_name),
            )
            for file, operator, frame in found
        ]

    def _matching(
        self, graphs: list[GraphFile], asked: _FramePredicate
    ) -> list[tuple[GraphFile, IrOperator, Frame]]:
        self.problems.clear()
        found: list[tuple[GraphFile, IrOperator, Frame]] = []
        for file in graphs:
            with noted_errors(self.problems):
                for operator in read_operators(file):
                    self.files.update(frame.file for frame in operator.frames)
                    frame = _innermost_frame(operator.frames, asked)
                    if frame is not None:
                        found.append((file, operator, frame))
        return found


class OperatorNames:
    """Names of operators in graphs, with the spellings that files and tables may use for them."""

    def __init__(self, op_names: Iterable[str]) -> None:
        self._spellings: set[str] = set()
        self._scopes: set[str] = set()
        for op_name in op_names:
            spellings = {op_name, *_spell_in_profiles(op_name)}
            self._spellings |= spellings | {clean_table_field(each) for each in spellings}
            self._scopes.add(_get_scope(sanitize_name(op_name)))

    def may_be(self, spelling: str) -> bool:
        """Return whether a name in a file, a table or a manifest may be one of these names."""
        return spelling in self._spellings or _get_scope(spelling) in self._scopes


TensorSource: TypeAlias = (
    "Iterable[Entry | Figures] | Callable[[OperatorNames], Iterable[Entry | Figures]]"
)


class _TensorNameIndex:
    """Index of tensors by the names of their operators."""

    def __init__(self, tensors: Iterable[Entry | Figures], names: OperatorNames) -> None:
        """Only tensors whose names are among `names` are indexed."""
        self._exact: defaultdict[_GraphName, list[Entry | Figures]] = defaultdict(list)
        self._scopes: defaultdict[_GraphName, list[Entry | Figures]] = defaultdict(list)
        for tensor in tensors:
            key = tensor.key
            spellings = {tensor.op_name, key.op_name}
            is_parameter = tensor.op_type == layout.PARAMETER_OP_TYPE
            if not is_parameter and any(map(names.may_be, spellings)):
                for name in spellings:
                    self._exact[key.rank, key.graph, name].append(tensor)
                self._scopes[key.rank, key.graph, _get_scope(key.op_name)].append(tensor)

    def tensors_of(self, file: GraphFile, op_name: str) -> tuple[tuple[Entry | Figures, ...], bool]:
        """Return the tensors of an operator, and whether they have exactly its name."""
        for name in (op_name, *sorted(_spell_in_profiles(op_name), key=len, reverse=True)):
            if (file.rank, file.graph, name) in self._exact:
                return tuple(self._exact[file.rank, file.graph, name]), True
        # Only the full scope is compared, because without its number every MatMul has the same
        # short name.
        scope = file.rank, file.graph, _get_scope(sanitize_name(op_name))
        others = self._scopes.get(scope, [])
        return tuple(others), not others


def _spell_in_profiles(op_name: str) -> set[str]:
    return {layout.spell_operator("", op_name, profile) for profile in PROFILES.values()}


def _get_scope(op_name: str) -> str:
    """Return a name without the operator's number at its end."""
    return _OPERATOR_NUMBER.sub("", op_name)


def _innermost_frame(frames: tuple[Frame, ...], asked: _FramePredicate) -> Frame | None:
    """Return the innermost frame of a stack that passes a test."""
    inner: Frame | None = None
    for frame in reversed(frames):
        if asked(frame, inner):
            return frame
        inner = frame
    return None


def _frame_at_line(file: str, line: int) -> _FramePredicate:
    same = _same_file_test(file)

    def asked(frame: Frame, inner: Frame | None) -> bool:
        if not frame.line <= line <= frame.last_line or not same(frame.file):
            return False
        # The frame of a function covers all its lines, and the next inner frame is the line that
        # ran.
        return frame.line == line or inner is None or not frame.holds(inner)

    return asked


def _same_file_test(wanted: str) -> Callable[[str], bool]:
    """Return a test whether one of two paths is the end of the other, by whole path components.

    Both may be absolute, because the path in a container may be the end of the path on the host.
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


def _frame_with_text(text: str) -> _FramePredicate:
    wanted = " ".join(text.split())

    def asked(frame: Frame, inner: Frame | None) -> bool:
        return bool(wanted) and wanted in " ".join(frame.code.split())

    return asked
