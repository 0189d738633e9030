"""What all workers counted, as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rankdump.contract.room import MetricSample
from rankdumpd.metric_names import AGENT, Key, joined, key_of, rises

REFUSED = "rankdump_refused_calls_total"
_START = "rankdump_start_time_seconds"


@dataclass(slots=True)
class _Seen:
    """What one worker counted."""

    begun_s: float = 0.0
    now: dict[Key, float] = field(default_factory=dict[Key, float])
    """What its process counted, as of the last answer."""
    before: dict[Key, float] = field(default_factory=dict[Key, float])
    """What its processes before that one counted."""


class Sums:
    """Adds up what workers say; what is counted never falls although one begins anew, or is
    silent. For one thread at a time.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def of(self, answers: Mapping[int, Sequence[MetricSample]]) -> list[MetricSample]:
        """Return what these workers say now, and what the others counted before."""
        for index, samples in answers.items():
            self._take(self._seen.setdefault(index, _Seen()), samples)
        gauges = [
            sample
            for samples in answers.values()
            for sample in samples
            if sample.name.startswith(AGENT) and not rises(sample.name)
        ]
        counted = [
            each
            for seen in self._seen.values()
            for sums in (seen.now, seen.before)
            for each in _samples(sums)
        ]
        return joined([*gauges, *counted])

    def _take(self, seen: _Seen, samples: Sequence[MetricSample]) -> None:
        begun_s = next((each.value for each in samples if each.name == _START), 0.0)
        if begun_s != seen.begun_s:
            for key, value in seen.now.items():
                seen.before[key] = seen.before.get(key, 0.0) + value
            seen.begun_s = begun_s
        seen.now = {
            key_of(each): each.value
            for each in samples
            if each.name == REFUSED or (each.name.startswith(AGENT) and rises(each.name))
        }


def _samples(sums: Mapping[Key, float]) -> Iterable[MetricSample]:
    return (MetricSample(name, value, dict(labels)) for (name, labels), value in sums.items())
