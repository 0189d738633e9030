# Functions of native.c; numpy_twin.py has the same, kernel_functions.py says what they do.
from collections.abc import Sequence

from rankdump._kernels.kernel_functions import FoundFingerprint, FoundMoments

SOURCE_DIGEST: str

def measure_elements(data: int | bytes, count: int, code: int, parts: int, /) -> FoundMoments: ...
def copy_and_measure(
    target: int, data: int | bytes, count: int, code: int, parts: int, /
) -> FoundMoments: ...
def widen_bfloat16(target: int, source: int, count: int, /) -> None: ...
def fingerprint_shard(
    address: int,
    code: int,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    first: int,
    /,
) -> FoundFingerprint: ...
def stream_memory(target: int, source: int, byte_count: int, /) -> None: ...
def copy_strided(
    target: int,
    source: int,
    item_bytes: int,
    extents: tuple[int, ...],
    target_strides: tuple[int, ...],
    source_strides: tuple[int, ...],
    /,
) -> None: ...
def read_memory(address: int, byte_count: int, /) -> bytes: ...
def read_strided(
    address: int, item_bytes: int, extents: tuple[int, ...], steps: tuple[int, ...], /
) -> bytes: ...
def encode_varint(number: int, /) -> bytes: ...
def write_small_files(
    folder: int, mode: int, files: Sequence[tuple[str, str, bytes]], /
) -> list[tuple[int, int, int] | int]: ...
def select_variant(name: str, /) -> bool: ...
def get_variant() -> str: ...
