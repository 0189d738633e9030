"""The kernels in use: the compiled ones where the installation has them, else those of numpy.

The variable RANKDUMP_KERNELS chooses: `numpy`, or a variant of the compiled ones (`plain`, `avx2`,
`avx512`).
Functions take addresses and sizes, so that measuring a small tensor makes no objects; callers keep
the memory alive, and as large as they say.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

KERNELS_VARIABLE = "RANKDUMP_KERNELS"
_NUMPY = "numpy"

FoundMoments: TypeAlias = "tuple[int, float, float, float, float, int, int, int, int, int, int]"
"""Fields of `ElementMoments`, in order."""
FoundFingerprint: TypeAlias = "tuple[int, bytes, FoundMoments]"
"""Digest, the 64 float64 of the sketch, moments."""


class KernelFunctions(Protocol):
    """Functions that the compiled module and numpy's twin of it have."""

    def measure_elements(
        self, data: int | bytes, count: int, code: int, parts: int, /
    ) -> FoundMoments:
        """Return the moments of elements at an address, or in a bytes object."""
        ...

    def pack_moments(self, data: int | bytes, count: int, code: int, parts: int, /) -> bytes:
        """Return the moments of elements as `PACKED_MOMENTS` packs them: one object for a tensor,
        which the garbage collector does not visit.
        """
        ...

    def widen_bfloat16(self, target: int, source: int, count: int, /) -> None:
        """Store bfloat16 elements as float32."""
        ...

    def fingerprint_shard(
        self,
        address: int,
        code: int,
        extents: tuple[int, ...],
        strides: tuple[int, ...],
        first: int,
        /,
    ) -> FoundFingerprint:
        """Return the fingerprint of elements in C order, of 1 to 32 dimensions.

        Element (i, j, ...) has the global index first + i * strides[0] + j * strides[1] + ...
        """
        ...

    def copy_strided(
        self,
        target: int,
        source: int,
        item_bytes: int,
        extents: tuple[int, ...],
        target_strides: tuple[int, ...],
        source_strides: tuple[int, ...],
        /,
    ) -> None:
        """Copy elements between arrays that do not overlap; strides are in bytes."""
        ...

    def stream_memory(self, target: int, source: int, byte_count: int, /) -> None:
        """Copy bytes between addresses past the caches, which is faster for a large target that is
        not in them, and slower where somebody reads it at once; ValueError below 0.
        """
        ...

    def read_memory(self, address: int, byte_count: int, /) -> bytes:
        """Return a copy of a few bytes, with the interpreter's lock held; ValueError below 0."""
        ...

    def read_strided(
        self, address: int, item_bytes: int, extents: tuple[int, ...], steps: tuple[int, ...], /
    ) -> bytes:
        """Return a copy of a few elements in C order, with the interpreter's lock held.

        Steps from one element to the next are counted in elements, as torch counts them.
        """
        ...

    def encode_varint(self, number: int, /) -> bytes:
        """Return the varint of a number (Protocol Buffers, Encoding: base 128).

        OverflowError below 0 and from 2^64 on.
        """
        ...


class SmallFileWriter(Protocol):
    """Makes the small files of a batch by one call of C, where Python needs six for each."""

    def __call__(
        self, folder: int, mode: int, files: Sequence[tuple[str, str, bytes]], /
    ) -> list[tuple[int, int, int] | int]:
        """Make files in an open folder, each of a mark, its name and its bytes.

        Return inode, size and time of change in ns of each, or the number of the error for which
        it could not be made. A file has the hidden name `.MARK.tmp` until it is complete, and after
        an error nothing is left: EEXIST says that its name is taken, EINVAL or ENOSYS that the
        system cannot rename a file without replacing another, EILSEQ that it cannot have its name.
        """
        ...


_COMPILED_FUNCTIONS = (
    *(name for name in vars(KernelFunctions) if not name.startswith("_")),
    "write_small_files",
)


class LoadedKernels(NamedTuple):
    """Functions, and the words that tell which ones they are."""

    functions: KernelFunctions
    description: str
    """For `--version`."""
    is_compiled: bool
    write_small_files: SmallFileWriter | None = None
    """None where nothing is compiled."""

    def explain_slowness(self) -> str:
        """Return the text for a log when the kernels are not compiled; empty when they are."""
        if self.is_compiled:
            return ""
        return (
            f"statistics and conversions are computed by {self.description}: they take several "
            "times as long as with compiled kernels"
        )


def load_kernels(wanted: str) -> LoadedKernels:
    """Return the kernels that the variable names; the fastest ones for an empty text."""
    if wanted == _NUMPY:
        return _load_numpy(f"{KERNELS_VARIABLE} is {_NUMPY!r}")
    try:
        import rankdump._kernels._native as native
    except ModuleNotFoundError:
        return _load_numpy("installed without a C compiler")
    except ImportError as error:
        return _load_numpy(str(error))
    if any(not hasattr(native, name) for name in _COMPILED_FUNCTIONS):
        # As in a working copy, until it is compiled again.
        return _load_numpy("the compiled module is older than the library: install it again")
    if wanted and not native.select_variant(wanted):
        return _load_numpy(f"{KERNELS_VARIABLE} is {wanted!r}, which does not run here")
    about = f"compiled, {native.get_variant()}"
    return LoadedKernels(native, about, True, native.write_small_files)


def _load_numpy(reason: str) -> LoadedKernels:
    from rankdump._kernels import numpy_twin

    return LoadedKernels(numpy_twin, f"{_NUMPY}, {reason}", is_compiled=False)


KERNELS = load_kernels(os.environ.get(KERNELS_VARIABLE, ""))
"""Loaded once for a process."""
