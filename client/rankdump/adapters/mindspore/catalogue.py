"""Which of MindSpore's functions, methods and primitives are calls of an API.

By rule: what MindSpore defines as an operator under a public name. What only asks a tensor
something, or serves the framework itself, is none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rankdump.adapters.mindspore.framework import Primitive, Tensor, namespaces, ops


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DEFINED_IN = (
    "mindspore.ops.function.",
    "mindspore.ops.auto_generate.",
    "mindspore.ops.functional_overload",
    "mindspore.ops.operations.manually_defined.",
    "mindspore.ops.composite.math_ops",
    "mindspore.mint",
)
_NOT_DEFINED_IN = (
    "mindspore.ops.function._add_attr_func",
    "mindspore.ops.function.debug_func",
    "mindspore.ops.function.grad.",
    "mindspore.ops.function.reshard_func",
    "mindspore.ops.function.vmap_func",
)
_QUESTIONS = _words("""
    is_tensor shape shape_ size dyn_shape rank typeof dtype is_complex is_floating_point isconstant
    is_contiguous is_signed is_init is_persistent_data allclose equal_all dim ndimension numel
    nelement item itemset tolist asnumpy numpy value type stride storage storage_offset
    untyped_storage data_ptr get_bytes data_sync wait_pipeline hooks register_hook remove_hook
    init_data set_const_arg set_cast_dtype set_device_address set_dtype set_init_flag
    flush_from_cache offload offload_file_path assign_value assign_value_cpp move_to
    asnumpy_of_slice_persistent_data persistent_data_from_numpy slice_num_of_persistent_data
    slice_shape_of_persistent_data to_coo to_csr stop_gradient
""")
"""Names that ask, convert or book, and compute nothing."""
_OPERATORS = frozenset(
    f"__{name}__"
    for name in _words("""
    abs add and eq floordiv ge getitem gt iadd ifloordiv imod imul invert isub itruediv le lt matmul
    mod mul ne neg or pos pow radd rfloordiv rmatmul rmod rmul rpow rsub rtruediv setitem sub
    truediv xor
    """)
)
_OUT_OF_PROGRAM = _words("""
    Depend HookBackward InsertGradientOf Load Print TensorDump TensorSummary ScalarSummary
    StopGradient ImageSummary HistogramSummary UpdateState
""")
_COMMUNICATION = "mindspore.ops.operations.comm_ops"


@dataclass(frozen=True, slots=True)
class Api:
    """What can be called: `Functional`, `relu`."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program finds an API: an attribute of a module or class."""

    owner: Any
    name: str
    function: Callable[..., Any]
    api: Api


def places() -> Iterator[Place]:
    """Return every place of every API."""
    yield from _functions()
    yield from _methods()
    yield from _primitives()


def api_of_primitive(primitive: object) -> Api | None:
    """Return what a call of a primitive is; None for one that is no part of the program."""
    kind = type(primitive)
    # Those without a class of their own ask for types and lengths.
    if kind is Primitive or kind.__name__ in _OUT_OF_PROGRAM or kind.__name__.startswith("_"):
        return None
    return Api("Distributed" if kind.__module__ == _COMMUNICATION else "Functional", kind.__name__)


def _functions() -> Iterator[Place]:
    for module in namespaces():
        for name, value in _attributes(module).items():
            if not name.startswith("_") and name not in _QUESTIONS and _is_operator(value):
                yield Place(module, name, value, Api("Functional", name))


def _is_operator(value: Any) -> bool:
    if not inspect.isfunction(value):
        return False
    module = value.__module__
    return module.startswith(_DEFINED_IN) and not module.startswith(_NOT_DEFINED_IN)


def _methods() -> Iterator[Place]:
    for name in dir(Tensor):
        if name in _QUESTIONS or (name.startswith("_") and name not in _OPERATORS):
            continue
        value = inspect.getattr_static(Tensor, name)
        if inspect.isfunction(value) or inspect.ismethoddescriptor(value):
            yield Place(Tensor, name, value, Api("Tensor", name))


def _primitives() -> Iterator[Place]:
    """Return the classes that say how their instances, which are operators, are called."""
    kinds: list[Any] = [value for value in _attributes(ops).values() if _is_primitive(value)]
    # Each once, in one order; of a class that inherits its call, the one it has it from.
    for base in dict.fromkeys(base for kind in (Primitive, *kinds) for base in kind.__mro__):
        call = _attributes(base).get("__call__")
        if call is not None and _is_primitive(base):
            yield Place(base, "__call__", call, Api("Functional", ""))


def _is_primitive(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Primitive)


def _attributes(owner: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(owner.__dict__)
    return found
