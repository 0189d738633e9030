"""Gradient buckets that DistributedDataParallel reduces in C++, without any Python call.

Our communication hook reduces exactly as DDP does without one, bit for bit. The hook cannot be
removed: after `detach` it still reduces and records nothing. A hook that the user registers later
takes over the reduction.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from rankdump._core.events import CallOutcome, EventKind
from rankdump._frameworks.torch.communication import (
    CollectiveRequest,
    PendingCollective,
    collective_recorder,
    count_elements,
    describe_group,
    read_group_timeout,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket

# The reducer is a C++ class whose stubs are partial, and registration is private to torch.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false


BucketHook: TypeAlias = "Callable[[Any, GradBucket], Future[Tensor]]"

ROUNDING_WARNING = (
    "gradient buckets of DistributedDataParallel are not recorded: with gradient_as_bucket_view "
    "and a world size that is not a power of two, a hook would round differently"
)
OCCUPIED_WARNING = (
    "gradient buckets of DistributedDataParallel are not recorded: a built-in communication hook "
    "is registered"
)


class GradientBuckets:
    """Reduction of one DistributedDataParallel by our hook."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._group: Any = ddp.process_group
        self._user_hook: tuple[BucketHook, object] | None = None
        self._joining_work: dist.Work | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the model's replicas; a model may change it."""
        ddp = self._ddp()
        if ddp is not None:
            self._group = ddp.process_group
        return self._group

    @property
    def is_delegated(self) -> bool:
        """Whether a hook of the user reduces."""
        return self._user_hook is not None

    def delegate_to_user(self, hook: BucketHook, state: object) -> None:
        """Leave the reduction to the user's hook."""
        self._user_hook = (hook, state)

    def set_joining_work(self, work: dist.Work, static: bool) -> None:
        """Divide by the number of ranks that this work sums, or by the world size."""
        self._joining_work = None if static else work

    def reduce_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket over the group, and record that it happened."""
        if self._user_hook is not None:
            hook, state = self._user_hook
            return hook(state, bucket)
        group, buffer = self.group, bucket.buffer()
        divisor = self._find_divisor(group)
        # DDP multiplies while it copies gradients into a bucket, and divides a sparse one.
        buffer.div_(divisor) if buffer.is_sparse else buffer.mul_(1.0 / divisor)
        pending = _begin_bucket(group, bucket.index(), buffer)
        try:
            with collective_recorder.suppress_nested():
                future = group.allreduce([buffer]).get_future()
        except BaseException:
            collective_recorder.fail(pending)
            raise
        on_device = buffer.device.type != "cpu"

        def done(reduced: Future[list[Tensor]]) -> Tensor:
            try:
                (tensor,) = reduced.value()
            except BaseException:
                collective_recorder.fail(pending)
                raise
            outcome = CallOutcome.UNKNOWN if on_device else CallOutcome.COMPLETE
            collective_recorder.end(pending, outcome=outcome)
            return tensor

        return future.then(done)

    def _find_divisor(self, group: dist.ProcessGroup) -> int:
        if self._joining_work is None:
            return group.size()
        return int(self._joining_work.get_future().wait()[0].item())


_registered_buckets: weakref.WeakKeyDictionary[Any, GradientBuckets] = weakref.WeakKeyDictionary()
"""By reducer. A registration cannot be undone, so this outlives every attachment."""


def observe_buckets(model: Module) -> None:
    """Register our hook with every DistributedDataParallel in the model that has no hook."""
    for ddp in model.modules():
        if isinstance(ddp, DistributedDataParallel) and _is_observable(ddp):
            buckets = GradientBuckets(ddp)
            _divert_registration()
            try:
                _register_hook(ddp.reducer, buckets, GradientBuckets.reduce_bucket)
            except RuntimeError:
                collective_recorder.warn_once(OCCUPIED_WARNING)
                continue
            _registered_buckets[ddp.reducer] = buckets


def _is_observable(ddp: DistributedDataParallel) -> bool:
    """Return whether our hook would change no result; if it would, warn once."""
    # A user's own hook communicates through Python, where its calls are seen.
    if (
        ddp.reducer in _registered_buckets
        or ddp._comm_hooks
        or getattr(ddp, "_use_python_reducer", False)
    ):
        return False
    size = dist.get_world_size(ddp.process_group)
    if ddp.gradient_as_bucket_view and size & (size - 1):
        collective_recorder.warn_once(ROUNDING_WARNING)
        return False
    return True


def _begin_bucket(group: dist.ProcessGroup, index: int, buffer: Tensor) -> PendingCollective | None:
    try:
        members = describe_group(group)
        element_count, dtype = count_elements([buffer])
        rank = members.ranks[group.rank()]
        return collective_recorder.begin(
            CollectiveRequest(
                kind=EventKind.ALL_REDUCE,
                group=members,
                rank=rank,
                element_count=element_count,
                dtype=dtype,
                scope=f"bucket-{index}/",
                timeout=read_group_timeout(group, buffer.device),
            )
        )
    except Exception as error:
        collective_recorder.report_failure(error)
        return None


_dist: Any = dist
_register_hook: Any = getattr(dist, "_register_comm_hook", None)
_register_builtin_hook: Any = getattr(dist, "_register_builtin_comm_hook", None)


def _divert_registration() -> None:
    """Redirect later registrations by the user to our hook instead of failing."""
    if _dist._register_comm_hook is _register_user_hook:
        return
    _dist._register_comm_hook = _register_user_hook
    _dist._register_builtin_comm_hook = _register_user_builtin_hook
    reducer = _dist.Reducer
    set_handle = reducer._set_forward_pass_work_handle

    def set_forward_pass_work_handle(self: Any, work: dist.Work, static: bool) -> None:
        buckets = _registered_buckets.get(self)
        if buckets is not None:
            buckets.set_joining_work(work, static)
        set_handle(self, work, static)

    reducer._set_forward_pass_work_handle = set_forward_pass_work_handle


def _register_user_hook(reducer: Any, state: object, hook: BucketHook) -> None:
    buckets = _registered_buckets.get(reducer)
    if buckets is None or buckets.is_delegated:
        # torch itself rejects a second hook, with its own error.
        _register_hook(reducer, state, hook)
    else:
        buckets.delegate_to_user(hook, state)


def _register_user_builtin_hook(reducer: Any, kind: BuiltinCommHookType) -> None:
    buckets = _registered_buckets.get(reducer)
    if buckets is None or buckets.is_delegated:
        _register_builtin_hook(reducer, kind)
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    same: dict[BuiltinCommHookType, BucketHook] = {
        _dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        _dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    buckets.delegate_to_user(same[kind], buckets.group)
