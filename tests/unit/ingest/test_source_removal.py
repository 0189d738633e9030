"""A source goes when it is still what was taken, and has been left alone for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankdumpd.ingest.dump_file import DumpFileKind, IngestedFile
from rankdumpd.ingest.engine import REMOVAL_DELAY_S, SourceCleaner
from rankdumpd.ingest.folder import IngestFolder


class Removed:
    """What the state would remember."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def removed(self, paths) -> None:
        self.paths += paths


@pytest.fixture
def cleared(tmp_path: Path):
    """A clearing with a clock of our own, one file that was taken, and the state."""
    path = tmp_path / "a.npy"
    path.write_bytes(b"x")
    source, state, now = IngestFolder(tmp_path), Removed(), [path.stat().st_ctime]
    clearing = SourceCleaner(source, state, lambda _: True, clock=lambda: now[0])  # type: ignore[arg-type]
    stamp = source.read_stamp("a.npy")
    assert stamp
    taken = IngestedFile("a.npy", DumpFileKind.NPY, stamp, "digest", "a.npy", stamp, False, ())
    yield clearing, taken, state, now, path
    source.close()


def test_a_young_file_waits(cleared):
    """Once, whoever asks again; then it goes with the next call, whatever that is about."""
    clearing, taken, state, now, path = cleared
    assert clearing.remove([taken]) == clearing.remove([taken]) == 0
    assert path.exists()
    now[0] += REMOVAL_DELAY_S + 0.1
    assert clearing.remove(()) == 1
    assert not path.exists()
    assert state.paths == ["a.npy"]
    now[0] += REMOVAL_DELAY_S + 0.1
    assert clearing.remove(()) == 0


def test_a_due_file_that_is_listed_again_counts_once(cleared):
    clearing, taken, state, now, _ = cleared
    assert clearing.remove([taken]) == 0
    now[0] += REMOVAL_DELAY_S + 0.1
    assert clearing.remove([taken]) == 1
    assert state.paths == ["a.npy"]


def test_the_end_waits_for_what_is_young(cleared):
    clearing, taken, _, now, path = cleared
    clearing.remove([taken])

    def wait(seconds: float) -> None:
        assert seconds <= REMOVAL_DELAY_S
        now[0] += seconds + 0.1

    assert clearing.remove_young(wait) == 1
    assert not path.exists()
    assert clearing.remove_young(lambda _: pytest.fail("nothing is left")) == 0


def test_what_changed_stays(cleared):
    clearing, taken, state, now, path = cleared
    path.write_bytes(b"another")
    now[0] += 100
    assert clearing.remove([taken]) == 0
    assert path.exists()
    assert state.paths == []
