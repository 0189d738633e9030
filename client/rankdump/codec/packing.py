"""Whether packing pays: the parts of a file packed by a codec, or left as they are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankdump.codec import Buffer, Codec
from rankdump.codec.stored import stored_frame

KEPT_SHARE = 0.875
"""A packed file may have at most this share of the plain one's bytes: ZFS asks as much of a block.

Measured with zstd at level 1: random bits stay at 1.000, normal float64 comes to 0.958, float32
to 0.924 and bfloat16 to 0.777; a sample differs from the whole by less than 0.005. The 8 % of
float32 cost a core as long as the training step that wrote them.
"""
SMALL_BYTES = 64 << 10
"""Up to here packing all of it costs no more than a sample would."""
_SAMPLES = 4
_SAMPLE_BYTES = SMALL_BYTES // _SAMPLES


@dataclass(frozen=True, slots=True)
class Packed:
    """The bytes of a file and what its name must end in."""

    suffix: str
    """Appended to `.npy`; that of the codec only when it packed."""
    parts: Sequence[Buffer]


def pack(codec: Codec, parts: Sequence[Buffer]) -> Packed:
    """Return the parts packed, or the parts themselves where that does not save enough.

    The same parts and codec give the same answer, whoever asks.
    """
    plain = Packed("", parts)
    if not codec.suffix:
        return plain
    size = sum(map(len, parts))
    if size > SMALL_BYTES:
        sample = _sample(max(parts, key=len))
        if not _pays(codec.encode((sample,)), len(sample)):
            return plain
    packed = codec.encode(parts)
    return Packed(codec.suffix, packed) if _pays(packed, size) else plain


def pack_each(codec: Codec, parts: Sequence[Buffer]) -> Packed:
    """Return every part that has bytes as a frame of its own, whether packing it pays or not.

    So files may be put together of such parts without a look inside.
    """
    if not codec.suffix:
        return Packed("", parts)
    return Packed(
        codec.suffix, [piece for part in parts if len(part) for piece in _frame(codec, part)]
    )


def _frame(codec: Codec, part: Buffer) -> Sequence[Buffer]:
    if len(part) > SMALL_BYTES:
        sample = _sample(part)
        if not _pays(codec.encode((sample,)), len(sample)):
            return stored_frame(part)
    return codec.encode((part,))


def _pays(packed: Sequence[Buffer], plain_bytes: int) -> bool:
    return sum(map(len, packed)) <= KEPT_SHARE * plain_bytes


def _sample(part: Buffer) -> bytes:
    """Return pieces from the part's beginning to its end, evenly spread."""
    step = max(len(part) - _SAMPLE_BYTES, 0) // (_SAMPLES - 1)
    starts = range(0, _SAMPLES * step, step) if step else (0,)
    return b"".join(memoryview(part)[at : at + _SAMPLE_BYTES] for at in starts)
