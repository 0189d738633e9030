"""Overflow records: both layouts of bytes, and msaccucmp's JSON of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.overflow_files import CORE, ZEROS, new, old

from rankdump._binfile.overflow_record import (
    OpDebugRecord,
    OverflowSection,
    convert_overflow_to_json,
    parse_overflow_record,
)
from rankdump.errors import CorruptedError, UnsupportedError

WORDS = st.lists(st.integers(0, (1 << 64) - 1), min_size=6, max_size=6)

OLD_TEXT = """{
    "DHA Atomic Add": {
        "model_id": 0,
        "stream_id": 0,
        "task_id": 0,
        "task_type": 0,
        "pc_start": "0x0",
        "para_base": "0x0",
        "status": 0
    },
    "L2 Atomic Add": {
        "model_id": 0,
        "stream_id": 0,
        "task_id": 0,
        "task_type": 0,
        "pc_start": "0x0",
        "para_base": "0x0",
        "status": 0
    },
    "AI Core": {
        "model_id": 1,
        "stream_id": 7,
        "task_id": 12,
        "task_type": 0,
        "pc_start": "0x12340000",
        "para_base": "0x56780000",
        "kernel_code": "0xabc",
        "block_idx": 3,
        "status": 32
    }
}"""
NEW_TEXT = """{
    "magic": "0x5a5a5a5a",
    "version": 0,
    "acc_list": {
        "valid": 1,
        "acc_type": "AIC",
        "rsv": 0,
        "data_len": 88,
        "data": {
            "model_id": 1,
            "stream_id": 2,
            "task_id": 3,
            "task_type": 4,
            "context_id": 5,
            "thread_id": 6,
            "pc_start": "0x7",
            "para_base": "0x8",
            "core_id": 9,
            "block_id": 10,
            "status": 256
        }
    }
}"""
MINDSPORE_TEXT = (
    '{"AI Core":{"block_idx":3,"kernel_code":"0xabc","model_id":1,"para_base":"0x56780000",'
    '"pc_start":"0x12340000","status":32,"stream_id":7,"task_id":12,"task_type":0},'
    '"DHA Atomic Add":{"model_id":0,"para_base":"0x0","pc_start":"0x0","status":0,"stream_id":0,'
    '"task_id":0,"task_type":0},"L2 Atomic Add":{"model_id":0,"para_base":"0x0","pc_start":"0x0",'
    '"status":0,"stream_id":0,"task_id":0,"task_type":0}}'
)


def test_overflow_json_of_the_old_layout():
    """Order of keys, hexadecimal texts, indent, and no newline at the end."""
    assert convert_overflow_to_json(old(core=CORE, status=(0, 0, 32))) == OLD_TEXT


def test_overflow_json_of_the_new_layout():
    """One object in `acc_list`."""
    assert convert_overflow_to_json(new(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 256)) == NEW_TEXT


@pytest.mark.parametrize(
    ("kind", "unit", "names", "texts"),
    [
        (1, "AIV", "context_id thread_id pc_start para_base core_id block_id", {6, 7}),
        (2, "AICPU", "context_id cpu_id thread_id", set[int]()),
        (3, "SDMA", "context_id thread_id src_addr dst_addr channel_id", {6, 7}),
    ],
)
@pytest.mark.parametrize("version", [0, 1])
def test_overflow_units_have_their_own_fields(
    kind: int, unit: str, names: str, texts: set[int], version: int
):
    """Each unit has its own fields; an AI core's status is a list in version 1."""
    keys = ["model_id", "stream_id", "task_id", "task_type", *names.split(), "status"]
    words = [100 + at for at in range(len(keys) + 3)]
    made = json.loads(convert_overflow_to_json(new(kind, *words, version=version)))
    values: list[object] = [hex(w) if at in texts else w for at, w in enumerate(words)]
    listed = version == 1 and unit == "AIV"
    status = values[len(keys) - 1 :] if listed else values[len(keys) - 1]
    assert made["version"] == version
    assert made["acc_list"]["acc_type"] == unit
    assert list(made["acc_list"]["data"].items()) == [
        *zip(keys[:-1], values, strict=False),
        ("status", status),
    ]


@given(dha=WORDS, core=WORDS, status=st.tuples(*[st.integers(0, (1 << 64) - 1)] * 3))
def test_overflow_json_round_trip(dha: list[int], core: list[int], status: tuple[int, int, int]):
    """A record, its JSON, and MindSpore's sorted line of the same say the same."""
    record = parse_overflow_record(old(dha=dha, core=core, status=status))
    assert OpDebugRecord.from_json(record.to_json()) == record
    line = json.dumps(json.loads(record.to_json()), sort_keys=True, separators=(",", ":"))
    again = OpDebugRecord.from_json(line)
    assert [dict(s.fields) for s in again.sections] == [dict(s.fields) for s in record.sections]
    assert again.overflowed_sections == OpDebugRecord.from_json(again.to_json()).overflowed_sections
    assert [s.status for s in again.sections] == [s.status for s in record.sections]


@pytest.mark.parametrize("version", [0, 1])
def test_overflow_json_of_the_new_layout_is_read(version: int):
    record = parse_overflow_record(new(1, *range(14), version=version))
    assert OpDebugRecord.from_json(record.to_json()) == record


def test_overflow_json_of_mindspore_is_read():
    """Compact, keys sorted."""
    (core,) = OpDebugRecord.from_json(MINDSPORE_TEXT).overflowed_sections
    assert core.unit == "AI Core"
    assert core.get_field("task_id") == 12
    assert core.get_field("kernel_code") == 0xABC
    assert core.meaning == ("float overflow",)


