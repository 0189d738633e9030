"""Groups compared by this process and by workers beside it, until none is left.

This process works from the start, while the others are still starting. One whose worker died goes
on with a new one, which tries the pairs of the lost group one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from queue import SimpleQueue
from threading import Lock, Thread

from rankdump.diff.groups import Answers, Group, compare_group, given_up
from rankdump.diff.values import Settings
from rankdump.diff.worker import Worker


class Crew:
    """Compares groups once; `run` does it all."""

    def __init__(
        self, groups: Iterable[Group], settings: Settings, done: Callable[[Answers], None]
    ) -> None:
        self._settings, self._done = settings, done
        self._waiting = deque(groups)
        self._lost: deque[Group] = deque()
        """Of a worker that died: they are tried again, but not in this process."""
        self._answers: SimpleQueue[Answers | BaseException | None] = SimpleQueue()
        """From the threads of workers; each ends with None."""
        self._lock = Lock()
        self._workers: set[Worker] = set()
        self._stopped = False

    def run(self, workers: int) -> None:
        """Compare all groups with as many workers beside this process; `done` hears of each here.

        An interrupt ends the workers in the midst of what they do.
        """
        threads = [
            Thread(target=self._lead, name=f"rankdump-diff-{number}") for number in range(workers)
        ]
        for thread in threads:
            thread.start()
        try:
            busy = self._work_here(len(threads))
            while busy:
                busy -= self._take_answer()
            # What a worker that died had, where none could be started after it.
            while (group := _next(self._lost)) is not None:
                self._done(given_up(group))
        finally:
            self._stop()
            for thread in threads:
                thread.join()

    def _work_here(self, busy: int) -> int:
        """Compare groups for as long as any waits; return how many threads are still busy."""
        while (group := _next(self._waiting)) is not None:
            self._done(compare_group(group, self._settings))
            while not self._answers.empty():
                busy -= self._take_answer()
        return busy

    def _take_answer(self) -> bool:
        """Wait for what a thread has to say; return whether that was its last word."""
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            return True
        self._done(answer)
        return False

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.kill()

    def _lead(self) -> None:
        """Keep one worker busy after the other."""
        try:
            while self._lead_one():
                pass
        except BaseException as error:
            self._answers.put(error)
        finally:
            self._answers.put(None)

    def _lead_one(self) -> bool:
        """Keep a worker busy until nothing waits or it died; return whether another follows."""
        with closing(Worker()) as worker:
            with self._lock:
                self._workers.add(worker)
                stopped = self._stopped
            try:
                return not stopped and worker.started() and self._died(worker)
            finally:
                with self._lock:
                    self._workers.remove(worker)

    def _died(self, worker: Worker) -> bool:
        while (group := _next(self._lost) or _next(self._waiting)) is not None:
            answers = worker.compare(group, self._settings)
            if self._stopped:
                return False
            if answers is None:
                if len(group) == 1:
                    self._answers.put(given_up(group))
                else:
                    # Only a pair that was alone can be the one that killed it.
                    self._lost.extend([placed] for placed in group)
                return True
            self._answers.put(answers)
        return False


def _next(groups: deque[Group]) -> Group | None:
    try:
        return groups.popleft()
    except IndexError:
        return None
