"""Functions for the session that the environment asks for; one per process.

Somebody who configures dumps in another way may put sessions of their own in its place.
"""

from __future__ import annotations

from collections.abc import Callable

from rankdump.session.counting import CallSession
from rankdump.session.frameworks import mark
from rankdump.session.lifetime import Session

_default: Session | None = None
_instead: Callable[[], Session] | None = None
_also: Callable[[int | None], None] | None = None


def attach(model: object, session: Session | None = None, *, name: str = "") -> Session:
    """Observe a model with a session, by default the one the environment asks for.

    `name` is that of the model's folder where the configuration does not name all models.

    Every call of a process without an explicit session shares the same one.
    """
    session = session or _session()
    session.attach(model, name)
    return session


def step(iteration: int | None = None) -> None:
    """Begin an iteration, by default the next one; of a dump of API calls as well."""
    _session().step(iteration)
    if _also is not None:
        _also(iteration)


def dump_start() -> None:
    """Dump from now on, whatever iterations the configuration names; devices and operators stay.

    From the first use of `dump_start` or `dump_stop` on, the two alone say when to dump.
    """
    _session().dump_start()


def dump_stop() -> None:
    """Dump nothing until `dump_start` is called."""
    _session().dump_stop()


def limit(name: str, seconds: float) -> None:
    """Say how long communication may wait where no variable says it; 0 for without end."""
    _session().limit(name, seconds)


def set_dump(target: object, enabled: bool = True) -> None:
    """Mark a torch module or a MindSpore cell, and what is inside it, for `dump_mode` 2.

    With `enabled` False the mark is taken away; the last call for a module or cell counts.
    ValueError when target is neither of them, or enabled no bool.
    """
    mark(target, enabled)


def instead(source: Callable[[], Session] | None) -> None:
    """Use the session that `source` returns in the place of the environment's; None ends that."""
    global _instead
    _instead = source


def also_step(begins: Callable[[int | None], None]) -> None:
    """Tell somebody else too where the script itself begins an iteration."""
    global _also
    _also = begins


def environment_in_use() -> bool:
    """Return whether the session that the environment asks for is open."""
    return _default is not None and _default.active


def _session() -> Session:
    global _default
    if _instead is not None:
        return _instead()
    if _default is None or _default.closed:
        _default = CallSession.from_environment()
    return _default
