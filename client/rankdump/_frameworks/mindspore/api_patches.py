"""API calls of MindSpore, and the patches of its functions, methods, primitives, cells and
compilers, all installed and removed together.

By rule, an API call is an operator that MindSpore defines under a public name, except queries of a
tensor and functions for the framework itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rankdump._frameworks.attribute_patch import AttributePatch
from rankdump._frameworks.mindspore.framework import (
    BYTECODE_CAPTURE,
    COMPILED_CALLS,
    COMPILERS,
    Cell,
    Primitive,
    RecomputedCell,
    Tensor,
    iterate_namespaces,
    ops,
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
    # Primitives without their own class query types and lengths.
    if kind is Primitive or kind.__name__ in _FRAMEWORK_PRIMITIVES or kind.__name__.startswith("_"):
        return None
    return MindSporeApi(
        "Distributed" if kind.__module__ == _COMMUNICATION_MODULE else "Functional", kind.__name__
    )


def _iterate_functions() -> Iterator[ApiLocation]:
    for module in iterate_namespaces():
        for name, value in _copy_attributes(module).items():
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
    kinds: list[Any] = [value for value in _copy_attributes(ops).values() if _is_primitive(value)]
    # Each class once, in a fixed order; for an inherited `__call__`, the class that defines it.
    for base in dict.fromkeys(base for kind in (Primitive, *kinds) for base in kind.__mro__):
        call = _copy_attributes(base).get("__call__")
        if call is not None and _is_primitive(base):
            yield ApiLocation(base, "__call__", call, MindSporeApi("Functional", ""))


def _is_primitive(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Primitive)


def _copy_attributes(owner: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(owner.__dict__)
    return found


class AttributePatches:
    """Replaced attributes of modules and classes, which can be restored."""

    def __init__(self) -> None:
        self._planned: dict[tuple[int, str], AttributePatch] = {}

    def plan(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Replace an attribute from the next `install` on; the first plan for it counts."""
        self._planned.setdefault((id(owner), name), AttributePatch(owner, name, ours))

    def install(self) -> None:
        """Replace all planned attributes."""
        for planned in self._planned.values():
            planned.install()

    def remove(self) -> None:
        """Restore the attributes, except those that other code has replaced meanwhile."""
        for planned in self._planned.values():
            planned.remove()


class CallInterceptor(Protocol):
    """Runs intercepted calls."""

    def make_call(
        self, api: MindSporeApi, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run an API call."""
        ...

    def call_cell(self, function: Callable[..., Any], cell: Any, args: Any, kwargs: Any) -> Any:
        """Run the call of a cell."""
        ...

    def run_compiled(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run compiled code."""
        ...

    def run_region(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, again: bool
    ) -> Any:
        """Run a region that is recomputed; the cell is its first argument."""
        ...

    def pause(self, args: Any, kwargs: Any) -> None:
        """Prepare for a compiler that reads the program, for a call with these arguments."""
        ...

    def resume(self) -> None:
        """Undo `pause` after a compiler has read the program."""
        ...

    def capture_begins(self, context: Any) -> None:
        """Note the start of a function that a bytecode compiler captures."""
        ...

    def capture_ends(self, context: Any, *, raised: bool) -> None:
        """Note the end of a function that a bytecode compiler captured."""
        ...


def make_call_patches(caller: CallInterceptor) -> AttributePatches:
    """Return the patches that intercept the program's calls."""
    found = AttributePatches()
    for place in iterate_api_locations():
        of_primitive = place.name == "__call__"
        wrap = _wrap_primitive if of_primitive else _wrap_function
        found.plan(place.owner, place.name, wrap(caller, place.api, place.function))
    call = Cell.__call__

    @functools.wraps(call)
    def of_cell(self: Any, *args: Any, **kwargs: Any) -> Any:
        return caller.call_cell(call, self, args, kwargs)

    found.plan(Cell, "__call__", of_cell)
    for name, again in (("construct", False), ("bprop", True)):
        ours = _wrap_region(caller, getattr(RecomputedCell, name), again=again)
        found.plan(RecomputedCell, name, ours)
    return found


def _wrap_function(
    caller: CallInterceptor, api: MindSporeApi, function: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return caller.make_call(api, function, args, kwargs)

    return observed


def _wrap_primitive(
    caller: CallInterceptor, _: MindSporeApi, function: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        api = find_primitive_api(self)
        if api is None:
            return function(self, *args, **kwargs)
        return caller.make_call(api, functools.partial(function, self), args, kwargs)

    return observed


def _wrap_region(
    caller: CallInterceptor, function: Callable[..., Any], *, again: bool
) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return caller.run_region(function, args, kwargs, again=again)

    return observed


def make_compiler_patches(caller: CallInterceptor) -> AttributePatches:
    """Return the patches that remove the others while the program is compiled."""
    found = AttributePatches()
    for owner, name in COMPILERS:
        found.plan(owner, name, _wrap_compiler(caller, getattr(owner, name)))
    for owner, name in COMPILED_CALLS:
        found.plan(owner, name, _wrap_compiled(caller, getattr(owner, name)))
    enter, leave = BYTECODE_CAPTURE.__enter__, BYTECODE_CAPTURE.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        caller.capture_begins(self)
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            caller.capture_ends(self, raised=error[0] is not None)

    found.plan(BYTECODE_CAPTURE, "__enter__", entered)
    found.plan(BYTECODE_CAPTURE, "__exit__", left)
    return found


def _wrap_compiler(caller: CallInterceptor, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        caller.pause(args, kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            caller.resume()

    return compiling


def _wrap_compiled(caller: CallInterceptor, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def running(*args: Any, **kwargs: Any) -> Any:
        return caller.run_compiled(function, args, kwargs)

    return running
