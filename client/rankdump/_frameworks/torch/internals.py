"""Private interfaces of torch that the adapter depends on, each with its behaviour if the installed
torch lacks it. Those of process groups are in `communication`, those of pipelines in
`forward_passes`.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

# These are C modules whose stubs, where there are any, leave much unknown.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateUsage=false, reportMissingModuleSource=false, reportUnknownParameterType=false


_C: Any = torch._C
_functorch: Any = getattr(_C, "_functorch", None)
_autograd: Any = getattr(_C, "_autograd", None)
_eval_frame: Any = getattr(getattr(_C, "_dynamo", None), "eval_frame", None)


is_wrapped: Callable[[Tensor], bool] = getattr(
    _functorch, "is_functorch_wrapped_tensor", lambda _tensor: False
)
"""Returns whether a tensor is a wrapper of torch.func."""


def unwrap_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of torch.func; that of a vmapped tensor includes the
    batch.
    """
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def has_own_elements(tensor: Tensor) -> bool:
    """Return whether a tensor holds its elements itself and not through its Python class."""
    kind: Any = type(tensor)
    if kind is Tensor or kind is Parameter:
        return True
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__


read_version: Callable[[Tensor], int] = attrgetter("_version")
"""Returns how often a tensor was changed in place; RuntimeError in inference mode."""


def find_base(tensor: Tensor) -> Tensor | None:
    """Return the base of a view; None if the tensor is not a view."""
    return tensor._base


def has_only_reference(tensors: Sequence[Tensor]) -> bool:
    """Return whether only the caller's sequence refers to the tensors and their memory.

    Then nothing can write to them any more.
    """
    count_uses = getattr(_C, "_storage_Use_Count", None)
    if count_uses is None:
        return False
    for tensor in tensors:
        # Three references are our own: the sequence, the loop variable, and the argument of the
        # call.
        if sys.getrefcount(tensor) > 3 or tensor._use_count() > 1:
            return False
        memory = tensor.untyped_storage()
        # Two uses are our own: the tensor, and the object of its storage that was just created.
        if count_uses(memory._cdata) > 2:
            return False
    return True


def read_node_number(node: Any) -> int:
    """Return the number of a node of autograd's graph; nodes are numbered in the order in which
    their thread created them.
    """
    return node._sequence_nr()


def read_structure(model: Module) -> list[object] | None:
    """Return the structure of a model, which stays equal as long as nothing is added, removed or
    moved.

    The result is None if the parts of a module cannot be listed. It holds only identities of
    modules and parameters, which are valid as long as the caller keeps these alive.
    """
    # The structure is read twice in each armed iteration. The loop is fast for the usual module,
    # which has no children or no tensors.
    found: list[object] = []
    waiting, seen, scripted = [model], set[int](), torch.jit.ScriptModule
    while waiting:
        module = waiting.pop()
        identity = id(module)
        if identity in seen:
            continue
        if isinstance(module, scripted):
            return None
        seen.add(identity)
        found += (identity, type(module), module.training, id(find_compiled_call(module)))
        children, parameters, buffers = module._modules, module._parameters, module._buffers
        for parts in (children, parameters):
            if parts:
                found += parts
                found += map(id, parts.values())
        if buffers:
            # A buffer may be another tensor after every step, so only its name counts, and whether
            # it is None.
            found += [(name, part is None) for name, part in buffers.items()]
            found += module._non_persistent_buffers_set
        if children:
            waiting += [child for child in children.values() if child is not None]
    return found


def is_persistent(module: Module, buffer: str) -> bool:
    """Return whether a buffer of the module is part of its state."""
    return buffer not in module._non_persistent_buffers_set


disable_function_modes: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunction
"""Context in which tensor functions are hidden from a user's function modes."""


@contextmanager
def disable_observation() -> Generator[None]:
    """Hide all operations on tensors in the block from autograd, autocast, torch.func and modes of
    the user.
    """
    with (
        _C.DisableTorchFunction(),
        _C._DisableTorchDispatch(),
        _disable_autocast(),
        torch.no_grad(),
        _disable_transforms(),
    ):
        yield


def has_mode(mode: TorchFunctionMode) -> bool:
    """Return whether a function mode is on this thread's stack."""
    at = _C._len_torch_function_stack()
    while at:
        at -= 1
        if _C._get_function_stack_at(at) is mode:
            return True
    return False


