"""Targets for files of tensors and their descriptions: npy, zstd, bin, manifests, overflow
records.
"""

from __future__ import annotations

from fuzz import samples
from fuzz.input_pieces import chosen, file_of

from rankdump._analysis.compare.card_findings import compare_cards, compare_ranks
from rankdump._analysis.reader import tensor_loader
from rankdump._analysis.reader.run_cards import FoundCards, RankCard
from rankdump._analysis.reader.tensor_loader import described, load_file
from rankdump._binfile import bin_file
from rankdump._binfile.header_parts import OpInput, OpOutput
from rankdump._binfile.overflow_record import OpDebugRecord, parse_overflow_record
from rankdump._codec.file_codec import get_codec
from rankdump._core.manifest import Manifest, find_card
from rankdump._core.run_card import parse_card
from rankdump.errors import RankdumpError

_LIMIT_BYTES = 1 << 20
"""Most that a packed input may unpack to."""


def npys(data: bytes) -> None:
    """An npy file: no more elements than the file has bytes, or twice that of bfloat16."""
    array = tensor_loader.read_npy_array(memoryview(data))
    assert array.nbytes <= 2 * len(data)
    assert not array.flags.writeable
    array.tobytes()


def packed(data: bytes) -> None:
    """A packed file: of any content within its limit, of an npy file."""
    which, rest = chosen(data, 2)
    if which:
        load_file(file_of(rest, "tensor.npy.zst"), limit_bytes=_LIMIT_BYTES)
    else:
        content = get_codec("zstd").decode(rest, limit_bytes=_LIMIT_BYTES)
        assert len(content) <= _LIMIT_BYTES


def bins(data: bytes) -> None:
    """A file of an operator, plain or packed: listed, and each of its tensors read."""
    which, rest = chosen(data, 2)
    path = file_of(rest, "operator.1.zst" if which else "operator.1")
    for _ in described(path):
        pass
    opened = bin_file.open_bin_file(path)
    again = bin_file.parse_bin_file(
        memoryview(bin_file.serialize_bin_head(opened.header) + bytes(_payloads(opened)))
    )
    assert again.header == opened.header
    for payload in opened.payloads:
        held = opened.read_payload(payload)
        assert len(held) == payload.part.size
        if isinstance(payload.part, OpInput | OpOutput):
            try:
                bin_file.read_payload_array(payload.part, held)
            except RankdumpError:
                continue


def _payloads(opened: bin_file.BinFile) -> int:
    return sum(payload.part.size for payload in opened.payloads)


def manifests(data: bytes) -> None:
    """A manifest: what is read is what would be written."""
    manifest = Manifest.from_json(data)
    assert Manifest.from_json(manifest.to_json()) == manifest


def cards(data: bytes) -> None:
    """A run card, alone or at the end of a manifest: its findings are lines of bounded length."""
    which, rest = chosen(data, 2)
    found = find_card(rest) if which else rest
    if not found:
        return
    card = parse_card(found)
    whole = FoundCards((RankCard(0, 0, 0, card),), (), 0)
    both = FoundCards((*whole.cards, RankCard(1, 0, 0, samples.CARD)), (), 0)
    places = [((0, 0), (0, 0))]
    for finding in (
        *compare_ranks(both),
        *compare_cards(whole, both, places),
        *compare_cards(both, whole, places),
        *compare_cards(FoundCards(both.cards[1:], (), 0), whole, [((1, 0), (0, 0))]),
    ):
        assert finding.text.isprintable()
        assert len(finding.text) < 1010


def opdebugs(data: bytes) -> None:
    """An overflow record, in bytes or as JSON; its JSON is one again."""
    which, rest = chosen(data, 2)
    record = parse_overflow_record(rest) if which else OpDebugRecord.from_json(rest)
    for section in record.overflowed_sections:
        assert section.meaning or not section.has_overflow
    OpDebugRecord.from_json(record.to_json())
