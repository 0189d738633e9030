"""Has the collectives of a process in the order of one model's calls, from now on."""

from __future__ import annotations

from weakref import ref

import torch.distributed as dist
from torch.nn import Module

from rankdump.adapters.torch.collectives import patch
from rankdump.adapters.torch.ddp import observe_buckets
from rankdump.adapters.torch.guard import shielded
from rankdump.adapters.torch.internals import running_ddp
from rankdump.adapters.torch.observing import Observer
from rankdump.values import Recorder


class Listening:
    """On every rank alike, armed or not, until `stop`: all must count the same collectives."""

    def __init__(self, model: Module, observer: Observer) -> None:
        self._observer = observer
        self._on = False
        self._around: ref[Module] | None = None
        if dist.is_available():
            shielded(self._start, observer.failed, model)

    def refresh(self) -> None:
        """Look again where collectives are to be listened for."""
        if self._on:
            shielded(patch.refresh, self._observer.failed)

    def model_called(self) -> None:
        """Find a wrapper that was put around the model later: it is known only while it runs."""
        around = running_ddp() if self._on else None
        if around is not None and (self._around is None or self._around() is not around):
            self._around = ref(around)
            observe_buckets(around)

    def record_with(self, recorder: Recorder) -> None:
        """Hand over to this recorder from now on, as the observer does."""
        observer, before = self._observer, self._observer.recorder
        observer.recorder = recorder
        if self._on:
            patch.forget(before, observer.graph)
            patch.listen(recorder, observer.graph)

    def stop(self) -> None:
        """Hear no more."""
        if self._on:
            self._on = False
            patch.forget(self._observer.recorder, self._observer.graph)

    def _start(self, model: Module) -> None:
        patch.listen(self._observer.recorder, self._observer.graph)
        self._on = True
        observe_buckets(model)