def test_overflow_section_is_set_by_any_status_bit():
    """Any bit of a status counts, and nothing else."""
    assert parse_overflow_record(old(core=CORE)).overflowed_sections == ()
    both = parse_overflow_record(old(dha=CORE, core=CORE, status=(1, 0, 8))).overflowed_sections
    assert [section.unit for section in both] == ["DHA Atomic Add", "AI Core"]


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        ((0,), ()),
        ((0x8,), ("smallest integer negated",)),
        ((0x30,), ("integer overflow", "float overflow")),
        ((0x80,), ("negative float to unsigned integer",)),
        ((0x500,), ("float32 or int32 to float16", "accumulation in the cube unit")),
        ((0x21,), ("float overflow", "bits 0x1")),
        ((1 << 63,), ("bits 0x8000000000000000",)),
        ((0, 0x20, 0, 1), ("word 1: 0x20", "word 3: 0x1")),
    ],
)
def test_overflow_meaning_describes_known_bits(status: tuple[int, ...], meaning: tuple[str, ...]):
    """Bits in words; what is described nowhere stays a number."""
    assert OverflowSection("AIC", (), status).meaning == meaning


def test_overflow_meaning_of_other_units_is_one_word():
    assert OverflowSection("SDMA", (), (4,)).meaning == ("overflow",)
    assert OverflowSection("L2 Atomic Add", (), (0,)).meaning == ()


def test_overflow_field_65535_is_unknown():
    """65535 stands for no context and no thread; of a task it is a number."""
    section = OverflowSection(
        "AIC", (("task_id", 65535), ("context_id", 65535), ("thread_id", 2)), (1,)
    )
    assert section.get_field("task_id") == 65535
    assert section.get_field("context_id") is None
    assert section.get_field("thread_id") == 2
    assert section.get_field("cpu_id") is None


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "of 0 bytes, 2048 expected"),
        (bytes(2047), "of 2047 bytes, 2048 expected"),
        (bytes(2049), "of 2049 bytes, 2048 expected"),
        (new(0, size=0)[:23], "of 23 bytes, but its head alone has 24"),
        (new(0, *range(10), size=0), "of 104 bytes, AIC takes 112"),
        (new(1, *range(11), version=1, size=0), "of 112 bytes, AIV takes 136"),
        (new(2, *range(7), size=0), "of 80 bytes, AICPU takes 88"),
        (new(3, *range(9), size=0), "of 96 bytes, SDMA takes 104"),
    ],
)
def test_overflow_record_of_wrong_size_is_rejected(payload: bytes, message: str):
    with pytest.raises(CorruptedError, match=message):
        parse_overflow_record(payload)


@pytest.mark.parametrize(("version", "kind"), [(2, 0), (0, 4), (1 << 31, 9)])
def test_overflow_record_of_a_later_version_is_unsupported(version: int, kind: int):
    with pytest.raises(UnsupportedError, match=f"version {version} and unit {kind}; known"):
        parse_overflow_record(new(kind, *ZEROS, version=version))


@given(data=st.binary(max_size=60))
@example(data=b"\xff" * 2048)
@example(data=b"\x5a" * 2048)
def test_overflow_record_of_any_bytes_raises_only_known_errors(data: bytes):
    """Any bytes are a record or one of the two errors."""
    for payload in (data, b"\x5a\x5a\x5a\x5a" + data, data.ljust(2048, b"\1")):
        try:
            parse_overflow_record(payload).to_json()
        except (CorruptedError, UnsupportedError):
            continue


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the JSON"),
        ("{", "not the JSON"),
        ("[" * 100_000, "not the JSON"),
        ("[1]", "not an object"),
        ("{}", "none of DHA Atomic Add, L2 Atomic Add, AI Core, acc_list"),
        ('{"AI Core": 3}', "AI Core is not an object"),
        ('{"AI Core": {"status": 1}}', "AI Core without task_id, stream_id"),
        ('{"AI Core": {"status": -1, "task_id": 1, "stream_id": 1}}', "status is -1"),
        ('{"AI Core": {"status": true, "task_id": 1, "stream_id": 1}}', "status is True"),
        ('{"AI Core": {"status": "12", "task_id": 1, "stream_id": 1}}', "status is '12'"),
        ('{"AI Core": {"status": "0xg", "task_id": 1, "stream_id": 1}}', "status is '0xg'"),
        ('{"AI Core": {"status": [1, []], "task_id": 1, "stream_id": 1}}', "status is list"),
        ('{"AI Core": {"status": 1, "task_id": 1.5, "stream_id": 1}}', "task_id is 1.5"),
        ('{"AI Core": {"status": 18446744073709551616, "task_id": 1, "stream_id": 1}}', "status"),
        ('{"acc_list": []}', "acc_list is not an object"),
        ('{"acc_list": {"acc_type": "AIC"}}', "valid is NoneType"),
    ],
)
def test_overflow_json_of_another_form_is_rejected(text: str, message: str):
    with pytest.raises(CorruptedError, match=message):
        OpDebugRecord.from_json(text)


def test_overflow_json_of_a_later_unit_is_unsupported():
    with pytest.raises(UnsupportedError, match="unit 'NPU'; known: AIC"):
        OpDebugRecord.from_json('{"acc_list": {"acc_type": "NPU"}}')
