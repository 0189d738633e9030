"""Cells of a model: their names, the arguments of their configuration, and the compiled calls that
run them, as far as these are visible from outside.

Arguments are plain values that print the same text in every run, never tensors, cells or
initializers. Inside a compiled call no Python function runs, so neither cells nor a backward are
visible there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from rankdump._frameworks.mindspore.framework import (
    PLAIN_TYPES,
    STATE_ATTRIBUTES,
    Cell,
    Parameter,
    find_derivation,
    is_mindspore_function,
    iterate_cells,
    iterate_own_parameters,
    iterate_primitives,
    read_attributes,
    read_closure,
    read_flags,
)
from rankdump._frameworks.model_observer import is_plain_value
from rankdump._frameworks.operator_names import OperatorScope, make_scope


@dataclass(frozen=True, slots=True)
class CellOperator:
    """Cell of a model with its scope; the cell is kept alive, so that its identity stays unique."""

    cell: Any
    scope: OperatorScope


def find_cell_operators(model: Any) -> dict[int, CellOperator]:
    """Return the cells of a model by identity; a cell that is in two places is named after the
    first place.
    """
    classes = {path: type(cell).__name__ for path, cell in iterate_cells(model)}
    return {
        id(cell): CellOperator(cell, _make_cell_scope(path, classes))
        for path, cell in iterate_cells(model)
    }


def iterate_parameter_names(model: Any, chosen: Callable[[Any], bool]) -> Iterator[str]:
    """Yield the names of the own parameters of the chosen cells."""
    for _, cell in iterate_cells(model):
        if chosen(cell):
            for parameter in iterate_own_parameters(cell):
                yield parameter.name


def _make_cell_scope(path: str, classes: dict[str, str]) -> OperatorScope:
    parts = [("", classes[""])]
    names = path.split(".") if path else []
    for depth, name in enumerate(names, 1):
        # A name that contains a dot makes path components that are no cells.
        parts.append((name, classes.get(".".join(names[:depth]), "")))
    return make_scope(parts)


_IGNORED_ATTRIBUTES = frozenset(("input_names", "output_names", "dump"))
"""Attributes of primitives that name inputs and outputs, or control dumps."""


def read_cell_arguments(cell: Any) -> dict[str, str]:
    """Return the arguments of a cell as texts, sorted by name.

    The name of an argument of a primitive begins with the primitive's attribute:
    `matmul.transpose_b`.
    """
    left_out = STATE_ATTRIBUTES | read_flags(cell).keys()
    found = {
        name: str(value)
        for name, value in read_attributes(cell).items()
        if not name.startswith("_") and name not in left_out and _is_plain(value)
    }
    for name, primitive in iterate_primitives(cell):
        for key, value in primitive.attrs.items():
            if (
                key not in _IGNORED_ATTRIBUTES
                and not key.startswith("side_effect")
                and _is_plain(value)
            ):
                found[f"{name}.{key}"] = str(value)
    return dict(sorted(found.items()))


def _is_plain(value: object) -> bool:
    return is_plain_value(value, PLAIN_TYPES, (tuple, list))


_NATIVE_DUMP_HINT = (
    "To dump them, use MindSpore's own dump: name a data_dump.json with another path in "
    "MINDSPORE_DUMP_CONFIG, and run `rankdump ingest THAT_PATH --into TREE --follow`"
)
COMPILED_WARNING = (
    "MindSpore runs the model compiled (graph mode or jit): inputs and outputs of the outermost "
    "call, parameters, and gradients that reach Python are dumped, cells and operators inside it "
    f"are not. {_NATIVE_DUMP_HINT}"
)
"""Warning of a dump of cells when it meets compiled code."""
NO_ARGUMENTS_WARNING = (
    "save_kernel_args: for a compiled call no arguments are written, neither its own nor those of "
    "the cells inside it"
)
"""Warning of a dump with arguments when it meets compiled code."""
COMPILED_APIS_WARNING = (
    "MindSpore runs compiled code (graph mode or jit): API calls inside it are not dumped. "
    f"{_NATIVE_DUMP_HINT}"
)
"""Warning of a dump of API calls when it meets compiled code."""

_MAX_SEARCHED_VALUES = 256
"""Maximum number of values that are searched to find the models that a function runs."""


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """Call of compiled code from Python."""

    program: Any
    """The called function, method or cell."""

    @staticmethod
    def from_function(function: Any, owner: Any = None) -> CompiledCall:
        """Return the call of a compiled function, or of a method of `owner`."""
        if owner is None or isinstance(function, MethodType):
            return CompiledCall(function)
        own = isinstance(owner, Cell) and function.__name__ == "construct"
        return CompiledCall(owner if own else MethodType(function, owner))

    @property
    def is_internal(self) -> bool:
        """Whether the called function is MindSpore's own, which runs no code of the script."""
        cell = isinstance(self.program, Cell)
        return (
            not cell
            and is_mindspore_function(self.program)
            and find_derivation(self.program) is None
        )


