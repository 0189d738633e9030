"""MindSpore itself: imported here and nowhere else. What of it is not public is named here.

It brings no types, so its names are Any.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from rankdump.contract.dtypes import ELEMENT_TYPES

_mindspore: Any = import_module("mindspore")
_api: Any = import_module("mindspore.common.api")
_bytecode: Any = import_module("mindspore.common._pijit_context")
_recompute: Any = import_module("mindspore.common.recompute")

Tensor: Any = _mindspore.Tensor
Parameter: Any = _mindspore.Parameter
Cell: Any = _mindspore.nn.Cell
Primitive: Any = _mindspore.ops.Primitive

ops: Any = _mindspore.ops
RecomputedCell: Any = _recompute._RecomputeCell
"""Runs a cell without keeping what its backward needs, and once more within the backward."""

COMPILED_CALLS: tuple[tuple[Any, str], ...] = ((_api._JitExecutor, "__call__"),)
"""Methods that run what was compiled."""
COMPILERS: tuple[tuple[Any, str], ...] = (
    (_api._JitExecutor, "compile"),
    (_api._CellGraphExecutor, "compile"),
)
"""Methods that read the source of the program: it has to find the functions that stand there."""
BYTECODE_CAPTURE: Any = _bytecode.PIJitCaptureContext
"""Between its `__enter__` and `__exit__` a compiler follows what the interpreter runs."""

FOLDER = str(Path(_mindspore.__file__).parent)
_DTYPES = {getattr(_mindspore, name): name for name in ELEMENT_TYPES if hasattr(_mindspore, name)}
_OPTIMIZERS = (
    _mindspore.nn.Optimizer,
    import_module("mindspore.experimental.optim").Optimizer,
)


def namespaces() -> Iterator[Any]:
    """Return the modules whose functions a program calls."""
    for name in ("ops", "ops.functional", "mint", "mint.nn.functional", "mint.linalg"):
        yield import_module(f"mindspore.{name}")
    yield import_module("mindspore.mint.special")


def in_graph_mode() -> bool:
    """Return whether cells are compiled as a whole, and so run out of sight."""
    return bool(_mindspore.get_context("mode") == _mindspore.GRAPH_MODE)


def records_gradients() -> bool:
    """Return whether a backward will follow what runs now."""
    return bool(_api._pynative_executor.requires_grad())


def dtype_of(tensor: Any) -> str:
    """Return the element type of a tensor: its common name, or MindSpore's of any other."""
    return _DTYPES.get(tensor.dtype) or str(tensor.dtype)


def cells_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Return the cells of a model, each with its dotted path; its own is empty."""
    for path, cell in model.cells_and_names():
        # Recomputation puts cells of its own beside those of the script.
        if _RECOMPUTATION not in path.split("."):
            yield path, cell


_RECOMPUTATION = "_recompute_cell"


def is_optimizer(cell: object) -> bool:
    """Return whether a cell is an optimizer, of either of MindSpore's kinds."""
    return isinstance(cell, _OPTIMIZERS)


def has_optimizers() -> bool:
    """Return whether there is an optimizer in this process."""
    # By the type itself: asking a proxy for its class may run what it stands for.
    kinds: set[Any] = {type(each) for each in gc.get_objects()}
    return any(issubclass(kind, _OPTIMIZERS) for kind in kinds)


def is_training_step(cell: object) -> bool:
    """Return whether a cell runs a whole step, as `nn.TrainOneStepCell` does."""
    return isinstance(cell, _mindspore.nn.TrainOneStepCell)


def is_built_in(cell: object) -> bool:
    """Return whether a cell is one of MindSpore's layers or losses, and contains no others."""
    module = type(cell).__module__
    return module.startswith(_LAYER_MODULES) and not module.endswith(".container")


def is_loss(cell: object) -> bool:
    """Return whether a cell is one of MindSpore's losses."""
    return type(cell).__module__.startswith("mindspore.nn.loss.")


_LAYER_MODULES = ("mindspore.nn.layer.", "mindspore.nn.loss.", "mindspore.mint.nn.layer.")


def recomputed_by_method(region: Any) -> Any | None:
    """Return the cell whose method a recomputed cell runs again; None when it runs a whole cell.

    So it is for `cell.recompute()`; `mindspore.recompute(cell, ...)` calls the cell itself.
    """
    return getattr(getattr(region.net, "function", None), "__self__", None)


def register_hook(tensor: Any, hook: Callable[[Any], Any]) -> Any:
    """Have a function called with a tensor's gradient; return what takes it away again."""
    return tensor.register_hook(hook)
