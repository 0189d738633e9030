"""Replay of a step: runs it, goes back to the state before, runs it again without recording
anything, and compares the digests of both runs. The first run is the one that counts: its result is
returned, it is in the dump, and the state after it is restored.

All ranks decide together whether there is a second run, because its collectives need all of them.
Whatever fails before it is a reason why there is none; an error of the first run is that of the
script, one of the second run is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rankdump._core.replay_report import ReplayReport, RunDigests, compare_runs
from rankdump._recorder.process_facts import read_random_states

if TYPE_CHECKING:
    from rankdump._frameworks.torch.job_state import JobState
    from rankdump._frameworks.torch.step_replay import RunObserver, TorchStepReplay


def make_step_replay(models: Sequence[Any], others: Iterable[object]) -> TorchStepReplay:
    """Return what replays a step of attached models of torch."""
    from rankdump._frameworks.torch.step_replay import TorchStepReplay

    return TorchStepReplay(models, others)


class StepReplay:
    """One replay of a step, on one rank."""

    def __init__(
        self,
        framework: TorchStepReplay,
        step: Callable[[], Any],
        hide: Callable[[], AbstractContextManager[None]],
        *,
        iteration: int,
        rank: int,
    ) -> None:
        """`hide` records nothing as long as its block runs."""
        self._framework, self._step, self._hide = framework, step, hide
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
                fault = _try(observer.end, result, read_random_states())
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
            with self._framework.hide_collectives(), self._hide():
                try:
                    result = self._step()
                    if observer is not None:
                        fault = _try(observer.end, result, read_random_states())
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
            return self._framework.copy_state(known), ""
        except Exception as error:
            return None, f"its state cannot be copied: {_describe(error)}"

    def _begin_observer(self, fault: str) -> tuple[RunObserver | None, str]:
        if fault:
            return None, fault
        try:
            observer = self._framework.observe(self._iteration)
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
            agreed = self._framework.agree(not fault)
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
