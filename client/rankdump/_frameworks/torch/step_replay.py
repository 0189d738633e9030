"""Replay of a step: runs the step, restores the state before it, runs it again without recording
anything, and compares the digests of both runs. The first run is the one that counts: its result is
returned, it is in the dump, and the state after it is restored.

All ranks decide together whether there is a second run, because its collectives need all of them.
Any failure before the second run is a reason for not making it. An error of the first run is the
script's; an error of the second run is a finding.

The state of a job consists of parameters and buffers of models, gradients, optimizers, schedulers
of learning rates, gradient scalers, and the random generators of torch, numpy and Python. Tensors
are copied by storage into host memory, so tensors that share memory stay shared, and accelerators
need no memory for the copy. They are written back in place, without raising autograd's counts of
changes. A storage that equals that of an earlier copy is not copied again. Objects keep their
identity, such as the gradient of a parameter or the state that an optimizer keeps for it. Each rank
copies its own shards of sharded models.

Not covered are: variables of the script, iterators of data, generators of the script, and models
and averages that are neither attached nor stepped by an optimizer. Such objects can be given in
`others`.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rankdump._core.determinism import ReplayReport, RunDigests, compare_runs
from rankdump._core.run_card import RANDOM_PREFIX
from rankdump._frameworks.model_observer import find_script_line, format_type
from rankdump._frameworks.null_recorder import DigestRecorder, digest_source
from rankdump._frameworks.operator_names import list_result_leaves
from rankdump._frameworks.torch.card_observer import read_device_generators
from rankdump._frameworks.torch.communication import collective_recorder
from rankdump._frameworks.torch.graph_description import FOREIGN_FILES
from rankdump._frameworks.torch.internals import disable_observation, find_objects
from rankdump._frameworks.torch.layouts import strip_distribution
from rankdump._frameworks.torch.model_hook import TorchModelHook
from rankdump._frameworks.torch.optimizer_states import TorchOptimizerHook
from rankdump._frameworks.torch.parameters import iterate_sharded_parameters
from rankdump._frameworks.torch.step_causes import digest_elements
from rankdump._frameworks.torch.tensors import make_torch_source
from rankdump.errors import UnsupportedError

# torch's stubs leave distributed, optimizers, schedulers, scalers and storages partly untyped.
# pyright: reportPrivateImportUsage=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

_StorageKey: TypeAlias = "tuple[str, int, int]"
"""Device, address and size of a storage."""
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
        """`known` is an earlier copy. UnsupportedError for objects that cannot be copied.

        Objects in `others` have `state_dict` and `load_state_dict`, or `get_state` and `set_state`,
        or are generators of numpy.
        """
        self._known = {} if known is None else known._storages
        self._storages: dict[_StorageKey, _StorageCopy] = {}
        self._restorers: list[Callable[[], object]] = []
        _synchronize()
        self.optimizers: list[Optimizer] = [*find_objects(Optimizer)]
        """Optimizers whose states are in the copy; optimizers that `gc.freeze` hides
        are missing.
        """
        parameters = [each for model in models for _, each in iterate_sharded_parameters(model)]
        for optimizer in self.optimizers:
            groups: list[dict[str, Any]] = optimizer.param_groups
            parameters += [each for group in groups for each in group["params"]]
            self._restorers += [self._save(optimizer.state), self._save(groups)]
        for parameter in {id(each): each for each in parameters}.values():
            self._add_parameter(parameter)
        for model in models:
            self._add_buffers(model)
        for each in find_objects(LRScheduler, ReduceLROnPlateau, GradScaler):
            self._restorers.append(self._save(vars(each)))
        self._restorers += [*_save_generators(parameters), *map(_save_other, others)]
        self._known = {}

    def restore(self) -> None:
        """Restore the state. It can be done only once, because the job goes on with the restored
        objects.
        """
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
            # The dictionary itself is saved too, because a module may replace a buffer instead of
            # writing to it.
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
        """Return a function that restores the content of a container and returns the value."""
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
    """Wait for accelerators, which may still compute with memory that is copied or overwritten."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


_RESULT, _GENERATOR = "Result", "Generator"
_DEVICES = {"nccl": "cuda", "hccl": "npu", "xccl": "xpu"}
"""Type of the device whose tensors a backend takes; other backends take tensors in host memory."""


class RunObserver:
    """Observes one run of a step of attached models."""

    def __init__(self, models: Sequence[Module], iteration: int) -> None:
        self.recorder = DigestRecorder(lambda: find_script_line(besides=FOREIGN_FILES))
        self._iteration = iteration
        self._models = [
            TorchModelHook(model, self.recorder, graph, collectives=False)
            for graph, model in enumerate(models)
        ]
        self._optimizers = TorchOptimizerHook(self.recorder, lambda: self._models)

    def begin(self) -> None:
        """Observe from now on."""
        self._optimizers.find_optimizers()
        for hook in self._models:
            hook.iteration_begins(self._iteration, True)

    def end(self, result: object, states: Mapping[str, str]) -> None:
        """Add the effects of the step: its result, the state of the job, and the states of
        generators.

        `states` are digests of generators that are not torch's.
        """
        self._add_result(result)
        for hook in (*self._models, self._optimizers):
            hook.iteration_ends(self._iteration, True)
        own = [(f"{RANDOM_PREFIX}cpu", torch.get_rng_state()), *read_device_generators()]
        found = {name: digest_elements(state, on_device=False) for name, state in own}
        for name, digest in {**found, **states}.items():
            self.recorder.add_digest(_GENERATOR, name, 0, digest)

    def detach(self) -> None:
        """Restore the models."""
        for hook in (self._optimizers, *reversed(self._models)):
            hook.detach()

    def find_unsaved(self, state: JobState) -> str:
        """Return a clause that names an optimizer which stepped although its state was not copied;
        empty if there is none.
        """
        for optimizer in self._optimizers.found:
            if all(each is not optimizer for each in state.optimizers):
                kind = format_type(optimizer)
                return f"an optimizer of type {kind} was not there, or not found, before the step"
        return ""

    def _add_result(self, result: object) -> None:
        for slot, _, value in list_result_leaves(result):
            if isinstance(value, Tensor):
                source = make_torch_source(value)
                if source is not None and not isinstance(source, str):
                    self.recorder.add_digest(_RESULT, "result", slot, digest_source(source))
            elif isinstance(value, (bool, int, float, complex, str)):
                self.recorder.add_value(_RESULT, "result", slot, value)


