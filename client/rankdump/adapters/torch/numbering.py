"""Numbers the calls of each operator, and knows the ones a recomputation may repeat."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from rankdump.adapters.torch.fingerprint import fingerprint_of
from rankdump.adapters.torch.internals import next_node, saving_watcher
from rankdump.adapters.torch.pairing import Call, Step, Surroundings, paired, region_start
from rankdump.hook import Scope


class Numbering:
    """The calls of one iteration; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_scope: dict[Scope, list[Call]] = {}
        self._by_thread: dict[int, list[Call]] = {}
        self._position = 0
        self._last_repeated: dict[int, tuple[Step, int]] = {}
        self._watchers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._fresh = itertools.count(1)

    def restart(self) -> None:
        """Forget all calls: an iteration begins."""
        with self._lock:
            self._by_scope.clear()
            self._by_thread.clear()
            self._last_repeated.clear()
            self._position = 0

    def forward(self, scope: Scope, first: Tensor | None) -> Call:
        """Return a new call, numbered from 0 within its operator; `first` is its first tensor."""
        fingerprint = fingerprint_of(first)
        with self._lock:
            calls = self._by_scope.setdefault(scope, [])
            self._position += 1
            call = Call(scope, len(calls), self._position, self._surroundings(), fingerprint)
            calls.append(call)
            self._by_thread.setdefault(call.began_in.thread, []).append(call)
        return call

    def recomputation(self, scope: Scope, first: Tensor | None, step: Step) -> Call | None:
        """Return the forward call that a call within the backward repeats, if there is one."""
        now = fingerprint_of(first)
        thread = threading.get_ident()

        def same_data(call: Call) -> bool:
            known = call.fingerprint
            return known is not None and now is not None and known.same_as(now)

        with self._lock:
            calls: Sequence[Call] = self._by_scope.get(scope, ())
            # The backward of an accelerator runs in threads of its own: any call may be meant.
            if thread in self._by_thread:
                calls = [call for call in calls if call.began_in.thread == thread]
            after = self._behind(thread, step)
            call, _ = paired(calls, after=after, same_data=same_data)
            if call is not None:
                call.repeated += 1
                self._last_repeated[thread] = (step, call.position)
        return call

    def _behind(self, thread: int, step: Step) -> int | None:
        """Return the position behind which the repeated region goes on, if that is known."""
        before = self._last_repeated.get(thread)
        if before is not None and before[0] == step:
            return before[1]
        threads = {thread} & self._by_thread.keys() or self._by_thread.keys()
        if len(threads) != 1:
            return None
        start = region_start(self._by_thread[next(iter(threads))], step)
        return None if start is None else start - 1

    def _surroundings(self) -> Surroundings:
        hook = saving_watcher()
        watcher = 0
        if hook is not None:
            watcher = self._watchers.setdefault(hook, next(self._fresh))
        grad = torch.is_grad_enabled()
        return Surroundings(threading.get_ident(), next_node(), watcher, grad)
