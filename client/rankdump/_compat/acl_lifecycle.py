"""Life cycle of a dump that a script controls with the calls of CANN, and the error codes of these
calls. No call raises. The codes are CANN's, their names are rankdump's. Source: CANN 8.0, AscendCL
API reference, aclmdlInitDump, aclmdlSetDump and aclmdlFinalizeDump.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

from rankdump._config import config_file
from rankdump._config.config_section import ConfigNotes
from rankdump._core.plan import DumpPlan
from rankdump._core.rank_identity import RankIdentity, identify_rank
from rankdump._session import default_session
from rankdump._session.agent_finder import AgentAddress, AgentFinder, default_agent_finder
from rankdump._session.default_session import CallSession
from rankdump._session.plan_source import STARTED_FORMAT, STARTED_VARIABLE
from rankdump._session.rank_session import Session
from rankdump.errors import ConfigError

_logger = logging.getLogger("rankdump")

OK = 0
NO_PATH = 100_000
INITIALISED_TWICE = 100_002
UNREADABLE_FILE = 100_003
UNPARSABLE = 100_006
BAD_CONFIGURATION = 100_009
NOT_INITIALISED = 100_045
INTERNAL = 500_000

_CallP = ParamSpec("_CallP")


@dataclass(slots=True)
class _AclDump:
    """The dump of one call of `set_dump`."""

    plan: DumpPlan
    source: bytes
    identity: RankIdentity
    agent: AgentAddress
    session: Session | None = None
    """Session of the dump; created when the first model is attached."""


class _AclCallError(Exception):
    """Failure of a call, with a documented error code."""

    def __init__(self, code: int, reason: object) -> None:
        super().__init__(str(reason))
        self.code = code


def _return_code(
    call: Callable[Concatenate[AclDumpLifecycle, _CallP], None],
) -> Callable[Concatenate[AclDumpLifecycle, _CallP], int]:
    """Make a call return its error code, and log the reason of a failure."""

    @wraps(call)
    def numbered(self: AclDumpLifecycle, /, *args: _CallP.args, **kwargs: _CallP.kwargs) -> int:
        try:
            with self.lock:
                call(self, *args, **kwargs)
        except _AclCallError as error:
            _logger.error("rankdump: %s returns %d: %s", call.__name__, error.code, error)
            return error.code
        except Exception:
            _logger.exception("rankdump: %s returns %d", call.__name__, INTERNAL)
            return INTERNAL
        return OK

    return numbered


class AclDumpLifecycle:
    """State of the dump calls of a process; safe to use from several threads."""

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
        agents: AgentFinder = default_agent_finder,
    ) -> None:
        """`environ` and `agents` are by default those of the process."""
        self._agents = agents
        self.lock = threading.RLock()
        self._environ = os.environ if environ is None else environ
        self._clock = clock
        self._initialised = False
        self._dumps: list[_AclDump] = []
        self._sessions = 0
        self._models: list[str] = []
        self._last_s = 0

    @_return_code
    def init_dump(self) -> None:
        """Initialise dumping."""
        if self._initialised:
            raise _AclCallError(INITIALISED_TWICE, "init_dump was called already")
        self._initialised = True

    @_return_code
    def set_dump(self, path: object) -> None:
        """Configure the models that are attached after this call."""
        if not self._initialised:
            raise _AclCallError(NOT_INITIALISED, "init_dump was not called")
        if not isinstance(path, (str, Path)) or not str(path):
            raise _AclCallError(NO_PATH, f"path {path!r} is not allowed; allowed: path of a file")
        dump = self._read_configuration(Path(path))
        if dump.identity.rank == 0:
            for warning in dump.plan.warnings:
                _logger.warning("rankdump: %s", warning)
        if self._dumps and self._dumps[-1].session is None:
            self._dumps.pop()  # no model was attached
        self._dumps.append(dump)
        default_session.replace_default_session(self._get_session)

    @_return_code
    def finalize_dump(self) -> None:
        """Close all sessions."""
        if not self._initialised:
            raise _AclCallError(NOT_INITIALISED, "init_dump was not called")
        self._initialised = False
        default_session.replace_default_session(None)
        dumps, self._dumps = self._dumps, []
        # A failure to close one session does not prevent the others from being closed.
        errors = [error for dump in dumps if (error := _close_session(dump.session)) is not None]
        if errors:
            raise errors[0]
        if any(dump.session.refused for dump in dumps if dump.session):
            raise _AclCallError(INTERNAL, "the agent rejected this rank")
        undelivered = sum(dump.session.undelivered for dump in dumps if dump.session)
        if undelivered:
            raise _AclCallError(INTERNAL, f"{undelivered} tensors did not reach an agent")

    def _read_configuration(self, path: Path) -> _AclDump:
        file, notes = str(path), ConfigNotes()
        with _failing_as(UNREADABLE_FILE):
            source = config_file.read_config_file(path)
        with _failing_as(UNPARSABLE):
            body = config_file.parse_acl_document(source, file=file, notes=notes)
        with _failing_as(BAD_CONFIGURATION):
            plan = config_file.make_acl_plan(body, file=file, environ=self._environ, notes=notes)
        agent = AgentAddress("")
        if plan.enabled:
            agent = self._agents.find(self._environ, embedded=plan.delivery.embedded)
        if agent.missing:
            raise _AclCallError(INTERNAL, f"nothing can be dumped: {agent.missing}")
        return _AclDump(plan, source, identify_rank(self._environ, plan.output.root), agent)

    def _get_session(self) -> Session:
        """Return the session of the last `set_dump`."""
        with self.lock:
            if not self._dumps:
                return Session()
            dump = self._dumps[-1]
            if dump.session is None or (dump.session.closed and dump.plan.enabled):
                dump.session = self._make_session(dump)
            return dump.session

    def _make_session(self, dump: _AclDump) -> Session:
        if not dump.plan.enabled:
            return Session()
        number = self._sessions + default_session.is_environment_session_active()
        self._sessions += 1
        identity = dump.identity
        if number:
            # A rank has only one session of a job at a time, and each job has its own execution
            # order.
            identity = replace(identity, job_id=f"{identity.job_id}-{number + 1}")
        session = CallSession(
            self._add_start_time(dump.plan),
            config_source=dump.source,
            identity=identity,
            agent=dump.agent,
            environ=self._environ,
        )
        # A model keeps its number until the process ends, because files refer to it.
        session.models = self._models
        return session

    def _add_start_time(self, plan: DumpPlan) -> DumpPlan:
        """Return the plan with a start time that no other session of this process uses for its
        folder.
        """
        first = not self._last_s
        self._last_s = now_s = max(int(self._clock()), self._last_s + 1)
        if first and self._environ.get(STARTED_VARIABLE):
            return plan
        started = time.strftime(STARTED_FORMAT, time.localtime(now_s))
        return replace(plan, output=replace(plan.output, started=started))


@contextmanager
def _failing_as(code: int) -> Generator[None]:
    try:
        yield
    except ConfigError as error:
        raise _AclCallError(code, error) from None


def _close_session(session: Session | None) -> Exception | None:
    try:
        if session is not None:
            session.close()
    except Exception as error:
        return error
    return None
