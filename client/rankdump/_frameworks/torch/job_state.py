"""Copy of the state of a torch job, and the way back to it: parameters and buffers of models,
gradients, optimizers, schedulers of learning rates, scalers of gradients, and the generators of
torch, numpy and Python.

Tensors are copied storage by storage into host memory, so tensors that share memory stay shared,
and accelerators need no memory for it; they are written back in place, past the counts of changes
of autograd. A storage that is equal to that of an earlier copy is not copied again. Objects stay
the same, such as the gradient of a parameter or the state that an optimizer keeps for it. Of
sharded models each rank copies its own shards.

Not covered is what the process does not have as one of these: variables of the script, iterators
of data, own generators, models and averages that are neither attached nor stepped by an optimizer.
`others` takes such objects.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rankdump._frameworks.model_observer import format_type
from rankdump._frameworks.torch.internals import disable_observation
from rankdump._frameworks.torch.layouts import strip_distribution
from rankdump._frameworks.torch.parameters import iterate_sharded_parameters
from rankdump.errors import UnsupportedError

# torch's stubs leave optimizers, schedulers, scalers and storages partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

_StorageKey: TypeAlias = "tuple[str, int, int]"
"""Device, address and size."""
_MAX_DEPTH = 16


class _StorageCopy:
    """Copy of the bytes of one storage."""

    def __init__(self, storage: Any, device: torch.device, known: _StorageCopy | None) -> None:
        with disable_observation():
            self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            if known is not None and device.type == "cpu" and torch.equal(self._bytes, known.saved):
                self.saved = known.saved
                return
            self.saved = self._bytes.to("cpu", copy=True)
            if known is not None and torch.equal(self.saved, known.saved):
                self.saved = known.saved

    def restore(self) -> None:
        with disable_observation():
            self._bytes.copy_(self.saved)


class JobState:
    """State of a job at one time."""

    def __init__(
        self, models: Sequence[Module], others: Iterable[object] = (), known: JobState | None = None
    ) -> None:
        """`known` is an earlier copy; UnsupportedError for what cannot be copied.

        `others` have `state_dict` and `load_state_dict`, or `get_state` and `set_state`, or are
        generators of numpy.
        """
        self._known = {} if known is None else known._storages
        self._storages: dict[_StorageKey, _StorageCopy] = {}
        self._restorers: list[Callable[[], object]] = []
        _synchronize()
        self.optimizers: list[Optimizer] = [*find_objects((Optimizer,))]
        """Whose states are in the copy; not those that `gc.freeze` hides."""
        parameters = [each for model in models for _, each in iterate_sharded_parameters(model)]
        for optimizer in self.optimizers:
            groups: list[dict[str, Any]] = optimizer.param_groups
            parameters += [each for group in groups for each in group["params"]]
            self._restorers += [self._save(optimizer.state), self._save(groups)]
        for parameter in {id(each): each for each in parameters}.values():
            self._add_parameter(parameter)
        for model in models:
            self._add_buffers(model)
        for each in find_objects((LRScheduler, ReduceLROnPlateau, GradScaler)):
            self._restorers.append(self._save(vars(each)))
        self._restorers += [*_save_generators(parameters), *map(_save_other, others)]
        self._known = {}

    def restore(self) -> None:
        """Go back to the state; for once, because the job goes on with the restored objects."""
        _synchronize()
        for restore in self._restorers:
            restore()
        for each in self._storages.values():
            each.restore()
        _synchronize()

    def _add_parameter(self, parameter: Tensor) -> None:
        self._add_tensor(parameter)
        gradient = parameter.grad
        if gradient is not None:
            self._add_tensor(gradient)

        def restore() -> None:
            if parameter.grad is not gradient:
                parameter.grad = gradient

        self._restorers.append(restore)

    def _add_buffers(self, model: Module) -> None:
        for module in model.modules():
            # A module may replace a buffer in place of writing to it.
            holder: Any = module
            self._restorers.append(self._save(holder._buffers))

    def _add_tensor(self, tensor: Tensor) -> None:
        local = strip_distribution(tensor)
        if local.is_meta or local.layout is not torch.strided:
            raise UnsupportedError(f"a tensor of type {format_type(tensor)} cannot be copied")
        try:
            storage = local.untyped_storage()
            key = str(local.device), storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError) as error:
            kind = format_type(tensor)
            raise UnsupportedError(f"a tensor of type {kind} cannot be copied: {error}") from None
        if key not in self._storages and key[2]:
            known = self._known.get(key)
            self._storages[key] = _StorageCopy(storage, local.device, known)

    def _save(self, value: Any, depth: int = 0) -> Callable[[], Any]:
        """Return a function that gives a container its content back, and returns the value."""
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif depth < _MAX_DEPTH and isinstance(value, dict):
            items = {key: self._save(each, depth + 1) for key, each in value.items()}
            return lambda: _fill_dict(value, {key: each() for key, each in items.items()})
        elif depth < _MAX_DEPTH and isinstance(value, list):
            parts = [self._save(each, depth + 1) for each in value]
            return lambda: _fill_list(value, [each() for each in parts])
        elif depth < _MAX_DEPTH and type(value) is tuple:
            members = [self._save(each, depth + 1) for each in value]
            return lambda: tuple(each() for each in members)
        return lambda: value


def _fill_dict(target: dict[Any, Any], content: dict[Any, Any]) -> dict[Any, Any]:
    target.clear()
    target.update(content)
    return target


def _fill_list(target: list[Any], content: list[Any]) -> list[Any]:
    target[:] = content
    return target


def find_objects(classes: tuple[type, ...]) -> Iterator[Any]:
    """Yield the objects of these classes that the process has."""
    for each in gc.get_objects():
        # `isinstance` would ask the object for its class, and some load modules then.
        if issubclass(type(each), classes):
            yield each


def _save_generators(parameters: Iterable[Tensor]) -> Iterator[Callable[[], object]]:
    python, host = random.getstate(), torch.get_rng_state()
    yield lambda: random.setstate(python)
    yield lambda: torch.set_rng_state(host)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.get_state()
        yield lambda: numpy.set_state(state)
    if torch.cuda.is_initialized():
        found = {each.device.index for each in parameters if each.is_cuda}
        for device in sorted(found | {torch.cuda.current_device()}):
            yield _save_device_generator(device)


def _save_device_generator(device: int) -> Callable[[], object]:
    state = torch.cuda.get_rng_state(device)
    return lambda: torch.cuda.set_rng_state(state, device)


def _save_other(other: Any) -> Callable[[], object]:
    if hasattr(other, "state_dict") and hasattr(other, "load_state_dict"):
        saved = copy.deepcopy(other.state_dict())
        return lambda: other.load_state_dict(saved)
    if hasattr(other, "get_state") and hasattr(other, "set_state"):
        state = copy.deepcopy(other.get_state())
        return lambda: other.set_state(state)
    bits = getattr(other, "bit_generator", None)
    if bits is not None:
        content = copy.deepcopy(bits.state)
        return lambda: setattr(bits, "state", content)
    raise UnsupportedError(
        f"also has an object of type {format_type(other)}, which has neither state_dict and "
        f"load_state_dict nor get_state and set_state"
    )


def _synchronize() -> None:
    """Wait for accelerators, which may still compute with what is copied or overwritten."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