def match_returned_gradients(call: CompiledCall, result: Any) -> list[tuple[Any, Any]]:
    """Return the gradients in the result of a compiled call, each with its parameter.

    Only functions made by `value_and_grad`, `grad` or `GradOperation` return any.
    """
    found = find_derivation(call.program)
    if found is None or found.weights is None:
        return []
    gradients = result if found.gradients_index is None else result[found.gradients_index]
    if found.after_inputs:
        gradients = gradients[1]
    if isinstance(found.weights, Parameter):
        return [(found.weights, _unpack_gradient(gradients))]
    if len(gradients) != len(found.weights):
        return []
    pairs = zip(found.weights, gradients, strict=True)
    return [(weight, _unpack_gradient(each)) for weight, each in pairs]


def _unpack_gradient(value: Any) -> Any:
    # With `return_ids` the value is a pair of the parameter's name and the gradient.
    return cast("Any", value[1]) if isinstance(value, tuple) else value


class CompiledCallFinder:
    """Finds compiled calls that run one attached model, other than calls of its own cells."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # The dictionary keeps programs alive, so that their identities stay unique.
        self._known: dict[tuple[int, int], tuple[object, bool]] = {}

    def clear(self) -> None:
        """Forget all programs, because the script may have changed them."""
        self._known.clear()

    def find_scope(
        self, call: CompiledCall, operators: Mapping[int, CellOperator]
    ) -> OperatorScope | None:
        """Return the scope of a call that runs the model; None for any other call.

        `operators` are the model's cells by identity. For a call of such a cell the result is None
        too, because it is observed as the call of a cell.
        """
        if id(call.program) in operators or not self._runs_model(call.program, operators):
            return None
        derived = find_derivation(call.program)
        if derived is not None:
            return OperatorScope(self._find_path(derived.program, operators), derived.kind)
        if isinstance(call.program, Cell):
            return make_scope([("", type(call.program).__name__)])
        return OperatorScope(
            self._find_path(call.program, operators), _format_program_name(call.program)
        )

    def _find_path(self, program: Any, operators: Mapping[int, CellOperator]) -> str:
        """Return the path of a function, method or cell as operator names have it."""
        cell = getattr(program, "__self__", program)
        if not isinstance(cell, Cell):
            return _format_program_name(program)
        operator = operators.get(id(cell))
        return (
            make_scope([("", type(cell).__name__)]).path
            if operator is None
            else operator.scope.path
        )

    def _runs_model(self, program: Any, operators: Mapping[int, CellOperator]) -> bool:
        # A method object is created on each access, so its identity is no key.
        place = (id(getattr(program, "__func__", program)), id(getattr(program, "__self__", None)))
        known = self._known.get(place)
        if known is None:
            reached = any(
                self._contains_model(cell, operators) for cell in _iterate_named_cells(program)
            )
            known = self._known[place] = (program, reached)
        return known[1]

    def _contains_model(self, cell: Any, operators: Mapping[int, CellOperator]) -> bool:
        if id(cell) in operators:
            return True
        return any(inside is self._model for _, inside in cell.cells_and_names())


def _iterate_named_cells(program: Any) -> Iterator[Any]:
    """Yield the cells that a function refers to, directly or in functions that it calls; for a
    cell, the cell itself.
    """
    waiting, seen = [program], set[int]()
    while waiting and len(seen) < _MAX_SEARCHED_VALUES:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_cell(value):
            yield value
        else:
            waiting += _list_named_values(value)


def _list_named_values(value: Any) -> list[Any]:
    """Return the functions, and the cells in containers and objects, that a value refers to."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        return [partial.func, *partial.args, *partial.keywords.values()]
    if isinstance(value, (list, tuple, dict)):
        parts = cast("Any", value.values() if isinstance(value, dict) else value)
        return list(parts) if len(parts) <= _MAX_SEARCHED_VALUES else []
    if not isinstance(value, FunctionType):
        attributes = getattr(value, "__dict__", {}).values()
        return [each for each in attributes if _is_cell(each)]
    found = list(read_closure(value).values())
    if not is_mindspore_function(value):
        names = set(_iterate_global_names(value.__code__))
        found += [each for name, each in value.__globals__.items() if name in names]
    return [each for each in found if not isinstance(each, (type, type(inspect)))]


def _iterate_global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that code uses, including those in nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iterate_global_names(constant)


def _is_cell(value: object) -> bool:
    # The type is checked, because `__class__` of a proxy may run code of the object behind it.
    return issubclass(type(value), Cell)


def _format_program_name(program: Any) -> str:
    name = str(getattr(program, "__name__", type(program).__name__))
    return "function" if name == "<lambda>" else name.replace("/", "_")
