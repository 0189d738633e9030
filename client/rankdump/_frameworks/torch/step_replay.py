"""Replay of a step: runs it, goes back to the state before, runs it again without recording
anything, and compares the digests of both runs. The first run is the one that counts: its result is
returned, it is in the dump, and the state after it is restored.

All ranks decide together whether there is a second run, because its collectives need all of them.
Whatever fails before it is a reason why there is none; an error of the first run is that of the
script, one of the second run is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from rankdump._core.replay_report import ReplayReport, RunDigests, compare_runs
from rankdump._core.run_card import RANDOM_PREFIX
from rankdump._frameworks.model_observer import find_script_line, format_type
from rankdump._frameworks.null_recorder import DigestRecorder, digest_source
from rankdump._frameworks.operator_names import list_result_leaves
from rankdump._frameworks.torch.card_observer import read_device_generators
from rankdump._frameworks.torch.communication import collective_recorder
from rankdump._frameworks.torch.graph_description import FOREIGN_FILES
from rankdump._frameworks.torch.job_state import JobState
from rankdump._frameworks.torch.model_hook import TorchModelHook
from rankdump._frameworks.torch.optimizer_states import TorchOptimizerHook
from rankdump._frameworks.torch.step_causes import digest_elements
from rankdump._frameworks.torch.tensors import make_torch_source

# torch's stubs leave the functions of torch.distributed partly untyped.
# pyright: reportUnknownMemberType=false

_RESULT, _GENERATOR = "Result", "Generator"
_DEVICES = {"nccl": "cuda", "hccl": "npu", "xccl": "xpu"}
"""Device of the tensors that a backend takes; others take those in host memory."""


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
        """Add what the step left behind: its result, the state of the job, and generators.

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
        """Return which optimizer stepped whose state was not copied, a clause; empty for none."""
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
        """`others` have state beside the models, as `JobState` takes them. `hide` records nothing
        as long as its block runs. `read_states` returns digests of generators that are not torch's.
        """
        self._models, self._others = models, tuple(others)
        self._step, self._hide, self._read_states = step, hide, read_states
        self._iteration, self._rank = iteration, rank
        self.report = ReplayReport(iteration, rank, skipped="it has not run")
        """What the runs have in common, after `run`."""

    def run(self) -> Any:
        """Run the step, two times if nothing is in the way; return the first result, or raise the
        error of the first run.
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
            before = None  # the error keeps this frame
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
        """Run the step a second time, and go back to the state after the first one."""
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
            # A training that went on with another state would be worse than one that ends.
            after.restore()
        if observer is None or fault:
            return ReplayReport(self._iteration, self._rank, skipped=fault)
        return self._compare(first, observer.recorder.run, raised)

    def _compare(self, first: RunDigests, second: RunDigests, raised: str) -> ReplayReport:
        # What a second run that raised did not come to does not differ.
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
        """Return why there is no second run on any rank; empty if all of them can make one."""
        try:
            agreed = _agree(not fault)
        except Exception as error:
            return fault or f"the ranks could not agree on it: {_describe(error)}"
        return fault or ("" if agreed else "another rank cannot make a second run")


def _try(body: Callable[..., object], *args: object) -> str:
    """Return the error of an action, as a clause; empty for none."""
    try:
        body(*args)
    except Exception as error:
        return _describe(error)
    return ""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}"


def _agree(ready: bool) -> bool:
    """Ask all ranks of the job, which all call this; return whether all of them are ready."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ready
    device = _DEVICES.get(str(dist.get_backend()), "cpu")
    flag = torch.tensor([int(ready)], device=device)
    with _hide_collectives():
        dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


@contextmanager
def _hide_collectives() -> Generator[None]:
    """Leave the collectives of the block out of the order, and of all counts."""
    before, collective_recorder.is_hidden = collective_recorder.is_hidden, True
    try:
        yield
    finally:
        collective_recorder.is_hidden = before
