"""Page of the model's modules: the hierarchy with marks for values that are not finite or large,
and the statistics of each operator. A closed part is loaded when it is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from rankdump._analysis.module_tree import (
    ModuleNode,
    OperatorTensor,
    TensorSeverity,
    find_module,
    make_module_tree,
)
from rankdump._analysis.table.table_schema import NONFINITE
from rankdump._web.dump_source import DumpSource, match_rows
from rankdump._web.page_kinds import AbsentPageError, PageKind, PageParameters

_MAX_CHILDREN = 300
_OPEN_ROWS = 60
"""Modules are open at the beginning as long as no more than this number of rows is shown."""
_MAX_LAYOUTS = 4


class ModuleRequest(NamedTuple):
    """Part of the model, iteration and rank that the page shows."""

    under: str
    """Path of a module; empty for the whole model."""
    iteration: int | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module or operator."""

    name: str
    path: str
    tensor_count: int
    severity: TensorSeverity
    nonfinite: int
    large: int
    tensors: tuple[OperatorTensor, ...]
    children: tuple[ModuleRow, ...]
    """Modules and operators in this module; empty if they are loaded when the module is opened."""
    child_count: int


@dataclass(frozen=True, slots=True)
class ModulePage:
    """Content of the page."""

    request: ModuleRequest
    above: tuple[tuple[str, str], ...]
    """Name and path of each module that contains the part, the outermost first."""
    modules: tuple[ModuleRow, ...]
    module_count: int
    tensors: tuple[OperatorTensor, ...]
    """Tensors of the part itself, if it is an operator."""
    opens_operators: bool
    """Whether the statistics of the listed operators are shown at once."""


def parse_modules(parameters: PageParameters) -> ModuleRequest:
    """Return the request that the parameters describe."""
    return ModuleRequest(
        under=parameters.read_text("under"),
        iteration=parameters.read_number("iteration"),
        rank=parameters.read_number("rank"),
    )


def build_modules(source: DumpSource, request: ModuleRequest) -> ModulePage:
    """Return the modules of a part; AbsentPageError if there is no such module."""
    place = request.iteration, request.rank
    root = source.keep(("modules", *place), lambda: _read_modules(source, *place))
    node = find_module(root, request.under)
    if node is None:
        raise AbsentPageError(f"no module {request.under!r} in the tree; /modules lists all")
    parts = request.under.split("/") if request.under else []
    above = tuple((part, "/".join(parts[: at + 1])) for at, part in enumerate(parts))
    children = [*node.children.values()][:_MAX_CHILDREN]
    rows = tuple(_make_row(child, _OPEN_ROWS // max(1, len(children))) for child in children)
    return ModulePage(
        request,
        above,
        rows,
        len(node.children),
        tuple(node.tensors),
        node.tensor_count <= _OPEN_ROWS,
    )


def _make_row(node: ModuleNode, room: int) -> ModuleRow:
    """Return the row of a module; with its children as long as `room` rows suffice."""
    children = [*node.children.values()] if len(node.children) <= room else []
    left = (room - len(children)) // max(1, len(children))
    return ModuleRow(
        *(node.name, node.path, node.tensor_count, node.severity, node.nonfinite, node.large),
        tuple(node.tensors),
        tuple(_make_row(child, left) for child in children),
        len(node.children),
    )


def _read_modules(source: DumpSource, iteration: int | None, rank: int | None) -> ModuleNode:
    conditions, values = match_rows(rank=rank, iteration=iteration)
    rows = source.get_rows(
        "SELECT CAST(name AS VARCHAR) AS name, CAST(op_type AS VARCHAR) AS op_type, "
        "CAST(side AS VARCHAR) AS side, slot, CAST(any_value(dtype) AS VARCHAR) AS dtype, "
        "any_value(shape) AS shape, list(DISTINCT CAST(layout AS VARCHAR)) AS layouts, "
        "max(l2norm) AS norm, max(max) AS maximum, min(min) AS minimum, "
        f"count(*) FILTER (WHERE {NONFINITE}) AS nonfinite, count(*) AS times "
        f"FROM tensors WHERE {' AND '.join(conditions)} "
        "GROUP BY name, op_type, side, slot ORDER BY min(position), name, side, slot",
        values,
    )
    return make_module_tree(map(_make_tensor, rows))


def _make_tensor(row: dict[str, Any]) -> OperatorTensor:
    layouts: list[str | None] = row["layouts"] or []
    shape: list[int] = row["shape"] or []
    known: dict[str, Any] = {
        "shape": tuple(shape),
        "layouts": tuple(sorted(filter(None, layouts))[:_MAX_LAYOUTS]),
        "slot": row["slot"] or 0,
    }
    return OperatorTensor(**(row | known))


MODULES = PageKind(
    "/modules",
    "modules.html",
    "Modules",
    parse_modules,
    build_modules,
    "modules_part.html",
    has_attempts=True,
)
