"""One ingest as a process of its own: its signals, its words, its code."""

from __future__ import annotations

import json
import logging
import sys
import threading
from dataclasses import asdict

from rankdump.contract.errors import RankdumpError
from rankdumpd.ingest.run import Run
from rankdumpd.ingest.values import Counts, Task
from rankdumpd.signals import Signals

_TELL_S = 0.2
_DONE, _WRONG = 0, 1

_log = logging.getLogger(__name__)


def take_over(task: Task, *, follow: bool, until_idle_s: float | None, progress: bool) -> int:
    """Run an ingest until it ends or a signal ends it; return the exit code of the process.

    With `progress`, what happens is told on standard output, a JSON object a line: `counts` while
    it goes on, `left` for a file that is left, `done` at the end.
    """
    asked = Signals()
    try:
        say = _say_left if progress else _warn
        run = Run(task, say=say, follow=follow, until_idle_s=until_idle_s)
        whole = _run_until(asked, run, progress=progress)
    finally:
        asked.close()
    return _last_words(run.counts, whole=whole, progress=progress)


def _run_until(asked: Signals, run: Run, *, progress: bool) -> bool:
    """Run it on a thread, for this one hears the signals; return whether it came to its end."""
    ended = threading.Event()
    whole: list[bool] = []

    def work() -> None:
        try:
            whole.append(run.run())
        except RankdumpError as error:
            _log.error("%s", error)
        except Exception:
            _log.exception("the ingest ended early")
        finally:
            ended.set()
            asked.ask()

    thread = threading.Thread(target=work, name="rankdumpd-ingest")
    thread.start()
    if progress:
        threading.Thread(target=_tell, args=(run, ended), daemon=True).start()
    asked.wait()
    run.ask()
    thread.join()
    return whole == [True]


def _last_words(counts: Counts, *, whole: bool, progress: bool) -> int:
    if progress:
        _say({"done": asdict(counts), "whole": whole})
    else:
        _log.info("%s", ", ".join(f"{name} {count}" for name, count in asdict(counts).items()))
    return _DONE if whole and not counts.failed else _WRONG


def _tell(run: Run, ended: threading.Event) -> None:
    while not ended.wait(_TELL_S):
        _say({"counts": asdict(run.counts)})


def _warn(text: str) -> None:
    _log.warning("%s", text)


def _say_left(text: str) -> None:
    _say({"left": text})


def _say(what: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()
    except OSError:
        return  # nobody listens any more