class StepReplay:
    """One replay of a step, on one rank."""

    def __init__(
        self,
        models: Sequence[Module],
        others: Iterable[object],
        step: Callable[[], Any],
        hide: Callable[[], AbstractContextManager[None]],
        read_states: Callable[[], Mapping[str, str]],
        *,
        iteration: int,
        rank: int,
    ) -> None:
        """`others` are objects with state apart from the models, as `JobState` takes them. `hide`
        returns a context in which nothing is recorded. `read_states` returns digests of generators
        that are not torch's.
        """
        self._models, self._others = models, tuple(others)
        self._step, self._hide, self._read_states = step, hide, read_states
        self._iteration, self._rank = iteration, rank
        self.report = ReplayReport(iteration, rank, skipped="it has not run")
        """Result of the comparison of both runs, after `run`."""

    def run(self) -> Any:
        """Run the step, twice if nothing prevents it; return the first result, or raise the error
        of the first run.
        """
        before, fault = self._copy_state(None, "")
        observer, fault = self._begin_observer(fault)
        fault = self._agree(fault)
        try:
            result = self._step()
            if observer is not None and not fault:
                fault = _try(observer.end, result, self._read_states())
                fault = fault or (observer.find_unsaved(before) if before is not None else "")
        except BaseException:
            before = None  # the error keeps this frame alive
            raise
        finally:
            if observer is not None:
                _try(observer.detach)
        after, fault = self._copy_state(before, fault)
        is_back = before is not None and not fault
        if before is not None and is_back:
            fault = _try(before.restore)
        fault = self._agree(fault)
        del before  # its memory may be needed
        if fault or observer is None or after is None:
            if after is not None and is_back:
                after.restore()
            self.report = ReplayReport(self._iteration, self._rank, skipped=fault)
        else:
            self.report = self._run_again(observer.recorder.run, after)
        return result

    def _run_again(self, first: RunDigests, after: JobState) -> ReplayReport:
        """Run the step a second time, and restore the state after the first run."""
        observer, fault = self._begin_observer("")
        raised = ""
        try:
            with _hide_collectives(), self._hide():
                try:
                    result = self._step()
                    if observer is not None:
                        fault = _try(observer.end, result, self._read_states())
                except Exception as error:
                    raised = _describe(error)
                finally:
                    if observer is not None:
                        _try(observer.detach)
        finally:
            # An error here is not caught: a training that goes on with a wrong state would be worse
            # than one that ends.
            after.restore()
        if observer is None or fault:
            return ReplayReport(self._iteration, self._rank, skipped=fault)
        return self._compare(first, observer.recorder.run, raised)

    def _compare(self, first: RunDigests, second: RunDigests, raised: str) -> ReplayReport:
        # Values that a second run that raised did not reach are no differences.
        count, differences = compare_runs(first, second, complete=not raised)
        return ReplayReport(
            self._iteration,
            self._rank,
            len(first.digests),
            count,
            differences,
            len(first.sources),
            first.unread,
            raised,
        )

    def _copy_state(self, known: JobState | None, fault: str) -> tuple[JobState | None, str]:
        if fault:
            return None, fault
        try:
            return JobState(self._models, self._others, known), ""
        except Exception as error:
            return None, f"its state cannot be copied: {_describe(error)}"

    def _begin_observer(self, fault: str) -> tuple[RunObserver | None, str]:
        if fault:
            return None, fault
        try:
            observer = RunObserver(self._models, self._iteration)
        except Exception as error:
            return None, f"its models cannot be observed: {_describe(error)}"
        fault = _try(observer.begin)
        if fault:
            _try(observer.detach)
            return None, f"its models cannot be observed: {fault}"
        return observer, ""

    def _agree(self, fault: str) -> str:
        """Return why there is no second run on any rank; empty if all ranks can make one."""
        try:
            agreed = _agree(not fault)
        except Exception as error:
            return fault or f"the ranks could not agree on it: {_describe(error)}"
        return fault or ("" if agreed else "another rank cannot make a second run")


def _try(body: Callable[..., object], *args: object) -> str:
    """Return the error of an action as a clause; empty if there is none."""
    try:
        body(*args)
    except Exception as error:
        return _describe(error)
    return ""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}"


def _agree(ready: bool) -> bool:
    """Exchange with all ranks of the job, which all call this; return whether all of them are
    ready.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ready
    device = _DEVICES.get(str(dist.get_backend()), "cpu")
    flag = torch.tensor([int(ready)], device=device)
    with _hide_collectives():
        dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


@contextmanager
def _hide_collectives() -> Generator[None]:
    """Leave the collectives in the block out of the execution order and of all counts."""
    before, collective_recorder.is_hidden = collective_recorder.is_hidden, True
    try:
        yield
    finally:
        collective_recorder.is_hidden = before