def push_mode(mode: TorchFunctionMode) -> None:
    """Put a function mode on this thread's stack, below the modes that `with` blocks will pop.

    The mode of the default device stays lowest, because torch expects it there.
    """
    above: list[TorchFunctionMode] = []
    while _C._len_torch_function_stack():
        above.append(_C._pop_torch_function_stack())
    if above and isinstance(above[-1], DeviceContext):
        _C._push_on_torch_function_stack(above.pop())
    for each in (mode, *reversed(above)):
        _C._push_on_torch_function_stack(each)


def remove_mode(mode: TorchFunctionMode) -> bool:
    """Remove a function mode from any place in this thread's stack; return whether it was there."""
    if not has_mode(mode):
        return False
    above: list[TorchFunctionMode] = []
    while (top := _C._pop_torch_function_stack()) is not mode:
        above.append(top)
    for each in reversed(above):
        _C._push_on_torch_function_stack(each)
    return True


def call_past_modes(function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Call a function without this thread's highest mode, which still sees the calls inside the
    function.

    If torch is too old for this, the mode sees neither.
    """
    if hasattr(_C, "_skip_one_hop_torch_function"):
        return _C._skip_one_hop_torch_function(function, types, args, kwargs)
    with disable_function_modes():
        return function(*args, **kwargs)


def _disable_autocast() -> AbstractContextManager[Any]:
    # If torch is too old for this, it may compute in autocast's types.
    return _C._DisableAutocast() if hasattr(_C, "_DisableAutocast") else nullcontext()


def _disable_transforms() -> AbstractContextManager[Any]:
    if _functorch is None or _functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def is_tracing() -> bool:
    """Return whether tensors are only traced and not computed; no hook may touch them then."""
    return torch.compiler.is_compiling() or _C._get_tracing_state() is not None


def skip_compilation(function: Callable[..., Any]) -> None:
    """Exclude a function and the calls inside it from compilation, unless it is being traced now.

    If torch is too old for this, it may compile the function, which then observes nothing.
    """
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        skip = _eval_frame._FrameAction.SKIP
        strategy = _eval_frame._FrameExecStrategy(skip, skip)
        _eval_frame.set_code_exec_strategy(getattr(function, "__code__", None), strategy)
    elif hasattr(_eval_frame, "skip_code"):
        _eval_frame.skip_code(getattr(function, "__code__", None))


def has_compiled_code() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("stats", {}).get("unique_graphs"))


def explain_uncompilable_observation() -> str:
    """Return why an operator cannot observe the inside of compiled regions; empty if it can.

    Operators with effects in a compiled backward were tried only with torch 2.13 and later.
    """
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release >= (2, 13) and hasattr(torch.library.Library, "_register_effectful_op"):
        return ""
    return (
        f"inside_compiled needs torch 2.13 or later, and this is {torch.__version__}: of compiled "
        "regions only the boundary is seen"
    )


def register_effect(library: Any, name: str) -> None:
    """Register an operator with an effect, which compilers must neither remove nor reorder."""
    from torch._library.effects import EffectType

    library._register_effectful_op(name, EffectType.ORDERED)


def is_region_traced() -> bool:
    """Return whether Dynamo is tracing a region for a compiler, and not a program for export."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


def find_untraceable_scope() -> str:
    """Return the construct around the traced code in which torch allows no operator with an effect.

    The result is empty if there is none. In torch 2.13 compilation fails for such operators inside
    activation checkpointing, control flow and other higher-order operators, inside torch.func, and
    where DDP splits the graph at its buckets: the first call of a part then returns the effect's
    token.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.utils import get_optimize_ddp_mode

    if find_running_ddp() is not None and get_optimize_ddp_mode() == "ddp_optimizer":
        return "DistributedDataParallel, unless torch._dynamo.config.optimize_ddp is False,"
    if _functorch is not None and _functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    if InstructionTranslator.current_tx().output.current_tracer.parent is not None:
        return "activation checkpointing, control flow or an autograd function"
    return ""


def find_compiled_call(module: Module) -> Callable[..., Any] | None:
    """Return the call that `Module.compile` installed in a module; None if there is none."""
    return getattr(module, "_compiled_call_impl", None)


def find_plain_call(module: Module) -> Callable[..., Any]:
    """Return the original call of a module, which runs its hooks."""
    return module._call_impl


def set_compiled_call(module: Module, call: Callable[..., Any] | None) -> None:
    """Set the call that `Module.compile` installs in a module; None removes it."""
    module._compiled_call_impl = call


def read_pre_hooks(module: Module) -> dict[int, Callable[..., Any]]:
    """Return the forward pre-hooks of a module, by torch's own keys."""
    return getattr(module, "_forward_pre_hooks", {})


def read_post_hooks(module: Module) -> dict[int, Callable[..., Any]]:
    """Return the hooks behind the calls of a module, by torch's own keys."""
    return getattr(module, "_forward_hooks", {})


def find_running_ddp() -> Module | None:
    """Return the innermost DistributedDataParallel whose forward is running; None if
    there is none.
    """
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def is_syncing_module(module: Module) -> bool:
    """Return whether a module is a DDP or FSDP wrapper that reduces gradients."""
    own = vars(module)
    return (
        "require_backward_grad_sync" in own
        or "_sync_gradients" in own
        or hasattr(type(module), "set_requires_gradient_sync")
    )


def has_deferred_sync(module: Module) -> bool:
    """Return whether a DDP or FSDP wrapper accumulates gradients now without reducing them.

    `no_sync` sets an attribute of DDP and of the first FSDP; `set_requires_gradient_sync` sets one
    of each parameter group of `fully_shard`.
    """
    own = vars(module)
    if own.get("require_backward_grad_sync") is False or own.get("_sync_gradients") is False:
        return True
    find_state = getattr(type(module), "_get_fsdp_state", None)
    if find_state is None:
        return False
    state = find_state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions have one group per module
        groups = (getattr(state, "_fsdp_param_group", None),)
    return any(getattr(group, "reduce_grads", True) is False for group in groups)


_apply_code: Any = getattr(torch.autograd.Function.apply, "__code__", None)


def is_inside_function() -> bool:
    """Return whether this thread runs the forward of an autograd function written in Python."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _apply_code:
            return True
        frame = frame.f_back
    return False


class _ThreadNumber(threading.local):
    """Number of each thread, assigned when it is first asked for."""

    def __init__(self) -> None:
        self.number = next(_thread_numbers)


_thread_numbers = itertools.count()
_THREAD = _ThreadNumber()


def find_thread_number() -> int:
    """Return the number of the calling thread, which no later thread gets.

    The identity of the thread is not used: a thread that starts after another has ended may get the
    same identity, and torch numbers the nodes of each thread from 0.
    """
    return _THREAD.number


def read_next_node_number() -> int:
    """Return the number that the next graph node of this thread will get."""
    return _autograd._get_sequence_nr() if hasattr(_autograd, "_get_sequence_nr") else 0


def find_saving_hook() -> object | None:
    """Return the innermost hook on the tensors that this thread saves for the backward; None if
    there is none.
    """
    if not hasattr(_autograd, "_top_saved_tensors_default_hooks"):
        return None
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks else None


def find_running_node() -> object | None:
    """Return the node that the backward of this thread is running; None outside of a backward, or
    if torch is too old.

    The same object is returned each time, as long as something keeps it alive.
    """
    return _C._current_autograd_node() if hasattr(_C, "_current_autograd_node") else None


class BackwardStep(NamedTuple):
    """Step of a backward: one node in one run through the graph."""

    task: int
    node: int
    """Number of the node; nodes are numbered in the order in which their thread created them."""
    function: bool
    """Whether the node is an autograd function written in Python."""


def find_backward_step() -> BackwardStep | None:
    """Return the step of the backward that this thread is running.

    The result is None outside of a backward, and always if torch is too old to report it.
    """
    if not hasattr(_C, "_current_graph_task_id"):
        return None
    task = _C._current_graph_task_id()
    if task == -1:
        return None
    node: Any = find_running_node()
    if node is None:
        return BackwardStep(task, -1, False)
    function = isinstance(node, torch.autograd.function.BackwardCFunction)
    return BackwardStep(task, node._sequence_nr(), function)


def find_objects(*classes: type) -> Iterator[Any]:
    """Yield all objects of these classes in the process, by searching all objects."""
    # The type is checked, because `__class__` of a proxy may run code of the object behind it, or
    # load modules.
    return (each for each in gc.get_objects() if issubclass(type(each), classes))
