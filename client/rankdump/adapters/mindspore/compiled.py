"""Calls of compiled code as far as they can be seen from outside.

Which attached models such a call runs, what it is called, and which gradients it returns. Inside
of it no function of Python runs, so no cell, and no backward, is seen there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from rankdump.adapters.mindspore.framework import (
    Cell,
    Parameter,
    closure_of,
    find_derivation,
    is_mindspores_own,
)
from rankdump.adapters.mindspore.scopes import CellOperator
from rankdump.hook import Scope, scope_of

_NATIVE_DUMP = (
    "For these let MindSpore dump by itself: name a data_dump.json with another path in "
    "MINDSPORE_DUMP_CONFIG, and run `rankdump ingest THAT_PATH --into TREE --follow`"
)
COMPILED = (
    "MindSpore runs the model compiled (graph mode or jit): inputs and outputs of the outermost "
    "call, parameters, and gradients that reach Python are dumped, cells and operators inside it "
    f"are not. {_NATIVE_DUMP}"
)
"""Warning of a dump of cells when it meets compiled code."""
NO_ARGUMENTS = (
    "save_kernel_args: a compiled call has no arguments of its own, and those of the cells inside "
    "it are not written"
)
"""Warning of a dump with arguments when it meets compiled code."""
COMPILED_APIS = (
    "MindSpore runs compiled code (graph mode or jit): calls of the API inside it are not dumped. "
    f"{_NATIVE_DUMP}"
)
"""Warning of a dump of API calls when it meets compiled code."""

_MOST_VALUES = 256
"""How many values are looked at to find the models that a function runs."""


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call from Python of something that was compiled."""

    program: Any
    """The function, method or cell."""

    @staticmethod
    def of(function: Any, owner: Any = None) -> CompiledCall:
        """Return the call of a compiled function, or of a method and the object it is called on."""
        if owner is None or isinstance(function, MethodType):
            return CompiledCall(function)
        own = isinstance(owner, Cell) and function.__name__ == "construct"
        return CompiledCall(owner if own else MethodType(function, owner))

    @property
    def internal(self) -> bool:
        """Whether it is a function of MindSpore, and runs nothing of the script."""
        cell = isinstance(self.program, Cell)
        return (
            not cell and is_mindspores_own(self.program) and find_derivation(self.program) is None
        )


def returned_gradients(call: CompiledCall, result: Any) -> list[tuple[Any, Any]]:
    """Return the gradients in a result, each with its parameter; of most functions none.

    The function must be what `value_and_grad`, `grad` or `GradOperation` made of another one.
    """
    found = find_derivation(call.program)
    if found is None or found.weights is None:
        return []
    gradients = result if found.place is None else result[found.place]
    if found.after_inputs:
        gradients = gradients[1]
    if isinstance(found.weights, Parameter):
        return [(found.weights, _gradient_in(gradients))]
    if len(gradients) != len(found.weights):
        return []
    pairs = zip(found.weights, gradients, strict=True)
    return [(weight, _gradient_in(each)) for weight, each in pairs]


def _gradient_in(value: Any) -> Any:
    # With `return_ids` a gradient stands behind the name of its parameter.
    return cast("Any", value[1]) if isinstance(value, tuple) else value


class CompiledBoundary:
    """Finds the compiled calls that run one attached model, and are no call of one of its cells."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # What was asked about is kept: its identity must not become another's.
        self._known: dict[tuple[int, int], tuple[object, bool]] = {}

    def forget(self) -> None:
        """Look again at what was looked at: the script may have changed it."""
        self._known.clear()

    def scope(self, call: CompiledCall, operators: Mapping[int, CellOperator]) -> Scope | None:
        """Return the name of a call that runs the model, or None.

        `operators` are the model's cells by identity. The call of such a cell is observed as that,
        and has None as well.
        """
        if id(call.program) in operators or not self._runs(call.program, operators):
            return None
        made_of = find_derivation(call.program)
        if made_of is not None:
            return Scope(self._path(made_of.program, operators), made_of.how)
        if isinstance(call.program, Cell):
            return scope_of([("", type(call.program).__name__)])
        return Scope(self._path(call.program, operators), _name(call.program))

    def _path(self, program: Any, operators: Mapping[int, CellOperator]) -> str:
        """Return where a function, method or cell stands."""
        cell = getattr(program, "__self__", program)
        if not isinstance(cell, Cell):
            return _name(program)
        operator = operators.get(id(cell))
        return (
            scope_of([("", type(cell).__name__)]).path if operator is None else operator.scope.path
        )

    def _runs(self, program: Any, operators: Mapping[int, CellOperator]) -> bool:
        # A method is made anew each time that it is asked for.
        place = (id(getattr(program, "__func__", program)), id(getattr(program, "__self__", None)))
        known = self._known.get(place)
        if known is None:
            reached = any(self._holds(cell, operators) for cell in _cells_within(program))
            known = self._known[place] = (program, reached)
        return known[1]

    def _holds(self, cell: Any, operators: Mapping[int, CellOperator]) -> bool:
        if id(cell) in operators:
            return True
        return any(inside is self._model for _, inside in cell.cells_and_names())


def _cells_within(program: Any) -> Iterator[Any]:
    """Return the cells that a function names, or those that it calls name; of a cell itself."""
    waiting, seen = [program], set[int]()
    while waiting and len(seen) < _MOST_VALUES:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_cell(value):
            yield value
        else:
            waiting += _named_by(value)


def _named_by(value: Any) -> list[Any]:
    """Return what a function may call, and cells that stand in a container or an object."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        return [partial.func, *partial.args, *partial.keywords.values()]
    if isinstance(value, (list, tuple, dict)):
        parts = cast("Any", value.values() if isinstance(value, dict) else value)
        return list(parts) if len(parts) <= _MOST_VALUES else []
    if not isinstance(value, FunctionType):
        attributes = getattr(value, "__dict__", {}).values()
        return [each for each in attributes if _is_cell(each)]
    found = list(closure_of(value).values())
    if not is_mindspores_own(value):
        names = set(_names_in(value.__code__))
        found += [each for name, each in value.__globals__.items() if name in names]
    return [each for each in found if not isinstance(each, (type, type(inspect)))]


def _names_in(code: CodeType) -> Iterator[str]:
    """Return the global names that code uses, also in functions defined inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_cell(value: object) -> bool:
    # By the type itself: asking a proxy for its class may run what it stands for.
    return issubclass(type(value), Cell)


def _name(program: Any) -> str:
    name = str(getattr(program, "__name__", type(program).__name__))
    return "function" if name == "<lambda>" else name.replace("/", "_")
