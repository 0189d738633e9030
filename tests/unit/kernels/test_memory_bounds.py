"""Kernels read and write no byte outside of what they are given: the pages before and behind it
cannot be touched, and a process that does is killed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = '''
import ctypes, mmap, sys
sys.path.insert(0, sys.argv[1])
from support.kernel_variants import ELEMENT_CODES, VARIANTS, get_dtype, native, using

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE

def make_room(pages):
    """Return the first address of writable pages between two that are not, and that behind them."""
    held = mmap.mmap(-1, (pages + 2) * PAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(held))
    for guard in (first, first + (pages + 1) * PAGE):
        assert libc.mprotect(guard, PAGE, 0) == 0, ctypes.get_errno()
    return held, first + PAGE, first + (pages + 1) * PAGE

kept = make_room(4), make_room(4)
large = make_room(1100), make_room(1100)
(_, source, source_end), (_, target, target_end) = kept
sizes = [*range(70), 127, 1023, 1024, 1025, 2047]
for variant in VARIANTS:
    with using(variant):
        for name, code in ELEMENT_CODES.items():
            width = get_dtype(name).itemsize
            for size in sizes:
                size = min(size, (source_end - source) // width)
                used = size * width
                for a, b in ((source, target), (source_end - used, target_end - used)):
                    native.measure_elements(a, size, code, 7)
                    native.fingerprint_shard(a, code, (size,), (3,), 5)
                    native.stream_memory(b, a, used)
        for rows in sizes[:40]:
            for columns in (1, 3, 8, 15, 16, 17, 31, 32, 33, 64, 65):
                for width in (1, 2, 4, 8, 24, 32):
                    size = rows * columns * width
                    if size > 4 * PAGE:
                        continue
                    for a, b in ((source, target), (source_end - size, target_end - size)):
                        native.copy_strided(
                            b, a, width, (columns, rows), (rows * width, width),
                            (width, columns * width),
                        )
                        native.read_strided(a, width, (columns, rows), (1, columns))
        for width in (1, 2, 4, 8, 16, 24, 32, 64):
            rows = 640
            columns = (4 << 20) // (rows * width) + 5
            size = rows * columns * width
            (_, source, source_end), (_, target, target_end) = large
            for a, b in ((source, target), (source_end - size, target_end - size)):
                native.copy_strided(
                    b, a, width, (columns, rows), (rows * width, width), (width, columns * width)
                )
print("kept within bounds")
'''


def test_kernels_stay_within_their_memory():
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tests)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "kept within bounds\n"), done.stderr
