"""File of hints in a tree, which jobs share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rankdump._core.timeouts import (
    HINTS_FILE,
    HintLevel,
    TimeoutHint,
    TimeoutLimit,
    format_hints,
    parse_hints,
)
from rankdump.errors import CorruptedError
from rankdump.reader import read_hints
from rankdumpd.coordinator.publish.tree_files import write_hints

LIMIT = TimeoutLimit("timeout of init_process_group", 20_000_000, "process group", (0, 1))
HINT = TimeoutHint(
    job_id="j", group="w", backend="gloo", level=HintLevel.WARNING, waiting=False,
    kind="all_reduce", name="AllReduce", iteration=3, sequence=7, first_rank=0, last_rank=1,
    spread_us=12_000_000, dump_us=11_000_000, limit=LIMIT, limits=(LIMIT,),
    projected_us=12_000_000, projected_iteration=-1,
    settings=("init_process_group(..., timeout=timedelta(seconds=28))",), reason="rank 1 came late",
)  # fmt: skip


def file_of(root: Path) -> Path:
    return root / ".dump_metadata" / HINTS_FILE


def test_hint_file_round_trips(tmp_path: Path):
    other = replace(HINT, group="p", limit=None, limits=())
    assert write_hints(str(tmp_path), "j", [HINT, other]) == ""
    assert read_hints(tmp_path) == (HINT, other)
    (first, _) = json.loads(file_of(tmp_path).read_text())["hints"]
    assert (first["share"], first["level"]) == (0.6, "warning")
    assert [path.name for path in file_of(tmp_path).parent.iterdir()] == [HINTS_FILE]


def test_hint_file_is_not_written_outside_configured_roots(tmp_path: Path):
    problem = write_hints(str(tmp_path / "a"), "j", [HINT], roots=[str(tmp_path / "b")])
    assert problem.startswith("hints could not be written: tree ")
    assert list(tmp_path.iterdir()) == []


def test_jobs_share_hint_file_and_replace_only_their_own_hints(tmp_path: Path):
    for job in ("a", "b", "a"):
        assert write_hints(str(tmp_path), job, [replace(HINT, job_id=job)]) == ""
    assert [hint.job_id for hint in read_hints(tmp_path)] == ["a"]
    assert [hint.job_id for hint in read_hints(tmp_path, "b")] == ["b"]
    with pytest.raises(CorruptedError, match="no hints of job 'c'; known: b, a"):
        read_hints(tmp_path, "c")
    for number in range(40):
        write_hints(str(tmp_path), f"n{number}", [replace(HINT, job_id=f"n{number}")])
    assert len(parse_hints(file_of(tmp_path).read_text())) == 16


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 7, "hints": []}', "\udcff"])
def test_damaged_hint_file_is_an_error_and_is_replaced(tmp_path: Path, text: str):
    file_of(tmp_path).parent.mkdir()
    file_of(tmp_path).write_text(text, errors="surrogateescape")
    with pytest.raises(CorruptedError, match=HINTS_FILE):
        read_hints(tmp_path)
    assert write_hints(str(tmp_path), "j", [HINT]) == ""
    assert read_hints(tmp_path) == (HINT,)


@pytest.mark.parametrize("field", ["level", "limit", "spread_us", "settings", "job_id"])
def test_hint_with_missing_field_is_corrupted(field: str):
    whole = json.loads(format_hints([HINT]))
    del whole["hints"][0][field]
    with pytest.raises(CorruptedError, match="not a hint"):
        parse_hints(json.dumps(whole))


def test_unwritable_hint_file_gives_one_line(tmp_path: Path):
    assert "no agent has reported the tree of job 'j'" in write_hints("", "j", [])
    (tmp_path / ".dump_metadata").symlink_to(tmp_path)
    assert "is a symbolic link" in write_hints(str(tmp_path), "j", [HINT])
    (tmp_path / "file").touch()
    assert write_hints(str(tmp_path / "file"), "j", [HINT]).startswith("hints could not be written")


def test_link_in_place_of_hint_file_is_replaced(tmp_path: Path):
    file_of(tmp_path).parent.mkdir()
    (tmp_path / "victim").write_text("mine")
    file_of(tmp_path).symlink_to(tmp_path / "victim")
    assert write_hints(str(tmp_path), "j", [HINT]) == ""
    assert (tmp_path / "victim").read_text() == "mine"
    assert read_hints(tmp_path) == (HINT,)


def test_missing_hint_file_is_an_error(tmp_path: Path):
    with pytest.raises(CorruptedError, match="no hints have been written"):
        read_hints(tmp_path)
