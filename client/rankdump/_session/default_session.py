"""Default session of a process, which the environment configures, and the public functions that use
it; also a session that counts the calls of its models as iterations, because inference has no
steps.

Other ways to configure dumps may replace the default session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

from rankdump._core.plan import DumpPlan
from rankdump._session.framework_adapters import (
    OutermostCallWatch,
    make_outermost_watch,
    mark_model,
)
from rankdump._session.plan_source import PlanSource
from rankdump._session.rank_session import Session, never_raises


class CallSession(Session):
    """Session that begins an iteration at every outermost call of a model, until `step` is called.

    It is used only for a plan from an `acl.json`, because other dialects count steps. An iteration
    has at most one call of each model; models that are called in turn share iterations.
    """

    def __init__(self, plan: DumpPlan | PlanSource | None = None, **about: Any) -> None:
        self._outermost: OutermostCallWatch | None = None
        self._has_explicit_steps = not (isinstance(plan, DumpPlan) and plan.dialect == "acl")
        self._iteration = 0
        super().__init__(plan, **about)

    @never_raises
    def attach(self, model: Any, name: str = "", *, inside_compiled: bool = False) -> None:
        """Observe a model's operators, and count its calls."""
        if self.active and not self._has_explicit_steps:
            self._watch(model)
        super().attach(model, name, inside_compiled=inside_compiled)

    def step(self, iteration: int | None = None) -> None:
        """Begin an iteration, by default the next one; from now on calls are not counted as
        iterations.
        """
        self._has_explicit_steps = True
        super().step(iteration)

    def close(self) -> None:
        """Remove the hooks from the models, and deliver buffered data."""
        if self._outermost is not None:
            self._outermost.remove()
        super().close()

    def _watch(self, model: Any) -> None:
        if self._outermost is None:
            self._called: set[int] = set()
            self._outermost = make_outermost_watch(model, self._begin_call)
        if self._outermost is not None:
            self._outermost.watch(model)

    def _begin_call(self, number: int) -> None:
        if self._has_explicit_steps or not self.active:
            return
        if number in self._called:
            self._called.clear()
            self._iteration += 1
        self._called.add(number)
        super().step(self._iteration)


_default: Session | None = None
_replacement: Callable[[], Session] | None = None
_step_listener: Callable[[int | None], None] | None = None


def attach(
    model: object,
    session: Session | None = None,
    *,
    name: str = "",
    inside_compiled: bool = False,
) -> Session:
    """Observe a model with a session, by default the one that the environment configures.

    `name` is the model's folder if the configuration does not name all models. `inside_compiled`
    also observes operators inside regions that torch.compile compiles after this call.

    All calls in a process that give no session share one session.
    """
    session = session or open_default_session()
    session.attach(model, name, inside_compiled=inside_compiled)
    return session


def step(iteration: int | None = None) -> None:
    """Begin an iteration, by default the next one, also of an API dump."""
    open_default_session().step(iteration)
    if _step_listener is not None:
        _step_listener(iteration)


def microbatch(index: SupportsIndex) -> None:
    """Begin a micro-batch of the running iteration; `step` ends the last one."""
    open_default_session().microbatch(index)


def dump_start() -> None:
    """Dump from now on, whatever iterations the configuration names; its devices and operators
    still apply.

    After the first call of `dump_start` or `dump_stop`, only these two decide when to dump.
    """
    open_default_session().dump_start()


def dump_stop() -> None:
    """Dump nothing until `dump_start` is called."""
    open_default_session().dump_stop()


def limit(name: str, seconds: float) -> None:
    """Declare a timeout of communication that no environment variable sets; 0 for no limit."""
    open_default_session().limit(name, seconds)


def layout(target: object, **declared: Any) -> None:
    """Declare which part of a logical tensor this rank has, with the arguments of `Session.layout`.

    `target` is a parameter or buffer of an attached model, or a name.
    """
    open_default_session().layout(target, **declared)


def note(**numbers: float) -> None:
    """Keep numbers of the running iteration in the black box, such as its loss."""
    open_default_session().note(**numbers)


def set_dump(target: object, enabled: bool = True) -> None:
    """Mark a torch module or a MindSpore cell, with everything inside it, for `dump_mode` 2.

    If `enabled` is False, the mark is removed; the last call for a module or cell counts.
    """
    mark_model(target, enabled)


def replace_default_session(source: Callable[[], Session] | None) -> None:
    """Use the session that `source` returns instead of the one that the environment configures;
    None undoes this.
    """
    global _replacement
    _replacement = source


def set_step_listener(begins: Callable[[int | None], None]) -> None:
    """Set the listener that receives every iteration that the script begins."""
    global _step_listener
    _step_listener = begins


def is_environment_session_active() -> bool:
    """Return whether the session that the environment configures is open."""
    return _default is not None and _default.active


def open_default_session() -> Session:
    """Return the default session, which is opened if it is not open."""
    global _default
    if _replacement is not None:
        return _replacement()
    if _default is None or _default.closed:
        _default = CallSession.from_environment()
    return _default
