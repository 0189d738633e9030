"""API calls of MindSpore, and the modules and classes that have its functions, methods and
primitives.

An API call is an operator that MindSpore defines under a public name, except queries of a tensor
and functions for the framework itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rankdump._frameworks.mindspore.framework import (
    Primitive,
    Tensor,
    iterate_namespaces,
    ops,
    read_attributes,
)


def _split_words(text: str) -> frozenset[str]:
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
_QUERY_NAMES = _split_words("""
    is_tensor shape shape_ size dyn_shape rank typeof dtype is_complex is_floating_point isconstant
    is_contiguous is_signed is_init is_persistent_data allclose equal_all dim ndimension numel
    nelement item itemset tolist asnumpy numpy value type stride storage storage_offset
    untyped_storage data_ptr get_bytes data_sync wait_pipeline hooks register_hook remove_hook
    init_data set_const_arg set_cast_dtype set_device_address set_dtype set_init_flag
    flush_from_cache offload offload_file_path assign_value assign_value_cpp move_to
    asnumpy_of_slice_persistent_data persistent_data_from_numpy slice_num_of_persistent_data
    slice_shape_of_persistent_data to_coo to_csr stop_gradient
""")
"""Names of functions that query, convert or register, and compute nothing."""
_OPERATOR_METHODS = frozenset(
    f"__{name}__"
    for name in _split_words("""
    abs add and eq floordiv ge getitem gt iadd ifloordiv imod imul invert isub itruediv le lt matmul
    mod mul ne neg or pos pow radd rfloordiv rmatmul rmod rmul rpow rsub rtruediv setitem sub
    truediv xor
    """)
)
_FRAMEWORK_PRIMITIVES = _split_words("""
    Depend HookBackward InsertGradientOf Load Print TensorDump TensorSummary ScalarSummary
    StopGradient ImageSummary HistogramSummary UpdateState
""")
_COMMUNICATION_MODULE = "mindspore.ops.operations.comm_ops"


@dataclass(frozen=True, slots=True)
class MindSporeApi:
    """Kind and name of an API, such as `Functional`, `relu`."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class ApiLocation:
    """Location of an API: an attribute of a module or class."""

    owner: Any
    name: str
    function: Callable[..., Any]
    api: MindSporeApi


def iterate_api_locations() -> Iterator[ApiLocation]:
    """Yield every location of every API."""
    yield from _iterate_functions()
    yield from _iterate_methods()
    yield from _iterate_primitives()


def find_primitive_api(primitive: object) -> MindSporeApi | None:
    """Return the API of a primitive; None for one that is not part of the program."""
    kind = type(primitive)
    # Primitives that have no class of their own query types and lengths.
    if kind is Primitive or kind.__name__ in _FRAMEWORK_PRIMITIVES or kind.__name__.startswith("_"):
        return None
    return MindSporeApi(
        "Distributed" if kind.__module__ == _COMMUNICATION_MODULE else "Functional", kind.__name__
    )


def _iterate_functions() -> Iterator[ApiLocation]:
    for module in iterate_namespaces():
        for name, value in dict(read_attributes(module)).items():
            if not name.startswith("_") and name not in _QUERY_NAMES and _is_operator(value):
                yield ApiLocation(module, name, value, MindSporeApi("Functional", name))


def _is_operator(value: Any) -> bool:
    if not inspect.isfunction(value):
        return False
    module = value.__module__
    return module.startswith(_DEFINED_IN) and not module.startswith(_NOT_DEFINED_IN)


def _iterate_methods() -> Iterator[ApiLocation]:
    for name in dir(Tensor):
        if name in _QUERY_NAMES or (name.startswith("_") and name not in _OPERATOR_METHODS):
            continue
        value = inspect.getattr_static(Tensor, name)
        if inspect.isfunction(value) or inspect.ismethoddescriptor(value):
            yield ApiLocation(Tensor, name, value, MindSporeApi("Tensor", name))


def _iterate_primitives() -> Iterator[ApiLocation]:
    """Yield the classes of primitives that define `__call__`."""
    kinds: list[Any] = [
        value for value in dict(read_attributes(ops)).values() if _is_primitive(value)
    ]
    # Each class is yielded once, in a fixed order; for an inherited `__call__`, the class that
    # defines it.
    for base in dict.fromkeys(base for kind in (Primitive, *kinds) for base in kind.__mro__):
        call = read_attributes(base).get("__call__")
        if call is not None and _is_primitive(base):
            yield ApiLocation(base, "__call__", call, MindSporeApi("Functional", ""))


def _is_primitive(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Primitive)
