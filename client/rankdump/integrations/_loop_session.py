"""Session of a training loop that a framework owns: it is opened, with the models of the loop, when
the first step begins, and closed when the loop ends. Also checks of the objects that a script
attaches.

A session that the script opened belongs to the script: it is not closed here, and models are
attached to it only if it has none. No internal error reaches the loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec

from rankdump._core.log_once import LogOnce
from rankdump._core.rank_identity import identify_rank
from rankdump._frameworks.model_observer import format_type
from rankdump._session import Session, default_session
from rankdump._session.framework_adapters import MODEL_TYPES, is_mindspore_cell, is_torch_module
from rankdump.errors import ExhaustedError

_logger = logging.getLogger("rankdump")
_log_once = LogOnce(_logger)

_P = ParamSpec("_P")
_CONFIGURATION_VARIABLES = ("RANKDUMP_CONFIG", "MINDSPORE_DUMP_CONFIG")


def shield(method: Callable[_P, None]) -> Callable[_P, None]:
    """Keep the errors of a callback away from the loop: each kind of error is logged once.

    Only the ExhaustedError of a strict plan is raised.
    """

    @wraps(method)
    def shielded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except ExhaustedError:
            raise
        except Exception as error:
            place = getattr(method, "__qualname__", repr(method))
            if _log_once.is_new(f"{place} {type(error).__name__}"):
                _logger.exception("rankdump: internal error in %s; data may be missing", place)

    return shielded


class LoopSession:
    """Session of one loop. Without a configuration it is off, and a step costs a few branches."""

    def __init__(self, user: str, session: Session | None = None) -> None:
        """`user` is the name of the integration in the log; `session` is the script's own, if it
        has one.
        """
        self._user = user
        self._given = session
        self._session: Session | None = None
        self._is_own = False

    @property
    def session(self) -> Session:
        """The session of the loop; before `open`, a session that is off."""
        return self._session or Session()

    @shield
    def open(self, models: Iterable[Any]) -> None:
        """Open the session and attach the models, unless this was done already."""
        if self._session is not None:
            return
        self._session = self._given or self._find_default()
        if not self._session.models:
            for model in models:
                self._session.attach(model)
        if self._given is None and not self._session.active:
            self._report_missing_configuration()

    @shield
    def begin_step(self, iteration: int, models: Iterable[Any], *, accumulates: bool) -> None:
        """Begin the step of the optimizer with this number, counted from 0.

        If `accumulates` is True, the micro-batches of the step are numbered, and the first one
        begins.
        """
        self.open(models)
        session = self._session
        if session is None or session.closed:  # the script closed it, and wants no more dumps
            return
        if self._given is None:
            default_session.step(iteration)  # an API dump is notified too
        else:
            session.step(iteration)
        if accumulates:
            self.begin_microbatch(0)

    @shield
    def begin_microbatch(self, index: int) -> None:
        """Begin the micro-batch with this number of the running step, counted from 0."""
        if self._session is not None:
            self._session.microbatch(index)

    @shield
    def close(self) -> None:
        """Close the session if this loop opened it; a later step opens another one."""
        session = self._session
        if session is not None and self._is_own:
            self._session = None
            session.close()

    def _find_default(self) -> Session:
        was_open = default_session.is_environment_session_active()
        session = default_session.open_default_session()
        self._is_own = not was_open and default_session.is_environment_session_active()
        return session

    def _report_missing_configuration(self) -> None:
        # An unusable configuration was reported when the session was made.
        if any(os.environ.get(name) for name in _CONFIGURATION_VARIABLES):
            return
        self.warn_once(
            "dumps nothing, because there is no configuration: name it in RANKDUMP_CONFIG, or "
            "start the job with `rankdump run --config FILE`"
        )

    def warn_once(self, text: str) -> None:
        """Log on rank 0, once for each text, what the integration does not support."""
        if identify_rank(os.environ, tree="").rank == 0:
            _log_once.log(logging.WARNING, f"rankdump: {self._user} {text}")


def check_models(caller: str, models: Sequence[Any]) -> None:
    """Raise TypeError if there is no model, or if the framework of a model cannot be observed."""
    if not models:
        raise TypeError(f"{caller}: no model is given; allowed: {MODEL_TYPES}")
    for model in models:
        if not (is_torch_module(model) or is_mindspore_cell(model)):
            raise TypeError(
                f"{caller}: a model of type {format_type(model)} is not allowed; "
                f"allowed: {MODEL_TYPES}"
            )


def check_owner(caller: str, owner: Any, members: Sequence[str], allowed: str) -> None:
    """Raise TypeError, which names `allowed`, if an object lacks a member of the
    framework's class.
    """
    missing = [name for name in members if not hasattr(owner, name)]
    if missing:
        raise TypeError(
            f"{caller}: an object of type {format_type(owner)}, without `{missing[0]}`, is not "
            f"allowed; allowed: {allowed}"
        )


def notify_around(
    owner: Any,
    name: str,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Make a method of one object call `before` at its begin, and `after` at its end if it raised
    no error.
    """
    method = getattr(owner, name)

    @wraps(method)
    def notifying(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = method(*args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(owner, name, notifying)
