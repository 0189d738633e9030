"""Targets for files of other tools: archives of tensors, pickles, JSON and text."""

from __future__ import annotations

import io
import json

from fuzz.input_pieces import chosen

from rankdump._layout.debug_log import parse_debug_log, parse_debug_stacks
from rankdump._layout.flight_record import parse_flight_dump
from rankdump._layout.msprobe_dump import parse_call_arguments, parse_dump_file, parse_stack_file
from rankdump._torchfile.pickle_values import read_pickle_values
from rankdump._torchfile.tensor_archive import open_tensor_archive
from rankdump.errors import CorruptedError

_LIMIT_BYTES = 1 << 20


def archives(data: bytes) -> None:
    """An archive of torch.save: every tensor is read, and none is larger than allowed."""
    with open_tensor_archive(io.BytesIO(data)) as archive:
        for name in archive.tensors:
            array = archive.load(name, limit_bytes=_LIMIT_BYTES)
            assert array.nbytes <= _LIMIT_BYTES
            position = archive.find_position(name)
            assert position is None or position + array.nbytes <= len(data)


def flights(data: bytes) -> None:
    """A dump of the Flight Recorder, as a pickle or in JSON."""
    which, rest = chosen(data, 2)
    try:
        body = json.loads(rest) if which else read_pickle_values(rest)
    except (ValueError, RecursionError) as error:
        raise CorruptedError(str(error)) from None
    for call in parse_flight_dump(body, 0).calls:
        assert call.element_count >= 0
        assert call.name


def foreigns(data: bytes) -> None:
    """The files of msprobe, and a log of DebugMode."""
    which, rest = chosen(data, 4)
    if which == 0:
        for call in parse_dump_file(rest):
            slots = [(tensor.side, tensor.slot) for tensor in call.tensors]
            assert len(set(slots)) == len(slots)
            parse_call_arguments(rest, call.name)
    elif which == 1:
        assert all(name for _, name, _ in parse_stack_file(rest) if name)
    else:
        calls = parse_debug_log(rest)
        assert len(list(parse_debug_stacks(rest))) == len(calls)
