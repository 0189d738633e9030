"""The kernels in use: the compiled ones if the installation has them, else those of numpy.

The variable RANKDUMP_KERNELS selects `numpy`, or a variant of the compiled kernels (`plain`,
`avx2`, `avx512`).

Functions take addresses and sizes, so that measuring a small tensor creates no objects. Callers
must keep the memory alive, and it must have the given size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

KERNELS_VARIABLE = "RANKDUMP_KERNELS"
_NUMPY = "numpy"

FoundMoments: TypeAlias = "tuple[int, float, float, float, float, int, int, int, int, int, int]"
"""The fields of `ElementMoments` in order."""
FoundFingerprint: TypeAlias = "tuple[int, bytes, FoundMoments]"
"""Digest, sketch as 64 float64 numbers, and moments."""


class KernelFunctions(Protocol):
    """Functions that both the compiled module and its twin in numpy have."""

    def measure_elements(
        self, data: int | bytes, count: int, code: int, parts: int, /
    ) -> FoundMoments:
        """Return the moments of elements at an address, or in a bytes object."""
        ...

    def pack_moments(self, data: int | bytes, count: int, code: int, parts: int, /) -> bytes:
        """Return the moments of elements in the form `PACKED_MOMENTS`: one object for each tensor,
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
        """Return the fingerprint of elements in C order, with 1 to 32 dimensions.

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
        """Copy bytes between addresses with stores that bypass the caches. This is faster for a
        large target that is not in the caches, and slower if the target is read soon. ValueError
        for a negative size.
        """
        ...

    def read_memory(self, address: int, byte_count: int, /) -> bytes:
        """Return a copy of a few bytes, while holding the interpreter's lock; ValueError for a
        negative size.
        """
        ...

    def read_strided(
        self, address: int, item_bytes: int, extents: tuple[int, ...], steps: tuple[int, ...], /
    ) -> bytes:
        """Return a copy of a few elements in C order, while holding the interpreter's lock.

        `steps` are distances between neighbours, counted in elements as torch does.
        """
        ...

    def encode_varint(self, number: int, /) -> bytes:
        """Return the varint of a number (Protocol Buffers, Encoding: base 128).

        OverflowError for a number below 0 or from 2^64 on.
        """
        ...


class SmallFileWriter(Protocol):
    """Writes the small files of a batch with one call of C, where Python would need six calls for
    each.
    """

    def __call__(
        self, folder: int, mode: int, files: Sequence[tuple[str, str, bytes]], /
    ) -> list[tuple[int, int, int] | int]:
        """Write files into an open folder; each file is given by a mark, its name and its bytes.

        Return for each file its inode, size and time of change in nanoseconds, or the number of the
        error that prevented it. A file has the hidden name `.MARK.tmp` until it is complete, and
        after an error nothing is left. EEXIST says that the name is taken, EINVAL or ENOSYS that
        the system cannot rename a file without replacing another, EILSEQ that a file cannot have
        this name.
        """
        ...


_COMPILED_FUNCTIONS = (
    *(name for name in vars(KernelFunctions) if not name.startswith("_")),
    "write_small_files",
)


class LoadedKernels(NamedTuple):
    """Kernel functions, and a text that says which ones they are."""

    functions: KernelFunctions
    description: str
    """Text about the kernels, for `--version`."""
    is_compiled: bool
    write_small_files: SmallFileWriter | None = None
    """Function that writes small files; None if nothing is compiled."""

    def explain_slowness(self) -> str:
        """Return a text for the log if the kernels are not compiled; empty if they are."""
        if self.is_compiled:
            return ""
        return (
            f"statistics and conversions are computed by {self.description}: they take several "
            "times as long as with compiled kernels"
        )


def load_kernels(wanted: str) -> LoadedKernels:
    """Return the kernels that the variable RANKDUMP_KERNELS names; the fastest ones if
    it is empty.
    """
    if wanted == _NUMPY:
        return _load_numpy(f"{KERNELS_VARIABLE} is {_NUMPY!r}")
    try:
        import rankdump._kernels._native as native
    except ModuleNotFoundError:
        return _load_numpy("installed without a C compiler")
    except ImportError as error:
        return _load_numpy(str(error))
    if any(not hasattr(native, name) for name in _COMPILED_FUNCTIONS):
        # This occurs in a working copy until it is compiled again.
        return _load_numpy("the compiled module is older than the library: install it again")
    if wanted and not native.select_variant(wanted):
        return _load_numpy(f"{KERNELS_VARIABLE} is {wanted!r}, which does not run here")
    about = f"compiled, {native.get_variant()}"
    return LoadedKernels(native, about, True, native.write_small_files)


def _load_numpy(reason: str) -> LoadedKernels:
    from rankdump._kernels import numpy_twin

    return LoadedKernels(numpy_twin, f"{_NUMPY}, {reason}", is_compiled=False)


KERNELS = load_kernels(os.environ.get(KERNELS_VARIABLE, ""))
"""The kernels of this process, which are loaded once."""
