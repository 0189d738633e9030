"""Manifest of an iteration: it is read back as written, and damage is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_layouts import layouts, shard_rows

from rankdump._core.manifest import (
    Manifest,
    ManifestRecord,
    ManifestSession,
    find_card,
    is_intact,
    make_manifest_name,
    names_no_file,
)
from rankdump._core.status import IterationStatus
from rankdump.errors import CorruptedError

counts = st.integers(0, 2**64 - 1)
texts = st.text(max_size=20)
manifests = st.builds(
    Manifest,
    status=st.builds(
        IterationStatus,
        job_id=texts,
        session_id=texts,
        rank=counts,
        iteration=counts,
        complete=st.booleans(),
        expected=counts,
        stored=counts,
        linked=counts,
        degraded=counts,
        dropped=st.dictionaries(texts, counts, max_size=3),
        bytes_in=counts,
        bytes_stored=counts,
        degraded_by=st.dictionaries(texts, counts, max_size=2),
        same_as_baseline=counts,
    ),
    world_size=counts,
    device=counts,
    host=texts,
    records=st.lists(
        st.builds(
            ManifestRecord,
            microbatch=st.none() | counts,
            phase=texts,
            layout=st.none() | layouts((2, 3)),
            baseline=texts,
            same_as=texts,
            path=texts,
            timestamp_us=counts,
            op_type=texts,
            op_name=texts,
            argument=texts,
            dtype=texts,
            shape=st.lists(counts, max_size=4).map(tuple),
            bytes_in=counts,
            bytes_stored=counts,
            digest=texts,
        ),
        max_size=3,
    ).map(tuple),
    session=st.none() | st.builds(ManifestSession, counts, texts, texts, counts, texts),
    card=st.none() | st.dictionaries(texts, texts | st.lists(texts), max_size=3),
)


@given(manifest=manifests)
def test_manifest_round_trip(manifest: Manifest):
    """Every manifest comes back as it was, whatever operators are called."""
    data = manifest.to_json()
    assert Manifest.from_json(data) == manifest
    assert is_intact(data)
    assert not is_intact(data.replace(b'"version": 1', b'"version": 2'))
    card = find_card(data)
    assert card is not None
    assert (json.loads(card) if card else None) == manifest.card
    if manifest.card is not None:
        assert find_card(data[-30:]) in (None, card)


def test_card_is_behind_the_records():
    """Readers of a head need no more bytes for it, and those of rows count the same lines."""
    plain, with_card = MANIFEST, replace(MANIFEST, card={"version": 1})
    lines, more = plain.to_json().split(b"\n"), with_card.to_json().split(b"\n")
    assert lines[:-1] == more[:-1]
    assert Manifest.parse_head(more[0] + b"\n") == replace(plain, records=())
    rows = replace(with_card, records=(RECORD._replace(path=""),))
    assert names_no_file(rows.to_json())
    assert not names_no_file(with_card.to_json())


def test_manifest_without_sessions_and_checksums_is_read():
    body = json.loads(MANIFEST.to_json())
    del body["crc32"]
    data = json.dumps(body).encode()
    assert is_intact(data)
    assert Manifest.from_json(data) == MANIFEST


RECORD = ManifestRecord("p", 1_700_000_000_000_000, "T", "a/b", "", "float32", (2, 3), 24, 20, "00")
STATUS = IterationStatus("job", "session", 0, 1, True, expected=1, stored=1)
MANIFEST = Manifest(STATUS, 2, 0, "host", (RECORD,))


def test_manifest_that_is_truncated_is_rejected():
    """No prefix of a manifest is accepted."""
    whole = MANIFEST.to_json()
    for length in range(len(whole)):
        with pytest.raises(CorruptedError, match="manifest cannot be read"):
            Manifest.from_json(whole[:length])


STATUS_NUMBERS = ("rank", "iteration", "expected", "stored", "linked", "bytes_in", "bytes_stored")


def test_manifest_has_each_layout_once():
    """Records refer to layouts by number: a layout of thousands of records is one object."""
    layouts = [shard_rows(0, row, (8, 3)) for row in (0, 2, 0)]
    records = tuple(RECORD._replace(layout=layout) for layout in layouts)
    manifest = Manifest(STATUS, 2, 0, "host", (RECORD, *records))
    body = json.loads(manifest.to_json())
    assert len(body["layouts"]) == 2
    assert [each.get("layout") for each in body["records"]] == [None, 0, 1, 0]
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_manifest_has_each_baseline_once():
    """Records name the tree that has their file by number, and others have no such field."""
    roots = ("/data/first", "/data/second", "/data/first")
    same = tuple(RECORD._replace(baseline=root, same_as="rank_0/x.npy") for root in roots)
    manifest = Manifest(STATUS, 2, 0, "host", (RECORD, *same))
    body = json.loads(manifest.to_json())
    assert body["baselines"] == ["/data/first", "/data/second"]
    assert [each.get("baseline") for each in body["records"]] == [None, 0, 1, 0]
    assert "same_as" not in body["records"][0]
    assert "same_as_baseline" not in body["status"]
    assert Manifest.from_json(manifest.to_json()) == manifest


RECORD_NUMBERS = ("timestamp_us", "bytes_in", "bytes_stored")
RECORD_TEXTS = ("path", "op_type", "op_name", "argument", "dtype", "digest")
NO_COUNTS = (None, "1", -1, 1.5, True, [1])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("version",), "1"),
        (("status",), None),
        (("status", "extra"), 1),
        (("world_size",), "many"),
        (("world_size",), None),
        (("world_size",), float("inf")),
        (("records",), None),
        (("records",), [1]),
        (("records", 0, "shape"), 5),
        (("records", 0, "extra"), 5),
        *((("status", name), value) for name in STATUS_NUMBERS for value in NO_COUNTS),
        *((("records", 0, name), value) for name in RECORD_NUMBERS for value in NO_COUNTS),
        *((("records", 0, name), value) for name in RECORD_TEXTS for value in (None, 1, ["a"])),
        (("status", "job_id"), 1),
        (("status", "complete"), "yes"),
        (("status", "dropped"), {"full": "many"}),
        (("status", "dropped"), ["full"]),
        (("world_size",), -1),
        (("host",), None),
        (("session",), 1),
        (("session",), {"pid": 1}),
        (("records", 0, "shape"), [2, "3"]),
        (("records", 0, "shape"), [-1]),
        (("records", 0, "microbatch"), -1),
        (("records", 0, "microbatch"), "1"),
        (("records", 0, "phase"), 1),
        (("records", 0, "layout"), 0),
        (("records", 0, "layout"), {}),
        (("records", 0, "baseline"), 0),
        (("records", 0, "baseline"), "/data/first"),
        (("records", 0, "same_as"), 1),
        (("baselines",), [1]),
        (("layouts",), [1]),
        (("layouts",), [{"source": "dtensor"}]),
    ],
)
def test_manifest_with_impossible_fields_is_rejected(path: tuple[Any, ...], value: object):
    """Readers may compute with every field, so an impossible one is reported as damage."""
    body: Any = json.loads(MANIFEST.to_json())
    inner = body
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(CorruptedError):
        Manifest.from_json(json.dumps(body).encode())


def test_manifest_of_before_rows():
    """A record without a time has no row."""
    body: Any = json.loads(MANIFEST.to_json())
    del body["records"][0]["timestamp_us"]
    (record,) = Manifest.from_json(json.dumps(body).encode()).records
    assert (record.path, record.timestamp_us) == (RECORD.path, 0)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"\xff", b"[" * 200_000])
def test_manifest_of_another_form_is_rejected(data: bytes):
    """Any other file is reported as damaged."""
    with pytest.raises(CorruptedError):
        Manifest.from_json(data)


def test_manifest_is_balanced_when_kept_and_dropped_add_up():
    """Expected is what was kept plus what was dropped, by any reason."""
    status = IterationStatus(
        "j", "s", 0, 0, True, 10, stored=4, linked=2, degraded=1, dropped={"full": 2, "late": 1}
    )
    assert status.kept_tensors == 7
    assert status.is_balanced
    assert not IterationStatus("j", "s", 0, 0, True, 11, stored=4).is_balanced


def test_manifest_name_differs_between_sessions():
    """Two sessions of one tree have manifests of their own."""
    assert make_manifest_name(3, "0123456789abcdef") == "iteration_3.0123456789ab.json"
    assert make_manifest_name(3, "a" * 32) != make_manifest_name(3, "b" * 32)


@given(manifest=manifests)
def test_manifest_shows_by_its_bytes_whether_it_names_files(manifest: Manifest):
    """Without reading records; never for one that is damaged or has no checksum."""
    data = manifest.to_json()
    has_rows_alone = bool(manifest.records) and not any(each.path for each in manifest.records)
    assert names_no_file(data) == has_rows_alone
    rows = replace(manifest, records=tuple(each._replace(path="") for each in manifest.records))
    data = rows.to_json()
    assert names_no_file(data) == bool(rows.records)
    assert not names_no_file(data.replace(b'"version": 1', b'"version": 2'))
    assert not names_no_file(data[: data.rfind(b", ")] + b"}")
