"""Access to MindSpore, which only this module imports. Every private interface of MindSpore that is
used is named here. MindSpore ships no types, so its names are `Any`.
"""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rankdump._core.element_types import ELEMENT_TYPES

_mindspore: Any = import_module("mindspore")
_api: Any = import_module("mindspore.common.api")
_bytecode: Any = import_module("mindspore.common._pijit_context")
_recompute: Any = import_module("mindspore.common.recompute")
_gradient: Any = import_module("mindspore.ops.composite.base")
_hooks: Any = import_module("mindspore.common.hook_handle")

Tensor: Any = _mindspore.Tensor
Parameter: Any = _mindspore.Parameter
Cell: Any = _mindspore.nn.Cell
Primitive: Any = _mindspore.ops.Primitive

ops: Any = _mindspore.ops
RecomputedCell: Any = _recompute._RecomputeCell
"""Class that runs a cell without saving tensors for the backward, and runs it again within the
backward.
"""

COMPILED_CALLS: tuple[tuple[Any, str], ...] = ((_api._JitExecutor, "__call__"),)
"""Methods that run compiled code."""
COMPILERS: tuple[tuple[Any, str], ...] = (
    (_api._JitExecutor, "compile"),
    (_api._CellGraphExecutor, "compile"),
)
"""Methods that compile: they read the source of the program, so they must find the original
functions.
"""
BYTECODE_CAPTURE: Any = _bytecode.PIJitCaptureContext
"""Context manager within which a compiler captures the code that the interpreter runs."""


def read_captured_arguments() -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of the function for which a bytecode capture begins or ends.

    MindSpore does not pass the arguments: they are read from the frame that enters the context.
    """
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != _bytecode.__file__:
        frame = frame.f_back
    found: dict[str, Any] = {} if frame is None else frame.f_locals
    return found.get("args", ()), found.get("kwds", {})


def is_method_of(function: Any, cell: object) -> bool:
    """Return whether a function is the attribute of the same name in a cell's class."""
    return isinstance(cell, Cell) and hasattr(type(cell), function.__name__)


MINDSPORE_FOLDER = str(Path(_mindspore.__file__).parent)
_DTYPE_NAMES = {
    getattr(_mindspore, name): name for name in ELEMENT_TYPES if hasattr(_mindspore, name)
}
_OPTIMIZER_CLASSES = (
    _mindspore.nn.Optimizer,
    import_module("mindspore.experimental.optim").Optimizer,
)


def iterate_namespaces() -> Iterator[Any]:
    """Yield the modules whose functions a program calls."""
    for name in ("ops", "ops.functional", "mint", "mint.nn.functional", "mint.linalg"):
        yield import_module(f"mindspore.{name}")
    yield import_module("mindspore.mint.special")


def is_graph_mode() -> bool:
    """Return whether cells are compiled as a whole, so that their calls are not visible."""
    if os.environ.get("MS_JIT") == "0":  # MindSpore compiles nothing then
        return False
    return bool(_mindspore.get_context("mode") == _mindspore.GRAPH_MODE)


def read_settings() -> dict[str, str]:
    """Return the seeds and flags that decide whether MindSpore's results can be reproduced."""
    settings = {"mindspore.seed": str(_mindspore.get_seed())}
    for name in ("mode", "deterministic", "device_target"):
        # Older releases do not have all of these keys.
        with suppress(ValueError, KeyError, RuntimeError):
            settings[f"mindspore.{name}"] = str(_mindspore.get_context(name))
    return settings


def read_generator_state() -> Any:
    """Return the state of MindSpore's random generator as a tensor; None in releases
    without one.
    """
    read = getattr(_mindspore, "get_rng_state", None)
    return None if read is None else read()


def is_recording_gradients() -> bool:
    """Return whether gradients are being recorded, so that a backward may follow."""
    return bool(_api._pynative_executor.requires_grad())


def read_dtype(tensor: Any) -> str:
    """Return the element type of a tensor: its common name, or MindSpore's name if it has none."""
    return _DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype)


