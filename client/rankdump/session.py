"""What a training script uses: a session, and `attach` for the model it trains."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec

from rankdump.adapters.arrays import ArraySource
from rankdump.contract.dialect import load
from rankdump.contract.errors import ExhaustedError, RankdumpError, UnsupportedError
from rankdump.contract.key import Side
from rankdump.contract.plan import DumpPlan
from rankdump.identity import DEFAULT_AGENT, Identity, identify, introduction
from rankdump.values import IterationHook, Observation

if TYPE_CHECKING:
    from rankdump.pipeline import Pipeline

logger = logging.getLogger("rankdump")

_P = ParamSpec("_P")
_SIDES = {side.value: side for side in Side}


def never_raises(method: Callable[_P, None]) -> Callable[_P, None]:
    """Keep our own failures out of the training; only a strict plan's loss passes."""

    @wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except ExhaustedError:
            raise
        except Exception:
            logger.exception("rankdump: internal error in %s", method.__name__)

    return guarded


@dataclass(frozen=True, slots=True)
class _OpenOperator:
    """The operator whose arrays are being dumped one by one."""

    name: str
    graph: int
    begun: tuple[int, int]


class Session:
    """One rank's dump. Without a plan it is off, and every call costs one branch.

    Iterations count from 0. Call `step(i)` where iteration i begins, or `step()` where one
    ends; the last one ends with `close()`, which runs by itself at exit.

    >>> session = Session()
    >>> session.active
    False
    """

    def __init__(
        self,
        plan: DumpPlan | None = None,
        *,
        config_source: bytes = b"",
        identity: Identity | None = None,
        agent: str = DEFAULT_AGENT,
    ) -> None:
        self._pipeline: Pipeline | None = None
        self._hooks: list[IterationHook] = []
        self._begun = False  # by the script, rather than by default
        self._open: dict[int, _OpenOperator] = {}  # by thread: several may dump at once
        self._strict = plan is not None and plan.delivery.strict
        self._losses_told = 0
        self.closed = False
        """Whether `close` was called."""
        if plan is not None:
            self._start(plan, config_source, identity or Identity(), agent)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Session:
        """Make the session that RANKDUMP_CONFIG, else MINDSPORE_DUMP_CONFIG, asks for.

        With neither it is off. With a configuration that cannot be used it logs the reason
        once and is off: the job trains on, undumped.
        """
        environ = os.environ if environ is None else environ
        path = environ.get("RANKDUMP_CONFIG") or environ.get("MINDSPORE_DUMP_CONFIG")
        if not path:
            return cls()
        agent = environ.get("RANKDUMP_AGENT") or DEFAULT_AGENT
        try:
            plan, source = load(Path(path), environ)
            return cls(plan, config_source=source, identity=identify(environ), agent=agent)
        except RankdumpError as error:
            logger.error("rankdump: nothing will be dumped: %s", error)
        except Exception:
            logger.exception("rankdump: nothing will be dumped: internal error")
        return cls()

    @property
    def active(self) -> bool:
        """Whether there is a plan."""
        return self._pipeline is not None

    @never_raises
    def step(self, iteration: int | None = None) -> None:
        """Begin an iteration, by default the next one; the one before is over."""
        pipeline = self._pipeline
        if pipeline is None:
            return
        following = pipeline.iteration + 1 if iteration is None else int(iteration)
        if following == pipeline.iteration:
            self._begun = True
            return
        self._end_iteration(pipeline, ran=self._begun or iteration is None)
        pipeline.begin_iteration(following)
        self._begun = iteration is not None
        for hook in self._hooks:
            hook.iteration_begins(following, pipeline.armed)
        self._tell_losses(pipeline)

    @never_raises
    def dump(
        self, op_type: str, op_name: str, side: str, slot: int, array: Any, *, graph: int = 0
    ) -> None:
        """Dump one array: `side` is `input` or `output`, `op_name` the full scope name.

        `array` is anything numpy can view. Consecutive calls with one `op_name` are one operator.
        """
        pipeline = self._pipeline
        if pipeline is None or not pipeline.armed:
            return
        if side not in _SIDES:
            pipeline.warn_once(f"dump of {op_name}: side {side!r}; allowed: input, output")
            return
        try:
            source = ArraySource(array)
        except (UnsupportedError, TypeError, ValueError) as error:
            pipeline.lose(op_name, _SIDES[side], "unsupported_dtype")
            pipeline.warn_once(f"dump of {op_name}: {error}")
            return
        self._open_operator(pipeline, op_name, graph)
        pipeline.observe(Observation(graph, op_type, op_name, _SIDES[side], slot, "", source))

    @never_raises
    def attach(self, model: Any) -> None:
        """Observe a model's operators from now on; a model of no known framework is said once."""
        pipeline = self._pipeline
        if pipeline is None:
            return
        if not any(base.__module__ == "torch.nn.modules.module" for base in type(model).__mro__):
            kind = f"{type(model).__module__}.{type(model).__qualname__}"
            pipeline.warn_once(f"cannot attach to {kind}; known: torch.nn.Module")
            return
        from rankdump.adapters import torch as adapter

        hook = adapter.attach(model, pipeline, graph=len(self._hooks))
        self._hooks.append(hook)
        hook.iteration_begins(pipeline.iteration, pipeline.armed)

    def close(self) -> None:
        """End the last iteration, deliver what waits, and leave the job as it was before."""
        self._close(ended=True)

    @never_raises
    def _close(self, *, ended: bool) -> None:
        pipeline, self._pipeline = self._pipeline, None
        self.closed = True
        if pipeline is None:
            return
        atexit.unregister(self._close_at_exit)
        if ended:
            self._end_iteration(pipeline, ran=self._begun)
        for hook in self._hooks:
            hook.detach()
        pipeline.close()
        self._tell_losses(pipeline)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(ended=error is None)

    def _start(self, plan: DumpPlan, source: bytes, identity: Identity, agent: str) -> None:
        # Imported here: a session that is off must not load gRPC.
        from rankdump.pipeline import Pipeline

        request = introduction(identity, plan_json=plan.to_json(), config_source=source)
        self._pipeline = Pipeline(plan, request, agent)
        self._pipeline.start()
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        # An unhandled exception left the running iteration unfinished.
        ended = not hasattr(sys, "last_value")
        try:
            self._close(ended=ended)
        except RankdumpError as error:  # a strict plan; the interpreter is leaving anyway
            logger.error("rankdump: %s", error)

    def _end_iteration(self, pipeline: Pipeline, *, ran: bool) -> None:
        for thread in list(self._open):
            self._finish_operator(pipeline, thread)
        for hook in self._hooks:
            hook.iteration_ends(pipeline.iteration, pipeline.armed)
        pipeline.end_iteration(ran=ran)

    def _open_operator(self, pipeline: Pipeline, name: str, graph: int) -> None:
        thread = threading.get_ident()
        current = self._open.get(thread)
        if current is None or current.name != name:
            self._finish_operator(pipeline, thread)
            self._open[thread] = _OpenOperator(name, graph, pipeline.started())

    def _finish_operator(self, pipeline: Pipeline, thread: int) -> None:
        operator = self._open.pop(thread, None)
        if operator is not None:
            pipeline.finished(operator.begun, graph=operator.graph, name=operator.name)

    def _tell_losses(self, pipeline: Pipeline) -> None:
        if self._strict and pipeline.losses > self._losses_told:
            lost, self._losses_told = pipeline.losses - self._losses_told, pipeline.losses
            raise ExhaustedError(f"{lost} tensors were lost and the plan is strict")


_default: Session | None = None


def attach(model: object, session: Session | None = None) -> Session:
    """Observe a model with a session, by default the one the environment asks for.

    Every call of a process without an explicit session shares the same one.
    """
    global _default
    if session is None:
        if _default is None or _default.closed:
            _default = Session.from_environment()
        session = _default
    session.attach(model)
    return session