def iterate_cells(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the cells of a model with their dotted paths; the path of the model itself is empty."""
    for path, cell in model.cells_and_names():
        # Recomputation adds cells of its own to those of the script.
        if _RECOMPUTATION_CELL not in path.split("."):
            yield path, cell


def iterate_own_parameters(cell: Any) -> Iterator[Any]:
    """Yield the own parameters of a cell, without those of cells inside it."""
    yield from cell.get_parameters(expand=False)


def iterate_primitives(cell: Any) -> Iterator[tuple[str, Any]]:
    """Yield the primitives that a cell holds, with the names of the attributes that hold them."""
    for name, primitive in getattr(cell, "_primitives", {}).items():
        if primitive is not None:
            yield name, primitive


def read_flags(cell: Any) -> dict[str, Any]:
    """Return the flags that `add_flags` set on a cell, for compilers."""
    # `get_flags` is not called because it would create the attribute.
    flags: dict[str, Any] = read_attributes(cell).get("_func_graph_flags", {})
    return flags


def read_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of a cell, a class or a module itself, without inherited ones."""
    attributes: dict[str, Any] = owner.__dict__
    return attributes


def read_dump_flag(cell: Any) -> bool | None:
    """Return the flag that `mindspore.set_dump` set on a cell; None if it was never called."""
    flag = read_flags(cell).get("dump")
    return None if flag is None else bool(flag)


def has_marked_primitive(cell: Any) -> bool:
    """Return whether `mindspore.set_dump` marked a primitive that a cell holds."""
    return any(each.attrs.get("dump") == "true" for _, each in iterate_primitives(cell))


STATE_ATTRIBUTES = frozenset(
    (
        "arguments_key",
        "cell_type",
        "grad_ops_label",
        "has_bprop",
        "is_top_cell",
        "mixed_precision_type",
        "requires_grad",
        "training",
    )
)
"""Public attributes that every cell has, which control how it runs and are not arguments."""
PLAIN_TYPES: tuple[type, ...] = (bool, int, float, str, type(None), _mindspore.Type)
"""Types whose values print the same text in every run, including element types."""

_RECOMPUTATION_CELL = "_recompute_cell"


def is_optimizer(cell: object) -> bool:
    """Return whether a cell is an optimizer of either of MindSpore's two kinds."""
    return isinstance(cell, _OPTIMIZER_CLASSES)


def has_optimizers() -> bool:
    """Return whether this process has an optimizer."""
    # The type is checked, because `__class__` of a proxy may run code of the object behind it.
    kinds: set[Any] = {type(each) for each in gc.get_objects()}
    return any(issubclass(kind, _OPTIMIZER_CLASSES) for kind in kinds)


def is_training_step(cell: object) -> bool:
    """Return whether a cell runs a whole training step, as `nn.TrainOneStepCell` does."""
    return isinstance(cell, _mindspore.nn.TrainOneStepCell)


def is_built_in(cell: object) -> bool:
    """Return whether a cell is one of MindSpore's layers or losses and contains no other cells."""
    module = type(cell).__module__
    return module.startswith(_LAYER_MODULES) and not module.endswith(".container")


def is_loss(cell: object) -> bool:
    """Return whether a cell is one of MindSpore's losses."""
    return type(cell).__module__.startswith("mindspore.nn.loss.")


_LAYER_MODULES = ("mindspore.nn.layer.", "mindspore.nn.loss.", "mindspore.mint.nn.layer.")


def find_recomputed_cell(region: Any) -> Any | None:
    """Return the cell whose method a recomputed region runs again; None if it runs a whole cell
    again.

    `cell.recompute()` runs the method; `mindspore.recompute(cell, ...)` calls the cell itself.
    """
    return getattr(getattr(region.net, "function", None), "__self__", None)


def add_hook(tensor: Any, hook: Callable[[Any], Any]) -> int:
    """Add a hook for a tensor's gradient; return the number of the hook.

    RuntimeError for a tensor without gradients.
    """
    # The method of `Tensor` is called because `Parameter.register_hook` makes MindSpore compile
    # everything anew.
    return int(Tensor.register_hook(tensor, hook).id)


def remove_hook(number: int) -> None:
    """Remove the hook with this number."""
    _hooks.Tensor_.remove_hook(number)


def list_hooks(tensor: Any) -> list[Callable[[Any], Any]]:
    """Return all hooks on a tensor, those of rankdump and of the job."""
    return list(tensor.hooks())


@dataclass(frozen=True, slots=True)
class DerivedFunction:
    """Function that `value_and_grad`, `grad`, `GradOperation` or `vmap` derived from another
    function.
    """

    kind: str
    """Kind of derivation: `value_and_grad`, `grad` or `vmap`."""
    program: Any
    """The original function or cell of the script."""
    weights: Any = None
    """Parameter or parameters whose gradients the function returns; None if it returns none."""
    gradients_index: int | None = None
    """Index of the gradients in the result; None if they are the whole result."""
    after_inputs: bool = False
    """Whether the gradients of parameters come after those of inputs."""


def find_derivation(function: Any) -> DerivedFunction | None:
    """Return how MindSpore derived a function; None if MindSpore did not derive it."""
    if not inspect.isfunction(function) or function.__module__ != _gradient.__name__:
        return None
    found = read_closure(function)
    program, grad = found.get("fn", found.get("fn_")), found.get("grad_")
    if program is None:
        return None
    if grad is None:
        return DerivedFunction("vmap", program)
    value, auxiliary = getattr(grad, "get_value", False), getattr(grad, "has_aux", False)
    return DerivedFunction(
        "value_and_grad" if value else "grad",
        program,
        weights=found.get("weights") if grad.get_by_list else None,
        gradients_index=1 if value else 0 if auxiliary else None,
        after_inputs=bool(getattr(grad, "get_by_position", False) or getattr(grad, "get_all", 0)),
    )


def read_closure(function: Any) -> dict[str, Any]:
    """Return a function's closure variables that have a value."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty closure cell has no value yet
            found[name] = cell.cell_contents
    return found


def is_mindspore_function(function: Any) -> bool:
    """Return whether a function is defined in MindSpore itself."""
    return str(getattr(function, "__module__", "")).startswith("mindspore.")
